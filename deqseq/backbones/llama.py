"""The Llama backbone: a stack of blocks with attention, and a final norm if the blocks are pre-norm.

Shapes: B sequences, L tokens, W tokens in the window, D width, H query heads, J key/value heads,
P = D / H head dim, S slots of the key/value state (one slot per token).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqseq import kernels
from deqseq.backbone import Context, State, Trace
from deqseq.backbones.attention import AttentionFunction
from deqseq.backbones.blocks import RMS_EPS, Block, Stack, SwiGLU, check_hidden, check_sizes
from deqseq.backbones.weights import LinearMaps, projection
from deqseq.checks import check_flag, check_positive
from deqseq.ops import advance, one_token
from deqseq.ops.one_token import AttentionWeights, SwiGLUWeights

SLOTS = 64
"""When a state grows, its number of slots is rounded up to a multiple of this number."""


class Attention(LinearMaps):
    """Self-attention with rotary positions and grouped key/value heads. Its linear maps have no biases."""

    def __init__(
        self, d_model: int, n_head: int, n_kv_head: int, function: AttentionFunction | None, causal: bool
    ) -> None:
        super().__init__()
        self.n_head = n_head
        self.n_kv_head = n_kv_head
        self.headdim = d_model // n_head
        self.wq = nn.Linear(d_model, d_model, bias=False)
        self.wk = nn.Linear(d_model, n_kv_head * self.headdim, bias=False)
        self.wv = nn.Linear(d_model, n_kv_head * self.headdim, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self.function = function
        # transformers' attention functions read these attributes:
        self.config = None if function is None else function.config
        self.is_causal = causal
        self.num_key_value_groups = n_head // n_kv_head

    def weights(self, x: Tensor) -> AttentionWeights:
        qkv = torch.cat([projection(linear, x) for linear in (self.wq, self.wk, self.wv)])
        return AttentionWeights(qkv, projection(self.out_proj, x))

    def forward(
        self, u: Tensor, weights: AttentionWeights, injection: Tensor | None,
        state: tuple[Tensor, ...] | None, rotary: tuple[Tensor, Tensor], mask: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
        """Returns the output (B, W, D), and the keys and values of the W tokens, each (B, J, W, P).

        Without a state, the second value is ``None``.
        """
        qkv = F.linear(u, weights.qkv)
        if injection is not None:
            qkv = qkv + injection
        qkv = qkv.unflatten(-1, (-1, self.headdim)).transpose(1, 2)  # (B, H + 2 J, W, P)
        q, k, v = qkv.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        trace = None if state is None else (k, v)
        if self.function is not None and no_slots(state):
            y = self.function(self, q, k, v, mask)
        else:
            if state is not None:
                k, v = (torch.cat([t.to(new.dtype), new], 2) for t, new in zip(state, (k, v), strict=True))
            y = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=self.is_causal and mask is None,
                enable_gqa=self.n_kv_head != self.n_head,
            ).transpose(1, 2)  # fmt: skip
        return F.linear(y.flatten(2), weights.out_proj), trace


def no_slots(state: tuple[Tensor, ...] | None) -> bool:
    """Whether there are no keys and values of earlier tokens: ``state`` is ``None`` or has no slots."""
    return state is None or state[0].shape[2] == 0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings (Su et al., 2021) to ``x`` (B, H, W, P).

    ``cos`` and ``sin`` are (B, 1, W, P). Channels i and i + P / 2 form a pair.
    """
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class LlamaBlock(Block):
    def forward(
        self, stream: Tensor, added: Tensor | None, weights: tuple[AttentionWeights, SwiGLUWeights],
        state: tuple[Tensor, ...] | None, choice: kernels.Choice, injection: Tensor | None,
        rotary: tuple[Tensor, Tensor], mask: Any, seen: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:  # fmt: skip
        """Returns the residual stream (B, W, D), the MLP's output (B, W, D) and the trace.

        The next block adds the MLP's output to the stream, as the argument ``added``. A post-norm block has
        already added the MLP's output, so it returns ``None`` instead.

        ``seen`` (B,): number of filled slots of each sequence. If ``seen`` and ``state`` are given, a fused
        kernel computes the block.
        """
        if seen is not None and state is not None:
            from deqseq.ops.one_token.triton import llama_block

            heads = self.mixer.n_head
            return llama_block(stream, added, *weights, injection, rotary, state, seen, heads, *self.norms())
        return self.by_parts(stream, added, weights, choice.others, injection, state, rotary, mask)


class LlamaBackbone(Stack):
    """f(z, x): a stack of Llama blocks and a final norm, with x injected into every block.

    The injection is a linear map of RMSNorm(x). All blocks share it, and each block adds it to its queries,
    keys and values.

    Fused attention and our kernels have no second derivative. For second derivatives, use
    ``attention="eager"``, or call the model inside ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``. On a
    GPU, both ways also need ``deqseq.kernels.use("torch")``.

    Args:
        d_model: width D.
        n_layer: number of blocks.
        n_head: number of query heads H; ``d_model / n_head`` must be an even integer.
        n_kv_head: number of key/value heads J, a divisor of H; by default H.
        d_inner: the MLP has int(2 d_inner / 3) hidden units; by default ``d_inner`` is 4 D.
        rope_theta: base of the rotary positions.
        norm_eps: constant that every norm adds to the mean square.
        weight_norm: whether every linear map has weight normalisation.
        injection: whether every block adds the injection. False makes the plain stack of an explicit layer.
        input_skip: if true, the first block gets ``gain * z + x``. ``gain`` (D,) is learned and initially 0.
        attention: ``"sdpa"`` is torch's ``scaled_dot_product_attention``. It runs a flash kernel if possible.
            All other names are from transformers' attention interface: ``"flash_attention_2"`` (or 3, 4),
            ``"flex_attention"``, ``"eager"``, and functions that are registered with
            ``transformers.AttentionInterface.register``. If a registered function takes a mask, register the
            mask too, with ``AttentionMaskInterface.register``. With a non-empty state (windows, decoding),
            the backbone always uses torch's function.
        causal: if true, each token attends to itself and to earlier tokens. If false, every token attends to
            all tokens of its sequence, and ``attention`` must be ``"sdpa"``.
        board: number of tokens in a row of a board, such as 9 for a Sudoku. Half of the channels then encode
            a token's row, the other half its column. Needs ``causal=False``. By default, all channels encode
            the position in the sequence.
        post_norm: if true, a block computes u <- norm(u + attention(u)), then u <- norm2(u + mlp(u)) on the
            residual stream u, and there is no final norm. Needs ``causal=False``, because the kernels for
            decoding compute pre-norm blocks. If false, the blocks are pre-norm, and there is a final norm.

    Raises:
        ValueError: a size is below 1; an option breaks a rule above; the attention is unknown or not
            installed.
    """

    rewinds = True

    def __init__(
        self, d_model: int, n_layer: int, n_head: int, n_kv_head: int | None = None,
        d_inner: int | None = None, rope_theta: float = 5e5, norm_eps: float = RMS_EPS,
        weight_norm: bool = True, injection: bool = True, input_skip: bool = False, attention: str = "sdpa",
        causal: bool = True, board: int | None = None, post_norm: bool = False,
    ) -> None:  # fmt: skip
        check_sizes(d_model=d_model)
        function = None if attention == "sdpa" else AttentionFunction(attention)
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        d_inner = 4 * d_model if d_inner is None else d_inner
        check_sizes(n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head, d_inner=d_inner)
        if d_model % n_head or (d_model // n_head) % 2:
            raise ValueError(f"n_head must divide d_model = {d_model} into an even head dim, got {n_head}")
        if n_head % n_kv_head:
            raise ValueError(f"n_kv_head must divide n_head = {n_head}, got {n_kv_head}")
        check_hidden(d_inner=d_inner)
        check_positive("rope_theta", rope_theta)
        check_flag("causal", causal)
        check_flag("post_norm", post_norm)
        if causal and post_norm:
            raise ValueError("post_norm needs causal=False, got post_norm=True with causal=True")
        if not causal and function is not None:
            raise ValueError(f"attention must be 'sdpa' with causal=False, got {attention!r}")
        if board is not None:
            check_sizes(board=board)
            if causal:
                raise ValueError(f"a board needs causal=False, got board={board} with causal=True")
            if d_model // n_head % 4:
                raise ValueError(f"a board needs a head dim that 4 divides, got {d_model // n_head}")
        headdim = d_model // n_head
        blocks = []
        for _ in range(n_layer):
            mixer = Attention(d_model, n_head, n_kv_head, function, causal)
            blocks.append(LlamaBlock(d_model, norm_eps, mixer, SwiGLU(d_model, d_inner), post_norm))
        width = (n_head + 2 * n_kv_head) * headdim
        super().__init__(blocks, d_model, width, norm_eps, weight_norm, injection, input_skip, post_norm)
        self.attention = function
        self.state_shapes = ((n_kv_head, 0, headdim),) * 2  # keys and values, initially without slots
        self.headdim = headdim
        self.rope_theta = rope_theta
        self.causal = causal
        self.board = board

    def prepare_next(self, x: Tensor, position_ids: Tensor | None, context: Context) -> Context:
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        cos, sin = (table.to(x.dtype) for table in self._rotary(position_ids))
        context = super().prepare_next(x, position_ids, context)
        return Context((cos, sin, *context.tokens), context.shared)

    def hide_padding(self, context: Context, lengths: Tensor) -> Context:
        real = torch.arange(context.tokens[0].shape[1], device=lengths.device) < lengths.clamp_min(1)[:, None]
        return Context((*context.tokens, real), context.shared._replace(padded=True))

    def _rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotation angles at ``position_ids`` (B, L), each (B, L, P) float32."""
        axes = (
            [position_ids] if self.board is None else [position_ids // self.board, position_ids % self.board]
        )
        size = self.headdim // len(axes)
        pair = torch.arange(0, size, 2, device=position_ids.device, dtype=torch.float32)
        rates = self.rope_theta ** -(pair / size)
        angle = torch.cat([axis[..., None].float() * rates for axis in axes], -1)  # (B, L, P / 2)
        angle = torch.cat([angle, angle], -1)
        return angle.cos(), angle.sin()

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        choice = kernels.effective(context.shared.choice)
        cos, sin, *tokens = context.tokens
        real = tokens.pop() if context.shared.padded else None
        stream, injection = self.enter(z, tuple(tokens))
        rotary = (cos[:, None], sin[:, None])
        seen = None
        mask = None if real is None else real[:, None, None]  # (B, 1, 1, L)
        if self.attention is not None and (state is None or no_slots(state.layers[0])):
            mask = self.attention.mask(stream)
        elif state is not None and one_token.supports(stream, state.layers[0], choice):
            seen = state.seen
        elif state is not None:
            mask = self._mask(z.shape[1], state)
        return self.through(stream, context, state, choice, injection, rotary, mask, seen)

    def _mask(self, tokens: int, state: State) -> Tensor | None:
        """The attention mask, (B, 1, W, S + W) bool, for a window of W = ``tokens`` tokens.

        Each token attends to all filled slots, to earlier tokens of the window and to itself. If the state
        has no slots, the result is ``None``, because torch's causal attention then needs no mask.
        """
        if no_slots(state.layers[0]):
            return None
        slots = torch.arange(state.layers[0][0].shape[2], device=state.seen.device)
        filled = (slots < state.seen[:, None])[:, None, None].expand(-1, 1, tokens, -1)
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=state.seen.device).tril()
        return torch.cat([filled, causal.expand(state.batch_size, 1, tokens, tokens)], -1)

    def reserve(self, state: State, z: Tensor) -> State:
        """Return a state with enough free slots for the tokens of ``z``.

        Growing copies all keys and values. To make this rare, every growth after the first adds 50 % spare
        slots.
        """
        slots = state.layers[0][0].shape[2]
        needed = int(state.seen.max()) + z.shape[1] if slots else z.shape[1]
        if needed <= slots:
            return state
        wanted = needed + needed // 2 if slots else needed
        grow = (0, 0, 0, -(-wanted // SLOTS) * SLOTS - slots)
        layers = tuple(tuple(F.pad(t, grow) for t in layer) for layer in state.layers)
        return State(state.seen, layers)

    def keep_last(self, state: State, tokens: int) -> State:
        check_sizes(tokens=tokens)
        slots = state.layers[0][0].shape[2]
        if not slots:
            return state
        gone = (state.seen - tokens).clamp_min(0)
        kept = gone[:, None] + torch.arange(min(tokens, slots), device=gone.device)  # (B, S)
        kept = kept.clamp_max(slots - 1)[:, None, :, None]
        # Rotate the kept keys back by the number of removed tokens, because positions restart at 0.
        cos, sin = (table[:, None] for table in self._rotary(-gone[:, None]))

        def taken(values: Tensor) -> Tensor:
            return values.gather(2, kept.expand(-1, values.shape[1], -1, values.shape[3]))

        layers = tuple((rotate(taken(keys), cos, sin), taken(values)) for keys, values in state.layers)
        return State(state.seen - gone, layers)

    def advance(self, trace: Trace, state: State, count: Tensor) -> State:
        layers = advance.keys_values(state.layers, trace.blocks, state.seen, count, trace.implementation)
        return State(state.seen + count, layers)
