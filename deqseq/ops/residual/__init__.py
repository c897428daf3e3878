"""The residuals of tokens. They decide which tokens converge, settle and freeze.

Shapes: B sequences, W tokens in the window, D width.
"""

import torch
from torch import Tensor

from deqseq import kernels


def residual_norms(z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
    """``||f(z) - z||`` and ``||f(z)||`` of every token, each (B, W) and at least float32.

    ``z`` and ``fz`` are (B, W, D).
    """
    if kernels.fused(z):
        from deqseq.ops.residual import triton

        return triton.residual(z, fz, judges=False)
    dtype = torch.promote_types(z.dtype, torch.float32)
    change = torch.linalg.vector_norm(fz - z, dim=-1, dtype=dtype)
    return change, torch.linalg.vector_norm(fz, dim=-1, dtype=dtype)


def relative(change: Tensor, size: Tensor) -> Tensor:
    """``change / size`` as float32. 0 / 0 gives 0, and finite inputs give finite results."""
    ratio = change / size.clamp_min(torch.finfo(size.dtype).tiny)
    largest = torch.finfo(torch.float32).max
    return torch.where(torch.isfinite(change), ratio.clamp_max(largest), ratio).float()


def judge(z: Tensor, fz: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    """Judge every token by its residual.

    Returns the relative residual, (B, W) float32, and whether the token has converged, (B, W) bool:
    ``||f(z) - z|| <= atol + rtol * ||f(z)||``.
    """
    if kernels.fused(z):
        from deqseq.ops.residual import triton

        return triton.residual(z, fz, True, atol, rtol)
    change, size = residual_norms(z, fz)
    return relative(change, size), change <= atol + rtol * size


def settle(
    residual: Tensor, converged: Tensor, stops: Tensor, settled: Tensor, active: Tensor, iterations: Tensor,
    status: Tensor, max_iter: int, codes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Settle each token that is done, if all tokens before it are done too.

    A token is done if one of these is true:

    - the policy lets it stop, and its residual is finite;
    - its budget is exhausted;
    - its residual is not finite, and neither is that of any earlier token that is not settled yet.

    Args:
        residual: (B, W) residual of each token's last evaluation.
        converged: (B, W) bool, true if the token meets the tolerance.
        stops: (B, W) bool, true if the policy lets the token settle.
        settled: (B, W) bool, true for padding and for tokens that settled before this evaluation.
        active: (B, W) bool, the opposite of ``settled``: the tokens of this evaluation.
        iterations: (B, W) int64, number of evaluations of each token, including this one.
        status: (B, W) int64 before this evaluation.
        max_iter: maximum number of evaluations per token.
        codes: the statuses for tokens that converged, that did not converge, and that are not finite.

    Returns:
        ``settled`` and ``status`` after this evaluation, and ``frozen`` (B, W) bool, true if the token is
        settled or its residual is not finite. z of a frozen token must not change.
    """
    if kernels.fused(residual):
        from deqseq.ops.residual import triton

        return triton.settle(residual, converged, stops, settled, iterations, status, max_iter, codes)
    finite = torch.isfinite(residual)
    can_change = ~settled & finite
    failed = ~finite & (can_change.cumsum(1) == 0)  # no earlier token can change this one
    done = settled | (stops & finite) | (iterations >= max_iter) | failed
    # A settled token stays settled. Padding counts as settled, even if tokens before it have not settled.
    settled = settled | ((~done).cumsum(1) == 0)
    code = torch.where(converged, codes[0], codes[1])
    code = torch.where(finite, code, codes[2])
    return settled, torch.where(settled & active, code, status), settled | ~finite


def freeze(frozen: Tensor, z: Tensor, proposal: Tensor) -> Tensor:
    """For ``frozen`` (B, W) tokens returns z (B, W, D), for other tokens the proposal.

    If gradients are disabled, the function may write the result into ``proposal``.
    """
    if kernels.fused(z):
        from deqseq.ops.residual import triton

        return triton.freeze_(frozen, z, proposal.contiguous())
    return torch.where(frozen[..., None], z, proposal)
