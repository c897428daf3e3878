"""Searches that remove settled sequences from the batch. Later evaluations of f then cost less.

A token has settled when its iteration has ended, for example because the token has converged or has used up
its budget of evaluations. A sequence has settled when all its tokens have settled.
"""

from dataclasses import replace

import torch
from torch import Tensor

from deqseq.loop import Runner, finish
from deqseq.problem import Problem
from deqseq.solution import Solution
from deqseq.trees import map_tensors, take, tensors


class CompactingRunner(Runner):
    """Runs a search. Whenever at least half of the batch has settled, removes the settled sequences."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._rows = torch.arange(problem.z0.shape[0], device=problem.z0.device)  # places in the whole batch
        self._left: list[tuple[Tensor, Solution]] = []  # places and solutions of removed rows

    def proceed(self) -> None:
        if self.passes and self.passes % self.check_every == 0:
            settled = self.carry.tokens.settled.all(1)
            if 2 * int(settled.sum()) >= len(settled):  # removing fewer rows costs more than it saves
                self._remove(settled)
        super().proceed()

    def _remove(self, settled: Tensor) -> None:
        problem, carry = self.problem, self.carry._replace(trace=None)
        gone, stay = settled.nonzero()[:, 0], (~settled).nonzero()[:, 0]
        self._left.append((self._rows[gone], take(finish(problem, carry, self.passes), gone)))
        z0, lengths, per_token, self._rows, self.carry = take(
            (problem.z0, problem.lengths, problem.context.tokens, self._rows, carry), stay
        )
        context = replace(problem.context, tokens=per_token)
        self.problem = replace(problem, context=context, z0=z0, lengths=lengths)

    def finish(self) -> Solution:
        last = super().finish()
        if not self._left:
            return last
        parts = [*self._left, (self._rows, last)]
        order = torch.cat([rows for rows, _ in parts]).argsort()
        pieces = zip(*(tensors(solution) for _, solution in parts), strict=True)
        joined: Solution = map_tensors(lambda _: torch.cat(next(pieces))[order], last)
        return joined


def compactable(problem: Problem) -> bool:
    """Whether settled sequences may be removed from the batch of ``problem``."""
    alone = problem.state is None and problem.group is None
    return (
        problem.compact and problem.solver.windowed and problem.window is None and alone and not problem.fixed
    )
