"""Llama attention as the body of an implicit layer: a stack of pre-norm blocks and a final norm.

Shapes: B sequences, W tokens, D width, H query heads, J key/value heads, P = D / H head dim, S slots of
the key/value state.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqseq import kernels
from deqseq.backbone import Backbone, Context, State, Trace
from deqseq.backbones.attention import AttentionFunction
from deqseq.backbones.blocks import (
    RMS_EPS,
    Injection,
    InputSkip,
    SwiGLU,
    add_norm,
    check_norm_eps,
    check_sizes,
    one_token,
    projection,
)
from deqseq.normalisation import normalise_weights

SLOTS = 64
"""Slots that are added to a state at a time."""


class _MixerWeights(NamedTuple):
    qkv: Tensor  # (D + 2 J P, D)
    out_proj: Tensor  # (D, D)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads, no biases."""

    def __init__(self, d_model: int, n_head: int, n_kv_head: int, function: AttentionFunction | None) -> None:
        super().__init__()
        self.n_head = n_head
        self.n_kv_head = n_kv_head
        self.headdim = d_model // n_head
        self.wq = nn.Linear(d_model, d_model, bias=False)
        self.wk = nn.Linear(d_model, n_kv_head * self.headdim, bias=False)
        self.wv = nn.Linear(d_model, n_kv_head * self.headdim, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self.function = function
        # What transformers' functions read from a module:
        self.config = None if function is None else function.config
        self.is_causal = True
        self.num_key_value_groups = n_head // n_kv_head

    def weights(self) -> _MixerWeights:
        qkv = torch.cat([projection(linear) for linear in (self.wq, self.wk, self.wv)])
        return _MixerWeights(qkv, projection(self.out_proj))

    def forward(
        self,
        u: Tensor,
        weights: _MixerWeights,
        injection: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        state: tuple[Tensor, ...] | None,
        mask: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        qkv = F.linear(u, weights.qkv)
        if injection is not None:
            qkv = qkv + injection
        qkv = qkv.unflatten(-1, (-1, self.headdim)).transpose(1, 2)  # (B, H + 2 J, W, P)
        q, k, v = qkv.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        trace = None if state is None else (k, v)
        if self.function is not None and _starts(state):
            y = self.function(self, q, k, v, mask)
        else:
            if state is not None:
                k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
            y = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, enable_gqa=self.n_kv_head != self.n_head
            ).transpose(1, 2)
        return F.linear(y.flatten(2), weights.out_proj), trace


def _starts(state: tuple[Tensor, ...] | None) -> bool:
    """Whether a layer's state has no slots, so that attention is plain and causal."""
    return state is None or state[0].shape[2] == 0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021) on ``x`` (B, H, W, P), tables (B, 1, W, P): halves are pairs."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class LlamaBlock(nn.Module):
    """Pre-norm attention and pre-norm SwiGLU, each added to the stream.

    What a block adds is handed on by itself, so that the addition is one with the next norm.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        n_kv_head: int,
        d_inner: int,
        norm_eps: float,
        function: AttentionFunction | None,
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mixer = Attention(d_model, n_head, n_kv_head, function)
        self.norm2 = nn.RMSNorm(d_model, eps=norm_eps)
        self.mlp = SwiGLU(d_model, d_inner)

    def weights(self) -> tuple[_MixerWeights, tuple[Tensor, Tensor, Tensor]]:
        return self.mixer.weights(), self.mlp.weights()

    def forward(
        self,
        stream: Tensor,
        added: Tensor | None,
        weights: tuple[_MixerWeights, tuple[Tensor, Tensor, Tensor]],
        injection: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        state: tuple[Tensor, ...] | None,
        mask: Any,
        seen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """The stream with ``added``, what this block adds to it, and the trace.

        ``seen`` (B,), slots that are filled, instead of a mask: one token a sequence, by its kernels.
        """
        if seen is not None and state is not None:
            from deqseq.backbones.kernels.token import llama_block

            return llama_block(self, stream, added, weights, injection, rotary, state, seen)
        stream, u = add_norm(stream, added, self.norm)
        mixed, trace = self.mixer(u, weights[0], injection, rotary, state, mask)
        stream, u = add_norm(stream, mixed, self.norm2)
        return stream, self.mlp(u, weights[1]), trace


class LlamaBackbone(Backbone):
    """f(z, x): a stack of Llama blocks and a final norm, with x injected into every block.

    One shared injection W RMSNorm(x) + b is added to queries, keys and values of every layer. Fused
    attention has no second derivative, no more than our kernels: where one is wanted, take
    ``attention="eager"``, or call under ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``, on a GPU also
    under ``deqseq.kernels.use("torch")``.

    Args:
        d_model: width D.
        n_layer: blocks.
        n_head: query heads H; divides ``d_model`` into an even head dim.
        n_kv_head: key/value heads J; divides H; H by default.
        d_inner: MLP width before SwiGLU's 2/3: hidden units are int(2 d_inner / 3). 4 D by default.
        rope_theta: base of the rotary positions.
        norm_eps: added to the mean square by every norm.
        weight_norm: weight normalisation of every linear map.
        injection: ``False`` for explicit use, where x enters as z.
        input_skip: x also enters the residual stream, which starts from ``gain * z + x`` with a learned
            gain (D,) that starts at 0: f(z, x) then starts without memory of z (see ``to_implicit``).
        attention: ``"sdpa"``, torch's own, which runs its flash kernel where that can; or a name in
            transformers' attention interface: ``"flash_attention_2"`` (3, 4), ``"flex_attention"``,
            ``"eager"``, or what ``transformers.AttentionInterface.register`` added, with its
            ``AttentionMaskInterface`` if it takes a mask. Where a state holds tokens already, as in
            windows and in decoding, attention is torch's whatever the name.

    Raises:
        ValueError: sizes below 1, or that do not divide as said; an attention that is unknown or not
            installed.
    """

    d_model: int
    rewinds = True
    capturable = True

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        n_head: int,
        n_kv_head: int | None = None,
        d_inner: int | None = None,
        rope_theta: float = 5e5,
        norm_eps: float = RMS_EPS,
        weight_norm: bool = True,
        injection: bool = True,
        input_skip: bool = False,
        attention: str = "sdpa",
    ) -> None:
        super().__init__()
        self.attention = None if attention == "sdpa" else AttentionFunction(attention)
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        d_inner = 4 * d_model if d_inner is None else d_inner
        check_sizes(d_model=d_model, n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head, d_inner=d_inner)
        if d_model % n_head or (d_model // n_head) % 2:
            raise ValueError(f"n_head must divide d_model = {d_model} into an even head dim, got {n_head}")
        if n_head % n_kv_head:
            raise ValueError(f"n_kv_head must divide n_head = {n_head}, got {n_kv_head}")
        if d_inner < 2:
            raise ValueError(f"d_inner must be at least 2, got {d_inner}")
        if not rope_theta > 0:
            raise ValueError(f"rope_theta must be positive, got {rope_theta}")
        check_norm_eps(norm_eps)
        self.d_model = d_model
        self.headdim = d_model // n_head
        self.n_kv_head = n_kv_head
        self.rope_theta = rope_theta
        self.layers = nn.ModuleList(
            LlamaBlock(d_model, n_head, n_kv_head, d_inner, norm_eps, self.attention) for _ in range(n_layer)
        )
        self.norm_f = nn.RMSNorm(d_model, eps=norm_eps)
        self.injects = injection
        qkv_width = (n_head + 2 * n_kv_head) * self.headdim
        self.injection = Injection(d_model, qkv_width, norm_eps) if injection else None
        if input_skip and not injection:
            raise ValueError("input_skip needs injection=True: in explicit use x enters as z")
        self.input_skip = InputSkip(d_model) if input_skip else None
        if weight_norm:
            normalise_weights(self)

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        tokens = [table.to(x.dtype) for table in self._rotary(position_ids)]
        if self.injection is not None:
            tokens.append(self.injection(x))
        if self.input_skip is not None:
            tokens.append(x)
        return Context(tuple(tokens), [cast(LlamaBlock, layer).weights() for layer in self.layers])

    def _rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, L, P) float32 that rotate by ``position_ids`` (B, L)."""
        pair = torch.arange(0, self.headdim, 2, device=position_ids.device, dtype=torch.float32)
        angle = position_ids[..., None].float() * self.rope_theta ** -(pair / self.headdim)  # (B, L, P / 2)
        angle = torch.cat([angle, angle], -1)
        return angle.cos(), angle.sin()

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        cos, sin, *injected = context.tokens
        injection = injected[0] if injected else None
        if self.input_skip is not None:
            z = self.input_skip(z, injected[1])
        rotary = (cos[:, None], sin[:, None])
        mask = seen = None
        if self.attention is not None and (state is None or _starts(state.layers[0])):
            mask = self.attention.mask(z)
        elif state is not None and one_token(z, context.shared[0][0].qkv, state.layers[0]):
            seen = state.seen
        elif state is not None:
            mask = self._mask(z.shape[1], state)
        stream, added, traces = z, None, []
        for i, layer in enumerate(self.layers):
            before = None if state is None else state.layers[i]
            stream, added, trace = layer(
                stream, added, context.shared[i], injection, rotary, before, mask, seen
            )
            traces.append(trace)
        return add_norm(stream, added, self.norm_f, last=True)[1], traces

    def _mask(self, width: int, state: State) -> Tensor | None:
        """(B, 1, W, S + W) bool: a token sees the slots that are filled, and the window up to itself.

        ``None`` without slots: what is left is plain causal attention, which needs no mask.
        """
        if _starts(state.layers[0]):
            return None
        slots = torch.arange(state.layers[0][0].shape[2], device=state.seen.device)
        filled = (slots < state.seen[:, None])[:, None, None].expand(-1, 1, width, -1)
        inside = torch.ones(width, width, dtype=torch.bool, device=state.seen.device).tril()
        return torch.cat([filled, inside.expand(state.batch_size, 1, width, width)], -1)

    def initial_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """No slots yet: per layer keys and values (B, J, 0, P)."""
        device = self.norm_f.weight.device if device is None else device
        dtype = self.norm_f.weight.dtype if dtype is None else dtype
        empty = torch.zeros(batch_size, self.n_kv_head, 0, self.headdim, device=device, dtype=dtype)
        seen = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return State(seen, ((empty, empty),) * len(self.layers))

    def reserve(self, state: State, z: Tensor) -> State:
        """Slots for every token of ``z``, and half as many more each time: growing copies all there are."""
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
        # Rotations add up: turned back by as many positions, keys stand where they would if they came first.
        cos, sin = (table[:, None] for table in self._rotary(-gone[:, None]))

        def taken(values: Tensor) -> Tensor:
            return values.gather(2, kept.expand(-1, values.shape[1], -1, values.shape[3]))

        layers = tuple((rotate(taken(keys), cos, sin), taken(values)) for keys, values in state.layers)
        return State(state.seen - gone, layers)

    def advance(self, trace: Trace, state: State, count: Tensor) -> State:
        if kernels.implementation(state.layers[0][0]) == "triton":
            from deqseq.backbones.kernels.advance import append_, fits

            if fits(trace[0][0].shape[2]):
                for (keys, values), (k, v) in zip(state.layers, trace, strict=True):
                    append_(keys, values, k, v, state.seen, count)
                return State(state.seen + count, state.layers)
        # Slot s takes the window's token s - seen, if that is one of the first ``count``.
        slots = torch.arange(state.layers[0][0].shape[2], device=count.device)
        token = slots - state.seen[:, None]  # (B, S)
        write = ((token >= 0) & (token < count[:, None]))[:, None, :, None]
        source = token.clamp(0, trace[0][0].shape[2] - 1)[:, None, :, None]

        def written(kept: Tensor, new: Tensor) -> Tensor:
            moved = new.to(kept.dtype).gather(2, source.expand_as(kept))
            return torch.where(write, moved, kept)

        layers = tuple(
            tuple(written(kept, new) for kept, new in zip(before, left, strict=True))
            for before, left in zip(state.layers, trace, strict=True)
        )
        return State(state.seen + count, layers)
