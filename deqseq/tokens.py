"""The progress of each token: whether the token has settled, why, and after how many evaluations.

Shapes: B sequences, W tokens in the window, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.ops.residual import settle
from deqseq.policy import ConvergencePolicy, FixedIterations, Judgement
from deqseq.solver import Progress
from deqseq.status import Status


class Tokens(NamedTuple):
    """The tokens in the window; every tensor is (B, W)."""

    settled: Tensor  # the search has ended for this token and all earlier tokens; also true for padding
    iterations: Tensor
    residual: Tensor
    status: Tensor
    frozen: Tensor  # z must not change: the token has settled, or its evaluation is not finite
    active: Tensor  # the token was unsettled when the last evaluation began

    @classmethod
    def enter(cls, solvable: Tensor) -> Tokens:
        """Tokens before their first evaluation; ``solvable`` (B, W): the tokens to solve."""
        count = torch.zeros(solvable.shape, dtype=torch.int64, device=solvable.device)
        residual = torch.zeros(solvable.shape, dtype=torch.float32, device=solvable.device)
        status = torch.full_like(count, int(Status.RUNNING))
        return cls(~solvable, count, residual, status, ~solvable, solvable)

    def after_evaluation(self) -> Tokens:
        """The tokens after one more evaluation: the iterations of unsettled tokens grow by 1."""
        active = ~self.settled
        return self._replace(active=active, iterations=self.iterations + active)

    @torch.no_grad()
    def judged(self, z: Tensor, fz: Tensor, policy: ConvergencePolicy, causal: bool = True) -> Tokens:
        """The tokens after ``policy`` has judged the evaluation ``fz`` of ``z``, each (B, W, D).

        ``causal``: whether the map is causal. If not, all tokens of a sequence settle together.
        """
        judgement = policy.judge(z, fz, self.iterations, self.active)
        _check(judgement, type(policy).__name__, self.active.shape)
        if not causal:
            judgement = _of_sequences(judgement, self.active)
        residual = torch.where(self.active, judgement.residual, self.residual)
        fixed = isinstance(policy, FixedIterations)
        not_converged = Status.COMPLETED if fixed else Status.BUDGET_EXHAUSTED
        settled, status, frozen = settle(
            residual, judgement.converged, judgement.may_settle, self.settled, self.active, self.iterations,
            self.status, policy.max_iter, (int(Status.CONVERGED), int(not_converged), int(Status.NON_FINITE)),
        )  # fmt: skip
        return self._replace(residual=residual, settled=settled, status=status, frozen=frozen)

    def progress(self, policy: ConvergencePolicy) -> Progress:
        """The progress of the tokens, as :meth:`Solver.step` takes it."""
        residual = None if isinstance(policy, FixedIterations) else self.residual
        return Progress(residual, self.active, self.iterations, self.settled, policy.max_iter)

    def slide(self, source: Tensor, stays: Tensor, solvable: Tensor) -> Tokens:
        """The tokens after the window has moved: settled tokens left its start, new tokens entered its end.

        Args:
            source: (B, W) int64, index of each staying token in the old window.
            stays: (B, W) bool, true for staying tokens, false for entering tokens.
            solvable: (B, W) bool, false past the end of a sequence.
        """
        return Tokens(
            settled=~solvable,
            iterations=self.iterations.gather(1, source) * stays,
            residual=self.residual.gather(1, source),
            status=self.status.gather(1, source) * stays,
            frozen=~solvable,
            active=solvable,
        )


def _check(judgement: object, name: str, shape: torch.Size) -> None:
    """Raise ``ValueError`` unless ``judgement`` is a judgement on every token, with tensors of this shape."""
    fields: tuple[object, ...] = ()
    if isinstance(judgement, Judgement):
        fields = (judgement.residual, judgement.converged, judgement.may_settle)
    tensors = [field for field in fields if isinstance(field, Tensor) and field.shape == shape]
    if len(tensors) < 3 or any(mask.dtype != torch.bool for mask in tensors[1:]):
        raise ValueError(
            f"{name}.judge must return a Judgement of tensors with one value for every token, "
            f"{tuple(shape)}; converged and may_settle must be bool"
        )


def _of_sequences(judgement: Judgement, active: Tensor) -> Judgement:
    """Change the policy's judgement so that all tokens of a sequence settle together.

    If the residual of one token is not finite, all tokens of its sequence get the residual NaN.
    """

    def every(tokens: Tensor) -> Tensor:
        return (tokens | ~active).all(1, keepdim=True).expand_as(tokens)

    finite = every(torch.isfinite(judgement.residual))
    residual = judgement.residual.where(finite, judgement.residual.new_full((), torch.nan))
    return Judgement(residual, judgement.converged, every(judgement.may_settle))
