"""Gradient strategies: which evaluations carry a graph.

A strategy receives the problem and decides how the loop is run on it. Forward and backward are two solves
of one kind.
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
from torch.utils.checkpoint import checkpoint

from deqseq.backbone import Context, State, Trace
from deqseq.convergence import ConvergencePolicy, FixedIterations, Residual, check_count, policies
from deqseq.loop import Map, Problem, iterate
from deqseq.registry import Registry
from deqseq.solution import Solution, Status
from deqseq.solver import Progress, Solver, SolverState, solvers

_UNSOLVED = 0.5
"""Share of tokens above which a backward system that did not converge is warned of."""

_ADVICE = (
    "the backward system of ImplicitDifferentiation did not converge for more than half of the tokens, so "
    "these gradients may be far off: give it another solver (solver='anderson') or a larger budget, or "
    "search for the fixed point more finely; out.solution.adjoint says how each solve went"
)


class GradientStrategy(ABC):
    """Solves a problem so that gradients reach its context (inputs and parameters)."""

    #: whether the strategy searches for the fixed point with the problem's solver and policy
    searches: bool = True

    @abstractmethod
    def solve(self, problem: Problem) -> Solution:
        """Solve; gradients flow through ``solution.z``."""


def search(problem: Problem) -> Solution:
    """The fixed point without a graph."""
    with torch.no_grad():
        return iterate(problem)


def _parallel(problem: Problem, z0: Tensor, **changes: Any) -> Problem:
    """The same map on all tokens at once from ``z0``: how the steps with a graph are run."""
    return replace(problem, z0=z0, window=None, carry=False, **changes)


@dataclass(frozen=True)
class Phantom(GradientStrategy):
    """Phantom gradient: after the search, ``steps`` damped iterations with a graph.

    z <- (1 - damping) z + damping f(z) (Geng et al., 2021, arXiv 2111.05177). One undamped step is the
    Jacobian-free gradient (JFB). Tends to the exact gradient as ``steps`` grows.

    Args:
        steps: iterations with a graph, each an evaluation of f on all tokens.
        damping: in (0, 1].
        checkpoint: recompute each step in the backward pass instead of storing its activations.

    Raises:
        ValueError: ``steps`` below 1, ``damping`` outside (0, 1].
    """

    steps: int = 4
    damping: float = 0.8
    checkpoint: bool = False

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        self._picard()

    def _picard(self) -> Solver:
        return solvers.create({"name": "picard", "damping": self.damping})

    def solve(self, problem: Problem) -> Solution:
        found = search(problem)
        start, solver, lost = found.z, self._picard(), _lost(found, problem.policy)
        if lost is not None:
            start, solver = _zeroed(start, lost), _Sparing(solver, lost)
        refined = iterate(
            _parallel(
                problem,
                start,
                map=checkpointed(problem.map) if self.checkpoint else problem.map,
                solver=solver,
                policy=FixedIterations(self.steps),
            )
        )
        z = refined.z if lost is None else torch.where(lost[..., None], found.z, refined.z)
        return replace(found, z=_first_order(z, "Phantom"), nfe=found.nfe + refined.nfe)


def _lost(found: Solution, policy: ConvergencePolicy) -> Tensor | None:
    """(B, L) bool, tokens from the first that is not finite on; ``None`` if there are none.

    They have no part in the steps with a graph: one NaN in a matrix product would reach the tokens before it
    (0 * NaN is NaN), which the search has kept from it. Without a residual test it has not, and nobody looks.
    """
    if not policy.tests_residual:
        return None
    lost = (found.status == Status.NON_FINITE).cumsum(1) > 0
    return lost if bool(lost.any()) else None


def _zeroed(z: Tensor, tokens: Tensor) -> Tensor:
    return z.where(~tokens[..., None], z.new_zeros(()))


class _Sparing(Solver):
    """Another solver's steps, which leave some tokens at zero."""

    def __init__(self, inner: Solver, tokens: Tensor) -> None:
        self._inner, self._tokens = inner, tokens

    def init(self, z: Tensor) -> SolverState:
        return self._inner.init(z)

    def step(
        self, z: Tensor, fz: Tensor, state: SolverState, progress: Progress
    ) -> tuple[Tensor, SolverState]:
        proposal, state = self._inner.step(z, fz, state, progress)
        return _zeroed(proposal, self._tokens), state


@dataclass(frozen=True)
class Unrolled(GradientStrategy):
    """Back-propagation through ``iterations`` steps of the layer's solver from the initial guess.

    No search: the layer's policy and window play no part while gradients are wanted. Coefficients of
    Anderson and Broyden are treated as constants; with these a second derivative raises.

    Args:
        iterations: evaluations of f on all tokens, each with a graph.
        checkpoint: recompute each step in the backward pass instead of storing its activations.

    Raises:
        ValueError: ``iterations`` below 1.
    """

    iterations: int
    checkpoint: bool = False
    searches = False

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)

    def solve(self, problem: Problem) -> Solution:
        unrolled = replace(
            problem,
            map=checkpointed(problem.map) if self.checkpoint else problem.map,
            policy=FixedIterations(self.iterations),
            window=None,
        )
        solution = iterate(unrolled)
        if not problem.solver.differentiable:
            solution.z = _first_order(solution.z, f"Unrolled({problem.solver})")
        return solution


class ImplicitDifferentiation(GradientStrategy):
    """The exact gradient at the fixed point, by the implicit function theorem.

    The cotangent u = v + (df/dz)^T u is found by the same loop as the fixed point itself, on the
    vector-Jacobian product (Bai et al., 2019, arXiv 1909.01377). f is causal, so this system is
    anti-causal: it is solved on the reversed sequence. Differentiating twice raises ``RuntimeError``.

    Args:
        solver: solver of the backward system; a name or an object. ``None``: the layer's.
        convergence: its policy. ``None``: a relative residual of 1e-4, or of eight roundings in types
            coarser than that, within the budget of the layer's policy, at least 64.
    """

    def __init__(
        self,
        solver: Solver | str | Mapping[str, Any] | None = None,
        convergence: ConvergencePolicy | str | Mapping[str, Any] | None = None,
    ) -> None:
        self.solver = None if solver is None else solvers.create(solver)
        self.convergence = None if convergence is None else policies.create(convergence)

    def __repr__(self) -> str:
        return f"ImplicitDifferentiation(solver={self.solver}, convergence={self.convergence})"

    def solve(self, problem: Problem) -> Solution:
        found = search(problem)
        lost = _lost(found, problem.policy)
        guess = (found.z if lost is None else _zeroed(found.z, lost)).detach().requires_grad_()
        picard = solvers.create("picard")
        once = iterate(_parallel(problem, guess, solver=picard, policy=FixedIterations(1)))
        solution = replace(found, nfe=found.nfe + once.nfe)
        backward = Problem(
            map=_Adjoint(once.z, guess, problem.valid),
            context=Context(),
            z0=guess.detach(),
            solver=self.solver or problem.solver,
            policy=self.convergence or _backward_policy(problem),
            lengths=None,
            group=problem.group,
        )
        attached: Tensor = _ImplicitFunction.apply(once.z, backward, solution)  # type: ignore[no-untyped-call]
        solution.z = attached if lost is None else torch.where(lost[..., None], found.z, attached)
        return solution


def _backward_policy(problem: Problem) -> ConvergencePolicy:
    rtol = max(1e-4, 8 * torch.finfo(problem.z0.dtype).eps)
    return Residual(rtol=rtol, max_iter=max(64, problem.policy.max_iter))


class _Adjoint:
    """u -> v + (df/dz)^T u on the reversed sequence, which makes it causal. It needs no state."""

    def __init__(self, fz: Tensor, z: Tensor, valid: Tensor) -> None:
        self.fz = fz
        self.z = z
        self.valid = valid  # (B, L) bool, tokens that are not padding
        self.cotangent = torch.zeros_like(z)  # v, reversed

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        product = torch.autograd.grad(self.fz, self.z, z.flip(1), retain_graph=True)[0]
        return self.cotangent + product.flip(1), None


class _ImplicitFunction(torch.autograd.Function):
    """The identity on f(z*), whose backward pass solves for the cotangent.

    The gradient then flows on through the evaluation of f to inputs and parameters by ordinary autograd,
    so hooks on them (DDP's) fire as always.
    """

    @staticmethod
    def forward(ctx: Any, fz: Tensor, backward: Problem, solution: Solution) -> Tensor:
        ctx.problem = backward
        # Weak, as the solution holds the tensor that this node makes.
        ctx.solution = weakref.ref(solution)
        return fz.view_as(fz)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _refuse_second_derivative("ImplicitDifferentiation")
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
        given_up = ((status == Status.BUDGET_EXHAUSTED) | (status == Status.NON_FINITE)) & adjoint.valid
        if int(given_up.sum()) > _UNSOLVED * int(adjoint.valid.sum()):
            warnings.warn(_ADVICE, RuntimeWarning, stacklevel=2)
        return z, None, None


class _FirstOrder(torch.autograd.Function):
    """The identity; its derivative may be taken once only."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, name: str) -> Tensor:
        ctx.name = name
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _refuse_second_derivative(ctx.name)
        return grad, None


def _first_order(z: Tensor, name: str) -> Tensor:
    marked: Tensor = _FirstOrder.apply(z, name)  # type: ignore[no-untyped-call]
    return marked


def _refuse_second_derivative(name: str) -> None:
    # Autograd enables gradients inside a backward pass exactly when a graph of it is asked for.
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"the second derivative through {name} would be wrong, because its search has no graph: "
            "call backward without create_graph, or use Unrolled with the Picard solver"
        )


class _Checkpointed:
    """A map whose activations are recomputed in the backward pass instead of stored."""

    def __init__(self, inner: Map) -> None:
        self.inner = inner

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        if not torch.is_grad_enabled():  # a search stores nothing anyway
            return self.inner.evaluate(z, context, state)
        fz, trace = checkpoint(self.inner.evaluate, z, context, state, use_reentrant=False)
        return fz, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def checkpointed(map: Map) -> Map:
    """``map``, with its activations recomputed in the backward pass instead of stored."""
    return map if isinstance(map, _Checkpointed) else _Checkpointed(map)


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
