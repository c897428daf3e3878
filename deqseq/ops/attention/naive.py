"""Causal self-attention with rotary positions and grouped key/value heads, by torch or a given function.

Shapes: B sequences, W tokens, D width, H query heads, J key/value heads, P head dim, S slots of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionWeights(NamedTuple):
    """Effective weights, computed once a forward pass."""

    qkv: Tensor  # (H P + 2 J P, D)
    out_proj: Tensor  # (D, H P)


def attend(
    u: Tensor, weights: AttentionWeights, injection: Tensor | None, rotary: tuple[Tensor, Tensor],
    state: tuple[Tensor, ...] | None, mask: Any, heads: int,
    function: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """The attention's output (B, W, D), and keys and values (B, J, W, P) if there is a state.

    Args:
        u: (B, W, D).
        injection: (B, W, H P + 2 J P) added to queries, keys and values.
        rotary: cosines and sines (B, 1, W, P).
        state: keys and values (B, J, S, P) of the tokens before.
        mask: (B, 1, W, S + W) bool, or what ``function`` takes; ``None``: causal without slots.
        heads: H.
        function: computes attention where there are no slots; torch does by default.
    """
    qkv = F.linear(u, weights.qkv)
    if injection is not None:
        qkv = qkv + injection
    qkv = qkv.unflatten(-1, (-1, rotary[0].shape[-1])).transpose(1, 2)  # (B, H + 2 J, W, P)
    shared = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split([heads, shared, shared], dim=1)
    q, k = rotate(q, *rotary), rotate(k, *rotary)
    trace = None if state is None else (k, v)
    if function is not None and no_slots(state):
        y = function(q, k, v, mask)
    else:
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=shared != heads
        ).transpose(1, 2)
    return F.linear(y.flatten(2), weights.out_proj), trace


def no_slots(state: tuple[Tensor, ...] | None) -> bool:
    """Whether a layer's state has no slots, so that attention is plain and causal."""
    return state is None or state[0].shape[2] == 0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021) on ``x`` (B, H, W, P), tables (B, 1, W, P): halves are pairs."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
