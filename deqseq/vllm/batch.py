"""Solves vLLM's flat batch with deqseq's loop.

vLLM concatenates the tokens of all requests. The loop judges rows of tokens, and each row is one sequence. So
every request becomes a row, and requests do not influence each other's iterations.

Shapes: T tokens in the flat batch, R requests, W tokens of the longest request, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deqseq.backbone import Context, State, Trace
from deqseq.guess import propose
from deqseq.inputs import Packing
from deqseq.iteration import search
from deqseq.problem import Problem, SolveOptions
from deqseq.solution import Solution


class FlatFunction(Protocol):
    """The map f of a flat batch, (T, D) -> (T, D)."""

    def __call__(self, z: Tensor) -> Tensor: ...

    def select(self, rows: Tensor, tokens: Tensor, starts: Tensor) -> FlatFunction:
        """The map of a flat batch with some of the requests.

        Args:
            rows: (r,) int64 ascending indices of these requests among the requests that have tokens.
            tokens: (t,) int64 ascending indices of their tokens in this map's flat batch.
            starts: (r + 1,) int64, ``query_start_loc`` of the new flat batch.
        """
        ...


def packing_of(starts: Tensor, tokens: int) -> Packing:
    """The packing that turns a flat batch, seen as (1, T), into one row per request. T is ``tokens``.

    ``starts`` (R + 1,) is vLLM's ``query_start_loc``: the index of every request's first token, then the
    number of real tokens. All later tokens are padding.
    """
    place = torch.arange(tokens + 1, device=starts.device)
    first = torch.isin(place, starts)
    return Packing.of_packed((place < starts[-1])[None, :tokens], first[None, :tokens])


@dataclass(frozen=True)
class FlatMap:
    """A map of the flat batch, (T, D) -> (T, D), as a map of rows, (R, W, D) -> (R, W, D)."""

    function: FlatFunction
    packing: Packing

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        return self.packing.pack(self.function(self.packing.unpack(z)[0])[None]), None

    def select(self, rows: Tensor) -> FlatMap:
        """The map of some of the requests; it evaluates only their tokens. ``rows`` (r,) int64: indices."""
        lengths, source = self.packing.lengths[rows], self.packing.source[rows]
        tokens = source[torch.arange(source.shape[1], device=rows.device) < lengths[:, None]]
        starts = F.pad(lengths.cumsum(0), (1, 0))
        return FlatMap(self.function.select(rows, tokens, starts), packing_of(starts, len(tokens)))


def solve(
    function: FlatFunction,
    x: Tensor,
    starts: Tensor,
    options: SolveOptions,
    group: dist.ProcessGroup | None,
    compact: bool,
) -> tuple[Tensor, Solution]:
    """The equilibria (T, D) of a flat batch, and the solution of its rows, whose tensors are (R, W, ...).

    Args:
        function: the map f of the flat batch.
        x: (T, D) the layer's input, from which the guess is made.
        starts: (R + 1,) vLLM's ``query_start_loc``.
        options: solver, policy and guess.
        group: processes that evaluate f together, and must stop after the same evaluation.
        compact: whether settled requests leave the batch. With a group they always stay.
    """
    packing = packing_of(starts, len(x))
    padded = packing.pack(x[None])
    real = torch.arange(padded.shape[1], device=x.device) < packing.lengths[:, None]
    padded = padded.where(real[..., None], 0)
    guess = propose(options.guess, padded, number=0, previous=None)
    z0 = torch.zeros_like(padded) if guess is None else guess.to(x.dtype).where(real[..., None], 0)
    f = FlatMap(function, packing)
    problem = Problem(f, Context(), z0, options, lengths=packing.lengths, compact=compact, group=group)
    solution = search(problem)
    return packing.unpack(solution.z)[0], solution
