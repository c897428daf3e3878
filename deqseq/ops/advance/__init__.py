"""Moving a state past the tokens that it consumes: recurrent states, and keys and values.

Shapes: B sequences, W tokens of the evaluation, H heads, P head dim, N state dim, K taps, C convolved
channels; J key/value heads, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deqseq.ops.advance import naive
from deqseq.ops.mixer.naive import LayerTrace

Layers = tuple[tuple[Tensor, ...], ...]

MOST_TOKENS = 64
"""Tokens that Triton consumes one by one; more are faster as matrix products."""


def recurrent(layers: Layers, traces: Sequence[LayerTrace], count: Tensor, form: str) -> Layers:
    """The layers' states after the first ``count`` (B,) tokens.

    Args:
        layers: per layer the convolution's tail (B, K-1, C) and the SSM state (B, H, P, N); may be changed in
            place.
        traces: of the evaluation, per layer.
    """
    if _by_triton(traces[0].x.shape[1], form):
        from deqseq.ops.advance.triton import recurrent_

        for (tail, ssm), trace in zip(layers, traces, strict=True):
            recurrent_(tail, ssm, trace, count)
        return layers
    return tuple(
        naive.recurrent(tail, ssm, trace, count) for (tail, ssm), trace in zip(layers, traces, strict=True)
    )


def keys_values(
    layers: Layers, traces: Sequence[tuple[Tensor, Tensor]], seen: Tensor, count: Tensor, form: str
) -> Layers:
    """The layers' keys and values with the first ``count`` (B,) tokens in the slots after ``seen`` (B,).

    Args:
        layers: per layer keys and values (B, J, S, P); may be changed in place.
        traces: per layer keys and values (B, J, W, P) of the evaluation.
    """
    if _by_triton(traces[0][0].shape[2], form):
        from deqseq.ops.advance.triton import append_

        for (keys, values), (k, v) in zip(layers, traces, strict=True):
            append_(keys, values, k, v, seen, count)
        return layers
    return naive.keys_values(layers, traces, seen, count)


def _by_triton(tokens: int, form: str) -> bool:
    return form == "triton" and tokens <= MOST_TOKENS and not torch.is_grad_enabled()
