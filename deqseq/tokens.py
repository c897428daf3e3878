"""The progress of each token: whether the token has settled, why, and after how many evaluations.

Shapes: B sequences, W tokens in the window, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.ops.residual import settle
from deqseq.policy import ConvergencePolicy, FixedIterations, Judgement
from deqseq.solution import Status
from deqseq.solver import Progress


class Tokens(NamedTuple):
    """The tokens in the window; every tensor is (B, W)."""

    settled: Tensor  # the search has ended for this token and all earlier tokens; also true for padding
    iterations: Tensor
    residual: Tensor
    status: Tensor
    frozen: Tensor  # z must not change: the token has settled, or its evaluation is not finite
    active: Tensor  # the token was unsettled when the last evaluation began

    @classmethod
    def enter(cls, inside: Tensor) -> Tokens:
        """Tokens before their first evaluation; ``inside`` (B, W) is false for padding."""
        count = torch.zeros(inside.shape, dtype=torch.int64, device=inside.device)
        residual = torch.zeros(inside.shape, dtype=torch.float32, device=inside.device)
        status = torch.full_like(count, int(Status.RUNNING))
        return cls(~inside, count, residual, status, ~inside, inside)

    def counted(self) -> Tokens:
        """The tokens after one more evaluation: the iterations of unsettled tokens grow by 1."""
        active = ~self.settled
        return self._replace(active=active, iterations=self.iterations + active)

    @torch.no_grad()
    def judged(self, z: Tensor, fz: Tensor, policy: ConvergencePolicy, causal: bool = True) -> Tokens:
        """The tokens after ``policy`` has judged the evaluation ``fz`` of ``z``, each (B, W, D).

        ``causal``: whether the map is causal. If not, all tokens of a sequence settle together.
        """
        verdict = policy.judge(z, fz, self.iterations, self.active)
        _check(verdict, type(policy).__name__, self.active.shape)
        if not causal:
            verdict = _of_sequences(verdict, self.active)
        residual = torch.where(self.active, verdict.residual, self.residual)
        fixed = isinstance(policy, FixedIterations)
        ended = Status.COMPLETED if fixed else Status.BUDGET_EXHAUSTED
        settled, status, frozen = settle(
            residual, verdict.converged, verdict.stops, self.settled, self.active, self.iterations,
            self.status, policy.max_iter, (int(Status.CONVERGED), int(ended), int(Status.NON_FINITE)),
        )  # fmt: skip
        return self._replace(residual=residual, settled=settled, status=status, frozen=frozen)

    def progress(self, policy: ConvergencePolicy) -> Progress:
        """The progress of the tokens, in the form that :meth:`Solver.step` takes."""
        residual = None if isinstance(policy, FixedIterations) else self.residual
        return Progress(residual, self.active, self.iterations, self.settled, policy.max_iter)

    def slide(self, source: Tensor, stays: Tensor, inside: Tensor) -> Tokens:
        """The tokens after the window has moved: settled tokens left its start, new tokens entered its end.

        Args:
            source: (B, W) int64, index of each staying token in the old window.
            stays: (B, W) bool, true for staying tokens, false for entering tokens.
            inside: (B, W) bool, false past the end of a sequence.
        """
        return Tokens(
            settled=~inside,
            iterations=self.iterations.gather(1, source) * stays,
            residual=self.residual.gather(1, source),
            status=self.status.gather(1, source) * stays,
            frozen=~inside,
            active=inside,
        )


def _check(verdict: object, name: str, shape: torch.Size) -> None:
    """Raise ``ValueError`` unless ``verdict`` is a judgement on every token, with tensors of this shape."""
    fields: tuple[object, ...] = ()
    if isinstance(verdict, Judgement):
        fields = (verdict.residual, verdict.converged, verdict.stops)
    tensors = [field for field in fields if isinstance(field, Tensor) and field.shape == shape]
    if len(tensors) < 3 or any(mask.dtype != torch.bool for mask in tensors[1:]):
        raise ValueError(
            f"{name}.judge must return a Judgement of tensors with one value for every token, "
            f"{tuple(shape)}; converged and done must be bool"
        )


def _of_sequences(verdict: Judgement, active: Tensor) -> Judgement:
    """Change the policy's verdict so that all tokens of a sequence stop together.

    If the residual of one token is not finite, all tokens of its sequence get the residual NaN.
    """

    def every(tokens: Tensor) -> Tensor:
        return (tokens | ~active).all(1, keepdim=True).expand_as(tokens)

    finite = every(torch.isfinite(verdict.residual))
    residual = verdict.residual.where(finite, verdict.residual.new_full((), torch.nan))
    return Judgement(residual, verdict.converged, every(verdict.stops))
