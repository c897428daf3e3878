"""The interface of backbones. A backbone is a map f(z, x) that evaluates all tokens in parallel.

Shapes: B sequences, L tokens of the input, W tokens in the window (W = L without a window), D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from deqseq.registry import Registry


@dataclass(frozen=True)
class Context:
    """Everything that f needs besides z and the state.

    :meth:`Backbone.prepare` computes the context once per forward pass.

    Attributes:
        tokens: per-token tensors (B, L, ...), such as the projected input x and tables of rotary embeddings.
        shared: values that all tokens share, such as weights after weight normalisation.
    """

    tokens: tuple[Tensor, ...] = ()
    shared: Any = None

    def take(self, index: Tensor) -> Context:
        """The context of the tokens with the indices ``index`` (B, W) int64."""
        return replace(self, tokens=tuple(take_tokens(t, index) for t in self.tokens))


@dataclass(frozen=True)
class State:
    """A backbone's memory of earlier tokens.

    Attributes:
        seen: (B,) int64, number of tokens of each sequence that the state remembers.
        layers: per layer, a tuple of tensors (B, ...). Mamba2: the last inputs of the convolution, and the
            SSM state. Llama: keys and values.
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
        """All tensors in the state: first ``seen``, then the tensors of each layer."""
        return [self.seen, *chain.from_iterable(self.layers)]

    def select(self, rows: Tensor) -> State:
        """The state of the sequences with the indices ``rows`` (int64), in the order of ``rows``."""
        return self.map(lambda t: t.index_select(0, rows))

    def copy(self) -> State:
        """A copy of the state, with contiguous tensors."""
        return self.map(lambda t: t.clone(memory_format=torch.contiguous_format))

    def detach(self) -> State:
        """The state, detached from the autograd graph."""
        return self.map(torch.Tensor.detach)


Trace = Any
"""Data from ``evaluate`` from which ``advance`` computes the next state. Each backbone has its own type of
trace. Its tensors are (B, ...), because sequences may leave the batch (``compact=True``)."""


class Backbone(nn.Module, ABC):
    """A map f(z, x), causal by default. Evaluating f may read a state, but never changes the state.

    A subclass implements :meth:`prepare` and :meth:`evaluate`. If it also implements :meth:`initial_state`
    and :meth:`advance`, it can carry state across windows and calls. Token t of f(z, x) may depend only on
    the state, and on tokens 0 to t of z and of the context. A backbone needs no masks: the layer moves
    padding to the end of each sequence, and a causal map cannot use later tokens.

    A backbone with ``causal = False`` may use all tokens, and needs no state. The search then ends for all
    tokens of a sequence in the same evaluation. To accept sequences of different lengths, such a backbone
    implements :meth:`hide_padding`.

    Attributes:
        d_model: width D of z and x; ``None`` if every width works.
        causal: whether token t of f(z, x) depends only on tokens 0 to t.
        injects: whether f reads x from the context. If not, f cannot be iterated: an explicit layer passes x
            as z.
        rewinds: true if lowering ``State.seen`` removes the last tokens from a state. This works for states
            with one slot per token (keys and values), not for recurrent states.
        capturable: true if a CUDA graph can record ``prepare``, ``prepare_next``, ``evaluate`` and
            ``advance``. These methods must then never make the host wait for the device.
    """

    d_model: int | None = None
    causal: bool = True
    injects: bool = True
    rewinds: bool = False
    capturable: bool = False

    @abstractmethod
    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        """Compute the context: everything in f(z, x) that does not depend on z.

        Args:
            x: (B, L, D) the layer's input.
            position_ids: (B, L) int64 position of every token; 0 … L-1 by default.
        """

    def prepare_next(self, x: Tensor, position_ids: Tensor | None, context: Context) -> Context:
        """Compute the context of other tokens. The result equals that of ``prepare(x, position_ids)``.

        A backbone may take everything that does not depend on the tokens from ``context``, such as weights
        after weight normalisation. Generation then computes them only once, and not for every token.

        Args:
            x: (B, L, D) the layer's input.
            position_ids: (B, L) int64 position of every token; 0 … L-1 by default.
            context: the result of :meth:`prepare` for inputs of the same type on the same device. The weights
                must not have changed since.
        """
        return self.prepare(x, position_ids)

    @abstractmethod
    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        """Evaluate f on the tokens that follow ``state``. Returns f(z) (B, W, D) and the trace.

        :meth:`advance` computes the next state from the trace, without evaluating f again. If ``state`` is
        ``None``, the trace may be ``None`` too. f(z) must not share memory with ``z``: without autograd, a
        solve may overwrite ``z``.
        """

    def forward(self, z: Tensor, context: Context, state: State | None = None) -> Tensor:
        """f(z), (B, W, D)."""
        return self.evaluate(z, context, state)[0]

    def zero(self, x: Tensor) -> Tensor:
        """z = 0 for :meth:`evaluate` without a state, when f is evaluated only once.

        By default zeros of the shape of ``x`` (B, L, D). A backbone whose :meth:`evaluate` accepts one token
        (1, 1, D) that stands for all tokens may return this token. That saves work.
        """
        return torch.zeros_like(x)

    def hide_padding(self, context: Context, lengths: Tensor) -> Context:
        """A context in which padding does not influence real tokens.

        Sequence i has ``lengths[i]`` real tokens, followed by padding. The layer calls this method only if
        the backbone is not causal and the call of the layer has an attention mask.
        """
        raise ValueError(
            f"{type(self).__name__} is not causal and cannot hide padding: pass one sequence in a row, all "
            "of one length, without attention_mask"
        )

    @property
    def keeps_state(self) -> bool:
        """Whether the backbone can carry state across windows and calls.

        By default, true if the class overrides :meth:`initial_state`. A backbone that wraps another backbone
        must return the value of the wrapped backbone.
        """
        return type(self).initial_state is not Backbone.initial_state

    def initial_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before the first token.

        A size that changes in later states, such as the number of slots for keys and values, must be 0 here.
        """
        raise ValueError(
            f"{type(self).__name__} keeps no state, but windows and decoding need one: use window=None"
        )

    @cached_property
    def state_form(self) -> tuple[int, list[tuple[int, ...]]]:
        """The number of layers in a state, and the shapes of the first layer's tensors.

        The shapes leave out the batch dimension. A size of 0 in a shape stands for any size.
        """
        layers = self.initial_state(1).layers
        return len(layers), [tuple(t.shape[1:]) for layer in layers[:1] for t in layer]

    def reserve(self, state: State, z: Tensor) -> State:
        """Return a state with capacity for the tokens of ``z`` (B, L, D). By default, ``state`` itself."""
        return state

    def keep_last(self, state: State, tokens: int) -> State:
        """Drop all but the last ``tokens`` tokens. The result's ``seen`` counts only the kept tokens.

        A recurrent state cannot drop tokens. By default the method returns ``state`` itself.
        """
        return state

    def advance(self, trace: Trace, state: State, count: Tensor) -> State:
        """The state after the first ``count`` (B,) tokens of the evaluation that returned ``trace``.

        The method may change ``state`` in place. Callers pass a state with contiguous tensors that no other
        code uses.
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
        "mixer": "deqseq.backbones.mixer:MixerBackbone",
        "recursion": "deqseq.backbones.recursion:RecursionBackbone",
    },
    base=Backbone,  # type: ignore[type-abstract]
    hint="; any module becomes a backbone as ModuleBackbone(module)",
)
