"""Gradient strategies: which evaluations carry a graph.

A strategy solves a problem with two calls: :func:`~deqseq.search` finds the fixed point without a graph, and
:func:`~deqseq.steps` does a number of iterations, with a graph where gradients are enabled.

Shapes: B sequences, L tokens, D width.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deqseq.backbone import Context, State, Trace
from deqseq.convergence import ConvergencePolicy, Residual, check_count, policies
from deqseq.problem import PolicySpec, Problem, SolveOptions
from deqseq.registry import Registry
from deqseq.search import search, steps
from deqseq.solution import Solution, Status
from deqseq.solver import Solver, solvers

_UNSOLVED_SHARE = 0.5
"""A warning is given if the backward system did not converge for more than this share of the tokens."""

_ADVICE = (
    "the backward system of ImplicitDifferentiation did not converge for more than half of the tokens, so "
    "these gradients may be far off: give it another solver (solver='anderson') or a larger budget, or use a "
    "tighter tolerance in the forward search; out.solution.adjoint says how each solve went"
)


class GradientStrategy(ABC):
    """Solves a problem so that gradients reach its context (inputs and parameters).

    A strategy of another package is a few lines::

        class JacobianFree(GradientStrategy):
            def solve(self, problem):
                return steps(problem, 1, start=search(problem))

    Attributes:
        searches: whether the strategy uses the problem's convergence policy.
    """

    searches: bool = True

    @abstractmethod
    def solve(self, problem: Problem) -> Solution:
        """Solve the problem; gradients flow through ``solution.z``."""

    def exact(self, problem: Problem) -> bool:
        """Whether autograd records the whole solve, so that derivatives of every order are right.

        If not, the layer lets a second derivative through ``solution.z`` raise ``RuntimeError``: a search has
        no graph, so that derivative would be wrong.
        """
        return False


@dataclass(frozen=True)
class Phantom(GradientStrategy):
    """Phantom gradient: after the search, ``steps`` damped iterations with a graph.

    z <- (1 - damping) z + damping f(z) (Geng et al., 2021, arXiv 2111.05177). One undamped step is the
    Jacobian-free gradient (JFB). The gradient tends to the exact one as ``steps`` grows.

    Args:
        steps: iterations with a graph, each an evaluation of f on all tokens.
        damping: in (0, 1].
        checkpoint: recompute every step in the backward pass instead of storing its activations.

    Raises:
        ValueError: ``steps`` below 1, ``damping`` outside (0, 1].
    """

    steps: int = 4
    damping: float = 0.8
    checkpoint: bool = False

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        self._solver()

    def _solver(self) -> Solver:
        return solvers.create({"name": "picard", "damping": self.damping})

    def solve(self, problem: Problem) -> Solution:
        return steps(problem, self.steps, search(problem), self._solver(), self.checkpoint)


@dataclass(frozen=True)
class Unrolled(GradientStrategy):
    """Back-propagation through ``iterations`` steps of the layer's solver from the initial guess.

    There is no search: the layer's policy and window are not used while gradients are wanted. The
        coefficients
    of Anderson and Broyden count as constants; with these solvers a second derivative raises.

    Args:
        iterations: evaluations of f on all tokens, each with a graph.
        checkpoint: recompute every step in the backward pass instead of storing its activations.

    Raises:
        ValueError: ``iterations`` below 1.
    """

    iterations: int
    checkpoint: bool = False
    searches = False

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)

    def solve(self, problem: Problem) -> Solution:
        return steps(problem, self.iterations, checkpoint=self.checkpoint)

    def exact(self, problem: Problem) -> bool:
        return problem.solver.differentiable


class ImplicitDifferentiation(GradientStrategy):
    """The exact gradient at the fixed point, by the implicit function theorem.

    The loop that finds the fixed point also solves for the cotangent u = v + (df/dz)^T u, with
    vector-Jacobian products as evaluations (Bai et al., 2019, arXiv 1909.01377). f is causal, so this system
    is anti-causal: it is solved on the reversed sequence.

    Args:
        solver: solver of the backward system; a name or an object. ``None``: the layer's.
        convergence: policy of the backward system. ``None``: a relative residual of 1e-4 (in coarse types
            eight times the rounding error), within the budget of the layer's policy, at least 64.
    """

    def __init__(
        self,
        solver: Solver | str | Mapping[str, Any] | None = None,
        convergence: PolicySpec | None = None,
    ) -> None:
        self.solver = None if solver is None else solvers.create(solver)
        self.convergence = None if convergence is None else policies.create(convergence)

    def __repr__(self) -> str:
        return f"ImplicitDifferentiation(solver={self.solver}, convergence={self.convergence})"

    def solve(self, problem: Problem) -> Solution:
        found = search(problem)
        z = found.z.detach().requires_grad_()
        solution = steps(problem, 1, replace(found, z=z), "picard")
        backward = Problem(
            map=_Adjoint(solution.z, z, problem.valid),
            context=Context(),
            z0=found.z.detach(),
            options=SolveOptions(
                self.solver or problem.solver, self.convergence or _backward_policy(problem)
            ),
            group=problem.group,
        )
        solution.z = _ImplicitFunction.apply(solution.z, backward, solution)  # type: ignore[no-untyped-call]
        return solution


def _backward_policy(problem: Problem) -> ConvergencePolicy:
    rtol = max(1e-4, 8 * torch.finfo(problem.z0.dtype).eps)
    return Residual(rtol=rtol, max_iter=max(64, problem.policy.max_iter))


class _Adjoint:
    """The map u -> v + (df/dz)^T u on the reversed sequence, which makes it causal. It needs no state."""

    def __init__(self, fz: Tensor, z: Tensor, valid: Tensor) -> None:
        self.fz = fz
        self.z = z
        self.valid = valid  # (B, L) bool, tokens that are not padding
        self.cotangent = torch.zeros_like(z)  # v, reversed

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        product = torch.autograd.grad(self.fz, self.z, z.flip(1), retain_graph=True)[0]
        return self.cotangent + product.flip(1), None


class _ImplicitFunction(torch.autograd.Function):
    """The identity on f(z*); its backward pass solves for the cotangent.

    The gradient then flows on through the evaluation of f to inputs and parameters by ordinary autograd, so
    hooks on them (DDP's) fire as always.
    """

    @staticmethod
    def forward(ctx: Any, fz: Tensor, backward: Problem, solution: Solution) -> Tensor:
        ctx.problem = backward
        ctx.solution = weakref.ref(
            solution
        )  # weak, because the solution holds the tensor that this node makes
        return fz.view_as(fz)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        problem: Problem = ctx.problem
        adjoint = problem.map
        assert isinstance(adjoint, _Adjoint)
        adjoint.cotangent = grad.flip(1)
        solved = search(replace(problem, z0=adjoint.cotangent))
        z, residual, iterations, status = (
            t.flip(1) for t in (solved.z, solved.residual, solved.iterations, solved.status)
        )
        padding = ~adjoint.valid
        solution = ctx.solution()
        if solution is not None:
            solution.adjoint = Solution(
                z,
                residual.masked_fill(padding, 0),
                iterations.masked_fill(padding, 0),
                status.masked_fill(padding, int(Status.CONVERGED)),
                solved.nfe,
            )
        failed = ((status == Status.BUDGET_EXHAUSTED) | (status == Status.NON_FINITE)) & adjoint.valid
        if int(failed.sum()) > _UNSOLVED_SHARE * int(adjoint.valid.sum()):
            warnings.warn(_ADVICE, RuntimeWarning, stacklevel=2)
        return z, None, None


class _FirstOrder(torch.autograd.Function):
    """The identity; taking its derivative twice raises."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, strategy: str) -> Tensor:
        ctx.strategy = strategy
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Autograd enables gradients inside a backward pass exactly when a graph of it is asked for.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"the second derivative through {ctx.strategy} would be wrong, because its search has no "
                "graph: call backward without create_graph, or use Unrolled with the Picard solver"
            )
        return grad, None


def solve_with_gradient(strategy: GradientStrategy, problem: Problem) -> Solution:
    """Solve by ``strategy``; a second derivative that would be wrong raises ``RuntimeError``."""
    solution = strategy.solve(problem)
    if not strategy.exact(problem):
        solution.z = _FirstOrder.apply(solution.z, str(strategy))  # type: ignore[no-untyped-call]
    return solution


gradients: Registry[GradientStrategy] = Registry(
    "gradient strategy",
    "deqseq.gradients",
    {
        "phantom": "deqseq.gradients:Phantom",
        "implicit": "deqseq.gradients:ImplicitDifferentiation",
        "unrolled": "deqseq.gradients:Unrolled",
    },
    base=GradientStrategy,  # type: ignore[type-abstract]
)
