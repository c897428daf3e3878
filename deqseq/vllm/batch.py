"""Solves vLLM's flat batch with deqseq's loop.

vLLM concatenates the tokens of all requests. The loop judges rows of tokens, and each row is one sequence. So
every request becomes a row, and requests do not influence each other's iterations.

Shapes: T tokens in the flat batch, R requests, W tokens of the longest request, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deqseq.backbone import Context, State, Trace
from deqseq.guess import propose
from deqseq.inputs import Packing
from deqseq.problem import Problem, SolveOptions
from deqseq.search import search


def rows_of(starts: Tensor, tokens: int) -> Packing:
    """The packing of a flat batch of T = ``tokens`` tokens, seen as (1, T), into one row per request.

    ``starts`` (R + 1,) is vLLM's ``query_start_loc``: the index of every request's first token, then the
    number of real tokens. The tokens after these are padding.
    """
    place = torch.arange(tokens + 1, device=starts.device)
    first = torch.isin(place, starts)
    return Packing.of_packed((place < starts[-1])[None, :tokens], first[None, :tokens])


@dataclass(frozen=True)
class FlatMap:
    """A map of the flat batch, (T, D) -> (T, D), as a map of rows, (R, W, D) -> (R, W, D)."""

    function: Callable[[Tensor], Tensor]
    rows: Packing

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        return self.rows.pack(self.function(self.rows.unpack(z)[0])[None]), None


def solve(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    starts: Tensor,
    options: SolveOptions,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The equilibria (T, D) of a flat batch.

    Args:
        function: the map f of the flat batch, (T, D) -> (T, D).
        x: (T, D) the layer's input, from which the guess is made.
        starts: (R + 1,) vLLM's ``query_start_loc``.
        options: solver, policy and guess.
        group: processes that evaluate f together, and must stop after the same evaluation.
    """
    rows = rows_of(starts, len(x))
    padded = rows.pack(x[None])
    real = torch.arange(padded.shape[1], device=x.device) < rows.lengths[:, None]
    padded = padded.where(real[..., None], 0)
    guess = propose(options.guess, padded, number=0, previous=None)
    z0 = torch.zeros_like(padded) if guess is None else guess.to(x.dtype).where(real[..., None], 0)
    problem = Problem(FlatMap(function, rows), Context(), z0, options, lengths=rows.lengths, group=group)
    return rows.unpack(search(problem).z)[0]
