"""A token's result does not depend on later tokens, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq import (
    Backbone,
    ConvergencePolicy,
    FixedIterations,
    GradientStrategy,
    ImplicitDifferentiation,
    ImplicitSequenceLayer,
    Phantom,
    Problem,
    Quantile,
    Residual,
    Solution,
    Solver,
    Unrolled,
    search,
    steps,
)
from deqseq.backbones import ModuleBackbone
from deqseq.solvers import Anderson, BestIterate, Broyden, Picard

MakeLayer = Callable[..., ImplicitSequenceLayer]

BACKBONES = ["mamba2", "llama", "module"]
WINDOWS = [None, 5, 3, 1]
SOLVERS: dict[str, Solver | str] = {
    "picard": "picard",
    "damped": Picard(damping=0.7),
    "anderson": Anderson(memory=3),
    "broyden": Broyden(memory=4),
    "best": BestIterate("anderson"),
}
POLICIES: dict[str, ConvergencePolicy] = {
    "rtol": Residual(rtol=0.05),
    "short": Residual(rtol=1e-4, max_iter=5),
    "atol": Residual(atol=0.02),
    "fixed": FixedIterations(5),
    "and": Residual(rtol=0.05) & FixedIterations(4),
    "or": Residual(rtol=1e-3) | FixedIterations(6),
    "both": (Residual(rtol=0.05) & Residual(atol=0.05)) | FixedIterations(9),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "other": lambda x: torch.randn_like(x),
    "huge": lambda x: 1e4 * torch.randn_like(x),
    "overflowing": lambda x: 1e25 * torch.randn_like(x),
}
L = 8
AT = (1, 4, 7)


def assert_blind_to_the_future(
    layer: ImplicitSequenceLayer,
    change: Callable[[Tensor], Tensor],
    at: tuple[int, ...] = AT,
) -> None:
    """Change one token in every sequence but the last: in sequence i, the token ``at[i]``.

    Results of earlier tokens, and of the last sequence, must stay the same.
    """
    x = torch.randn(len(at) + 1, L, 16)
    changed = x.clone()
    for row, t in enumerate(at):
        changed[row, t] = change(x[row, t])
    before, after = layer(x), layer(changed)
    for row, t in enumerate(at):
        assert not torch.equal(after.z[row, t], before.z[row, t])
    for name in ("z", "residual", "iterations", "status"):
        old, new = getattr(before.solution, name), getattr(after.solution, name)
        for row, t in enumerate(at):
            assert torch.equal(new[row, :t], old[row, :t]), f"{name} of tokens before {t}"
        assert torch.equal(new[-1], old[-1]), f"{name} of the other sequence"


class Bursting(nn.Module):
    """A causal map. It overflows at a token if a channel of the token's input is above 50."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, u: Tensor) -> Tensor:
        weights = torch.ones(u.shape[1], u.shape[1]).tril() / u.shape[1]
        return torch.tanh(self.linear(0.3 * (weights @ u))) + torch.where(u > 50, u * u * 1e38, 0.0)


class JacobianFree(GradientStrategy):
    """A gradient strategy that uses only the public interface, as a strategy of another package would."""

    def solve(self, problem: Problem) -> Solution:
        return steps(problem, 1, start=search(problem))


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    "gradient", ["phantom", "implicit", JacobianFree()], ids=["phantom", "implicit", "other"]
)
def test_a_future_that_overflows_in_training(gradient: Any, window: int | None) -> None:
    layer = ImplicitSequenceLayer(ModuleBackbone(Bursting()), gradient=gradient, window=window)
    layer.train_solve = layer.eval_solve = replace(layer.solve, convergence=Residual(rtol=1e-3, max_iter=50))
    x = torch.randn(2, 6, 16)
    bursts = x.clone()
    bursts[0, 3, 0] = 100.0
    found = []
    for inputs in (x.requires_grad_(), bursts.requires_grad_()):
        layer.zero_grad()
        out = layer(inputs)
        (out.z[0, :3].square().sum() + out.z[1].square().sum()).backward()
        gradients = [inputs.grad[0, :3], inputs.grad[1], *(p.grad for p in layer.parameters())]
        found.append((out.z, out.solution.status, gradients))
    (z, _, expected), (burst, status, gradients) = found
    assert torch.equal(burst[0, :3], z[0, :3]) and torch.equal(burst[1], z[1])
    assert status[0].tolist()[:4] == [1, 1, 1, 3] and (status[1] == 1).all()
    # Do not compare implicit gradients: their backward system contains an infinite derivative.
    if gradient != "implicit":
        for new, old in zip(gradients, expected, strict=True):
            torch.testing.assert_close(new, old)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_evaluation(make_layer: MakeLayer, backbone: str, solver: str, window: int | None) -> None:
    layer = make_layer(backbone, solver=SOLVERS[solver], window=window).eval()
    layer.train_solve = layer.eval_solve = replace(layer.solve, convergence=POLICIES["rtol"])
    with torch.no_grad():
        assert_blind_to_the_future(layer, CHANGES["other"])


@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("solver", ["anderson", "best"])
def test_every_policy(make_layer: MakeLayer, solver: str, policy: str, window: int | None) -> None:
    layer = make_layer("mamba2", solver=SOLVERS[solver], convergence=POLICIES[policy], window=window).eval()
    with torch.no_grad():
        assert_blind_to_the_future(layer, CHANGES["other"], at=(1, 4))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_training(make_layer: MakeLayer, backbone: str, solver: str, window: int | None) -> None:
    for gradient in (Phantom(steps=3), Unrolled(5), ImplicitDifferentiation()):
        layer = make_layer(backbone, solver=SOLVERS[solver], gradient=gradient, window=window)
        assert layer.training
        assert_blind_to_the_future(layer, CHANGES["other"], at=(4,))


@pytest.mark.parametrize("change", ["huge", "overflowing"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_huge_future(
    make_layer: MakeLayer, backbone: str, solver: str, window: int | None, change: str
) -> None:
    layer = make_layer(backbone, solver=SOLVERS[solver], window=window).eval()
    with torch.no_grad():
        assert_blind_to_the_future(layer, CHANGES[change], at=(4,))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("solver", ["picard", "anderson"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_nan_in_the_future(make_layer: MakeLayer, backbone: str, solver: str, window: int | None) -> None:
    layer = make_layer(backbone, solver=SOLVERS[solver], window=window).eval()
    with torch.no_grad():
        assert_blind_to_the_future(layer, lambda x: torch.full_like(x, torch.nan), at=(4,))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_carried_state(make_layer: MakeLayer, backbone: str, window: int | None) -> None:
    layer = make_layer(backbone, solver="anderson", window=window).eval()
    with torch.no_grad():
        past = layer(torch.randn(4, 5, 16), state=layer.backbone.initial_state(4)).state

        def carried(x: Tensor) -> object:
            return layer(x, state=past)

        assert_blind_to_the_future(carried, CHANGES["other"])  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("gradient", [Phantom(steps=3), Unrolled(5), ImplicitDifferentiation()], ids=repr)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_no_gradient_from_the_future(
    make_layer: MakeLayer, backbone: str, gradient: object, window: int | None
) -> None:
    layer = make_layer(backbone, solver="anderson", gradient=gradient, window=window)
    x = torch.randn(2, L, 16, requires_grad=True)
    out = layer(x)
    for t in (0, 4, 6):
        (dx,) = torch.autograd.grad(out.z[:, t].sum(), x, retain_graph=True)
        assert not dx[:, t + 1 :].any()
        assert dx[:, t].any()


SEQUENCE_SCOPED = {
    "anderson": {"solver": Anderson(scope="sequence")},
    "broyden": {"solver": Broyden(scope="sequence")},
    "best": {"solver": BestIterate("picard", scope="sequence")},
    "residual": {"convergence": Residual(rtol=0.05, scope="sequence")},
    "quantile": {"convergence": Quantile(Residual(rtol=0.05), share=0.5)},
    "torchdeq": {"solver": "torchdeq:anderson"},
    "combined": {"convergence": Residual(rtol=0.05, scope="sequence") | FixedIterations(9)},
    "wrapped": {"solver": BestIterate(Anderson(scope="sequence"))},
}


@pytest.mark.parametrize("parts", SEQUENCE_SCOPED.values(), ids=SEQUENCE_SCOPED)
def test_sequence_scope_is_refused_in_training_unless_asked_for(
    make_layer: MakeLayer, parts: dict[str, object]
) -> None:
    x = torch.randn(2, L, 16)
    layer = make_layer("module", **parts)
    with pytest.raises(ValueError, match="causal=False"):
        layer(x)
    with pytest.raises(ValueError, match="causal=False"), torch.no_grad():
        layer(x)
    assert torch.isfinite(layer.eval()(x).z).all()
    assert torch.isfinite(make_layer("module", **parts, causal=False)(x).z).all()


@pytest.mark.parametrize("name", [n for n in SEQUENCE_SCOPED if n != "best"])
def test_sequence_scope_leaks(rates: Backbone, name: str) -> None:
    """In sequence scope, a later token changes earlier tokens. So causal training refuses this scope."""
    layer = ImplicitSequenceLayer(rates, **SEQUENCE_SCOPED[name], causal=False)
    if name == "quantile":
        layer.train_solve = layer.eval_solve = replace(
            layer.solve, convergence=Quantile(Residual(rtol=0.05), share=0.75)
        )
    x = torch.rand(1, 4, 3) + 0.1
    x[0, :, 0] = torch.tensor([0.8, 0.5, 0.5, 0.5])
    changed = x.clone()
    changed[0, -1, 0] = 0.95
    with torch.no_grad():
        leak = (layer(x).z - layer(changed).z)[:, :-1].abs().max()
    assert leak > 1e-3


def test_best_of_a_sequence_leaks(rates: Backbone) -> None:
    """If all tokens share one best iterate, a later token changes the result of an earlier token."""
    x = torch.full((1, 2, 2), 0.5)
    x[0, 0, 0] = -0.9  # converges slowly
    layer = ImplicitSequenceLayer(
        rates,
        solver=BestIterate("picard", scope="sequence"),
        convergence=Residual(rtol=1e-6, max_iter=6),
        causal=False,
    )
    other = x.clone()
    other[0, 1, 0] = -1.5  # diverges
    with torch.no_grad():
        assert not torch.equal(layer(x).z[0, 0], layer(other).z[0, 0])
