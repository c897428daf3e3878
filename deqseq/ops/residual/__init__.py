"""Norms of f(z) - z, and whether tokens meet a tolerance.

Shapes: B sequences, W tokens in the window, D width.
"""

from __future__ import annotations

from torch import Tensor

from deqseq import kernels
from deqseq.ops.residual import naive
from deqseq.ops.residual.naive import relative

__all__ = ["judge", "relative", "residual_norms"]


def residual_norms(z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
    """``||f(z) - z||`` and ``||f(z)||`` of every token, each (B, W), at least float32; z, fz (B, W, D)."""
    if kernels.fused(z):
        from deqseq.ops.residual.triton import residual_norms as fused

        return fused(z, fz)
    return naive.residual_norms(z, fz)


def judge(z: Tensor, fz: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    """The relative residual, float32, and ``||f(z) - z|| <= atol + rtol * ||f(z)||``, each (B, W)."""
    if kernels.fused(z):
        from deqseq.ops.residual.triton import judge as fused

        return fused(z, fz, atol, rtol)
    return naive.judge(z, fz, atol, rtol)
