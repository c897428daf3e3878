"""The mixer backbone: a stack of blocks that mix tokens, then channels, with MLPs.

Shapes: B sequences, L tokens, D width.
"""

import math

from torch import Tensor, nn

from deqseq import kernels
from deqseq.backbone import Backbone, Context
from deqseq.backbones.blocks import RMS_EPS, Block, Stack, SwiGLU, check_hidden, check_sizes
from deqseq.checks import check_flag
from deqseq.ops.one_token import SwiGLUWeights


class TokenMixer(nn.Module):
    """A SwiGLU over the L tokens of each channel.

    Its hidden width is int(2 d_inner / 3), rounded up to a multiple of 8, because matrix products of such
    widths are faster on GPUs.
    """

    def __init__(self, tokens: int, d_inner: int) -> None:
        super().__init__()
        hidden = -(-(2 * d_inner // 3) // 8) * 8
        self.mlp = SwiGLU(tokens, 3 * hidden // 2)

    def weights(self) -> SwiGLUWeights:
        return self.mlp.weights()

    def forward(self, u: Tensor, weights: SwiGLUWeights, injection: Tensor | None) -> tuple[Tensor, None]:
        """The output (B, L, D). There is no trace, because the mixer keeps no state."""
        if injection is not None:
            u = u + injection
        return self.mlp(u.transpose(1, 2), weights).transpose(1, 2), None


class MixerBlock(Block):
    def forward(
        self, stream: Tensor, added: Tensor | None, weights: tuple[SwiGLUWeights, SwiGLUWeights],
        state: None, choice: kernels.Choice, injection: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
        """Returns the stream, the block's last output (to be added by the next block), and no trace."""
        return self.by_parts(stream, added, weights, choice.others, injection)


class MixerBackbone(Stack):
    """f(z, x): an MLP-Mixer for boards, with x injected into every block.

    (MLP-Mixer, Tolstikhin et al., 2021, arXiv 2105.01601; here with SwiGLU and RMSNorm.)

    A block mixes the tokens of each channel, then the channels of each token. One shared injection
    W RMSNorm(x) + b is added to the input of every token mixer.

    A mixer has no position embeddings, because the MLPs over tokens have weights of their own for every
    position. So a mixer is not causal, keeps no state, and takes sequences of exactly ``tokens`` tokens,
    without padding.

    The weights of all linear maps are initially normal with standard deviation 1 / sqrt(fan-in), truncated to
    [-2, 2].

    Args:
        d_model: width D.
        n_layer: number of blocks.
        tokens: number of tokens L of every sequence, such as 81 for a Sudoku.
        d_inner: the MLP over channels has int(2 d_inner / 3) hidden units; by default ``d_inner`` is 4 D.
        tokens_inner: the MLP over tokens has int(2 tokens_inner / 3) hidden units, rounded up to a multiple
            of 8; by default ``tokens_inner`` is 4 L.
        norm_eps, weight_norm, injection, input_skip: as in :class:`Mamba2Backbone`.
        post_norm: true: a block computes u <- norm(u + mix(u)), then u <- norm2(u + mlp(u)), and there is no
            final norm. False: pre-norm blocks and a final norm.

    Raises:
        ValueError: a size is too small or no whole number, or another option breaks a rule above; in a call,
            x has another number of tokens, or there is a mask.
    """

    causal = False
    initial_state = Backbone.initial_state  # keeps no state

    def __init__(
        self, d_model: int, n_layer: int, tokens: int, d_inner: int | None = None,
        tokens_inner: int | None = None, norm_eps: float = RMS_EPS, weight_norm: bool = True,
        injection: bool = True, input_skip: bool = False, post_norm: bool = True,
    ) -> None:  # fmt: skip
        check_sizes(d_model=d_model, n_layer=n_layer, tokens=tokens)
        d_inner = 4 * d_model if d_inner is None else d_inner
        tokens_inner = 4 * tokens if tokens_inner is None else tokens_inner
        sizes = {"d_inner": d_inner, "tokens_inner": tokens_inner}
        check_sizes(**sizes)
        check_hidden(**sizes)
        check_flag("post_norm", post_norm)
        blocks = [
            MixerBlock(
                d_model, norm_eps, TokenMixer(tokens, tokens_inner), SwiGLU(d_model, d_inner), post_norm
            )
            for _ in range(n_layer)
        ]
        super().__init__(blocks, d_model, d_model, norm_eps, weight_norm, injection, input_skip, post_norm)
        self.tokens = tokens

    def initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=1 / math.sqrt(module.in_features))

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        if x.shape[1] != self.tokens:
            raise ValueError(f"x must have the mixer's {self.tokens} tokens, got {x.shape[1]}")
        return super().prepare(x)
