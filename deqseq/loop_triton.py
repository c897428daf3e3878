"""What the loop does with every evaluation, in three Triton kernels instead of some thirty.

Shapes: B sequences, W tokens in the window, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deqseq.kernels import launch


@triton.jit
def _norms_kernel(z, fz, change, size, rows, D, R: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    of_change = tl.zeros((R,), tl.float32)
    of_size = tl.zeros((R,), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)[None, :]
        mask = (r < rows) & (d < D)
        new = tl.load(fz + r * D + d, mask, 0.0).to(tl.float32)
        step = new - tl.load(z + r * D + d, mask, 0.0).to(tl.float32)
        of_change += tl.sum(step * step, 1)
        of_size += tl.sum(new * new, 1)
    r1 = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    tl.store(change + r1, tl.sqrt(of_change), r1 < rows)
    tl.store(size + r1, tl.sqrt(of_size), r1 < rows)


def residual_norms(z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`deqseq.convergence.residual_norms`."""
    z, fz = z.contiguous(), fz.contiguous()
    width = z.shape[-1]
    rows = z.numel() // width
    change = torch.empty(z.shape[:-1], device=z.device, dtype=torch.float32)
    size = torch.empty_like(change)
    block = min(1024, triton.next_power_of_2(width))
    tokens = max(1, 2048 // block)
    grid = (triton.cdiv(rows, tokens),)
    launch(_norms_kernel, grid, z, fz, change, size, rows, width, R=tokens, BLOCK=block)
    return change, size


@triton.jit
def _hold_kernel(z, out, hold, rows, D, R: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    held = tl.load(hold + r, r < rows, 0).to(tl.int1)
    if tl.max(held.to(tl.int32), 0) > 0:
        for start in range(0, D, BLOCK):
            d = start + tl.arange(0, BLOCK)[None, :]
            mask = held[:, None] & (d < D)
            place = r[:, None] * D + d
            tl.store(out + place, tl.load(z + place, mask, 0.0), mask)


def hold_(out: Tensor, z: Tensor, hold: Tensor) -> Tensor:
    """``out`` (B, W, D) with z where ``hold`` (B, W) says so, in place; what is not held is not touched."""
    width = z.shape[-1]
    rows = z.numel() // width
    block = min(1024, triton.next_power_of_2(width))
    tokens = max(1, 2048 // block)
    grid = (triton.cdiv(rows, tokens),)
    launch(_hold_kernel, grid, z.contiguous(), out, hold.contiguous(), rows, width, R=tokens, BLOCK=block)
    return out


@triton.jit
def _settle_kernel(residual, converged, stops, settled, iterations, status, new_settled, new_status, hold,
                   W, budget, CONVERGED: tl.constexpr, ENDED: tl.constexpr, NON_FINITE: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    w = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * W + w
    mask = w < W
    found = tl.load(residual + place, mask, 0.0)
    finite = (found == found) & (tl.abs(found) != float("inf"))
    before = tl.load(settled + place, mask, 1).to(tl.int1)
    ends = tl.load(stops + place, mask, 1).to(tl.int1) & finite
    exhausted = tl.load(iterations + place, mask, 0) >= budget
    # A value that is not finite is final once no finite token before it can still change it.
    open_before = tl.where(before | ~finite, 0, 1)
    failed = ~finite & (tl.cumsum(open_before, 0) - open_before == 0)
    done = before | ends | exhausted | failed
    done = tl.cumsum(tl.where(done, 0, 1), 0) == 0
    code = tl.where(tl.load(converged + place, mask, 0).to(tl.int1), CONVERGED, ENDED)
    code = tl.where(finite, code, NON_FINITE)
    code = tl.where(done & ~before, code, tl.load(status + place, mask, 0))
    tl.store(new_settled + place, done, mask)
    tl.store(new_status + place, code, mask)
    tl.store(hold + place, done | ~finite, mask)


def settle(
    residual: Tensor, converged: Tensor, stops: Tensor, settled: Tensor, iterations: Tensor, status: Tensor,
    budget: int, codes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Who is settled after an evaluation, their status, and whose z must not move; each (B, W).

    Args:
        codes: of statuses: converged, ended otherwise, not finite.
    """
    width = residual.shape[1]
    now, hold = torch.empty_like(settled), torch.empty_like(settled)
    code = torch.empty_like(status)
    launch(
        _settle_kernel, (residual.shape[0],), residual.contiguous(), converged.contiguous(),
        stops.contiguous(), settled.contiguous(), iterations, status.contiguous(), now, code, hold, width,
        budget, CONVERGED=codes[0], ENDED=codes[1], NON_FINITE=codes[2], BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return now, code, hold
