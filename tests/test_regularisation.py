"""Tests of the Jacobian penalty and the spectral radius, on maps with known Jacobians."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deqseq import Backbone, jacobian_penalty, spectral_radius

MakeBackbone = Callable[..., Backbone]


def test_penalty_of_a_linear_map() -> None:
    """The penalty is ||A||_F^2 / D for a map that applies A (D, D) to every token."""
    matrix = torch.randn(6, 6)
    z = torch.randn(4, 16, 6)
    found = jacobian_penalty(lambda z: z @ matrix.T, z, samples=100)
    expected = matrix.square().sum() / 6
    assert abs(float(found / expected) - 1) < 0.03


def test_penalty_against_the_exact_jacobian(make_backbone: MakeBackbone) -> None:
    f = make_backbone("module", dtype=torch.float64)
    z, x = torch.randn(2, 1, 4, 16, dtype=torch.float64)
    context = f.prepare(x)
    jacobian = torch.autograd.functional.jacobian(lambda z: f(z, context), z)
    expected = jacobian.square().sum() / z.numel()
    found = jacobian_penalty(lambda z: f(z, context), z, samples=2000)
    assert abs(float(found.detach() / expected) - 1) < 0.03


@pytest.mark.parametrize("backbone", ["mamba2", "llama", "module"])
def test_penalty_trains_the_weights(
    make_backbone: MakeBackbone, fold_on_gpu: Callable[[Backbone], Backbone], backbone: str
) -> None:
    """The penalty's gradient w.r.t. the weights agrees with finite differences."""
    f = fold_on_gpu(make_backbone(backbone, dtype=torch.float64))
    x, z = torch.randn(2, 1, 4, 16, dtype=torch.float64)

    def penalty() -> Tensor:
        generator = torch.Generator(torch.get_default_device()).manual_seed(3)
        context = f.prepare(x)
        return jacobian_penalty(lambda z: f(z, context), z, samples=4, generator=generator)

    parameters = [p for p in f.parameters()]
    found = torch.autograd.grad(penalty(), parameters, allow_unused=True)
    used = [(p, g) for p, g in zip(parameters, found, strict=True) if g is not None]
    norm = sum(g.square().sum() for _, g in used).sqrt()
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            for p, g in used:
                p.add_(g / norm, alpha=step)
        values.append(float(penalty()))
        with torch.no_grad():
            for p, g in used:
                p.sub_(g / norm, alpha=step)
    assert (values[0] - values[1]) / 2e-5 == pytest.approx(float(norm), rel=1e-4)


def test_penalty_in_half_precision_does_not_overflow() -> None:
    z = torch.randn(8, 512, 64)
    full, half = (jacobian_penalty(lambda z: 2 * z, z.to(t)) for t in (torch.float32, torch.float16))
    torch.testing.assert_close(half, full, rtol=1e-2, atol=0)


def test_penalty_takes_z_as_a_constant() -> None:
    z = torch.randn(1, 3, 4, requires_grad=True)
    weight = torch.tensor(2.0, requires_grad=True)
    penalty = jacobian_penalty(lambda z: weight * z.square(), z)
    penalty.backward()
    assert z.grad is None and weight.grad is not None


def test_penalty_is_reproducible_with_a_generator() -> None:
    z, matrix = torch.randn(1, 3, 4), torch.randn(4, 4)
    a, b, c = (
        jacobian_penalty(
            lambda z: z @ matrix, z, generator=torch.Generator(torch.get_default_device()).manual_seed(seed)
        )
        for seed in (1, 1, 2)
    )
    assert a == b != c


@pytest.mark.parametrize("largest", [0.3, 0.9, 1.7])
def test_radius_of_symmetric_maps(largest: float) -> None:
    basis, _ = torch.linalg.qr(torch.randn(5, 5))
    eigenvalues = torch.tensor([largest, -0.5 * largest, 0.2 * largest, 0.0, 0.1 * largest])
    matrix = basis @ torch.diag(eigenvalues) @ basis.T
    found = spectral_radius(lambda z: z @ matrix.T, torch.randn(3, 4, 5), iterations=40)
    torch.testing.assert_close(found, torch.full((3,), largest), rtol=1e-2, atol=0)


def test_radius_with_complex_eigenvalues() -> None:
    turn = 0.8 * torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    found = spectral_radius(lambda z: z @ turn.T, torch.randn(3, 1, 2), iterations=100)
    torch.testing.assert_close(found, torch.full((3,), 0.8), rtol=2e-2, atol=0)


def test_radius_of_every_sequence_is_its_own() -> None:
    rates = torch.tensor([0.2, 0.7, 1.5])[:, None, None]
    found = spectral_radius(lambda z: rates * z, torch.randn(3, 4, 5))
    torch.testing.assert_close(found, rates.flatten())


def test_radius_against_the_exact_eigenvalues(make_backbone: MakeBackbone) -> None:
    f = make_backbone("module", dtype=torch.float64)
    z, x = torch.randn(2, 1, 3, 16, dtype=torch.float64)
    context = f.prepare(x)
    jacobian = torch.autograd.functional.jacobian(lambda z: f(z, context), z).view(48, 48)
    expected = torch.linalg.eigvals(jacobian).abs().max()
    found = spectral_radius(lambda z: f(z, context), z, iterations=400)
    torch.testing.assert_close(found, expected[None], rtol=5e-2, atol=0)


def test_radius_of_nothing_is_zero() -> None:
    assert spectral_radius(lambda z: 0 * z, torch.randn(2, 3, 4)).max() < 1e-30


@pytest.mark.parametrize("f", [lambda z: torch.ones_like(z), lambda z: torch.ones_like(z).requires_grad_()])
def test_maps_that_ignore_z(f: Callable[[Tensor], Tensor]) -> None:
    z = torch.randn(2, 3, 4)
    assert jacobian_penalty(f, z) == 0
    assert spectral_radius(f, z).max() < 1e-30


def test_radius_leaves_no_graph() -> None:
    weight = torch.tensor(0.5, requires_grad=True)
    with torch.no_grad():
        found = spectral_radius(lambda z: weight * z, torch.randn(2, 3, 4))
    assert not found.requires_grad
    torch.testing.assert_close(found, torch.full((2,), 0.5))


def test_wrong_options() -> None:
    z = torch.randn(1, 2, 3)
    with pytest.raises(ValueError, match="0"):
        jacobian_penalty(lambda z: z, z, samples=0)
    with pytest.raises(ValueError, match="1"):
        spectral_radius(lambda z: z, z, iterations=1)
