"""Residual addition and RMSNorm."""

import torch
from torch import Tensor, nn

from deqseq import kernels


def add_norm(
    stream: Tensor, added: Tensor | None, norm: nn.RMSNorm, form: str, last: bool = False
) -> tuple[Tensor, Tensor]:
    """``stream + added`` (B, W, D) in the stream's type, and its RMSNorm.

    The norm has autocast's type, because linear maps follow. With ``last``, the norm is f(z) in the stream's
    type, and the returned sum is undefined: do not read it.
    """
    dtype = stream.dtype if last else kernels.autocast_dtype(stream)
    # Compiled code uses the plain form, which the compiler fuses with the operations around it.
    if form == "triton" and not torch.compiler.is_compiling():
        from deqseq.ops.add_norm import triton

        return triton.add_norm(stream, added, norm, dtype, last)
    if added is not None:
        stream = stream + added
    return stream, norm(stream).to(dtype)
