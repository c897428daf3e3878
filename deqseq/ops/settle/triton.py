"""Which tokens are settled, in one Triton kernel; arguments and results as in :mod:`deqseq.ops.settle`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deqseq.kernels import launch


@triton.jit
def _settle_kernel(residual, converged, stops, settled, iterations, status, new_settled, new_status, frozen,
                   W, max_iter, CONVERGED: tl.constexpr, ENDED: tl.constexpr, NON_FINITE: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    w = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * W + w
    mask = w < W
    found = tl.load(residual + place, mask, 0.0)
    finite = (found == found) & (tl.abs(found) != float("inf"))
    before = tl.load(settled + place, mask, 1).to(tl.int1)
    ends = tl.load(stops + place, mask, 1).to(tl.int1) & finite
    exhausted = tl.load(iterations + place, mask, 0) >= max_iter
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
    tl.store(frozen + place, done | ~finite, mask)


def settle(
    residual: Tensor, converged: Tensor, stops: Tensor, settled: Tensor, iterations: Tensor, status: Tensor,
    max_iter: int, codes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width = residual.shape[1]
    now, code, frozen = (torch.empty_like(t) for t in (settled, status, settled))
    launch(
        _settle_kernel, (residual.shape[0],), residual.contiguous(), converged.contiguous(),
        stops.contiguous(), settled.contiguous(), iterations, status.contiguous(), now, code, frozen, width,
        max_iter, CONVERGED=codes[0], ENDED=codes[1], NON_FINITE=codes[2],
        BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return now, code, frozen
