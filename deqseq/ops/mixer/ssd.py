"""The state-space recurrence of Mamba2 (SSD; Dao & Gu, 2024, arXiv 2405.21060) in plain PyTorch.

Every head computes h_t = exp(a_t) h_{t-1} + x_t b_t^T and y_t = h_t c_t.

Shapes: B sequences, L tokens, H heads, P head dim, N state dim, G groups of heads that share b and c,
C chunks of Q tokens.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def ssd(x: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None, chunk: int = 64) -> Tensor:
    """Compute the recurrence over all tokens, in chunks.

    Args:
        x: (B, L, H, P) inputs, already multiplied by the step size.
        a: (B, L, H) log decays, <= 0, at least float32.
        b, c: (B, L, G, N) input and output projections; G divides H.
        state: (B, H, P, N) the state before the first token; zero by default.
        chunk: number of tokens in a chunk; affects only speed, memory and rounding.

    Returns:
        y (B, L, H, P).
    """
    length = x.shape[1]
    chunk = min(chunk, length)
    padding = -length % chunk
    if padding:
        x, b, c = (F.pad(t, (0, 0, 0, 0, 0, padding)) for t in (x, b, c))
        a = F.pad(a, (0, 0, 0, padding))
    groups = b.shape[2]
    x = rearrange(x, "b (c q) (g h) p -> b c g h q p", q=chunk, g=groups)
    total = rearrange(a, "b (c q) (g h) -> b c g h q", q=chunk, g=groups).cumsum(-1)
    b = rearrange(b, "b (c q) g n -> b c g 1 q n", q=chunk)
    c = rearrange(c, "b (c q) g n -> b c g 1 q n", q=chunk)

    # Inside a chunk, with total = cumsum(a): y_q = sum_{k <= q} exp(total_q - total_k) (c_q . b_k) x_k
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill_(future, -torch.inf).exp_()
    y = (decay * (c @ b.transpose(-1, -2))).to(x.dtype) @ x

    if x.shape[1] > 1 or state is not None:
        # Between chunks: compute what each chunk adds to the state, then the state before each chunk, then
        # what these states add to y.
        left = (total[..., -1:] - total).exp().to(x.dtype)  # decay from a token to its chunk's end
        added = (x * left[..., None]).transpose(-1, -2) @ b  # (B, C, G, H/G, P, N)
        kept = total[..., -1].exp().to(x.dtype)[..., None, None]  # decay through a chunk
        current = torch.zeros_like(added[:, 0])
        if state is not None:
            current = rearrange(state, "b (g h) p n -> b g h p n", g=groups).to(x.dtype)
        starts = [current]
        for i in range(x.shape[1] - 1):
            starts.append(starts[i] * kept[:, i] + added[:, i])
        carried = c @ torch.stack(starts, 1).transpose(-1, -2)
        y = torch.addcmul(y, carried, total.exp().to(x.dtype)[..., None])
    y = rearrange(y, "b c g h q p -> b (c q) (g h) p")
    return y[:, :length] if padding else y


def ssd_advance(x: Tensor, a: Tensor, b: Tensor, state: Tensor, count: Tensor) -> Tensor:
    """The state (B, H, P, N) after the first ``count`` (B,) tokens of each sequence.

    The other arguments are those of :func:`ssd`.
    """
    position = torch.arange(x.shape[1], device=x.device)
    consumed = position < count[:, None]  # (B, L)
    a = a.where(consumed[..., None], a.new_zeros(()))
    total = a.cumsum(1)
    left = (total[:, -1:] - total).exp()  # decay from a token to the last consumed token
    left = left.where(consumed[..., None], left.new_zeros(()))
    # Set x and b of tokens that are not consumed to 0. Multiplying them by 0 would turn infinities into NaN.
    x, b = (t.where(consumed[..., None, None], t.new_zeros(())) for t in (x, b))
    weighted = rearrange(x * left.to(x.dtype)[..., None], "b l (g h) p -> b l g h p", g=b.shape[2])
    added = torch.einsum("blghp,blgn->bghpn", weighted, b).flatten(1, 2)
    return state * total[:, -1].exp().to(state.dtype)[..., None, None] + added.to(state.dtype)
