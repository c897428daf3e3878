"""Residual addition and RMSNorm."""

import torch
from torch import Tensor, nn

from deqseq import kernels


def add_norm(
    stream: Tensor, added: Tensor | None, norm: nn.RMSNorm, form: str, last: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the sum ``stream + added`` (B, W, D) in the stream's type, and the RMSNorm of the sum.

    The RMSNorm has the type that autocast gives the inputs of linear maps. Set ``last`` if the RMSNorm is
    the next stream (post-norm blocks) or f(z) (the final norm). It then has the stream's type. Do not use the
    returned sum then: its value depends on ``form``.
    """
    dtype = stream.dtype if last else kernels.autocast_dtype(stream)
    # Compiled code uses the plain form, which the compiler fuses with the operations around it.
    if form == "triton" and not torch.compiler.is_compiling():
        from deqseq.ops.add_norm import triton

        return triton.add_norm(stream, added, norm, dtype, last)
    if added is not None:
        stream = stream + added
    return stream, norm(stream).to(dtype)
