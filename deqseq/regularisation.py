"""Diagnostics and penalties on the Jacobian of a fixed-point map.

The functions take a map of z: ``lambda z: backbone(z, context)`` with ``context = backbone.prepare(x)``.
Shapes: B sequences, L tokens, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deqseq import kernels
from deqseq.checks import check_count


def jacobian_penalty(
    f: Callable[[Tensor], Tensor], z: Tensor, samples: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Hutchinson's estimate of ``||df/dz||_F^2 / (B L D)``, a scalar to add to a loss.

    (Bai et al., *Stabilizing Equilibrium Models by Jacobian Regularization*, 2021, arXiv 2106.14342.)

    Args:
        f: the map, (B, L, D) -> (B, L, D); gradients of the penalty flow to the tensors that ``f`` uses.
        z: (B, L, D) point of the Jacobian, usually the equilibrium. No gradient flows to it.
        samples: number of Gaussian probes; each needs one vector-Jacobian product.
        generator: random generator of the probes, on z's device.

    Raises:
        ValueError: ``samples`` below 1.
    """
    check_count("samples", samples)
    # Training on the penalty needs second derivatives. Fused attention and our kernels have none.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), kernels.twice_differentiable():
        z = z.detach().requires_grad_()
        fz = f(z)
        total = fz.new_zeros((), dtype=torch.promote_types(fz.dtype, torch.float32))  # float16 overflows
        for _ in range(samples):
            probe = torch.randn(fz.shape, generator=generator, device=fz.device, dtype=fz.dtype)
            (product,) = torch.autograd.grad(fz, z, probe, create_graph=True)
            total = total + product.to(total.dtype).square().sum()
    return total / (samples * fz.numel())


def spectral_radius(
    f: Callable[[Tensor], Tensor], z: Tensor, iterations: int = 20, generator: torch.Generator | None = None
) -> Tensor:
    """Estimate the spectral radius of df/dz for every sequence, (B,), by the power method.

    The iteration z <- f(z) contracts near a fixed point if and only if the radius is below 1. The estimate is
    the geometric mean of the growth over the second half of the iterations, because growth oscillates for
    complex leading eigenvalues. For a causal map, df/dz is block-triangular: the diagonal blocks, one per
    token, determine its eigenvalues. Even if the radius is below 1, the error of z <- f(z) may grow for up to
    L iterations before it shrinks.

    Args:
        f: the map, (B, L, D) -> (B, L, D), with sequences independent of each other.
        z: (B, L, D) point of the Jacobian.
        iterations: number of vector-Jacobian products.
        generator: random generator of the start vector, on z's device.

    Raises:
        ValueError: ``iterations`` below 2.
    """
    if iterations < 2:
        raise ValueError(f"iterations must be at least 2, got {iterations}")
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        fz = f(z)
    probe = torch.randn(fz.shape, generator=generator, device=fz.device, dtype=fz.dtype)
    tiny = torch.finfo(fz.dtype).tiny
    growth = []
    for step in range(iterations):
        probe = probe / torch.linalg.vector_norm(probe, dim=(1, 2), keepdim=True).clamp_min(tiny)
        (probe,) = torch.autograd.grad(fz, z, probe, retain_graph=step + 1 < iterations)
        growth.append(torch.linalg.vector_norm(probe, dim=(1, 2)))
    return torch.stack(growth[iterations // 2 :]).clamp_min(tiny).log().mean(0).exp()
