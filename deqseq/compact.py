"""Searches that remove settled sequences from the batch. Later evaluations of f then cost less.

A token has settled when its iteration has ended, for example because the token has converged or has used up
its budget of evaluations. A sequence has settled when all its tokens have settled.

Shapes: B sequences, L tokens of the longest sequence, D width.
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from deqseq.backbone import Backbone
from deqseq.loop import Carry, Runner, finish
from deqseq.problem import Problem
from deqseq.solution import Solution
from deqseq.status import Status
from deqseq.trees import map_tensors, take, tensors

SHARE = 1 / 8
"""Settled sequences are removed once they cause this share of the cost of an evaluation. Removing also costs
time, so a smaller share may not pay."""


class CompactingRunner(Runner):
    """Runs a search. Removes settled sequences once they cause a ``SHARE`` of the cost of an evaluation.

    If the map has a method ``select``, a sequence costs as much as its number of real tokens. Other maps also
    evaluate padding, so all sequences cost the same.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        batch, self._length, _ = problem.z0.shape
        self._rows = torch.arange(batch, device=problem.z0.device)  # indices in the whole batch
        self._left: list[tuple[Tensor, Solution]] = []  # indices and solutions of removed sequences

    def proceed(self) -> None:
        if self.passes and self.passes % self.check_every == 0:
            settled = self.carry.tokens.settled.all(1)
            flat = hasattr(self.problem.map, "select")
            cost = self.problem.sequence_lengths if flat else torch.ones_like(self.problem.sequence_lengths)
            if (cost * settled).sum() >= SHARE * cost.sum():
                self._remove(settled)
        super().proceed()

    def _remove(self, settled: Tensor) -> None:
        gone, stay = settled.nonzero()[:, 0], (~settled).nonzero()[:, 0]
        problem, carry = _part(self.problem, self.carry, gone)
        if self.problem.state is not None:  # the state after the tokens is computed from the trace
            carry = carry._replace(trace=take(self.carry.trace, gone))
        self._left.append((self._rows[gone], finish(problem, carry, self.passes)))
        select = getattr(self.problem.map, "select", None)
        self.problem, self.carry = _part(self.problem, self.carry, stay)
        if select is not None:
            self.problem = replace(self.problem, map=select(stay))
        self._rows = self._rows[stay]

    def finish(self) -> Solution:
        last = super().finish()
        if not self._left:
            return last
        rows, solutions = zip(*self._left, (self._rows, last), strict=True)
        order = torch.cat(rows).argsort()

        def joined(name: str, padding: float = 0) -> Tensor:
            values = [getattr(solution, name) for solution in solutions]
            sizes = [(0, 0) * (value.dim() - 2) + (0, self._length - value.shape[1]) for value in values]
            padded = [F.pad(value, size, value=padding) for value, size in zip(values, sizes, strict=True)]
            return torch.cat(padded)[order]

        status = joined("status", int(Status.CONVERGED))
        pieces = zip(*(tensors(solution.state) for solution in solutions), strict=True)
        state = map_tensors(lambda _: torch.cat(next(pieces))[order], last.state)
        return Solution(joined("z"), joined("residual"), joined("iterations"), status, last.nfe, state)


def _part(problem: Problem, carry: Carry, rows: Tensor) -> tuple[Problem, Carry]:
    """The problem and the carry of the sequences ``rows`` only. Drops padding that all of them have.

    The problem keeps its map. The carry has no trace.
    """
    length, lengths = problem.z0.shape[1], None
    if problem.lengths is not None:
        lengths = problem.lengths[rows]
        # The context of a map that is not causal may have tensors of another shape than (B, L, ...).
        length = int(lengths.max()) if problem.causal else length

    def part(value: Any) -> Any:
        return map_tensors(lambda t: t[rows, :length], value)

    context = replace(problem.context, tokens=part(problem.context.tokens))
    state = None if problem.state is None else problem.state.select(rows)
    problem = replace(problem, context=context, z0=part(problem.z0), lengths=lengths, state=state)
    return problem, part(carry._replace(trace=None))


def compactable(problem: Problem) -> bool:
    """Whether settled sequences may be removed from the batch of ``problem``.

    A state that grows with the sequence, such as keys and values, forbids this: copying rows costs too much.
    """
    small = problem.state is None or not cast(Backbone, problem.map).rewinds
    together = problem.window is None and problem.solver.windowed and not problem.fixed
    return problem.compact and together and small and problem.group is None
