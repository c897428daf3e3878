"""Residual addition and RMSNorm in one Triton kernel, forward and backward.

Shapes: ``rows`` tokens, D width. A program loads tiles of R rows and BLOCK columns, with BLOCK >= D.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from deqseq.kernels import first_derivative_only, launch


@triton.jit
def summed(stream, added, place, mask, HAS_ADDED: tl.constexpr):
    """Load ``stream + added`` at ``place``, in the stream's dtype. Without ``added``, load ``stream``."""
    v = tl.load(stream + place, mask, 0.0)
    if HAS_ADDED:
        v = (v.to(tl.float32) + tl.load(added + place, mask, 0.0).to(tl.float32)).to(v.dtype)
    return v


@triton.jit
def _add_norm_kernel(stream, added, weight, total, out, rows, D, eps, HAS_ADDED: tl.constexpr,
                     STORE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (r < rows) & (d < D)
    v = summed(stream, added, r * D + d, mask, HAS_ADDED)
    if STORE:
        tl.store(total + r * D + d, v, mask)
    v = v.to(tl.float32)
    w = tl.load(weight + d, d < D, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
    tl.store(out + r * D + d, (v * scale * w).to(out.dtype.element_ty), mask)


@triton.jit
def _add_norm_backward_kernel(d_out, d_total, stream, added, weight, d_stream, d_weight, rows, D, eps,
                              HAS_ADDED: tl.constexpr, HAS_TOTAL: tl.constexpr, R: tl.constexpr,
                              BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    d = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + d, d < D, 0.0).to(tl.float32)
    d_w = tl.zeros((1, BLOCK), tl.float32)
    for i in range(BLOCKS):
        r = (tl.program_id(0).to(tl.int64) * BLOCKS + i) * R + tl.arange(0, R)[:, None]
        mask = (r < rows) & (d < D)
        v = summed(stream, added, r * D + d, mask, HAS_ADDED).to(tl.float32)
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


def sum_and_norm(
    stream: Tensor, added: Tensor | None, weight: Tensor, eps: float | None, dtype: torch.dtype, last: bool
) -> tuple[Tensor, Tensor]:
    """Returns two tensors: the sum ``stream + added``, and the RMSNorm of the sum in ``dtype``.

    If there is nothing to add, or with ``last``, no sum is stored, and the first tensor is ``stream``.
    Both summands must be contiguous. The results have no gradients; :func:`add_norm` has them.
    """
    width = stream.shape[-1]
    rows = stream.numel() // width
    store = added is not None and not last
    total = torch.empty_like(stream) if store else stream
    out = torch.empty_like(stream, dtype=dtype)
    tile = _tile(width)
    launch(
        _add_norm_kernel, (triton.cdiv(rows, tile["R"]),), stream, stream if added is None else added, weight,
        total, out, rows, width, eps, HAS_ADDED=added is not None, STORE=store, **tile,
    )  # fmt: skip
    return total, out


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, added: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype,
        last: bool,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        total, out = sum_and_norm(stream, added, weight, eps, dtype, last)
        # For the backward pass, save the total. It is an output, so it stays in memory anyway. With ``last``
        # there is no total, so save its two summands.
        kept = (stream, added) if last else (total, None)
        ctx.save_for_backward(*kept, weight)
        ctx.eps = eps
        ctx.of_added = None if added is None else added.dtype
        ctx.set_materialize_grads(False)
        return None if last else total.view_as(total), out

    @staticmethod
    def backward(ctx: Any, d_total: Tensor | None, d_out: Tensor | None) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        stream, added, weight = ctx.saved_tensors
        if d_out is None:
            d_added = None if ctx.of_added is None or d_total is None else d_total.to(ctx.of_added)
            return d_total, d_added, None, None, None, None
        width = stream.shape[-1]
        rows = stream.numel() // width
        tile = _tile(width)
        blocks = max(1, triton.cdiv(rows, tile["R"] * 1024))
        parts = triton.cdiv(rows, tile["R"] * blocks)
        d_stream = torch.empty_like(stream)
        d_weight = torch.empty(parts, width, device=stream.device, dtype=torch.float32)
        launch(
            _add_norm_backward_kernel, (parts,), d_out.contiguous(),
            d_out if d_total is None else d_total.contiguous(), stream, stream if added is None else added,
            weight, d_stream, d_weight, rows, width, ctx.eps, HAS_ADDED=added is not None,
            HAS_TOTAL=d_total is not None, **tile, BLOCKS=blocks,
        )  # fmt: skip
        d_added = None if ctx.of_added is None else d_stream.to(ctx.of_added)
        return d_stream, d_added, d_weight.sum(0).to(weight.dtype), None, None, None


def add_norm(
    stream: Tensor, added: Tensor | None, norm: nn.RMSNorm, dtype: torch.dtype, last: bool
) -> tuple[Tensor, Tensor]:
    """Returns the sum ``stream + added``, and the RMSNorm of the sum in ``dtype``.

    With ``last``, the first tensor is undefined.
    """
    stream = stream.contiguous()
    added = None if added is None else added.contiguous()
    if not torch.is_grad_enabled():
        return sum_and_norm(stream, added, norm.weight, norm.eps, dtype, last)
    total, out = _AddNorm.apply(stream, added, norm.weight, norm.eps, dtype, last)
    return total, out
