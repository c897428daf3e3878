"""The convolution and the recurrence of Mamba2, computed by flash-linear-attention (fla-core).

Shapes and arguments are those of :mod:`deqseq.ops.mixer.naive`, which uses plain PyTorch.
"""

import torch
from fla.modules.conv import causal_conv1d
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor

from deqseq.ops.mixer import naive


def convolve(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor | None) -> Tensor:
    """SiLU of the causal convolution of ``x``. If ``tail`` is given, plain PyTorch computes the result."""
    if tail is not None:
        return naive.convolve(x, weight, bias, tail)
    out = causal_conv1d(x.contiguous(), weight.to(x.dtype), bias.to(x.dtype), activation="silu")
    y: Tensor = out[0] if isinstance(out, tuple) else out
    return y


def recur(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor | None,
    chunk: int,
) -> Tensor:  # fmt: skip
    """The recurrence plus skip * x.

    The recurrence is computed as gated linear attention: queries are c, keys are b, values are step * x.
    """
    repeat = x.shape[2] // b.shape[2]
    q, k = (t.repeat_interleave(repeat, 2).contiguous() for t in (c, b))
    v = (x * step.to(x.dtype)[..., None]).contiguous()
    start = None if state is None else state.transpose(-1, -2).float().contiguous()
    y, _ = chunk_simple_gla(q, k, v, g=step * decay, scale=1.0, initial_state=start)
    return torch.addcmul(y, x, skip.to(x.dtype)[:, None])
