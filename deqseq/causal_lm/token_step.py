"""One step of generation: feed one token of every sequence to a model.

Shapes: B sequences, D width, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deqseq.backbone import State
from deqseq.causal_lm.head import logits_of
from deqseq.causal_lm.modeling import ImplicitForCausalLM
from deqseq.layer import ImplicitSequenceLayer
from deqseq.problem import Problem, SolveOptions


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
        self.layer = model.model.layer
        self.x = model.model.embed_tokens(torch.zeros_like(memory.position_ids))  # (B, 1, D) of any token
        self.context = self.layer.backbone.prepare(self.x, memory.position_ids)

    def __call__(self, ids: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Feed the tokens ``ids`` (B,).

        Args:
            memory: the memory of all earlier tokens. Its state needs capacity for one more token. The call
                may overwrite the tensors of the state.

        Returns:
            The logits of the next token, (B, V) float32, and the memory that includes ``ids``.
        """
        out = self.layer.decode(*self._inputs(ids, memory))
        assert out.state is not None
        return self.result(out.z, out.state, memory)

    def problem(self, memory: Memory, ids: Tensor | None = None) -> Problem | None:
        """The problem that a call solves; ``None`` if the model is explicit.

        ``ids``: (B,) the tokens of the call; by default any tokens.
        """
        if not isinstance(self.layer, ImplicitSequenceLayer):
            return None
        ids = torch.zeros_like(memory.position_ids[:, 0]) if ids is None else ids
        return self.layer.token_problem(*self._inputs(ids, memory))

    def result(self, z: Tensor, state: State, memory: Memory) -> tuple[Tensor, Memory]:
        """The result of a call, from the layer's output ``z`` (B, 1, D) and the new ``state``.

        ``memory``: the memory before the call.
        """
        logits = logits_of(z, self.model.lm_head)[0][:, -1].float()
        return logits, Memory(state, z[:, 0], memory.position_ids + 1)

    def _inputs(self, ids: Tensor, memory: Memory) -> tuple[Any, ...]:
        """The arguments of ``decode`` and ``token_problem`` of the layer, in order."""
        x = self.model.model.embed_tokens(ids[:, None])
        return x, memory.position_ids, memory.state, self.context, self.solve, memory.equilibrium
