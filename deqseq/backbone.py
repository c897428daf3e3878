"""The contract between a backbone and the loop: a causal map f(z, x), parallel over tokens, pure in z.

Shapes: B sequences, L tokens of the input, W tokens in the window (W = L without one), D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deqseq.registry import Registry


@dataclass(frozen=True)
class Context:
    """All that f needs and that does not depend on z, made once a forward pass by ``prepare``.

    Attributes:
        tokens: per-token tensors (B, L, ...), such as the injection and rotary tables.
        shared: what all tokens share, such as effective (normalised) weights.
    """

    tokens: tuple[Tensor, ...] = ()
    shared: Any = None

    def take(self, index: Tensor) -> Context:
        """The context of the tokens at ``index`` (B, W) int64."""
        return replace(self, tokens=tuple(take_tokens(t, index) for t in self.tokens))


@dataclass(frozen=True)
class State:
    """What a backbone remembers of the tokens consumed so far.

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

    def select(self, rows: Tensor) -> State:
        """The state of the sequences ``rows`` (int64 indices), in that order."""
        return self.map(lambda t: t.index_select(0, rows))

    def copy(self) -> State:
        """The same in memory of its own, contiguous."""
        return self.map(lambda t: t.clone(memory_format=torch.contiguous_format))

    def detach(self) -> State:
        """The state cut from its graph."""
        return self.map(torch.Tensor.detach)


Trace = Any
"""What one evaluation leaves behind for ``advance``; its form belongs to the backbone."""


class Backbone(nn.Module, ABC):
    """A causal map f(z, x). It reads a state and never changes it.

    A subclass implements :meth:`prepare` and :meth:`evaluate`; with :meth:`initial_state` and
    :meth:`advance` it also carries state across windows and calls. Token t of the result depends on
    tokens up to t of z, the context and the state only. Padding never reaches a backbone: the layer
    moves every sequence's real tokens to the front, where causality alone protects them.

    Attributes:
        d_model: width D of z and x; ``None`` where any width goes.
        injects: whether f depends on x through the context. Explicit use, where x enters as z, takes a
            backbone that does not.
        rewinds: whether lowering ``State.seen`` takes a state back to fewer tokens, as it does where the
            state keeps a slot for every token.
        capturable: whether ``prepare``, ``evaluate`` and ``advance`` read nothing on the host, so that a CUDA
            graph of them is right.
    """

    d_model: int | None = None
    injects: bool = True
    rewinds: bool = False
    capturable: bool = False

    @abstractmethod
    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        """Do all work that does not depend on z.

        Args:
            x: (B, L, D) the layer's input.
            position_ids: (B, L) int64 position of every token; 0 … L-1 by default.
        """

    @abstractmethod
    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        """One evaluation: f(z) (B, W, D) of the tokens that follow ``state``, and its trace.

        The trace is what :meth:`advance` needs to consume tokens at exactly these z, so that moving
        the state on costs no further evaluation; without a state there is nothing to move, and it may be
        ``None``. f(z) is a tensor of its own, which a solve without a graph may overwrite.
        """

    def forward(self, z: Tensor, context: Context, state: State | None = None) -> Tensor:
        """f(z), (B, W, D)."""
        return self.evaluate(z, context, state)[0]

    @property
    def keeps_state(self) -> bool:
        """Whether it can carry state across windows and calls. A wrapper asks what it wraps."""
        return type(self).initial_state is not Backbone.initial_state

    def initial_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """The state before the first token."""
        raise ValueError(
            f"{type(self).__name__} keeps no state, so it runs without a window only (window=None)"
        )

    def reserve(self, state: State, z: Tensor) -> State:
        """Make room for the tokens of ``z`` (B, L, D) in states that grow with the sequence."""
        return state

    def keep_last(self, state: State, tokens: int) -> State:
        """The state with no more than its last ``tokens`` tokens, where it keeps a slot for every token.

        What is kept goes on as if it had come first: ``seen`` counts no more than it. Recurrent states,
        whose size does not grow, stay as they are.
        """
        return state

    def advance(self, trace: Trace, state: State, count: Tensor) -> State:
        """The state after the first ``count`` (B,) tokens of the evaluation that left ``trace``.

        The tensors of ``state`` are contiguous and the caller's own: they may be changed in place and
        returned.
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
