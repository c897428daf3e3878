"""The outputs of the models.

Shapes: B sequences, L tokens, D width, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput

from deqseq.causal_lm.cache import EquilibriumCache
from deqseq.solution import Solution


@dataclass
class ImplicitModelOutput(ModelOutput):
    """The output of :class:`ImplicitModel`.

    Attributes:
        last_hidden_state: (B, L, D) the equilibria z*, or the output of an explicit stack.
        past_key_values: the cache to pass to the next call; ``None`` if the call uses no cache.
        hidden_states: with ``output_hidden_states``, two tensors (B, L, D): the embeddings x and
            ``last_hidden_state``. Outputs of single blocks or iterations are not returned.
        solution: residual, iterations and status of every token; ``None`` for explicit models.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: EquilibriumCache | None = None
    hidden_states: tuple[Tensor, Tensor] | None = None
    solution: Solution | None = None


@dataclass
class ImplicitCausalLMOutput(ModelOutput):
    """The output of the language model.

    Attributes:
        loss: mean cross-entropy of token t + 1 given the tokens up to t; ``None`` without labels.
        logits: (B, L, V), or (B, n, V) for n tokens in ``logits_to_keep``; ``None`` if a loss is
            computed with ``skip_logits``.
        past_key_values, hidden_states, solution: as in :class:`ImplicitModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: EquilibriumCache | None = None
    hidden_states: tuple[Tensor, Tensor] | None = None
    solution: Solution | None = None
