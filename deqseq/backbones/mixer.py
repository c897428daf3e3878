"""The mixer backbone: a stack of blocks. Each block mixes tokens, then channels.

Shapes: B sequences, L tokens, D width.
"""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqseq import kernels
from deqseq.backbone import Backbone, Context
from deqseq.backbones.blocks import RMS_EPS, Block, Stack, SwiGLU, ValueGateMLP, check_hidden, check_sizes
from deqseq.checks import check_flag
from deqseq.ops.one_token import ValueGateWeights


class ChannelMixer(SwiGLU):
    """A SwiGLU over the channels of each token. It computes value and gate with one matrix product."""

    forward = ValueGateMLP.forward  # type: ignore[assignment]  # both have the same kind of weights

    def weights(self, x: Tensor) -> ValueGateWeights:  # type: ignore[override]
        found = super().weights(x)
        return ValueGateWeights(torch.cat([found.value, found.gate]), found.out)


class TokenMixer(SwiGLU):
    """A SwiGLU over the L tokens of each channel, with bounded outputs.

    Every output token is divided by sqrt(m + 1), where m is its mean square. So the token's root mean square
    is below 1. Without this bound, a trained model had very large outputs for boards whose tokens are all
    equal. Such a board was then a fixed point, whatever x was, and some searches ended there.

    The mixer computes weights @ u for every sequence u (L, D), without transposing u. The weights of value
    and gate have rows of L numbers. With L = 81, such rows are not aligned in memory, and GPUs multiply them
    more slowly. So these weights are stored column by column.

    Its hidden width is int(2 d_inner / 3), rounded up to a multiple of 8. Matrix products of such widths are
    faster on GPUs.
    """

    def __init__(self, tokens: int, d_inner: int) -> None:
        hidden = -(-(2 * d_inner // 3) // 8) * 8
        super().__init__(tokens, 3 * hidden // 2)

    def weights(self, x: Tensor) -> ValueGateWeights:  # type: ignore[override]
        found = super().weights(x)
        return ValueGateWeights(torch.cat([found.value.t(), found.gate.t()], 1).t(), found.out)

    def forward(  # type: ignore[override]
        self, u: Tensor, weights: ValueGateWeights, injection: Tensor | None
    ) -> tuple[Tensor, None]:
        """Returns the output (B, L, D) and no trace (``None``), because the mixer keeps no state."""
        if injection is not None:
            u = u + injection
        into, out = (weight.expand(len(u), -1, -1) for weight in weights)
        value, gate = torch.bmm(into, u).chunk(2, 1)
        return _bounded(torch.bmm(out, value * F.silu(gate))), None


class BoardConvolution(nn.Module):
    """A gated convolution of each channel over a square board of L cells, with bounded outputs.

    A cell gets value * silu(gate). Both are weighted sums of a channel over a window of ``kernel`` by
    ``kernel`` cells around the cell. All cells share the weights. Cells outside the board count as zero.
    Outputs are bounded as in :class:`TokenMixer`.

    The sums are computed from shifted boards, not by cuDNN, which rounds float32 to TF32 by default. And
    ``torch.compile`` can fuse them.
    """

    def __init__(self, d_model: int, tokens: int, kernel: int) -> None:
        super().__init__()
        self.side, self.kernel = math.isqrt(tokens), kernel
        self.window = nn.Parameter(torch.empty(kernel, kernel, 2, d_model))

    def weights(self, x: Tensor) -> Tensor:
        return self.window.to(kernels.autocast_dtype(x))

    def forward(self, u: Tensor, weights: Tensor, injection: Tensor | None) -> tuple[Tensor, None]:
        """Returns the output (B, L, D) and no trace (``None``), because the mixer keeps no state."""
        if injection is not None:
            u = u + injection
        side, reach = self.side, self.kernel // 2
        board = F.pad(u.unflatten(1, (side, side)), (0, 0, reach, reach, reach, reach))
        value = gate = u.new_zeros(())
        for i, j in itertools.product(range(self.kernel), repeat=2):
            shifted = board[:, i : i + side, j : j + side]
            value = value + shifted * weights[i, j, 0]
            gate = gate + shifted * weights[i, j, 1]
        return _bounded((value * F.silu(gate)).flatten(1, 2)), None


def _bounded(mixed: Tensor) -> Tensor:
    """``mixed`` (B, L, D), with every token divided by sqrt(m + 1), where m is its mean square."""
    # Autocast on GPUs computes norms in float32.
    return F.rms_norm(mixed, mixed.shape[-1:], eps=1.0).to(mixed.dtype)


def _token_mixer(d_model: int, tokens: int, tokens_inner: int | None, kernel: int | None) -> nn.Module:
    if kernel is None:
        tokens_inner = 4 * tokens if tokens_inner is None else tokens_inner
        check_sizes(tokens_inner=tokens_inner)
        check_hidden(tokens_inner=tokens_inner)
        return TokenMixer(tokens, tokens_inner)
    check_sizes(kernel=kernel)
    if tokens_inner is not None:
        raise ValueError(f"a mixer with a kernel has no tokens_inner, got {tokens_inner}")
    if kernel < 3 or kernel % 2 == 0:
        raise ValueError(f"kernel must be an odd number >= 3, got {kernel}")
    if math.isqrt(tokens) ** 2 != tokens:
        raise ValueError(f"a mixer with a kernel needs a square number of tokens, got {tokens}")
    return BoardConvolution(d_model, tokens, kernel)


class MixerBlock(Block):
    def forward(
        self, stream: Tensor, added: Tensor | None, weights: tuple[Any, ValueGateWeights],
        state: None, choice: kernels.Choice, injection: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
        """Returns the residual stream, the block's last output, and no trace (``None``).

        The next block adds the output to the stream. A post-norm block adds the output itself, and
        returns ``None`` in its place.
        """
        return self.by_parts(stream, added, weights, choice.others, injection)


class MixerBackbone(Stack):
    """f(z, x): an MLP-Mixer for boards, with x injected into every block.

    The MLP-Mixer is by Tolstikhin et al. (2021, arXiv 2105.01601). This version uses SwiGLU and RMSNorm.

    A block mixes the tokens of each channel, then the channels of each token. One shared injection
    W RMSNorm(x) + b is added to the input of every token mixer. The output of a token mixer has a root mean
    square below 1 in every token.

    By default, the token mixer is an MLP over all tokens. It has separate weights for every position, so it
    needs no position embeddings. With ``kernel``, the token mixer is a gated convolution over a square board.
    It has the same weights at all positions. In each block, a cell reads only the cells up to ``kernel // 2``
    rows and columns away. Such blocks are variants of ConvMixer's (Trockman and Kolter, 2022, arXiv
    2201.09792).

    A mixer takes sequences of exactly ``tokens`` tokens, without padding. It is not causal and keeps no
    state.

    Initial weights are drawn from a normal distribution with standard deviation 1 / sqrt(fan-in), truncated
    to [-2, 2]. The last map (``fc2``) of every MLP gets a tenth of this, and convolutions get 0.3 of it.
    Before outputs were bounded, gradients of a new post-norm mixer with full initial weights exploded in a
    :class:`RecursionBackbone`: with width 512, their norm was 3e4 instead of 3.

    Args:
        d_model: width D.
        n_layer: number of blocks.
        tokens: number of tokens L of every sequence, such as 81 for a Sudoku.
        d_inner: the MLP over channels has int(2 d_inner / 3) hidden units; by default ``d_inner`` is 4 D.
        tokens_inner: the MLP over tokens has int(2 tokens_inner / 3) hidden units, rounded up to a multiple
            of 8; by default ``tokens_inner`` is 4 L. Only without ``kernel``.
        kernel: side of the convolution's window in cells, an odd number such as 3. ``None``: the token mixer
            is an MLP.
        norm_eps: constant that every norm adds to the mean square.
        weight_norm: true: use weight normalisation for every linear map.
        injection: true: every block adds the injection. False makes the plain stack of an explicit layer.
        input_skip: true: the first block gets ``gain * z + x``. ``gain`` (D,) is learned and initially 0.
        post_norm: true: a block computes u <- norm(u + mix(u)), then u <- norm2(u + mlp(u)), and there is no
            final norm. False: pre-norm blocks and a final norm.
        norm_gain: true: norms have learned gains. False: the gains are 1, and training does not change them,
            as in TRM (arXiv 2510.04871). The output of a post-norm mixer then has a root mean square of 1.

    Raises:
        ValueError: a size is too small or not a whole number, or another option is invalid; ``kernel`` is
            even or below 3, or given without a square number of tokens; in a call, the number of tokens is
            not ``tokens``, or a mask is given.
    """

    causal = False
    initial_state = Backbone.initial_state  # raises ValueError, because a mixer keeps no state

    def __init__(
        self, d_model: int, n_layer: int, tokens: int, d_inner: int | None = None,
        tokens_inner: int | None = None, norm_eps: float = RMS_EPS, weight_norm: bool = True,
        injection: bool = True, input_skip: bool = False, post_norm: bool = True, norm_gain: bool = True,
        kernel: int | None = None,
    ) -> None:  # fmt: skip
        check_sizes(d_model=d_model, n_layer=n_layer, tokens=tokens)
        d_inner = 4 * d_model if d_inner is None else d_inner
        check_sizes(d_inner=d_inner)
        check_hidden(d_inner=d_inner)
        check_flag("post_norm", post_norm)
        check_flag("norm_gain", norm_gain)
        blocks = []
        for _ in range(n_layer):
            mixer = _token_mixer(d_model, tokens, tokens_inner, kernel)
            blocks.append(MixerBlock(d_model, norm_eps, mixer, ChannelMixer(d_model, d_inner), post_norm))
        super().__init__(blocks, d_model, d_model, norm_eps, weight_norm, injection, input_skip, post_norm)
        self.tokens = tokens
        if not norm_gain:
            for module in self.modules():
                if isinstance(module, nn.RMSNorm):
                    module.weight.requires_grad_(False)

    def initialise(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                size = 0.1 if name.endswith("fc2") else 1.0
                nn.init.trunc_normal_(module.weight, std=size / math.sqrt(module.in_features))
            elif isinstance(module, BoardConvolution):
                nn.init.trunc_normal_(module.window, std=0.3 / module.kernel)

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        if x.shape[1] != self.tokens:
            raise ValueError(f"x must have the mixer's {self.tokens} tokens, got {x.shape[1]}")
        return super().prepare(x)
