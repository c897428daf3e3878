"""What the loop knows of the tokens it solves: who has settled, after how many evaluations, and how.

Shapes: B sequences, W tokens in the window, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deqseq.backbone import State
from deqseq.convergence import ConvergencePolicy
from deqseq.ops.settle import settle
from deqseq.solution import Solution, Status
from deqseq.solver import Progress


@dataclass(frozen=True)
class Tokens:
    """The loop's knowledge of the tokens in the window; every tensor (B, W)."""

    settled: Tensor  # it and all before it are done, or it is padding: frozen
    iterations: Tensor
    residual: Tensor
    status: Tensor
    hold: Tensor  # z must not move: the token is settled, or its evaluation is not finite
    active: Tensor  # took part in the last evaluation

    @classmethod
    def enter(cls, inside: Tensor) -> Tokens:
        count = torch.zeros(inside.shape, dtype=torch.int64, device=inside.device)
        residual = torch.zeros(inside.shape, dtype=torch.float32, device=inside.device)
        status = torch.full_like(count, int(Status.RUNNING))
        return cls(~inside, count, residual, status, ~inside, inside)

    def counted(self) -> Tokens:
        """After one more evaluation."""
        active = ~self.settled
        return replace(self, active=active, iterations=self.iterations + active)

    @torch.no_grad()
    def judged(self, z: Tensor, fz: Tensor, policy: ConvergencePolicy) -> Tokens:
        """Those of which it is known which settle with the evaluation ``fz``."""
        active = self.active
        verdict = policy.judge(z, fz, self.iterations, active)
        residual = torch.where(active, verdict.residual, self.residual)  # what settled keeps its own
        converged = verdict.converged
        ended = Status.BUDGET_EXHAUSTED if policy.tests_residual else Status.COMPLETED
        settled, status, hold = settle(
            residual, converged, verdict.stops, self.settled, active, self.iterations, self.status,
            policy.max_iter, (int(Status.CONVERGED), int(ended), int(Status.NON_FINITE)),
        )  # fmt: skip
        return replace(self, residual=residual, settled=settled, status=status, hold=hold)

    def progress(self, policy: ConvergencePolicy) -> Progress:
        residual = self.residual if policy.tests_residual else None
        return Progress(residual, self.active, self.iterations, self.settled, policy.max_iter)

    def slide(self, source: Tensor, stays: Tensor, inside: Tensor) -> Tokens:
        """The tokens after the settled ones have left; ``source`` (B, W) is where each was before."""
        return Tokens(
            settled=~inside,
            iterations=self.iterations.gather(1, source) * stays,
            residual=self.residual.gather(1, source),
            status=self.status.gather(1, source) * stays,
            hold=~inside,
            active=inside,
        )

    def solution(self, z: Tensor, valid: Tensor, nfe: int, state: State | None) -> Solution:
        nothing_to_solve = torch.full_like(self.status, int(Status.CONVERGED))
        return Solution(
            z=z,
            residual=self.residual.where(valid, self.residual.new_zeros(())),
            iterations=self.iterations * valid,
            status=self.status.where(valid, nothing_to_solve),
            nfe=nfe,
            state=state,
        )
