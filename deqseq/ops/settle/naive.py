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
    can_change = ~settled & finite
    failed = ~finite & (can_change.cumsum(1) == 0)  # no finite token before it can change it
    done = settled | (stops & finite) | (iterations >= max_iter) | failed
    # Settled tokens stay settled, also padding after tokens that are not.
    settled = settled | ((~done).cumsum(1) == 0)
    code = torch.where(converged, codes[0], codes[1])
    code = torch.where(finite, code, codes[2])
    return settled, torch.where(settled & active, code, status), settled | ~finite
