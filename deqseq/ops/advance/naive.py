"""Moving states on in plain PyTorch. Shapes as in :mod:`deqseq.ops.advance`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deqseq.ops.mixer.naive import LayerTrace
from deqseq.ops.mixer.ssd import ssd_advance


def recurrent(tail: Tensor, ssm: Tensor, trace: LayerTrace, count: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's tail and SSM state after the first ``count`` (B,) tokens."""
    taps = tail.shape[1]
    # The last inputs consumed, of which some may be in the tail.
    last = torch.arange(taps, device=tail.device) + count[:, None]
    if taps:
        parts = [_tokens(part, (last - taps).clamp_min(0)) for part in trace.conv]
        new = torch.stack(parts).sum(0).to(tail.dtype)
        tail = torch.where((last < taps)[..., None], _tokens(tail, last.clamp_max(taps - 1)), new)
    x = trace.x * trace.step.to(trace.x.dtype)[..., None]
    return tail, ssd_advance(x, trace.step * trace.decay, trace.b, ssm, count)


def _tokens(values: Tensor, index: Tensor) -> Tensor:
    """``values`` (B, W, C) at ``index`` (B, K), (B, K, C)."""
    return values.gather(1, index[..., None].expand(*index.shape, values.shape[2]))


def keys_values(
    layers: tuple[tuple[Tensor, ...], ...], traces: Sequence[tuple[Tensor, Tensor]], seen: Tensor,
    count: Tensor,
) -> tuple[tuple[Tensor, ...], ...]:  # fmt: skip
    """The layers' keys and values with the first ``count`` (B,) tokens."""
    # Slot s takes the window's token s - seen, if that is one of the first ``count``.
    slots = torch.arange(layers[0][0].shape[2], device=count.device)
    token = slots - seen[:, None]  # (B, S)
    write = ((token >= 0) & (token < count[:, None]))[:, None, :, None]
    source = token.clamp(0, traces[0][0].shape[2] - 1)[:, None, :, None]

    def written(kept: Tensor, new: Tensor) -> Tensor:
        moved = new.to(kept.dtype).gather(2, source.expand_as(kept))
        return torch.where(write, moved, kept)

    return tuple(
        tuple(written(kept, new) for kept, new in zip(before, trace, strict=True))
        for before, trace in zip(layers, traces, strict=True)
    )
