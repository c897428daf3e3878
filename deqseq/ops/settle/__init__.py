"""Which tokens are settled after an evaluation.

Shapes: B sequences, W tokens in the window.
"""

import torch
from torch import Tensor

from deqseq import kernels


def settle(
    residual: Tensor, converged: Tensor, stops: Tensor, settled: Tensor, active: Tensor, iterations: Tensor,
    status: Tensor, max_iter: int, codes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Settle the tokens that are done and have only done tokens before them.

    A token is done when it ``stops`` with a finite residual, when its budget is exhausted, or when it is not
    finite and no finite token before it can still change it.

    Args:
        residual: (B, W) of this evaluation; of settled tokens, their last one.
        converged: (B, W) bool, the tolerance is met.
        stops: (B, W) bool, the policy lets the token settle.
        settled: (B, W) bool, before this evaluation; padding counts as settled.
        active: (B, W) bool, took part in this evaluation: the tokens that are not ``settled``.
        iterations: (B, W) int64 evaluations of each token, this one included.
        status: (B, W) int64 before this evaluation.
        max_iter: evaluations that a token may take part in.
        codes: statuses of tokens that settle converged, otherwise, and not finite.

    Returns:
        ``settled``, ``status`` and ``frozen`` (B, W) bool: z must not move, because the token is settled or
        its evaluation is not finite.
    """
    if kernels.fused(residual):
        from deqseq.ops.settle import triton

        return triton.settle(residual, converged, stops, settled, iterations, status, max_iter, codes)
    finite = torch.isfinite(residual)
    can_change = ~settled & finite
    failed = ~finite & (can_change.cumsum(1) == 0)  # no finite token before it can change it
    done = settled | (stops & finite) | (iterations >= max_iter) | failed
    # Settled tokens stay settled, also padding after tokens that are not.
    settled = settled | ((~done).cumsum(1) == 0)
    code = torch.where(converged, codes[0], codes[1])
    code = torch.where(finite, code, codes[2])
    return settled, torch.where(settled & active, code, status), settled | ~finite
