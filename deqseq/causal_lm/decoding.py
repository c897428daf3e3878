"""Decoding token by token: reserves capacity, records steps as CUDA graphs, and writes back to the cache.

Shapes: B sequences, V vocabulary.
"""

import torch
from torch import Tensor

from deqseq.causal_lm.cache import StateLayer
from deqseq.causal_lm.modeling import ImplicitForCausalLM
from deqseq.causal_lm.recorded import RecordedStep, can_record_step
from deqseq.causal_lm.support import check_layer
from deqseq.causal_lm.token_step import Memory, TokenStep
from deqseq.problem import SolveOptions

LEAST_CAPACITY = 64
"""When the state is full, it gets capacity for more tokens: as many as have been fed so far, but at least
this number. So its shapes rarely change."""
LEAST_CAPACITY_RECORDED = 1024
"""The same for recorded steps, because new shapes need a new recording."""
LEAST_RECORDED = 4
"""A recording is made only if at least this number of tokens is left. Making it takes about as long as two
tokens without a recording."""


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
        self._failed = False  # whether feeding a token has raised an error
        self._capacity = 0  # number of tokens that the state has had capacity for
        self._records = can_record_step(self.step, self.memory)
        self._recorded: RecordedStep | None = None

    def feed(self, ids: Tensor) -> Tensor:
        """Feed the tokens ``ids`` (B,). Returns the logits of the next token, (B, V) float32."""
        if self._count == self._capacity:
            self._extend()
        # The first step is not recorded. It compiles the kernels. If the memory has no equilibria yet, this
        # step adds them, and a recording needs a memory of fixed structure.
        left = self._capacity - self._count
        if self._records and self._recorded is None and self._count and left >= LEAST_RECORDED:
            self._recorded = RecordedStep(self.step, self.memory)
            self.memory = self._recorded.memory
        self._failed = True
        if self._recorded is not None:
            logits = self._recorded(ids)
        else:
            logits, self.memory = self.step(ids, self.memory)
        self._failed = False
        self._count += 1
        return logits

    def _extend(self) -> None:
        """Give the state capacity for more tokens."""
        least = LEAST_CAPACITY_RECORDED if self._records else LEAST_CAPACITY
        added = min(max(least, self._count), self._most - self._count)
        state = self._backbone.reserve(self.memory.state, self.step.x.expand(-1, added, -1))
        if state is not self.memory.state:  # new tensors, which the recording does not know
            self.memory, self._recorded = self.memory._replace(state=state), None
        self._capacity += added

    def commit(self) -> None:
        """Write the memory of all tokens that have been fed to the cache.

        If feeding a token has raised an error, the memory may hold a part of this token. Then the cache stays
        as it was before the first token.

        Raises:
            ValueError: the cache has changed since the decoder was made.
        """
        if self._count and not self._failed and self.memory.equilibrium is not None:
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
