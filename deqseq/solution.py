"""The result of a solve: the equilibrium, and how the iteration of every token ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from deqseq.statistics import SolveStatistics
from deqseq.status import Status

if TYPE_CHECKING:
    from deqseq.backbone import State

PER_TOKEN = ("z", "residual", "iterations", "status")
"""The attributes of a solution with one entry per token."""


@dataclass(repr=False)
class Solution:
    """The result of one solve. Shapes: B sequences, L tokens, D width.

    Attributes:
        z: (B, L, D) the equilibrium.
        residual: (B, L) float32, ``||f(z) - z|| / ||f(z)||`` in the token's last evaluation.
        iterations: (B, L) int64, number of iterations of each token: evaluations of f until it settled.
        status: (B, L) int64, why the iteration of each token ended, as a code of :class:`Status`. Padding has
            the code ``CONVERGED``.
        nfe: number of function evaluations, including gradient steps. One evaluation is one call of f for all
            tokens of the batch or window.
        state: the detached backbone state after the last token; ``None`` if the solve got no state.
        adjoint: the solution of the backward system (the linear system for the gradient). The backward pass
            of :class:`~deqseq.ImplicitDifferentiation` sets this attribute. Each row of the adjoint is one
            sequence, followed by padding, even if a row of the layer's input held several sequences.
    """

    z: Tensor
    residual: Tensor
    iterations: Tensor
    status: Tensor
    nfe: int
    state: State | None = None
    adjoint: Solution | None = None

    def __repr__(self) -> str:
        """A summary in one line. Statistics leave out padding. Makes the host wait for the device."""
        size = " x ".join(map(str, self.status.shape))
        real = self.real
        if not real.any():
            return f"Solution({size} tokens, nfe={self.nfe})"
        counts = {s.name.lower().replace("_", " "): int((self.status[real] == s).sum()) for s in Status}
        ends = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        if padding := int((~real).sum()):
            ends += f", {padding} padding"
        iterations, residual = self.iterations[real], self.residual[real & self.residual.isfinite()]
        most = f", residual at most {float(residual.max()):.2g}" if residual.numel() else ""
        return (
            f"Solution({size} tokens: {ends}; {int(iterations.min())} to {int(iterations.max())} "
            f"iterations{most}, nfe={self.nfe})"
        )

    @property
    def real(self) -> Tensor:
        """(B, L) bool, false at padding."""
        return (self.iterations > 0) | (self.status == Status.NON_FINITE)

    def __getitem__(self, row: int | slice | Tensor) -> Solution:
        """The solution of one sequence (an index) or of several (a slice, indices, or (B,) bool).

        The result has no state and no adjoint.

        Pipelines of transformers need this method, because they index model outputs to split a batch.
        """
        per_token = {name: getattr(self, name)[row] for name in PER_TOKEN}
        return replace(self, **per_token, state=None, adjoint=None)

    def summary(self, counted: Tensor | None = None) -> dict[str, float]:
        """Statistics for a log: ``nfe``, mean iterations, mean residual, and the share of each final status.

        Args:
            counted: (B, L) bool, the tokens to average over; by default all except padding.

        Raises:
            ValueError: ``counted`` is no tensor with one value for every token.
        """
        statistics = SolveStatistics()
        statistics.add(self, counted)
        return statistics.read()
