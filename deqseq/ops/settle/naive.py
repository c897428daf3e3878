"""Which tokens are settled, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def settle(
    residual: Tensor, converged: Tensor, stops: Tensor, settled: Tensor, active: Tensor, iterations: Tensor,
    status: Tensor, max_iter: int, codes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Arguments and results as in :func:`deqseq.ops.settle.settle`."""
    finite = torch.isfinite(residual)
    failed = ~finite & _all_before(settled | ~finite)
    done = settled | (stops & finite) | (iterations >= max_iter) | failed
    # What is settled stays so, also padding behind tokens that are not.
    settled = settled | _all_up_to(done)
    code = torch.where(converged, codes[0], codes[1])
    code = torch.where(finite, code, codes[2])
    return settled, torch.where(settled & active, code, status), settled | ~finite


def _all_up_to(done: Tensor) -> Tensor:
    """(B, W) bool: the token and all before it are done."""
    return (~done).cumsum(1) == 0


def _all_before(done: Tensor) -> Tensor:
    """(B, W) bool: all tokens before this one are done."""
    return (~done).cumsum(1) - (~done).long() == 0
