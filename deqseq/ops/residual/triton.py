"""Norms of f(z) - z in one Triton kernel; arguments and results as in :mod:`deqseq.ops.residual`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deqseq.kernels import launch


@triton.jit
def _residual_kernel(z, fz, residual, converged, change_out, size_out, rows, D, atol, rtol,
                     JUDGES: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    change = tl.zeros((R,), tl.float32)
    size = tl.zeros((R,), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)[None, :]
        mask = (r[:, None] < rows) & (d < D)
        new = tl.load(fz + r[:, None] * D + d, mask, 0.0).to(tl.float32)
        step = new - tl.load(z + r[:, None] * D + d, mask, 0.0).to(tl.float32)
        change += tl.sum(step * step, 1)
        size += tl.sum(new * new, 1)
    change = tl.sqrt(change)
    size = tl.sqrt(size)
    if JUDGES:  # as deqseq.ops.residual.relative
        ratio = change / tl.maximum(size, 1.1754943508222875e-38)
        ratio = tl.where(tl.abs(change) < float("inf"), tl.minimum(ratio, 3.4028234663852886e38), ratio)
        tl.store(residual + r, ratio, r < rows)
        tl.store(converged + r, change <= atol + rtol * size, r < rows)
    else:
        tl.store(change_out + r, change, r < rows)
        tl.store(size_out + r, size, r < rows)


def _residual(z: Tensor, fz: Tensor, judges: bool, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    z, fz = z.contiguous(), fz.contiguous()
    first = torch.empty(z.shape[:-1], device=z.device, dtype=torch.float32)
    second = torch.empty_like(first, dtype=torch.bool if judges else torch.float32)
    width = z.shape[-1]
    rows = z.numel() // width
    block = min(1024, triton.next_power_of_2(width))
    tokens = max(1, 2048 // block)
    launch(
        _residual_kernel, (triton.cdiv(rows, tokens),), z, fz, first, second, first, second, rows, width,
        float(atol), float(rtol), JUDGES=judges, R=tokens, BLOCK=block,
    )  # fmt: skip
    return first, second


def residual_norms(z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
    return _residual(z, fz, False, 0.0, 0.0)


def judge(z: Tensor, fz: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    return _residual(z, fz, True, atol, rtol)
