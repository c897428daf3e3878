"""The state-space recurrence of Mamba2 (SSD; Dao & Gu, 2024, arXiv 2405.21060) in plain PyTorch.

h_t = exp(a_t) h_{t-1} + x_t b_t^T,  y_t = h_t c_t, for every head.

Shapes: B sequences, L tokens, H heads, P head dim, N state dim, G groups of heads that share b and c,
C chunks of Q tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def ssd(
    x: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None, chunk: int = 64
) -> Tensor:
    """The recurrence over all tokens, in chunks: quadratic inside a chunk, linear in L.

    Args:
        x: (B, L, H, P) inputs, already multiplied by the step size.
        a: (B, L, H) log decays, <= 0, float32 or better.
        b, c: (B, L, G, N) input and output projections; G divides H.
        state: (B, H, P, N) before the first token; zero by default.
        chunk: tokens in a chunk.

    Returns:
        y (B, L, H, P).
    """
    length = x.shape[1]
    chunk = min(chunk, length)
    padding = -length % chunk
    if padding:
        x, b, c = (F.pad(t, (0, 0, 0, 0, 0, padding)) for t in (x, b, c))
        a = F.pad(a, (0, 0, 0, padding))
    # (B, C, Q, ...) chunks; heads in front of the tokens for batched products
    x, a, b, c = (t.unflatten(1, (-1, chunk)) for t in (x, a, b, c))
    heads, groups = x.shape[3], b.shape[3]
    x = x.transpose(2, 3)  # (B, C, H, Q, P)
    b, c = b.transpose(2, 3), c.transpose(2, 3)  # (B, C, G, Q, N)
    total = a.transpose(2, 3).cumsum(-1)  # (B, C, H, Q) log decay since the chunk's start

    # Inside a chunk: y_q = sum_{k <= q} exp(total_q - total_k) (c_q . b_k) x_k
    score = c @ b.transpose(-1, -2)  # (B, C, G, Q, Q)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill_(future, -torch.inf).exp_()
    weight = decay.unflatten(2, (groups, -1)) * score[:, :, :, None]
    y = weight.flatten(2, 3).to(x.dtype) @ x  # (B, C, H, Q, P)

    chunks = x.shape[1]
    if chunks > 1 or state is not None:
        # Between chunks: what each adds to the state, the state each starts from, and what that gives.
        left = (total[..., -1:] - total).exp().to(x.dtype)  # decay from a token to its chunk's end
        added = ((x * left[..., None]).unflatten(2, (groups, -1)).transpose(-1, -2)) @ b[:, :, :, None]
        added = added.flatten(2, 3)  # (B, C, H, P, N)
        through = total[..., -1, None, None].exp().to(x.dtype)  # (B, C, H, 1, 1)
        current = torch.zeros_like(added[:, 0]) if state is None else state.to(x.dtype)
        starts = []
        for i in range(chunks):
            starts.append(current)
            if i + 1 < chunks:
                current = current * through[:, i] + added[:, i]
        start = torch.stack(starts, 1).unflatten(2, (groups, -1))  # (B, C, G, H/G, P, N)
        carried = c[:, :, :, None] @ start.transpose(-1, -2)  # (B, C, G, H/G, Q, P)
        y = torch.addcmul(y, carried.flatten(2, 3), total.exp().to(x.dtype)[..., None])
    y = y.transpose(2, 3).flatten(1, 2)
    return y[:, :length] if padding else y


def ssd_advance(
    x: Tensor, a: Tensor, b: Tensor, state: Tensor, count: Tensor
) -> Tensor:
    """The state (B, H, P, N) after the first ``count`` (B,) of the tokens; arguments as in :func:`ssd`."""
    position = torch.arange(x.shape[1], device=x.device)
    consumed = position < count[:, None]  # (B, L)
    a = a.where(consumed[..., None], a.new_zeros(()))
    total = a.cumsum(1)
    left = (total[:, -1:] - total).exp()  # decay from a token to the end, 1 for what is not consumed
    left = left.where(consumed[..., None], left.new_zeros(()))
    weighted = (x * left.to(x.dtype)[..., None]).unflatten(2, (b.shape[2], -1))  # (B, L, G, H/G, P)
    added = torch.einsum("blghp,blgn->bghpn", weighted, b).flatten(1, 2)
    return state * total[:, -1].exp().to(state.dtype)[..., None, None] + added.to(state.dtype)


def ssd_naive(
    x: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token, as written; the oracle of the fast forms. Returns y and the state."""
    batch, length, heads, width = x.shape
    repeat = heads // b.shape[2]
    b, c = b.repeat_interleave(repeat, 2), c.repeat_interleave(repeat, 2)
    h = x.new_zeros(batch, heads, width, b.shape[-1]) if state is None else state
    y = []
    for t in range(length):
        h = h * a[:, t].exp()[..., None, None] + x[:, t, ..., None] * b[:, t, :, None]
        y.append((h * c[:, t, :, None]).sum(-1))
    return torch.stack(y, 1), h
