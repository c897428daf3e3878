"""The functions of :mod:`deqseq.ops.residual` in Triton. Each function launches one kernel.

Shapes: B sequences, W tokens in the window, D width.
"""

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
    if JUDGES:  # the ratio is change / size: 0 / 0 gives 0, and finite inputs give finite results
        ratio = change / tl.maximum(size, 1.1754943508222875e-38)
        ratio = tl.where(tl.abs(change) < float("inf"), tl.minimum(ratio, 3.4028234663852886e38), ratio)
        tl.store(residual + r, ratio, r < rows)
        tl.store(converged + r, change <= atol + rtol * size, r < rows)
    else:
        tl.store(change_out + r, change, r < rows)
        tl.store(size_out + r, size, r < rows)


def residual(
    z: Tensor, fz: Tensor, judges: bool, atol: float = 0.0, rtol: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute two values (B, W) for every token, from z and f(z), both (B, W, D).

    With ``judges``, as in :func:`deqseq.ops.residual.judge`: the relative residual (float32), and whether the
    token has converged (bool). Without ``judges``: the norms of f(z) - z and of f(z), both float32.
    """
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


@triton.jit
def _settle_kernel(residual, converged, may_settle, settled, iterations, status,
                   new_settled, new_status, frozen, W, max_iter, CONVERGED: tl.constexpr, ENDED: tl.constexpr,
                   NON_FINITE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    w = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * W + w
    mask = w < W
    found = tl.load(residual + place, mask, 0.0)
    finite = (found == found) & (tl.abs(found) != float("inf"))
    before = tl.load(settled + place, mask, 1).to(tl.int1)
    may = tl.load(may_settle + place, mask, 1).to(tl.int1) & finite
    exhausted = tl.load(iterations + place, mask, 0) >= max_iter
    # The loop does not change z of non-finite tokens. So if a token and all unsettled tokens before it are
    # non-finite, f(z) at this token cannot become finite again: the token has failed.
    open_before = tl.where(before | ~finite, 0, 1)
    failed = ~finite & (tl.cumsum(open_before, 0) - open_before == 0)
    ready = before | may | exhausted | failed
    now = before | (tl.cumsum(tl.where(ready, 0, 1), 0) == 0)
    code = tl.where(tl.load(converged + place, mask, 0).to(tl.int1), CONVERGED, ENDED)
    code = tl.where(finite, code, NON_FINITE)
    code = tl.where(now & ~before, code, tl.load(status + place, mask, 0))
    tl.store(new_settled + place, now, mask)
    tl.store(new_status + place, code, mask)
    tl.store(frozen + place, now | ~finite, mask)


def settle(
    residual: Tensor, converged: Tensor, may_settle: Tensor, settled: Tensor, iterations: Tensor,
    status: Tensor, max_iter: int, codes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width = residual.shape[1]
    now, code, frozen = (torch.empty_like(t) for t in (settled, status, settled))
    launch(
        _settle_kernel, (residual.shape[0],), residual.contiguous(), converged.contiguous(),
        may_settle.contiguous(), settled.contiguous(), iterations, status.contiguous(), now, code, frozen,
        width, max_iter, CONVERGED=codes[0], ENDED=codes[1], NON_FINITE=codes[2],
        BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return now, code, frozen


@triton.jit
def _freeze_kernel(z, out, frozen, rows, D, R: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    kept = tl.load(frozen + r, r < rows, 0).to(tl.int1)
    if tl.max(kept.to(tl.int32), 0) > 0:
        for start in range(0, D, BLOCK):
            d = start + tl.arange(0, BLOCK)[None, :]
            mask = kept[:, None] & (d < D)
            place = r[:, None] * D + d
            tl.store(out + place, tl.load(z + place, mask, 0.0), mask)


def freeze_(frozen: Tensor, z: Tensor, out: Tensor) -> Tensor:
    """Overwrite ``out`` with z at the tokens where ``frozen`` (B, W) is true.

    ``z`` and ``out`` are (B, W, D). ``out`` must be contiguous.
    """
    width = z.shape[-1]
    rows = z.numel() // width
    block = min(1024, triton.next_power_of_2(width))
    tokens = max(1, 2048 // block)
    grid = (triton.cdiv(rows, tokens),)
    launch(_freeze_kernel, grid, z.contiguous(), out, frozen.contiguous(), rows, width, R=tokens, BLOCK=block)
    return out
