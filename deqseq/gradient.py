"""The interface of gradient strategies. A strategy decides which evaluations of f record an autograd graph.

A strategy is built from two functions. :func:`~deqseq.search` finds the fixed point without an autograd
graph. :func:`~deqseq.steps` does some iterations, and records an autograd graph if gradients are enabled.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from deqseq.checks import shown
from deqseq.problem import Problem
from deqseq.registry import Registry
from deqseq.solution import Solution


class GradientStrategy(ABC):
    """Solves a fixed-point problem. Gradients flow from the solution to the inputs and parameters of f.

    Example of a strategy in another package::

        class JacobianFree(GradientStrategy):
            def solve(self, problem):
                return steps(problem, 1, start=search(problem))

    Attributes:
        searches: true if the strategy uses the problem's convergence policy.
    """

    searches: bool = True

    @abstractmethod
    def solve(self, problem: Problem) -> Solution:
        """Solve the problem. Gradients flow through ``z`` of the returned solution."""

    def exact(self, problem: Problem) -> bool:
        """Whether autograd records the whole solve. If true, derivatives of every order are correct.

        If false, a second derivative through ``solution.z`` raises ``RuntimeError``. This derivative would be
        wrong, because the search records no autograd graph.
        """
        return False


class _FirstOrder(torch.autograd.Function):
    """Returns its input z unchanged. A second derivative through this function raises ``RuntimeError``."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, strategy: str) -> Tensor:
        ctx.strategy = strategy
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Inside a backward pass, gradients are enabled only if the caller has set create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"the second derivative through {ctx.strategy} would be wrong, because its search has no "
                "graph: call backward without create_graph, or use Unrolled with before=0 and "
                "the Picard solver"
            )
        return grad, None


def solve_with_gradient(strategy: GradientStrategy, problem: Problem) -> Solution:
    """Solve with ``strategy``. If ``strategy.exact`` is false, second derivatives raise ``RuntimeError``.

    Raises ``ValueError`` if the strategy returns no :class:`Solution`.
    """
    solution = strategy.solve(problem)
    if not isinstance(solution, Solution):
        raise ValueError(f"{type(strategy).__name__}.solve must return a Solution, got {shown(solution)}")
    if not strategy.exact(problem):
        solution.z = _FirstOrder.apply(solution.z, type(strategy).__name__)  # type: ignore[no-untyped-call]
    return solution


gradients: Registry[GradientStrategy] = Registry(
    "gradient strategy",
    "deqseq.gradients",
    {
        "phantom": "deqseq.gradients.phantom:Phantom",
        "implicit": "deqseq.gradients.implicit:ImplicitDifferentiation",
        "unrolled": "deqseq.gradients.unrolled:Unrolled",
    },
    base=GradientStrategy,  # type: ignore[type-abstract]
)
