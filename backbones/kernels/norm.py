"""Residual addition and RMSNorm in one Triton kernel, forward and backward.

Shapes: R rows (tokens), D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


@triton.jit
def _add_norm_kernel(stream, delta, weight, total, out, rows, D, eps, HAS_DELTA: tl.constexpr,
                     R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (r < rows) & (d < D)
    v = tl.load(stream + r * D + d, mask, 0.0).to(tl.float32)
    if HAS_DELTA:
        v += tl.load(delta + r * D + d, mask, 0.0).to(tl.float32)
        v = v.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + r * D + d, v.to(total.dtype.element_ty), mask)
    w = tl.load(weight + d, d < D, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
    tl.store(out + r * D + d, (v * scale * w).to(out.dtype.element_ty), mask)


@triton.jit
def _add_norm_backward_kernel(d_out, d_total, total, weight, d_stream, d_weight, rows, D, eps,
                              HAS_TOTAL: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
                              BLOCKS: tl.constexpr):  # fmt: skip
    d = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + d, d < D, 0.0).to(tl.float32)
    d_w = tl.zeros((1, BLOCK), tl.float32)
    for i in range(BLOCKS):
        r = (tl.program_id(0).to(tl.int64) * BLOCKS + i) * R + tl.arange(0, R)[:, None]
        mask = (r < rows) & (d < D)
        v = tl.load(total + r * D + d, mask, 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
        unit = v * scale
        g = tl.load(d_out + r * D + d, mask, 0.0).to(tl.float32)
        d_w += tl.sum(g * unit, 0)[None, :]
        d_unit = g * w
        d_v = (d_unit - unit * (tl.sum(d_unit * unit, 1) / D)[:, None]) * scale
        if HAS_TOTAL:
            d_v += tl.load(d_total + r * D + d, mask, 0.0).to(tl.float32)
        tl.store(d_stream + r * D + d, d_v.to(d_stream.dtype.element_ty), mask)
    tl.store(d_weight + tl.program_id(0) * D + d, d_w, d < D)


def _tile(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"R": max(1, 2048 // block), "BLOCK": block}


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        stream = stream.contiguous()
        width = stream.shape[-1]
        rows = stream.numel() // width
        total = stream if delta is None else torch.empty_like(stream)
        out = torch.empty_like(stream, dtype=dtype)
        tile = _tile(width)
        _add_norm_kernel[(triton.cdiv(rows, tile["R"]),)](
            stream, stream if delta is None else delta.contiguous(), weight, total, out, rows, width, eps,
            HAS_DELTA=delta is not None, **tile,
        )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.delta_dtype = None if delta is None else delta.dtype
        if delta is None:
            ctx.mark_dirty()
            total = stream.view_as(stream)
        return total, out

    @staticmethod
    def backward(ctx: Any, d_total: Tensor | None, d_out: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        width = total.shape[-1]
        rows = total.numel() // width
        tile = _tile(width)
        blocks = max(1, triton.cdiv(rows, tile["R"] * 1024))
        parts = triton.cdiv(rows, tile["R"] * blocks)
        d_stream = torch.empty_like(total)
        d_weight = torch.empty(parts, width, device=total.device, dtype=torch.float32)
        _add_norm_backward_kernel[(parts,)](
            d_out.contiguous(), d_out if d_total is None else d_total.contiguous(), total, weight, d_stream,
            d_weight, rows, width, ctx.eps, HAS_TOTAL=d_total is not None, BLOCKS=blocks, **tile,
        )  # fmt: skip
        d_delta = None if ctx.delta_dtype is None else d_stream.to(ctx.delta_dtype)
        return d_stream, d_delta, d_weight.sum(0).to(weight.dtype), None, None


def add_norm(
    stream: Tensor, delta: Tensor | None, norm: nn.RMSNorm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """stream + delta, and its norm in ``dtype``."""
    total, out = _AddNorm.apply(stream, delta, norm.weight, norm.eps, dtype)
    return total, out
