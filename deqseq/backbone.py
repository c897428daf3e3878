"""The contract between a backbone and the loop: a causal map f(z, x), parallel over tokens, pure in z.

Shapes: B sequences, L tokens of the input, W tokens in the window (W = L without one), D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from deqseq.registry import Registry


@dataclass(frozen=True)
class Context:
    """Everything that f needs besides z. ``prepare`` makes it once a forward pass.

    Attributes:
        tokens: per-token tensors (B, L, ...), such as the injection and rotary tables.
        shared: values that all tokens share, such as effective (normalised) weights.
    """

    tokens: tuple[Tensor, ...] = ()
    shared: Any = None

    def take(self, index: Tensor) -> Context:
        """The context of the tokens at ``index`` (B, W) int64."""
        return replace(self, tokens=tuple(take_tokens(t, index) for t in self.tokens))


@dataclass(frozen=True)
class State:
    """A backbone's memory of the tokens it has consumed.

    Attributes:
        seen: (B,) int64, number of tokens consumed by each sequence.
        layers: per layer, a tuple of tensors (B, ...): convolution tail and SSM state, keys and values.
    """

    seen: Tensor
    layers: tuple[tuple[Tensor, ...], ...]

    @property
    def batch_size(self) -> int:
        return self.seen.shape[0]

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """The state with ``function`` applied to every tensor in it."""
        layers = tuple(tuple(function(t) for t in layer) for layer in self.layers)
        return State(function(self.seen), layers)

    def tensors(self) -> list[Tensor]:
        """Every tensor in the state, in order."""
        return [self.seen, *chain.from_iterable(self.layers)]

    def select(self, rows: Tensor) -> State:
        """The state of the sequences ``rows`` (int64 indices), in that order."""
        return self.map(lambda t: t.index_select(0, rows))

    def copy(self) -> State:
        """A contiguous copy."""
        return self.map(lambda t: t.clone(memory_format=torch.contiguous_format))

    def detach(self) -> State:
        """The state without its graph."""
        return self.map(torch.Tensor.detach)


Trace = Any
"""A record of one evaluation, from which ``advance`` computes the next state. The backbone chooses its
form."""


class Backbone(nn.Module, ABC):
    """A causal map f(z, x). It reads a state and never changes it.

    A subclass implements :meth:`prepare` and :meth:`evaluate`. With :meth:`initial_state` and :meth:`advance`
    it also carries state across windows and calls. Token t of the result depends only on the tokens up to t
    of z, on the context and on the state. A backbone needs no masks: the layer moves the real tokens of every
    sequence to the front, and the padding behind them cannot influence them.

    Attributes:
        d_model: width D of z and x; ``None`` if every width works.
        injects: whether f depends on x through the context. An explicit layer passes x as z, so its backbone
            has ``injects=False``.
        rewinds: whether lowering ``State.seen`` takes a state back to fewer tokens. True for states with a
            slot for every token (keys and values), false for recurrent ones.
        capturable: whether ``prepare``, ``evaluate`` and ``advance`` never make the host wait for the
            device, so that they can be recorded as a CUDA graph.
    """

    d_model: int | None = None
    injects: bool = True
    rewinds: bool = False
    capturable: bool = False

    @abstractmethod
    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        """Compute everything that does not depend on z.

        Args:
            x: (B, L, D) the layer's input.
            position_ids: (B, L) int64 position of every token; 0 … L-1 by default.
        """

    @abstractmethod
    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        """One evaluation: f(z) (B, W, D) of the tokens that follow ``state``, and its trace.

        :meth:`advance` computes from the trace the state after consuming these z, without evaluating f again.
        Without a state the trace may be ``None``. The result must not alias ``z``, because a solve without a
        graph may overwrite ``z``.
        """

    def forward(self, z: Tensor, context: Context, state: State | None = None) -> Tensor:
        """f(z), (B, W, D)."""
        return self.evaluate(z, context, state)[0]

    @property
    def keeps_state(self) -> bool:
        """Whether the backbone can carry state across windows and calls. A wrapper returns the value
        of the backbone that it wraps."""
        return type(self).initial_state is not Backbone.initial_state

    def initial_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before the first token."""
        raise ValueError(
            f"{type(self).__name__} keeps no state, which a window and decoding need: use window=None"
        )

    def reserve(self, state: State, z: Tensor) -> State:
        """The state with capacity for the tokens of ``z`` (B, L, D). By default states do not grow."""
        return state

    def keep_last(self, state: State, tokens: int) -> State:
        """The state with the slots of the last ``tokens`` tokens only.

        Afterwards ``seen`` counts only the tokens that were kept. States of constant size stay as they are.
        """
        return state

    def advance(self, trace: Trace, state: State, count: Tensor) -> State:
        """The state after the first ``count`` (B,) tokens of the evaluation that left ``trace``.

        The tensors of ``state`` are contiguous, and nothing else uses them: the method may change them in
        place.
        """
        raise ValueError(f"{type(self).__name__} keeps no state to advance")


def take_tokens(values: Tensor, index: Tensor) -> Tensor:
    """Gather tokens: ``values`` (B, L, ...) at ``index`` (B, W) -> (B, W, ...)."""
    shape = index.shape + (1,) * (values.dim() - 2)
    return values.gather(1, index.view(shape).expand(*index.shape, *values.shape[2:]))


backbones: Registry[Backbone] = Registry(
    "backbone",
    "deqseq.backbones",
    {
        "mamba2": "deqseq.backbones.mamba2:Mamba2Backbone",
        "llama": "deqseq.backbones.llama:LlamaBackbone",
    },
    base=Backbone,  # type: ignore[type-abstract]
    hint="; any causal module becomes a backbone as ModuleBackbone(module)",
)
