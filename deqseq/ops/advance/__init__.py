"""Updates a backbone's state with new tokens. The state is recurrent, or consists of keys and values.

Shapes: B sequences, W tokens of the evaluation, H heads, P head dim, N state dim, K taps of the
convolution, C channels of the convolution; J key/value heads, S slots for keys and values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deqseq.ops.mixer.naive import LayerTrace
from deqseq.ops.mixer.ssd import ssd_advance

Layers = tuple[tuple[Tensor, ...], ...]

MOST_TOKENS = 64
"""Maximum number of tokens for the Triton kernels. They process tokens one by one. For more tokens, PyTorch's
matrix products are faster."""


def recurrent(layers: Layers, traces: Sequence[LayerTrace], count: Tensor, implementation: str) -> Layers:
    """The layers' states after the first ``count`` (B,) tokens.

    Args:
        layers: per layer, the tail (the last K-1 inputs of the convolution, (B, K-1, C)) and the SSM state
            (B, H, P, N). The function may overwrite these tensors.
        traces: per layer, the trace of the evaluation.
    """
    if _by_triton(traces[0].x.shape[1], implementation):
        from deqseq.ops.advance.triton import recurrent_

        for (tail, ssm), trace in zip(layers, traces, strict=True):
            recurrent_(tail, ssm, trace, count)
        return layers
    return tuple(_recurrent(layer, trace, count) for layer, trace in zip(layers, traces, strict=True))


def _recurrent(layer: tuple[Tensor, ...], trace: LayerTrace, count: Tensor) -> tuple[Tensor, Tensor]:
    tail, ssm = layer
    taps = tail.shape[1]
    # The new tail is the last K-1 entries of [old tail, first ``count`` inputs]. ``last``: their indices.
    last = torch.arange(taps, device=tail.device) + count[:, None]
    if taps:
        last = last[..., None]
        parts = [part.take_along_dim((last - taps).clamp_min(0), 1) for part in trace.conv]
        new = torch.stack(parts).sum(0).to(tail.dtype)
        tail = torch.where(last < taps, tail.take_along_dim(last.clamp_max(taps - 1), 1), new)
    x = trace.x * trace.step.to(trace.x.dtype)[..., None]
    return tail, ssd_advance(x, trace.step * trace.decay[:, None], trace.b, ssm, count)


def keys_values(
    layers: Layers, traces: Sequence[tuple[Tensor, Tensor]], seen: Tensor, count: Tensor, implementation: str
) -> Layers:
    """Write keys and values of the first ``count`` (B,) tokens into the slots from number ``seen`` (B,) on.

    Returns the updated layers.

    Args:
        layers: per layer, keys and values (B, J, S, P). The function may overwrite these tensors.
        traces: per layer, keys and values (B, J, W, P) of the evaluation.
    """
    tokens = traces[0][0].shape[2]
    if _by_triton(tokens, implementation):
        from deqseq.ops.advance.triton import append_

        for (keys, values), (k, v) in zip(layers, traces, strict=True):
            append_(keys, values, k, v, seen, count)
        return layers
    # Slot s takes token s - seen of the window if 0 <= s - seen < count. Other slots keep their values.
    token = torch.arange(layers[0][0].shape[2], device=count.device) - seen[:, None]  # (B, S)
    write = ((token >= 0) & (token < count[:, None]))[:, None, :, None]
    source = token.clamp(0, tokens - 1)[:, None, :, None]

    def written(kept: Tensor, new: Tensor) -> Tensor:
        return torch.where(write, new.to(kept.dtype).gather(2, source.expand_as(kept)), kept)

    return tuple(tuple(map(written, kept, new)) for kept, new in zip(layers, traces, strict=True))


def _by_triton(tokens: int, implementation: str) -> bool:
    return implementation == "triton" and tokens <= MOST_TOKENS and not torch.is_grad_enabled()
