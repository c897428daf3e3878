"""The Jacobian of a fixed-point map: a penalty for training, and the spectral radius as a diagnostic.

Both functions take a map of z alone. To make such a map from a backbone::

    context = backbone.prepare(x)
    penalty = jacobian_penalty(lambda z: backbone(z, context), z)

Shapes: B sequences, L tokens, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deqseq import kernels
from deqseq.checks import check_count, check_floating, check_tensor


def jacobian_penalty(
    f: Callable[[Tensor], Tensor], z: Tensor, samples: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Hutchinson's estimate of ``||df/dz||_F^2 / (B L D)``, a scalar to add to a loss.

    Source: Stabilizing Equilibrium Models by Jacobian Regularization, Bai et al., 2021, arXiv 2106.14342.

    Args:
        f: the map, (B, L, D) -> (B, L, D). The penalty sends gradients to all tensors that ``f`` uses.
        z: (B, L, D) the point at which to take the Jacobian, usually the equilibrium. z gets no gradient.
        samples: number of probes, which are Gaussian random vectors. Each needs one vector-Jacobian product.
        generator: random generator of the probes, on z's device.

    Raises:
        ValueError: ``samples`` is below 1; ``z`` is no floating-point tensor (B, L, D); ``f(z)`` has
            another shape than ``z``.
    """
    check_count("samples", samples)
    # Use plain attention and plain PyTorch: training on the penalty needs second derivatives, and fused
    # attention and our kernels have no second derivatives.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), kernels.twice_differentiable():
        z, fz = _evaluated(f, z)
        # Sum in float32 at least: a sum in float16 would overflow.
        total = fz.new_zeros((), dtype=torch.promote_types(fz.dtype, torch.float32))
        if not fz.requires_grad:
            return total  # f does not depend on z
        for _ in range(samples):
            probe = torch.randn(fz.shape, generator=generator, device=fz.device, dtype=fz.dtype)
            (product,) = torch.autograd.grad(fz, z, probe, create_graph=True, materialize_grads=True)
            total = total + product.to(total.dtype).square().sum()
    return total / (samples * fz.numel())


def spectral_radius(
    f: Callable[[Tensor], Tensor], z: Tensor, iterations: int = 20, generator: torch.Generator | None = None
) -> Tensor:
    """Estimate the spectral radius of df/dz for every sequence, (B,), by the power method.

    Near a fixed point, the iteration z <- f(z) converges if the radius is below 1. The error may still grow
    at first. With a causal f, it may grow for up to L iterations.

    Every iteration multiplies a vector by the transposed Jacobian and measures how much the vector grows. The
    growth oscillates if the largest eigenvalues are complex. Therefore the estimate is the geometric mean of
    the growth over the second half of the iterations.

    Args:
        f: the map, (B, L, D) -> (B, L, D), which computes every sequence independently.
        z: (B, L, D) the point at which to take the Jacobian.
        iterations: number of vector-Jacobian products.
        generator: random generator of the start vector, on z's device.

    Raises:
        ValueError: ``iterations`` is below 2; ``z`` is no floating-point tensor (B, L, D); ``f(z)`` has
            another shape than ``z``.
    """
    check_count("iterations", iterations, least=2)
    with torch.enable_grad():
        z, fz = _evaluated(f, z)
    if not fz.requires_grad:
        return fz.new_zeros(fz.shape[0])  # f does not depend on z
    probe = torch.randn(fz.shape, generator=generator, device=fz.device, dtype=fz.dtype)
    tiny = torch.finfo(fz.dtype).tiny
    growth = []
    for step in range(iterations):
        probe = probe / torch.linalg.vector_norm(probe, dim=(1, 2), keepdim=True).clamp_min(tiny)
        (probe,) = torch.autograd.grad(
            fz, z, probe, retain_graph=step + 1 < iterations, materialize_grads=True
        )
        growth.append(torch.linalg.vector_norm(probe, dim=(1, 2)))
    return torch.stack(growth[iterations // 2 :]).clamp_min(tiny).log().mean(0).exp()


def _evaluated(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of ``z`` that requires gradients, and its f(z)."""
    check_tensor("z", z)
    check_floating("z", z)
    if z.dim() != 3:
        raise ValueError(f"z must be (B, L, D), got {tuple(z.shape)}")
    z = z.detach().requires_grad_()
    fz = f(z)
    check_tensor("f(z)", fz, z.shape, "the shape of z, ")
    return z, fz
