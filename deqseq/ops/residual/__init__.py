"""Norms of f(z) - z, and whether tokens meet a tolerance.

Shapes: B sequences, W tokens in the window, D width.
"""

import torch
from torch import Tensor

from deqseq import kernels


def residual_norms(z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
    """``||f(z) - z||`` and ``||f(z)||`` of every token, each (B, W), at least float32; z, fz (B, W, D)."""
    if kernels.fused(z):
        from deqseq.ops.residual import triton

        return triton.residual_norms(z, fz)
    dtype = torch.promote_types(z.dtype, torch.float32)
    change = torch.linalg.vector_norm(fz - z, dim=-1, dtype=dtype)
    return change, torch.linalg.vector_norm(fz, dim=-1, dtype=dtype)


def relative(change: Tensor, size: Tensor) -> Tensor:
    """``change / size`` as float32: 0 where both are zero, and finite wherever both are finite."""
    ratio = change / size.clamp_min(torch.finfo(size.dtype).tiny)
    largest = torch.finfo(torch.float32).max
    return torch.where(torch.isfinite(change), ratio.clamp_max(largest), ratio).float()


def judge(z: Tensor, fz: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    """The relative residual, float32, and ``||f(z) - z|| <= atol + rtol * ||f(z)||``, each (B, W)."""
    if kernels.fused(z):
        from deqseq.ops.residual import triton

        return triton.judge(z, fz, atol, rtol)
    change, size = residual_norms(z, fz)
    return relative(change, size), change <= atol + rtol * size
