"""The result of a solve: the equilibrium, and for every token how the search for it ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from deqseq.backbone import State


class Status(enum.IntEnum):
    """Why the iteration of a token ended. ``Status(code).message`` says what to try."""

    RUNNING = 0
    CONVERGED = 1
    BUDGET_EXHAUSTED = 2
    NON_FINITE = 3
    COMPLETED = 4

    @property
    def message(self) -> str:
        """One sentence on what happened and what to try."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.RUNNING: "The token is still being iterated.",
    Status.CONVERGED: "The residual of the token met the tolerance, when all tokens before it had settled.",
    Status.BUDGET_EXHAUSTED: (
        "The evaluation budget ended above the tolerance: raise max_iter, loosen the tolerance, use a "
        "smaller window, damp the solver, or train with more iterations or Jacobian regularisation."
    ),
    Status.NON_FINITE: (
        "The iterate became infinite or NaN: look for NaN in the inputs or weights, lower the learning "
        "rate, normalise the weights, or damp the solver."
    ),
    Status.COMPLETED: "The requested number of iterations was done; no tolerance was asked for.",
}


@dataclass
class Solution:
    """The result of one solve. Shapes: B sequences, L tokens, D width.

    Attributes:
        z: (B, L, D) the equilibrium.
        residual: (B, L) float32, relative, ``||f(z) - z|| / ||f(z)||`` where the search ended.
        iterations: (B, L) int64, evaluations each token took part in while it was unsettled.
        status: (B, L) int64 codes of :class:`Status`.
        nfe: number of function evaluations: calls of f over all tokens of a window, gradient steps
            included.
        state: backbone state after the last token, detached; ``None`` unless the solve started from one.
        adjoint: the solution of the backward system, after the backward pass of
            :class:`~deqseq.ImplicitDifferentiation`. If the call had padding or packed rows, the rows of the adjoint
            are the sequences as they were solved: one a row, its tokens first.
    """

    z: Tensor
    residual: Tensor
    iterations: Tensor
    status: Tensor
    nfe: int
    state: State | None = None
    adjoint: Solution | None = None

    def __getitem__(self, row: int | slice) -> Solution:
        """The solution of some sequences. Pipelines take batches apart this way."""
        per_token = {name: getattr(self, name)[row] for name in ("z", "residual", "iterations", "status")}
        return replace(self, **per_token, state=None, adjoint=None)

    def summary(self, valid: Tensor | None = None) -> dict[str, float]:
        """Means for a log: iterations, residual and the share of tokens of each final status.

        Args:
            valid: (B, L) bool, tokens to count; all but padding by default.
        """
        keep = (self.iterations > 0) | (self.status == Status.NON_FINITE) if valid is None else valid.bool()
        count = keep.sum().clamp_min(1)
        residual = self.residual.where(keep, self.residual.new_zeros(()))
        means = {
            "nfe": float(self.nfe),
            "iterations": float((self.iterations * keep).sum() / count),
            "residual": float(residual.sum() / count),
        }
        for status in Status:
            if status is not Status.RUNNING:
                share = ((self.status == status) & keep).sum() / count
                means[f"share_{status.name.lower()}"] = float(share)
        return means
