"""Residual addition and RMSNorm."""

import torch
from torch import Tensor, nn

from deqseq import kernels


def add_norm(
    stream: Tensor, added: Tensor | None, norm: nn.RMSNorm, implementation: str, last: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the sum ``stream + added`` (B, W, D) in the stream's dtype, and the RMSNorm of the sum.

    The RMSNorm has the dtype in which autocast computes linear maps.

    Args:
        stream: (B, W, D), or one token (1, 1, D) that stands for all tokens.
        implementation: a name in :mod:`deqseq.kernels`.
        last: true if the caller needs only the RMSNorm. This is the case for a final norm, whose result is
            f(z), and in post-norm blocks. The RMSNorm then has the stream's dtype, and the returned sum is
            undefined.
    """
    dtype = stream.dtype if last else kernels.autocast_dtype(stream)
    if added is not None and stream.shape != added.shape:
        stream, added = (stream + added).to(stream.dtype), None
    # In compiled code, use plain PyTorch, because the compiler fuses it with the operations around it.
    if implementation == "triton" and not torch.compiler.is_compiling():
        from deqseq.ops.add_norm import triton

        return triton.add_norm(stream, added, norm, dtype, last)
    if added is not None:
        stream = stream + added
    return stream, norm(stream).to(dtype)
