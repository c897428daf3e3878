"""Mamba2 as the body of an implicit layer: a stack of Mamba2 blocks and a final norm.

Shapes: B sequences, L tokens, D width, E = expand * D inner width, H = E / headdim heads, P = headdim,
N = d_state, G = n_groups, K = d_conv.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqseq.backbone import Backbone, Context, State, Trace, take_tokens
from deqseq.backbones.blocks import (
    RMS_EPS,
    Injection,
    InputSkip,
    MLPWeights,
    ValueGateMLP,
    check_norm_eps,
    check_sizes,
    plain_weight,
)
from deqseq.backbones.ssd import ssd, ssd_advance
from deqseq.normalisation import normalise_weights


class _MixerWeights(NamedTuple):
    in_proj: Tensor  # (2 E + 2 G N + H, D): rows [gate, x, B, C, dt]
    conv: Tensor  # (E + 2 G N, K)
    conv_bias: Tensor
    decay: Tensor  # (H,) A < 0
    dt_bias: Tensor  # (H,)
    skip: Tensor  # (H,) D
    norm: Tensor  # (E,)
    out_proj: Tensor  # (D, E)


class _LayerTrace(NamedTuple):
    conv: Tensor  # (B, W, E + 2 G N) inputs of the convolution
    x: Tensor  # (B, W, H, P) inputs of the recurrence
    a: Tensor  # (B, W, H)
    b: Tensor  # (B, W, G, N)


class Mamba2Mixer(nn.Module):
    """The Mamba2 mixer (Dao & Gu, 2024), evaluated with weights that were computed beforehand."""

    def __init__(
        self, d_model: int, d_state: int, expand: int, headdim: int, d_conv: int, n_groups: int,
        chunk_size: int, norm_groups: int, norm_eps: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.inner = expand * d_model
        self.heads = self.inner // headdim
        self.headdim = headdim
        self.d_state = d_state
        self.n_groups = n_groups
        self.chunk_size = chunk_size
        self.conv_width = self.inner + 2 * n_groups * d_state
        self.in_proj = nn.Linear(d_model, self.inner + self.conv_width + self.heads, bias=False)
        self.conv1d = nn.Conv1d(
            self.conv_width, self.conv_width, d_conv, groups=self.conv_width, padding=d_conv - 1
        )
        # Step sizes start log-uniform in [1e-3, 1e-1], decay rates uniform in [1, 16], as in Mamba2.
        dt = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm_groups = norm_groups
        self.norm = nn.RMSNorm(self.inner, eps=norm_eps)
        self.out_proj = nn.Linear(self.inner, d_model, bias=False)

    def weights(self) -> _MixerWeights:
        assert self.conv1d.bias is not None
        return _MixerWeights(
            plain_weight(self.in_proj),
            plain_weight(self.conv1d).squeeze(1),
            self.conv1d.bias,
            -at_least_float32(self.A_log).exp(),
            self.dt_bias,
            self.D,
            self.norm.weight,
            plain_weight(self.out_proj),
        )

    def forward(
        self,
        u: Tensor,
        weights: _MixerWeights,
        injection: Tensor | None,
        state: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, _LayerTrace]:
        projected = F.linear(u, weights.in_proj)
        if injection is not None:
            projected = projected + injection
        gate, conv_in, dt = projected.split([self.inner, self.conv_width, self.heads], dim=-1)
        tail = None if state is None else state[0]
        convolved = F.silu(causal_conv(conv_in, weights.conv, weights.conv_bias, tail))
        shared = self.n_groups * self.d_state
        x, b, c = convolved.split([self.inner, shared, shared], dim=-1)
        x = x.unflatten(-1, (self.heads, self.headdim))
        b, c = (t.unflatten(-1, (self.n_groups, self.d_state)) for t in (b, c))
        step = F.softplus(at_least_float32(dt + weights.dt_bias))  # (B, W, H)
        a = step * weights.decay
        scaled = x * step.to(x.dtype)[..., None]
        before = None if state is None else state[1]
        y = ssd(scaled, a, b, c, before, self.chunk_size)
        y = torch.addcmul(y, x, weights.skip.to(x.dtype)[:, None]).flatten(-2)
        y = self._gated_norm(y * F.silu(gate), weights.norm)
        return F.linear(y, weights.out_proj), _LayerTrace(conv_in, scaled, a, b)

    def _gated_norm(self, y: Tensor, weight: Tensor) -> Tensor:
        eps = self.norm.eps
        if self.norm_groups == 1:
            return F.rms_norm(y, (self.inner,), weight, eps)
        groups = y.unflatten(-1, (self.norm_groups, -1))
        return F.rms_norm(groups, groups.shape[-1:], eps=eps).flatten(-2) * weight


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


class Mamba2Block(nn.Module):
    """Pre-norm mixer and, where ``d_inner`` > 0, pre-norm gated MLP, each added to the stream."""

    def __init__(self, mixer: Mamba2Mixer, d_model: int, d_inner: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mixer = mixer
        self.norm2 = nn.RMSNorm(d_model, eps=norm_eps) if d_inner else None
        self.mlp = ValueGateMLP(d_model, d_inner) if d_inner else None

    def weights(self) -> tuple[_MixerWeights, MLPWeights | None]:
        return self.mixer.weights(), None if self.mlp is None else self.mlp.weights()

    def forward(
        self,
        z: Tensor,
        weights: tuple[_MixerWeights, MLPWeights | None],
        injection: Tensor | None,
        state: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, _LayerTrace]:
        mixed, trace = self.mixer(self.norm(z), weights[0], injection, state)
        z = z + mixed
        if self.mlp is not None and self.norm2 is not None:
            z = z + self.mlp(self.norm2(z), weights[1])
        return z, trace


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
        weight_norm: weight normalisation of every linear map and convolution.
        injection: ``False`` for explicit use, where x enters as z.
        input_skip: x also enters the residual stream, which starts from ``gain * z + x`` with a learned
            gain (D,) that starts at 0: f(z, x) then starts without memory of z (see ``to_implicit``).

    Raises:
        ValueError: sizes below 1, or that do not divide as said.
    """

    d_model: int

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
        self.d_model = d_model
        self.layers = nn.ModuleList(
            Mamba2Block(
                Mamba2Mixer(
                    d_model, d_state, expand, headdim, d_conv, n_groups, chunk_size, norm_groups, norm_eps
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
        traces = []
        for i, layer in enumerate(self.layers):
            before = None if state is None else state.layers[i]
            z, trace = layer(z, context.shared[i], injection, before)
            traces.append(trace)
        return self.norm_f(z), traces

    def initial_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """Zeros: per layer the convolution's tail (B, K-1, E + 2 G N) and the SSM state (B, H, P, N)."""
        mixer = self._mixer
        device = self.norm_f.weight.device if device is None else device
        dtype = self.norm_f.weight.dtype if dtype is None else dtype
        kernel = mixer.conv1d.kernel_size[0]
        layer = (
            torch.zeros(batch_size, kernel - 1, mixer.conv_width, device=device, dtype=dtype),
            torch.zeros(batch_size, mixer.heads, mixer.headdim, mixer.d_state, device=device, dtype=dtype),
        )
        seen = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return State(seen, (layer,) * len(self.layers))

    def advance(self, trace: Trace, state: State, count: Tensor) -> State:
        layers = []
        for (tail, ssm), left in zip(state.layers, trace, strict=True):
            inputs = torch.cat([tail, left.conv.to(tail.dtype)], 1)
            last = torch.arange(tail.shape[1], device=tail.device) + count[:, None]
            layers.append((take_tokens(inputs, last), ssd_advance(left.x, left.a, left.b, ssm, count)))
        return State(state.seen + count, tuple(layers))
