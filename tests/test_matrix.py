"""Forward and backward passes of every combination of solver, gradient strategy, window and backbone."""

from collections.abc import Callable

import pytest
import torch

from deqseq import (
    GradientStrategy,
    ImplicitDifferentiation,
    ImplicitSequenceLayer,
    Phantom,
    Residual,
    Solver,
    Status,
    Unrolled,
)
from deqseq.solvers import Anderson, BestIterate, Broyden, Picard

MakeLayer = Callable[..., ImplicitSequenceLayer]

SOLVERS: dict[str, Solver | str] = {
    "picard": "picard",
    "damped": Picard(damping=0.7),
    "anderson": "anderson",
    "broyden": "broyden",
    "best-picard": BestIterate("picard"),
    "best-anderson": BestIterate("anderson"),
    "sequence-anderson": Anderson(scope="sequence"),
    "sequence-broyden": Broyden(scope="sequence"),
    "sequence-best": BestIterate("anderson", scope="sequence"),
}
TORCHDEQ = ["torchdeq:anderson", "torchdeq:fixed_point_iter", "torchdeq:broyden"]
GRADIENTS: dict[str, GradientStrategy] = {
    "phantom": Phantom(steps=2),
    "implicit": ImplicitDifferentiation(),
    "unrolled": Unrolled(3),
}
BACKBONES = ["mamba2", "llama", "module"]


def check_forward_backward(layer: ImplicitSequenceLayer) -> None:
    x = torch.randn(2, 5, 16, requires_grad=True)
    out = layer(x)
    (out.z * torch.randn_like(out.z)).sum().backward()

    assert out.z.shape == x.shape and torch.isfinite(out.z).all()
    solution = out.solution
    for values in (solution.residual, solution.iterations, solution.status):
        assert values.shape == (2, 5)
    assert solution.residual.dtype == torch.float32 and torch.isfinite(solution.residual).all()
    assert solution.nfe >= 1 and (solution.iterations >= 1).all()
    ended = Status.COMPLETED if isinstance(layer.gradient, Unrolled) else Status.CONVERGED
    assert (solution.status == ended).all()
    for name, tensor in [("x", x), *layer.named_parameters()]:
        assert tensor.grad is not None, name
        assert torch.isfinite(tensor.grad).all() and tensor.grad.any(), name


@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_forward_and_backward(
    make_layer: MakeLayer, backbone: str, solver: str, gradient: str, window: int | None
) -> None:
    layer = make_layer(
        backbone,
        solver=SOLVERS[solver],
        gradient=GRADIENTS[gradient],
        convergence=Residual(rtol=1e-3, max_iter=60),
        window=window,
        causal=not solver.startswith("sequence"),
    )
    check_forward_backward(layer)


@pytest.mark.parametrize("gradient", ["phantom", "implicit"])
@pytest.mark.parametrize("solver", TORCHDEQ)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_forward_and_backward_with_torchdeq(
    make_layer: MakeLayer, backbone: str, solver: str, gradient: str
) -> None:
    layer = make_layer(
        backbone,
        solver=solver,
        gradient=GRADIENTS[gradient],
        convergence=Residual(rtol=1e-3, max_iter=60),
        causal=False,
    )
    check_forward_backward(layer)


@pytest.mark.parametrize("solver", TORCHDEQ)
def test_torchdeq_refuses_what_it_cannot_do(make_layer: MakeLayer, solver: str) -> None:
    x = torch.randn(2, 12, 16)
    with pytest.raises(ValueError, match="cannot be unrolled"):
        make_layer("mamba2", solver=solver, gradient=Unrolled(3), causal=False)(x)
    for window in (8, 1):
        with pytest.raises(ValueError, match="window=None"):
            make_layer("mamba2", solver=solver, window=window, causal=False)(x)
