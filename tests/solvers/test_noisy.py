"""The solver wrapper ``Noisy``: it adds noise to the iterates of tokens that have not settled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deqseq import Backbone, FixedIterations, ImplicitSequenceLayer, Progress, Residual, Status, Unrolled
from deqseq.solvers import Anderson, BestIterate, Noisy, Picard

D = 16
MakeLayer = Callable[..., ImplicitSequenceLayer]


def test_noise_has_its_variance_and_keeps_settled_tokens(make_progress: Callable[..., Progress]) -> None:
    z, fz = torch.randn(2, 20, 50, 64)
    settled = torch.rand(20, 50) < 0.5
    solver = Noisy(Picard(0.5), std=0.2)
    progress = make_progress(z, 0, settled=settled)
    noise = solver.step(z, fz, solver.init(z), progress)[0] - Picard(0.5).step(z, fz, (), progress)[0]
    assert (noise[settled] == 0).all()
    assert noise[~settled].mean().abs() < 0.005
    assert abs(noise[~settled].std() - 0.2) < 0.005


def test_settled_tokens_do_not_move(rates: Backbone) -> None:
    """The first two tokens settle at 0 in the first evaluation. Noise moves only the third, slow token."""
    x = torch.tensor([0.0, 0.0, 0.9])[:, None].repeat(1, 4)[None]
    layer = ImplicitSequenceLayer(rates, Noisy(std=0.1), convergence=Residual(rtol=1e-6, max_iter=10))
    with torch.no_grad():
        out = layer(x)
    assert (out.z[0, :2] == 0).all() and out.solution.iterations.tolist() == [[1, 1, 10]]
    assert out.solution.status[0, 2] == Status.BUDGET_EXHAUSTED


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("solver", ["picard", "anderson"])
def test_noise_leads_near_the_equilibrium(make_layer: MakeLayer, solver: str, window: int | None) -> None:
    x = torch.randn(2, 7, D)
    noisy = make_layer(
        "module", solver=(Noisy(solver, 1e-3), solver), window=window, convergence=Residual(1e-4)
    )
    with torch.no_grad():
        found = noisy(x).z
        expected = noisy.eval()(x).z
    assert not torch.equal(found, expected)
    assert (found - expected).abs().max() < 0.05


def test_noise_is_a_constant_for_autograd(make_layer: MakeLayer) -> None:
    """The layer has the same gradient as a plain loop that adds the same noise as a constant."""
    layer = make_layer("module", solver=Noisy(std=0.3), gradient=Unrolled(3), convergence=FixedIterations(3))
    x = torch.randn(2, 5, D, requires_grad=True)
    torch.manual_seed(5)
    found = torch.autograd.grad(layer(x).z.square().sum(), x)[0]
    torch.manual_seed(5)
    context, z = layer.backbone.prepare(x), torch.zeros_like(x)
    for step in range(3):
        z = layer.backbone(z, context)
        if step < 2:  # the last iterate has no noise
            z = z + 0.3 * torch.randn(z.shape)
    torch.testing.assert_close(found, torch.autograd.grad(z.square().sum(), x)[0])


def test_it_follows_the_wrapped_solver(make_layer: MakeLayer) -> None:
    for solver in (Picard(), Anderson(), Anderson(scope="sequence"), BestIterate("picard")):
        noisy = Noisy(solver)
        for name in ("causal", "windowed", "differentiable"):
            assert getattr(noisy, name) == getattr(solver, name)
        assert noisy.random and not noisy.capturable and BestIterate(noisy).random
    x: Any = torch.randn(1, 4, D)
    with pytest.raises(ValueError, match="Anderson"):
        make_layer("module", solver=Noisy(Anderson(scope="sequence")))(x)


def test_the_backward_system_takes_no_noise(make_layer: MakeLayer) -> None:
    x: Tensor = torch.randn(1, 4, D)
    with pytest.raises(ValueError, match="Noisy"):
        make_layer("module", solver="noisy", gradient="implicit")(x)
    layer = make_layer("module", solver="noisy", gradient={"name": "implicit", "solver": "picard"})
    layer(x).z.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
