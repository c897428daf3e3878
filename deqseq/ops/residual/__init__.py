"""The residuals of tokens, and which tokens converge, settle and freeze because of them.

Shapes: B sequences, W tokens in the window, D width.
"""

import torch
from torch import Tensor

from deqseq import kernels


def residual_norms(z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
    """``||f(z) - z||`` and ``||f(z)||`` of every token, each (B, W), at least float32; z, fz (B, W, D)."""
    if kernels.fused(z):
        from deqseq.ops.residual import triton

        return triton.residual(z, fz, judges=False)
    dtype = torch.promote_types(z.dtype, torch.float32)
    change = torch.linalg.vector_norm(fz - z, dim=-1, dtype=dtype)
    return change, torch.linalg.vector_norm(fz, dim=-1, dtype=dtype)


def relative(change: Tensor, size: Tensor) -> Tensor:
    """``change / size`` as float32: 0 where both are zero, and finite wherever both are finite."""
    ratio = change / size.clamp_min(torch.finfo(size.dtype).tiny)
    largest = torch.finfo(torch.float32).max
    return torch.where(torch.isfinite(change), ratio.clamp_max(largest), ratio).float()


def judge(z: Tensor, fz: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    """The relative residual, float32, and ``||f(z) - z|| <= atol + rtol * ||f(z)||``, each (B, W)."""
    if kernels.fused(z):
        from deqseq.ops.residual import triton

        return triton.residual(z, fz, True, atol, rtol)
    change, size = residual_norms(z, fz)
    return relative(change, size), change <= atol + rtol * size


def settle(
    residual: Tensor, converged: Tensor, stops: Tensor, settled: Tensor, active: Tensor, iterations: Tensor,
    status: Tensor, max_iter: int, codes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Settle the tokens that are done and have only done tokens before them.

    A token is done when it ``stops`` with a finite residual, when its budget is exhausted, or when its
    residual is not finite and every earlier token is settled or not finite either.

    Args:
        residual: (B, W) residual of this evaluation; for settled tokens, of their last evaluation.
        converged: (B, W) bool, true if the token meets the tolerance.
        stops: (B, W) bool, true if the policy lets the token settle.
        settled: (B, W) bool, true if settled before this evaluation, and at padding.
        active: (B, W) bool, the opposite of ``settled``: the tokens of this evaluation.
        iterations: (B, W) int64, number of evaluations of each token, including this one.
        status: (B, W) int64 before this evaluation.
        max_iter: maximum number of evaluations per token.
        codes: the statuses for tokens that converged, that did not converge, and that are not finite.

    Returns:
        ``settled``, ``status`` and ``frozen`` (B, W) bool: z must not move, because the token is settled or
        its evaluation is not finite.
    """
    if kernels.fused(residual):
        from deqseq.ops.residual import triton

        return triton.settle(residual, converged, stops, settled, iterations, status, max_iter, codes)
    finite = torch.isfinite(residual)
    can_change = ~settled & finite
    failed = ~finite & (can_change.cumsum(1) == 0)  # no earlier token can still make it finite
    done = settled | (stops & finite) | (iterations >= max_iter) | failed
    # Settled tokens stay settled, including padding after unsettled tokens.
    settled = settled | ((~done).cumsum(1) == 0)
    code = torch.where(converged, codes[0], codes[1])
    code = torch.where(finite, code, codes[2])
    return settled, torch.where(settled & active, code, status), settled | ~finite


def freeze(frozen: Tensor, z: Tensor, proposal: Tensor) -> Tensor:
    """z (B, W, D) where ``frozen`` (B, W), else the proposal.

    The result may be in the proposal's memory, unless gradients are recorded.
    """
    if kernels.fused(z):
        from deqseq.ops.residual import triton

        return triton.freeze_(frozen, z, proposal.contiguous())
    return torch.where(frozen[..., None], z, proposal)
