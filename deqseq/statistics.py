"""Statistics of fixed-point solves. Sums over tokens stay on the device until the statistics are read.

Shapes: B sequences, L tokens.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from deqseq.checks import check_tensor, shown
from deqseq.status import Status

_SHARES = tuple(status for status in Status if status is not Status.RUNNING)
_MEANS = ("iterations", "residual", *(f"share_{status.name.lower()}" for status in _SHARES))
_SAMPLE = 4096


class Solved(Protocol):
    """The fields of :class:`~deqseq.solution.Solution` that statistics read. Tensors are (B, L) or (L,)."""

    residual: Tensor
    iterations: Tensor
    status: Tensor
    nfe: int

    @property
    def real(self) -> Tensor: ...


class SolveStatistics:
    """Means over the tokens of one or more solves. Padding and residuals that are not finite do not count.

    All tokens of all solves have the same weight. :meth:`read` makes the host wait for the device, and
    :meth:`add` never does. Sums are float64 (float32 on MPS devices).

    Args:
        tail: also report ``residual_p99``, the 99th percentile of the last solve's residuals (estimated from
            at most 4,096 tokens).

    Attributes:
        solves: number of solves that were added.
    """

    def __init__(self, tail: bool = False) -> None:
        self.tail = tail
        self.reset()

    def reset(self) -> None:
        """Forget all solves."""
        self.solves = 0
        self._nfe = 0
        # One column per position in the sequence. Row 0 counts the tokens, and row 1 those with a finite
        # residual. Every other row has the sums for one of the means.
        self._sums = torch.zeros(2 + len(_MEANS), 0)
        self._residuals = torch.empty(0)

    def add(self, solution: Solved, counted: Tensor | None = None) -> None:
        """Add a solve.

        Args:
            counted: (B, L) bool, the tokens to average over; by default all except padding.

        Raises:
            ValueError: ``counted`` is no tensor with one value for every token.
        """
        iterations, status, residual = solution.iterations, solution.status, solution.residual.detach()
        if counted is None:
            counted = solution.real
        check_tensor("counted", counted, residual.shape, "one value for every token, ")
        precise = torch.float32 if residual.device.type == "mps" else torch.float64
        finite = residual.isfinite()
        means = iterations, residual.where(finite, 0), *(status == share for share in _SHARES)
        values = [torch.ones_like(residual), finite, *means]
        stacked = torch.stack([torch.atleast_2d(value).to(precise) for value in values])
        sums = stacked.where(torch.atleast_2d(counted).bool(), 0).sum(1)
        before, self._sums = self._sums.to(sums), sums
        if before.shape[1] > sums.shape[1]:
            before, self._sums = sums, before
        self._sums[:, : before.shape[1]] += before
        self._nfe += solution.nfe
        self.solves += 1
        if self.tail:
            every = -(-residual.numel() // _SAMPLE)
            self._residuals = residual.where(finite, torch.nan).flatten()[::every]

    def read(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """The means by name. The result is empty if no solve was added.

        ``nfe`` is a mean over solves. ``iterations``, ``residual`` and the share of each final status, such
        as ``share_converged``, are means over tokens.

        Args:
            reduce: a function that sums a tensor over all processes. If given, every process must call
                :meth:`read`.
        """
        if not self.solves:
            return {}
        tail = [torch.nanquantile(self._residuals.float(), 0.99) * self.solves] if self.tail else []
        counts = self._sums.new_tensor([self.solves, self._nfe])
        values = torch.cat([self._sums.sum(1), counts, *(value.view(1).to(counts) for value in tail)])
        if reduce is not None:
            values = reduce(values)
        tokens, finite, *sums = values.tolist()
        solves, nfe, *tails = sums[len(_MEANS) :]
        found = {"nfe": nfe / solves}
        found |= {name: total / max(tokens, 1) for name, total in zip(_MEANS, sums, strict=False)}
        found["residual"] *= max(tokens, 1) / finite if finite else math.nan
        return found | ({"residual_p99": tails[0] / solves} if tails else {})

    def by_position(self, name: str) -> Tensor:
        """The mean of the statistic ``name`` at every position: (L,) on the CPU.

        L is the length of the longest solve. Positions without counted tokens are NaN.

        Raises:
            ValueError: no statistic has this name.
        """
        if name not in _MEANS:
            raise ValueError(f"unknown statistic {shown(name)}; known: {', '.join(_MEANS)}")
        tokens, finite, *sums = self._sums.cpu().unbind()
        return sums[_MEANS.index(name)] / (finite if name == "residual" else tokens)
