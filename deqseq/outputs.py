"""The output of a sequence layer, and functions that mark the results of non-finite inputs in it.

Shapes: B sequences, L tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deqseq.backbone import State
from deqseq.inputs import Inputs
from deqseq.solution import Solution
from deqseq.status import Status


@dataclass
class LayerOutput:
    """The output of a sequence layer. Shapes: B sequences, L tokens, D width.

    Attributes:
        z: (B, L, D); zero at padding.
        state: the detached backbone state after the last token; ``None`` if the layer was called with no
            state.
        solution: how every token was solved; ``None`` for an explicit layer.
    """

    z: Tensor
    state: State | None = None
    solution: Solution | None = None


def mark_unsolvable(solution: Solution, inputs: Inputs) -> Solution:
    """Mark the tokens that depend on a non-finite input. Changes ``solution`` and returns it.

    The z and the residual of these tokens become NaN, and their status becomes ``NON_FINITE``. The states of
    their sequences become NaN too.
    """
    unsolvable = inputs.unsolvable
    solution.z = solution.z.masked_fill(unsolvable[..., None], torch.nan)
    solution.residual = solution.residual.masked_fill(unsolvable, torch.nan)
    solution.status = solution.status.masked_fill(unsolvable, int(Status.NON_FINITE))
    solution.state = state_after(solution.state, unsolvable)
    return solution


def state_after(state: State | None, unsolvable: Tensor) -> State | None:
    """A copy of ``state`` that is NaN for every sequence with an ``unsolvable`` token.

    ``unsolvable`` (B, L) marks the tokens that depend on a non-finite input. The copy's ``seen`` also counts
    these tokens.
    """
    if state is None:
        return None
    affected = unsolvable.any(1)

    def with_nan(values: Tensor) -> Tensor:
        if not values.is_floating_point():  # integers have no NaN
            return values
        return values.masked_fill(affected.view(-1, *[1] * (values.dim() - 1)), torch.nan)

    layers = tuple(tuple(map(with_nan, layer)) for layer in state.layers)
    return State(state.seen + unsolvable.sum(1), layers)
