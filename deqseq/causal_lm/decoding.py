"""The steps of generation: feed one token of every sequence to a model, and choose the next token.

Shapes: B sequences, D width, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.backbone import State
from deqseq.causal_lm.cache import StateLayer
from deqseq.causal_lm.modeling import ImplicitForCausalLM
from deqseq.causal_lm.support import check_layer
from deqseq.problem import SolveOptions

LEAST_ROOM = 64
"""When the state is full, it gets capacity for more tokens: as many as have been fed so far, but at least
this number. So its shapes rarely change."""


class Memory(NamedTuple):
    """A model's memory of the tokens that it has consumed."""

    state: State
    equilibrium: Tensor | None  # (B, D) of the last token; ``None`` if it is unknown
    position_ids: Tensor  # (B, 1) int64, position of the next token


class TokenStep:
    """A function that feeds one token of every sequence to a model.

    All tensors keep their shapes from call to call. With a fixed number of iterations, and in explicit
    models, the host never waits for the device. The constructor prepares the backbone's weights. So do not
    change the weights afterwards.

    Args:
        model: the language model.
        memory: the memory before the first call.
        solve: solver, policy and guess; by default those of the layer.
    """

    def __init__(self, model: ImplicitForCausalLM, memory: Memory, solve: SolveOptions | None = None) -> None:
        self.model, self.solve = model, solve
        self.x = model.model.embed_tokens(torch.zeros_like(memory.position_ids))  # (B, 1, D) of any token
        self.context = model.model.layer.backbone.prepare(self.x, memory.position_ids)

    def __call__(self, ids: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Feed the tokens ``ids`` (B,).

        Args:
            memory: the memory of all earlier tokens. Its state needs capacity for one more token. The call
                may overwrite the tensors of the state.

        Returns:
            The logits of the next token, (B, V) float32, and the memory that includes ``ids``.
        """
        state, previous, position_ids = memory
        x = self.model.model.embed_tokens(ids[:, None])
        out = self.model.model.layer.decode(x, position_ids, state, self.context, self.solve, previous)
        assert out.state is not None
        logits = self.model._logits(out.z)[0][:, -1].float()
        return logits, Memory(out.state, out.z[:, 0], position_ids + 1)


class Decoder:
    """Feeds tokens to a model one after the other, starting after the prompt.

    Args:
        model: the language model.
        content: the content of the cache that the prompt has filled. The decoder works on a copy of the
            state; :meth:`commit` updates the cache.
        most: maximum number of tokens to feed.
        position_ids: (B, 1) int64, position of the first token; by default the number of tokens before it.
        solve: solver, policy and guess; by default those of the layer.
    """

    def __init__(
        self, model: ImplicitForCausalLM, content: StateLayer, most: int,
        position_ids: Tensor | None = None, solve: SolveOptions | None = None,
    ) -> None:  # fmt: skip
        assert content.state is not None  # the prompt has filled the cache
        if position_ids is None:
            position_ids = content.state.seen[:, None]
        self._begun = content.state
        self.memory = Memory(content.state.copy(), content.equilibrium, position_ids)
        self.step = TokenStep(model, self.memory, solve)
        self._backbone = model.model.layer.backbone
        self._content, self._most = content, most
        self._count = 0  # number of tokens that have been fed
        self._capacity = 0  # number of tokens that the state has had capacity for

    def feed(self, ids: Tensor) -> Tensor:
        """Feed the tokens ``ids`` (B,). Returns the logits of the next token, (B, V) float32."""
        if self._count == self._capacity:
            room = min(max(LEAST_ROOM, self._count), self._most - self._count)
            state = self._backbone.reserve(self.memory.state, self.step.x.expand(-1, room, -1))
            self.memory = self.memory._replace(state=state)
            self._capacity += room
        logits, self.memory = self.step(ids, self.memory)
        self._count += 1
        return logits

    def commit(self) -> None:
        """Write the memory of all tokens that have been fed to the cache.

        Raises:
            ValueError: the cache has changed since the decoder was made.
        """
        if self._count and self.memory.equilibrium is not None:
            if self._content.state is not self._begun:
                raise ValueError(
                    "the cache has changed during generation, so it does not get the new tokens: give every "
                    "call a cache of its own, such as copy.deepcopy(cache)"
                )
            z = self.memory.equilibrium[:, None].expand(-1, self._count, -1)
            self._content.commit(self.memory.state, z, None)


def choose_ids(scores: Tensor, do_sample: bool, generator: torch.Generator | None) -> Tensor:
    """Choose a token of every sequence: (B, V) scores -> (B,) ids.

    Sampling divides the probabilities by exponential random numbers and takes the largest quotient.
    ``torch.multinomial`` computes the same from the same random numbers, but its checks make the host wait.
    """
    if not do_sample:
        return scores.argmax(-1)
    probabilities = scores.softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)


def check_model(model: object, function: str) -> None:
    """Raise ``ValueError`` if ``model`` cannot generate without calls of its ``forward``."""
    if not isinstance(model, ImplicitForCausalLM):
        hint = ": pass model.get_base_model()" if hasattr(model, "get_base_model") else ""
        raise ValueError(
            f"{function} is for ImplicitForCausalLM, got {type(model).__name__}{hint or '; use generate'}"
        )
    check_layer(model, function)
