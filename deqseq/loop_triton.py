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
def _residual_kernel(z, fz, residual, converged, change_out, size_out, rows, D, atol, rtol,
                     VERDICT: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
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
    if VERDICT:  # as convergence.relative has it
        ratio = change / tl.maximum(size, 1.1754943508222875e-38)
        ratio = tl.where(tl.abs(change) < float("inf"), tl.minimum(ratio, 3.4028234663852886e38), ratio)
        tl.store(residual + r, ratio, r < rows)
        tl.store(converged + r, change <= atol + rtol * size, r < rows)
    else:
        tl.store(change_out + r, change, r < rows)
        tl.store(size_out + r, size, r < rows)


def _residual(z: Tensor, fz: Tensor, outputs: tuple[Tensor, ...], atol: float, rtol: float) -> None:
    z, fz = z.contiguous(), fz.contiguous()
    width = z.shape[-1]
    rows = z.numel() // width
    block = min(1024, triton.next_power_of_2(width))
    tokens = max(1, 2048 // block)
    launch(
        _residual_kernel, (triton.cdiv(rows, tokens),), z, fz, *outputs, *outputs, rows, width,
        float(atol), float(rtol), VERDICT=outputs[1].dtype == torch.bool, R=tokens, BLOCK=block,
    )  # fmt: skip


def residual_norms(z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`deqseq.ops.residual.residual_norms`."""
    change = torch.empty(z.shape[:-1], device=z.device, dtype=torch.float32)
    size = torch.empty_like(change)
    _residual(z, fz, (change, size), 0.0, 0.0)
    return change, size


def verdict(z: Tensor, fz: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    """The relative residual and whether it meets the tolerance, each (B, W), token by token."""
    residual = torch.empty(z.shape[:-1], device=z.device, dtype=torch.float32)
    converged = torch.empty_like(residual, dtype=torch.bool)
    _residual(z, fz, (residual, converged), atol, rtol)
    return residual, converged


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
    done = before | (tl.cumsum(tl.where(done, 0, 1), 0) == 0)
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
