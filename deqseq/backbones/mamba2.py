"""The Mamba2 backbone: a stack of Mamba2 blocks and a final norm.

Shapes: B sequences, L tokens, W tokens in the window, D width, E = expand * D inner width,
H = E / headdim heads, P = headdim, N = d_state, G = n_groups, K = d_conv.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from deqseq import kernels
from deqseq.backbone import State, Trace
from deqseq.backbones.blocks import RMS_EPS, Block, Stack, ValueGateMLP, check_sizes
from deqseq.backbones.weights import LinearMaps, active_norm, effective_weight, projection
from deqseq.checks import check_count, check_positive
from deqseq.ops import advance, one_token
from deqseq.ops.mixer import mix
from deqseq.ops.mixer.naive import LayerTrace, MixerSizes, MixerWeights, at_least_float32
from deqseq.ops.one_token import ValueGateWeights


class Mamba2Mixer(LinearMaps):
    """The Mamba2 mixer (Dao & Gu, 2024).

    Call :meth:`weights` once per forward pass: it applies weight normalisation. Pass its result to every
    call of ``forward``.
    """

    def __init__(self, d_model: int, sizes: MixerSizes, d_conv: int, dt_min: float, dt_max: float) -> None:
        super().__init__()
        self.sizes = sizes
        heads, inner, width = sizes.heads, sizes.inner, sizes.conv_width
        self.in_proj = nn.Linear(d_model, inner + width + heads, bias=False)
        self.conv1d = nn.Conv1d(width, width, d_conv, groups=width, padding=d_conv - 1)
        # As in the original Mamba2, draw the initial step sizes log-uniformly, and the initial decay rates
        # uniformly from [1, 16].
        dt = torch.exp(torch.empty(heads).uniform_(math.log(dt_min), math.log(dt_max)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(inner, eps=sizes.norm_eps)
        self.out_proj = nn.Linear(inner, d_model, bias=False)

    def weights(self, x: Tensor) -> MixerWeights:
        assert self.conv1d.bias is not None
        return MixerWeights(
            projection(self.in_proj, x),
            effective_weight(self.conv1d).squeeze(1),
            self.conv1d.bias,
            -at_least_float32(self.A_log).exp(),
            self.dt_bias,
            self.D,
            active_norm(self.norm).weight,
            projection(self.out_proj, x),
        )

    def forward(
        self, u: Tensor, weights: MixerWeights, injection: Tensor | None, state: Any, implementation: str
    ) -> tuple[Tensor, LayerTrace | None]:
        return mix(u, weights, injection, state, self.sizes, implementation)


class Mamba2Block(Block):
    def forward(
        self, stream: Tensor, added: Tensor | None, weights: tuple[MixerWeights, ValueGateWeights | None],
        state: tuple[Tensor, ...] | None, choice: kernels.Choice, injection: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, LayerTrace | None]:  # fmt: skip
        """Returns the residual stream, the output that the next block adds to the stream, and the trace."""
        sizes: MixerSizes = self.mixer.sizes
        if state is not None and sizes.norm_groups == 1 and one_token.supports(stream, state, choice):
            from deqseq.ops.one_token.triton import mamba2_block

            return mamba2_block(stream, added, *weights, injection, state, sizes, *self.norms())
        return self.by_parts(stream, added, weights, choice.others, injection, state, choice.products)


class Mamba2Backbone(Stack):
    """f(z, x): a stack of Mamba2 blocks and a final norm, with x injected into every block.

    The injection is W RMSNorm(x) + b. All blocks add the same injection to their input projections.

    Args:
        d_model: width D.
        n_layer: number of blocks.
        d_state: state dimension N of a head.
        expand: inner width divided by D.
        headdim: width P of a head, a divisor of ``expand * d_model``.
        d_conv: kernel size of the causal convolution.
        d_inner: hidden width of the MLP, rounded up to a multiple of 128; 0: no MLP.
        n_groups: number of groups of heads. The heads of a group share their B and C projections.
        norm_groups: number of channel groups in the gated norm, a divisor of the inner width. Each group is
            normalised separately. The original Mamba2 has ``n_groups`` such groups.
        norm_eps: constant that every norm adds to the mean square.
        chunk_size: tokens per chunk of the recurrence. It affects only the speed: the work in a chunk is
            quadratic in its size.
        dt_min, dt_max: range of the initial step sizes dt, which are drawn log-uniformly. The defaults are
            those of the original Mamba2. A head with decay rate A remembers about ``1 / (dt * A)`` tokens.
            The initial A is in [1, 16].
        weight_norm: whether to use weight normalisation for every linear map and convolution.
        injection: whether every block adds the injection. False makes the plain stack of an explicit layer.
        input_skip: whether the first block gets ``gain * z + x`` instead of z. ``gain`` (D,) is learned and
            initially 0. ``ImplicitForCausalLM.to_implicit`` sets this option.

    Raises:
        ValueError: a size is below 1 (``d_inner`` may be 0) or breaks a rule above, or the step sizes break
            0 < dt_min <= dt_max < inf.
    """

    def __init__(
        self, d_model: int, n_layer: int, d_state: int = 128, expand: int = 2, headdim: int = 64,
        d_conv: int = 4, d_inner: int = 0, n_groups: int = 1, norm_groups: int = 1, norm_eps: float = RMS_EPS,
        chunk_size: int = 64, dt_min: float = 1e-3, dt_max: float = 1e-1, weight_norm: bool = True,
        injection: bool = True, input_skip: bool = False,
    ) -> None:  # fmt: skip
        check_sizes(
            d_model=d_model, n_layer=n_layer, d_state=d_state, expand=expand, headdim=headdim,
            d_conv=d_conv, n_groups=n_groups, norm_groups=norm_groups, chunk_size=chunk_size,
        )  # fmt: skip
        check_count("d_inner", d_inner, least=0)
        inner = expand * d_model
        for name, value in (("headdim", headdim), ("norm_groups", norm_groups)):
            if inner % value:
                raise ValueError(f"{name} must divide expand * d_model = {inner}, got {value}")
        heads = inner // headdim
        if heads % n_groups:
            raise ValueError(f"n_groups must divide the {heads} heads, got {n_groups}")
        check_positive("dt_min", dt_min)
        check_positive("dt_max", dt_max)
        if dt_min > dt_max:
            raise ValueError(f"dt_min and dt_max need 0 < dt_min <= dt_max < inf, got {dt_min} and {dt_max}")
        sizes = MixerSizes(heads, headdim, d_state, n_groups, norm_groups, norm_eps, chunk_size)
        blocks = []
        for _ in range(n_layer):
            mixer = Mamba2Mixer(d_model, sizes, d_conv, dt_min, dt_max)
            mlp = ValueGateMLP(d_model, d_inner) if d_inner else None
            blocks.append(Mamba2Block(d_model, norm_eps, mixer, mlp))
        width = sizes.inner + sizes.conv_width + heads
        super().__init__(blocks, d_model, width, norm_eps, weight_norm, injection, input_skip)
        # Shapes of the last inputs of the convolution, and of the SSM state.
        self.state_shapes = (d_conv - 1, sizes.conv_width), (heads, headdim, d_state)

    def zero(self, x: Tensor) -> Tensor:
        """z = 0 as one token (1, 1, D), so that the first block does not multiply zeros for every token.

        If a subclass overrides a method that gets z: zeros of the shape of ``x``.
        """
        methods = "enter", "evaluate", "through"
        if any(getattr(type(self), name) is not getattr(Stack, name) for name in methods):
            return super().zero(x)
        return x.new_zeros(1, 1, self.d_model)

    def advance(self, trace: Trace, state: State, count: Tensor) -> State:
        layers = advance.recurrent(state.layers, trace.blocks, count, trace.implementation)
        return State(state.seen + count, layers)
