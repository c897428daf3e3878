"""The convolution and the recurrence of Mamba2, by kernels of the packages causal_conv1d and mamba_ssm.

:mod:`deqseq.ops.mixer.naive` has the same functions in plain PyTorch, with the same shapes and arguments.
"""

from causal_conv1d import causal_conv1d_fn
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

from deqseq.ops.mixer import naive

CHUNK = 256  # the fastest size for mamba_ssm's kernels on an H100


def convolve(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor | None) -> Tensor:
    """SiLU of the causal convolution, by plain PyTorch if there is a tail or the shape is unsupported."""
    by_channel = x.transpose(1, 2)
    aligned = by_channel.stride(0) % 8 == 0 and by_channel.stride(2) % 8 == 0
    if tail is not None or not aligned or not 2 <= weight.shape[1] <= 4:
        return naive.convolve(x, weight, bias, tail)
    out: Tensor = causal_conv1d_fn(by_channel, weight.to(x.dtype), bias.to(x.dtype), activation="silu")
    return out.transpose(1, 2)


def recur(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor | None,
    chunk: int,
) -> Tensor:  # fmt: skip
    """The output of the recurrence, plus ``skip * x``."""
    y: Tensor = mamba_chunk_scan_combined(
        x, step, decay, b, c, chunk_size=CHUNK, D=skip.float(), initial_states=state
    )
    return y
