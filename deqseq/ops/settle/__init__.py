"""Temporary."""

import torch
from torch import Tensor

from deqseq import kernels


def settle(
    residual: Tensor, converged: Tensor, stops: Tensor, settled: Tensor, active: Tensor, iterations: Tensor,
    status: Tensor, max_iter: int, codes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if kernels.implementation(residual) == "triton":
        from deqseq.loop_triton import settle as fused

        return fused(residual, converged, stops, settled, iterations, status, max_iter, codes)
    finite = torch.isfinite(residual)
    failed = ~finite & _all_before(settled | ~finite)
    exhausted = iterations >= max_iter
    now = settled | _all_up_to(settled | (stops & finite) | exhausted | failed)
    code = torch.where(converged, codes[0], codes[1])
    code = torch.where(finite, code, codes[2])
    return now, torch.where(now & active, code, status), now | ~finite


def _all_up_to(done: Tensor) -> Tensor:
    return (~done).cumsum(1) == 0


def _all_before(done: Tensor) -> Tensor:
    return (~done).cumsum(1) - (~done).long() == 0
