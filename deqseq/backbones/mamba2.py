"""Mamba2 as the body of an implicit layer: a stack of Mamba2 blocks and a final norm.

Shapes: B sequences, L tokens, D width, E = expand * D inner width, H = E / headdim heads, P = headdim,
N = d_state, G = n_groups, K = d_conv.
"""

from __future__ import annotations

import math
import sys
from importlib import import_module
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqseq import kernels
from deqseq.backbone import Backbone, Context, State, Trace, take_tokens
from deqseq.backbones.blocks import (
    RMS_EPS,
    Injection,
    InputSkip,
    MLPWeights,
    ValueGateMLP,
    add_norm,
    check_norm_eps,
    check_sizes,
    one_token,
    plain_weight,
    projection,
)
from deqseq.backbones.ssd import ssd, ssd_advance
from deqseq.normalisation import normalise_weights

_plain = sys.modules[__name__]


class MixerSizes(NamedTuple):
    """What a mixer's kernels need to know."""

    heads: int
    headdim: int
    d_state: int
    n_groups: int
    norm_groups: int
    norm_eps: float
    chunk: int

    @property
    def inner(self) -> int:
        """E."""
        return self.heads * self.headdim

    @property
    def conv_width(self) -> int:
        """E + 2 G N."""
        return self.inner + 2 * self.n_groups * self.d_state


class MixerWeights(NamedTuple):
    in_proj: Tensor  # (2 E + 2 G N + H, D): rows [gate, x, B, C, dt]
    conv: Tensor  # (E + 2 G N, K)
    conv_bias: Tensor
    decay: Tensor  # (H,) A < 0
    dt_bias: Tensor  # (H,)
    skip: Tensor  # (H,) D
    norm: Tensor  # (E,)
    out_proj: Tensor  # (D, E)


class LayerTrace(NamedTuple):
    """What moves a layer's state on."""

    conv: tuple[Tensor, ...]  # inputs of the convolution are their sum; each (B, W, E + 2 G N)
    x: Tensor  # (B, W, H, P) inputs of the recurrence
    b: Tensor  # (B, W, G, N)
    step: Tensor  # (B, W, H)
    decay: Tensor  # (H,)


class Mamba2Mixer(nn.Module):
    """The Mamba2 mixer (Dao & Gu, 2024), evaluated with weights that were computed beforehand."""

    def __init__(
        self, d_model: int, d_state: int, expand: int, headdim: int, d_conv: int, n_groups: int,
        chunk_size: int, norm_groups: int, norm_eps: float, dt_min: float, dt_max: float,
    ) -> None:  # fmt: skip
        super().__init__()
        heads = expand * d_model // headdim
        self.sizes = MixerSizes(heads, headdim, d_state, n_groups, norm_groups, norm_eps, chunk_size)
        inner, width = self.sizes.inner, self.sizes.conv_width
        self.in_proj = nn.Linear(d_model, inner + width + heads, bias=False)
        self.conv1d = nn.Conv1d(width, width, d_conv, groups=width, padding=d_conv - 1)
        # Step sizes start log-uniform, decay rates uniform in [1, 16], as in Mamba2.
        dt = torch.exp(torch.empty(heads).uniform_(math.log(dt_min), math.log(dt_max)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(inner, eps=norm_eps)
        self.out_proj = nn.Linear(inner, d_model, bias=False)

    def weights(self) -> MixerWeights:
        assert self.conv1d.bias is not None
        return MixerWeights(
            projection(self.in_proj),
            plain_weight(self.conv1d).squeeze(1),
            self.conv1d.bias,
            -at_least_float32(self.A_log).exp(),
            self.dt_bias,
            self.D,
            self.norm.weight,
            projection(self.out_proj),
        )

    def forward(
        self,
        u: Tensor,
        weights: MixerWeights,
        injection: Tensor | None,
        state: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, LayerTrace | None]:
        """The mixer of u (B, W, D), and what moves ``state`` on, if there is one."""
        name = kernels.implementation(u, products=True)
        if name == "triton" and weights.conv.shape[1] <= 4:
            from deqseq.backbones.kernels.mamba2 import mix

            return mix(u, injection, weights, state, self.sizes)
        sizes = self.sizes
        projected = F.linear(u, weights.in_proj)
        if injection is not None:
            projected = projected + injection
        gate, conv_in, dt = projected.split([sizes.inner, sizes.conv_width, sizes.heads], dim=-1)
        tail, before = (None, None) if state is None else state
        parts = _plain if name in ("torch", "triton") else import_module(f"deqseq.backbones.kernels.{name}")
        convolved = parts.convolve(conv_in, weights.conv, weights.conv_bias, tail)
        shared = sizes.n_groups * sizes.d_state
        x, b, c = convolved.split([sizes.inner, shared, shared], dim=-1)
        x = x.unflatten(-1, (sizes.heads, sizes.headdim))
        b, c = (t.unflatten(-1, (sizes.n_groups, sizes.d_state)) for t in (b, c))
        step = F.softplus(at_least_float32(dt + weights.dt_bias))  # (B, W, H)
        y = parts.recur(x, step, weights.decay, b, c, weights.skip, before, sizes.chunk)
        y = self._gated_norm(y.flatten(-2) * F.silu(gate), weights.norm)
        out = F.linear(y, weights.out_proj)
        return out, None if state is None else LayerTrace((conv_in,), x, b, step, weights.decay)

    def _gated_norm(self, y: Tensor, weight: Tensor) -> Tensor:
        sizes = self.sizes
        if sizes.norm_groups == 1:
            return F.rms_norm(y, (sizes.inner,), weight.to(y.dtype), sizes.norm_eps)
        groups = y.unflatten(-1, (sizes.norm_groups, -1))
        return F.rms_norm(groups, groups.shape[-1:], eps=sizes.norm_eps).flatten(-2) * weight


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or in its own type where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor | None = None) -> Tensor:
    """Causal depthwise convolution of ``x`` (B, W, E) with ``weight`` (E, K), after ``tail`` (B, K-1, E)."""
    width, kernel = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, kernel - 1, 0)) if tail is None else torch.cat([tail.to(x.dtype), x], 1)
    y = torch.addcmul(bias, padded[:, :width], weight[:, 0])
    for k in range(1, kernel):
        y = torch.addcmul(y, padded[:, k : k + width], weight[:, k])
    return y


def convolve(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor | None) -> Tensor:
    """SiLU of the causal convolution; arguments as in :func:`causal_conv`."""
    return F.silu(causal_conv(x, weight, bias, tail))


def recur(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor | None,
    chunk: int,
) -> Tensor:  # fmt: skip
    """The recurrence with its skip, y (B, W, H, P).

    Args:
        x: (B, W, H, P).
        step: (B, W, H) step sizes, float32 or better.
        decay, skip: (H,).
        b, c: (B, W, G, N).
        state: (B, H, P, N) before the first token; zero by default.
        chunk: tokens handled quadratically at a time.
    """
    y = ssd(x * step.to(x.dtype)[..., None], step * decay, b, c, state, chunk)
    return torch.addcmul(y, x, skip.to(x.dtype)[:, None])


class Mamba2Block(nn.Module):
    """Pre-norm mixer and, where ``d_inner`` > 0, pre-norm gated MLP, each added to the stream.

    What a block adds is handed on by itself, so that the addition is one with the next norm.
    """

    def __init__(self, mixer: Mamba2Mixer, d_model: int, d_inner: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mixer = mixer
        self.norm2 = nn.RMSNorm(d_model, eps=norm_eps) if d_inner else None
        self.mlp = ValueGateMLP(d_model, d_inner) if d_inner else None

    def weights(self) -> tuple[MixerWeights, MLPWeights | None]:
        return self.mixer.weights(), None if self.mlp is None else self.mlp.weights()

    def forward(
        self,
        stream: Tensor,
        added: Tensor | None,
        weights: tuple[MixerWeights, MLPWeights | None],
        injection: Tensor | None,
        state: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, Tensor, LayerTrace | None]:
        """The stream with ``added``, what this block adds to it, and the trace."""
        if self.mixer.sizes.norm_groups == 1 and one_token(stream, weights[0].in_proj, state):
            from deqseq.backbones.kernels.token import mamba2_block

            assert state is not None
            return mamba2_block(self, stream, added, weights, injection, state)
        stream, u = add_norm(stream, added, self.norm)
        added, trace = self.mixer(u, weights[0], injection, state)
        if self.mlp is not None and self.norm2 is not None:
            stream, u = add_norm(stream, added, self.norm2)
            added = self.mlp(u, weights[1])
        return stream, added, trace


class Mamba2Backbone(Backbone):
    """f(z, x): a stack of Mamba2 blocks and a final norm, with x injected into every block.

    One shared injection W RMSNorm(x) + b is added to the input projection of every layer.

    Args:
        d_model: width D.
        n_layer: blocks.
        d_state: state dim N of a head.
        expand: inner width over D.
        headdim: width P of a head; divides ``expand * d_model``.
        d_conv: taps of the causal convolution.
        d_inner: 0: no MLP; otherwise its hidden width, rounded up to a multiple of 128.
        n_groups: groups of heads that share the B and C projections.
        norm_groups: groups of channels that the gated norm normalises by themselves; divides the inner
            width. The original Mamba2 has ``n_groups`` of them.
        norm_eps: added to the mean square by every norm.
        chunk_size: tokens handled quadratically at a time by the recurrence; speed only.
        dt_min, dt_max: range of the first step sizes, log-uniform, with the original's defaults. A head
            forgets in some ``1 / (dt * A)`` tokens, its decay rate A starting in [1, 16].
        weight_norm: weight normalisation of every linear map and convolution.
        injection: ``False`` for explicit use, where x enters as z.
        input_skip: x also enters the residual stream, which starts from ``gain * z + x`` with a learned
            gain (D,) that starts at 0: f(z, x) then starts without memory of z (see ``to_implicit``).

    Raises:
        ValueError: sizes below 1, or that do not divide as said; an empty range of step sizes.
    """

    d_model: int
    capturable = True

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        d_conv: int = 4,
        d_inner: int = 0,
        n_groups: int = 1,
        norm_groups: int = 1,
        norm_eps: float = RMS_EPS,
        chunk_size: int = 64,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        weight_norm: bool = True,
        injection: bool = True,
        input_skip: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(
            d_model=d_model, n_layer=n_layer, d_state=d_state, expand=expand, headdim=headdim,
            d_conv=d_conv, n_groups=n_groups, norm_groups=norm_groups, chunk_size=chunk_size,
        )  # fmt: skip
        if d_inner != 0:
            check_sizes(d_inner=d_inner)
        if expand * d_model % headdim:
            raise ValueError(f"headdim must divide expand * d_model = {expand * d_model}, got {headdim}")
        if (expand * d_model // headdim) % n_groups:
            raise ValueError(f"n_groups must divide the {expand * d_model // headdim} heads, got {n_groups}")
        if expand * d_model % norm_groups:
            raise ValueError(
                f"norm_groups must divide expand * d_model = {expand * d_model}, got {norm_groups}"
            )
        check_norm_eps(norm_eps)
        if not 0 < dt_min <= dt_max < math.inf:
            raise ValueError(f"dt_min and dt_max must be 0 < dt_min <= dt_max, got {dt_min} and {dt_max}")
        self.d_model = d_model
        self.layers = nn.ModuleList(
            Mamba2Block(
                Mamba2Mixer(
                    d_model,
                    d_state,
                    expand,
                    headdim,
                    d_conv,
                    n_groups,
                    chunk_size,
                    norm_groups,
                    norm_eps,
                    dt_min,
                    dt_max,
                ),
                d_model,
                d_inner,
                norm_eps,
            )
            for _ in range(n_layer)
        )
        self.norm_f = nn.RMSNorm(d_model, eps=norm_eps)
        self.injects = injection
        width = self._mixer.in_proj.out_features
        self.injection = Injection(d_model, width, norm_eps) if injection else None
        if input_skip and not injection:
            raise ValueError("input_skip needs injection=True: in explicit use x enters as z")
        self.input_skip = InputSkip(d_model) if input_skip else None
        if weight_norm:
            normalise_weights(self)

    @property
    def _mixer(self) -> Mamba2Mixer:
        return cast(Mamba2Block, self.layers[0]).mixer

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        tokens = () if self.injection is None else (self.injection(x),)
        if self.input_skip is not None:
            tokens = (*tokens, x)
        return Context(tokens, [cast(Mamba2Block, layer).weights() for layer in self.layers])

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        injection = context.tokens[0] if context.tokens else None
        if self.input_skip is not None:
            z = self.input_skip(z, context.tokens[1])
        stream, added, traces = z, None, []
        for i, layer in enumerate(self.layers):
            before = None if state is None else state.layers[i]
            stream, added, trace = layer(stream, added, context.shared[i], injection, before)
            traces.append(trace)
        return add_norm(stream, added, self.norm_f, last=True)[1], traces

    def initial_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """Zeros: per layer the convolution's tail (B, K-1, E + 2 G N) and the SSM state (B, H, P, N)."""
        mixer = self._mixer
        sizes = mixer.sizes
        device = self.norm_f.weight.device if device is None else device
        dtype = self.norm_f.weight.dtype if dtype is None else dtype
        kernel = mixer.conv1d.kernel_size[0]
        layer = (
            torch.zeros(batch_size, kernel - 1, sizes.conv_width, device=device, dtype=dtype),
            torch.zeros(batch_size, sizes.heads, sizes.headdim, sizes.d_state, device=device, dtype=dtype),
        )
        seen = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return State(seen, (layer,) * len(self.layers))

    def advance(self, trace: Trace, state: State, count: Tensor) -> State:
        if kernels.implementation(state.layers[0][1]) == "triton":
            from deqseq.backbones.kernels.advance import fits, recurrent_

            if fits(trace[0].x.shape[1]):
                for (tail, ssm), left in zip(state.layers, trace, strict=True):
                    recurrent_(tail, ssm, left, count)
                return State(state.seen + count, state.layers)
        layers = []
        for (tail, ssm), left in zip(state.layers, trace, strict=True):
            # The last inputs consumed, which may reach back into the tail.
            taps = tail.shape[1]
            last = torch.arange(taps, device=tail.device) + count[:, None]
            if taps:
                parts = [take_tokens(part, (last - taps).clamp_min(0)) for part in left.conv]
                new = torch.stack(parts).sum(0).to(tail.dtype)
                tail = torch.where((last < taps)[..., None], take_tokens(tail, last.clamp_max(taps - 1)), new)
            x = left.x * left.step.to(left.x.dtype)[..., None]
            layers.append((tail, ssd_advance(x, left.step * left.decay, left.b, ssm, count)))
        return State(state.seen + count, tuple(layers))
