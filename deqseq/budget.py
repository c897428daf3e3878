"""Adapts the budget of searches in training: the maximum number of evaluations per token."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from deqseq.checks import check_count, check_instance, check_not_negative
from deqseq.layer import ImplicitSequenceLayer
from deqseq.policy import ConvergencePolicy
from deqseq.solution import Solution


class AdaptiveBudget:
    """Changes ``max_iter`` of a layer's training policy by one after every optimiser step.

    A search ends when its slowest token has converged, and most tokens converge much earlier. A smaller
    budget ends the search before the slowest tokens have converged.

    The budget grows by one if the mean residual of the step's tokens was above ``residual``. Otherwise it
    falls by one. It begins at the policy's ``max_iter``. It never exceeds this value, and never falls below
    the policy's ``min_iter`` or below 1.

    The budget depends on earlier steps only. A rule that looks at the current batch would let a token's
    result depend on later tokens.

    Use it like a learning rate scheduler::

        budget = AdaptiveBudget(layer, residual=0.05)
        for x, y in batches:
            out = layer(x)
            budget.add(out.solution)
            loss(out.z, y).backward()
            optimizer.step()
            budget.step()

    Args:
        layer: the layer whose ``train_solve`` changes.
        residual: mean relative residual that searches should reach.

    Attributes:
        max_iter: the budget of the next step.

    Raises:
        ValueError: the layer is not implicit; ``residual`` is not positive; ``max_iter`` of the layer's
            policy cannot change, for example that of :class:`~deqseq.FixedIterations`.
    """

    def __init__(self, layer: ImplicitSequenceLayer, residual: float) -> None:
        check_instance("layer", layer, ImplicitSequenceLayer, "an ImplicitSequenceLayer")
        check_target(residual, layer.train_solve.convergence)
        self.layer, self.residual = layer, residual
        self.max_iter = self.most = layer.train_solve.convergence.max_iter
        self._sums: Tensor | None = None  # sum of the residuals and number of the tokens since the last step

    def add(self, solution: Solution) -> None:
        """Add a solve of this step. The host does not wait for the device.

        Padding does not count, and neither do tokens whose residual is not finite.
        """
        counted = (solution.iterations > 0) & solution.residual.isfinite()  # no iterations at padding
        total = solution.residual.detach().where(counted, 0).sum()
        sums = torch.stack([total, counted.sum().to(total)])
        self._sums = sums if self._sums is None else self._sums + sums

    def step(self, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        """Set the budget of the next step. The host waits for the device.

        If no token was added since the last call, nothing changes.

        Args:
            reduce: a function that sums a tensor over all processes, which then have the same budget. If
                given, every process must call :meth:`step`.
        """
        if self._sums is None:
            return
        total, tokens = (self._sums if reduce is None else reduce(self._sums)).tolist()
        self._sums = None
        if tokens:
            self.set(self.max_iter + (1 if total > self.residual * tokens else -1))

    def set(self, max_iter: int) -> None:
        """Set the budget, for example from a checkpoint. Clips it to the allowed range.

        Raises:
            ValueError: ``max_iter`` is no whole number of at least 0.
        """
        check_count("max_iter", max_iter, least=0)
        options = self.layer.train_solve
        self.max_iter = min(self.most, max(1, options.convergence.min_iter, max_iter))
        policy = copy(options.convergence)  # a policy may be frozen, and other solves may use the same policy
        object.__setattr__(policy, "max_iter", self.max_iter)
        self.layer.train_solve = replace(options, convergence=policy)


def check_target(residual: float, policy: ConvergencePolicy) -> None:
    """Raise ``ValueError`` if an :class:`AdaptiveBudget` cannot have this target or adapt this policy."""
    check_not_negative("adaptive_budget", residual)
    if residual == 0:
        raise ValueError("adaptive_budget must be a positive mean residual, got 0")
    if "max_iter" not in getattr(policy, "__dict__", {}):
        raise ValueError(
            f"adaptive_budget needs a policy whose max_iter can change, such as residual, got {policy}: "
            "choose another policy, or set adaptive_budget to null"
        )
