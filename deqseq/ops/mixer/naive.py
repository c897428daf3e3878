"""The Mamba2 mixer in plain PyTorch, and the named tuples that all implementations use.

Shapes: B sequences, W tokens, D width, E = H P inner width, H heads, P head dim, N state dim, G groups of
heads that share b and c, K taps, C channels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deqseq.ops.mixer.ssd import ssd


class MixerSizes(NamedTuple):
    """Sizes and options of a mixer that cannot be read from the shapes of its tensors."""

    heads: int
    headdim: int
    d_state: int
    n_groups: int
    norm_groups: int
    norm_eps: float
    chunk: int

    @property
    def inner(self) -> int:
        """The inner width E."""
        return self.heads * self.headdim

    @property
    def conv_width(self) -> int:
        """The number of convolved channels, E + 2 G N."""
        return self.inner + 2 * self.n_groups * self.d_state


class MixerWeights(NamedTuple):
    """The mixer's weights, after weight normalisation and adapters. Computed once per forward pass."""

    in_proj: Tensor  # (2 E + 2 G N + H, D): rows [gate, x, b, c, dt]
    conv: Tensor  # (E + 2 G N, K)
    conv_bias: Tensor
    decay: Tensor  # (H,) Mamba2's parameter A, negative
    dt_bias: Tensor  # (H,)
    skip: Tensor  # (H,) Mamba2's parameter D
    norm: Tensor  # (E,)
    out_proj: Tensor  # (D, E)


class LayerTrace(NamedTuple):
    """The data of one evaluation of the mixer from which ``advance`` computes the layer's next state."""

    conv: tuple[Tensor, ...]  # each (B, W, E + 2 G N); the convolution's input is their sum
    x: Tensor  # (B, W, H, P) inputs of the recurrence
    b: Tensor  # (B, W, G, N)
    step: Tensor  # (B, W, H) step sizes
    decay: Tensor  # (B, H) Mamba2's parameter A, the same for all sequences


def mix(
    u: Tensor, weights: MixerWeights, injection: Tensor | None, state: tuple[Tensor, ...] | None,
    sizes: MixerSizes, convolve: Callable[..., Tensor], recur: Callable[..., Tensor],
) -> tuple[Tensor, LayerTrace | None]:  # fmt: skip
    """Compute the mixer, with ``convolve`` for the convolution and ``recur`` for the recurrence.

    The result and the other arguments are those of :func:`deqseq.ops.mixer.mix`.
    """
    projected = F.linear(u, weights.in_proj)
    if injection is not None:
        projected = projected + injection
    gate, conv_in, dt = projected.split([sizes.inner, sizes.conv_width, sizes.heads], dim=-1)
    tail, before = (None, None) if state is None else state
    convolved = convolve(conv_in, weights.conv, weights.conv_bias, tail)
    shared = sizes.n_groups * sizes.d_state
    x, b, c = convolved.split([sizes.inner, shared, shared], dim=-1)
    x = x.unflatten(-1, (sizes.heads, sizes.headdim))
    b, c = (t.unflatten(-1, (sizes.n_groups, sizes.d_state)) for t in (b, c))
    step = F.softplus(at_least_float32(dt + weights.dt_bias))  # (B, W, H)
    y = recur(x, step, weights.decay, b, c, weights.skip, before, sizes.chunk)
    out = F.linear(_norm(y.flatten(-2) * F.silu(gate), weights.norm, sizes), weights.out_proj)
    if state is None:
        return out, None
    return out, LayerTrace((conv_in,), x, b, step, weights.decay.expand(len(u), -1))


def _norm(y: Tensor, weight: Tensor, sizes: MixerSizes) -> Tensor:
    """RMSNorm, separately for each of the ``norm_groups`` groups of channels."""
    if sizes.norm_groups == 1:
        return F.rms_norm(y, (sizes.inner,), weight.to(y.dtype), sizes.norm_eps)
    groups = y.unflatten(-1, (sizes.norm_groups, -1))
    return F.rms_norm(groups, groups.shape[-1:], eps=sizes.norm_eps).flatten(-2) * weight


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def convolve(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor | None) -> Tensor:
    """SiLU of the causal depthwise convolution of x (B, W, C) with ``weight`` (C, K) and ``bias`` (C,).

    ``tail``: (B, K-1, C) the last inputs before the first token; ``None``: zeros.
    """
    tokens, kernel = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, kernel - 1, 0)) if tail is None else torch.cat([tail.to(x.dtype), x], 1)
    y = torch.addcmul(bias, padded[:, :tokens], weight[:, 0])
    for k in range(1, kernel):
        y = torch.addcmul(y, padded[:, k : k + tokens], weight[:, k])
    return F.silu(y)


def recur(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor | None,
    chunk: int,
) -> Tensor:  # fmt: skip
    """Compute y (B, W, H, P): the output of Mamba2's recurrence, plus skip * x.

    Args:
        x: (B, W, H, P) inputs, not yet multiplied by the step size.
        step: (B, W, H) step sizes, at least float32.
        decay, skip: (H,) Mamba2's parameters A and D.
        b, c: (B, W, G, N) input and output projections.
        state: (B, H, P, N) the state before the first token; zero by default.
        chunk: number of tokens in a chunk; affects only speed, memory and rounding.
    """
    y = ssd(x * step.to(x.dtype)[..., None], step * decay, b, c, state, chunk)
    return torch.addcmul(y, x, skip.to(x.dtype)[:, None])
