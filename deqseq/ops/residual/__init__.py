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
    """``change / size`` as float32. 0 / 0 gives 0. The result is finite if the inputs are finite."""
    ratio = change / size.clamp_min(torch.finfo(size.dtype).tiny)
    largest = torch.finfo(torch.float32).max
    return torch.where(torch.isfinite(change), ratio.clamp_max(largest), ratio).float()


def judge(z: Tensor, fz: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    """Judge every token by its residual.

    A token has converged if ``||f(z) - z|| <= atol + rtol * ||f(z)||``. Returns the relative residual, (B, W)
    float32, and whether the token has converged, (B, W) bool.
    """
    if kernels.fused(z):
        from deqseq.ops.residual import triton

        return triton.residual(z, fz, True, atol, rtol)
    change, size = residual_norms(z, fz)
    return relative(change, size), change <= atol + rtol * size


def settle(
    residual: Tensor, converged: Tensor, may_settle: Tensor, settled: Tensor, active: Tensor,
    iterations: Tensor, status: Tensor, max_iter: int, codes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Settle each token that is ready, if all tokens before it are ready too.

    A token is ready if one of these is true:

    - it has settled before;
    - the policy lets it settle, and its residual is finite;
    - it has had ``max_iter`` iterations;
    - its residual is not finite, and no earlier token can still change. A token can change if it is not
      settled and its residual is finite.

    Args:
        residual: (B, W) residual of each token's last evaluation.
        converged: (B, W) bool, true if the token meets the tolerance.
        may_settle: (B, W) bool, true if the policy lets the token settle.
        settled: (B, W) bool, true for padding and for tokens that settled before this evaluation.
        active: (B, W) bool, true for the tokens of this evaluation: the opposite of ``settled``.
        iterations: (B, W) int64, number of iterations of each token, including this one.
        status: (B, W) int64, status of each token before this evaluation.
        max_iter: maximum number of iterations per token.
        codes: the statuses for tokens that converged, that did not converge, and that are not finite.

    Returns:
        ``settled`` and ``status`` after this evaluation, and ``frozen`` (B, W) bool. A token is frozen if it
        is settled or its residual is not finite. z of a frozen token must not change.
    """
    if kernels.fused(residual):
        from deqseq.ops.residual import triton

        return triton.settle(residual, converged, may_settle, settled, iterations, status, max_iter, codes)
    finite = torch.isfinite(residual)
    can_change = ~settled & finite
    failed = ~finite & (can_change.cumsum(1) == 0)  # no earlier token can make it finite again
    ready = settled | (may_settle & finite) | (iterations >= max_iter) | failed
    # Settle the tokens before the first token that is not ready. Tokens after it stay settled if they already
    # are: padding is always settled.
    settled = settled | ((~ready).cumsum(1) == 0)
    code = torch.where(converged, codes[0], codes[1])
    code = torch.where(finite, code, codes[2])
    return settled, torch.where(settled & active, code, status), settled | ~finite


def freeze(frozen: Tensor, z: Tensor, proposal: Tensor) -> Tensor:
    """Returns z (B, W, D) at the tokens that are ``frozen`` (B, W), and the proposal at all other tokens.

    If gradients are disabled, the function may write the result into ``proposal``.
    """
    if kernels.fused(z):
        from deqseq.ops.residual import triton

        return triton.freeze_(frozen, z, proposal.contiguous())
    return torch.where(frozen[..., None], z, proposal)
