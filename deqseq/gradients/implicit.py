"""The exact gradient, by the implicit function theorem.

Shapes: B sequences, L tokens, D width.
"""

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from deqseq import kernels
from deqseq.backbone import Context, State, Trace
from deqseq.gradient import GradientStrategy
from deqseq.iteration import search, steps
from deqseq.policies.residual import Residual
from deqseq.policy import policies
from deqseq.problem import PolicySpec, Problem, SolveOptions
from deqseq.solution import Solution
from deqseq.solver import Solver, solvers
from deqseq.status import Status
from deqseq.trees import tensors

_UNSOLVED_SHARE = 0.5
"""Warn if the solve in the backward pass did not converge for more than this share of the tokens."""

_ADVICE = (
    "the backward system of ImplicitDifferentiation did not converge for more than half of the tokens, so "
    "these gradients may be far off: use another solver (solver='anderson') or a larger max_iter there, or "
    "a tighter tolerance in the forward search; out.solution.adjoint has the residual of every token"
)


class ImplicitDifferentiation(GradientStrategy):
    """The exact gradient at the fixed point, by the implicit function theorem.

    The backward pass solves the linear system u = v + (df/dz)^T u for u (Bai et al., 2019, arXiv 1909.01377).
    Here v is the gradient of the loss with respect to the equilibrium. The loop of the forward search also
    solves this backward system. Each evaluation is then one vector-Jacobian product. If f is causal, u at a
    token depends on u at later tokens. The loop therefore runs on the reversed sequence.

    Args:
        solver: solver of the backward system, as a name or an object. By default the layer's solver.
        convergence: convergence policy of the backward system. By default, the relative residual must reach
            1e-4; in bfloat16 and float16, 8 times the dtype's eps; under autocast, twice the eps of
            autocast's dtype if this is more. The default ``max_iter`` is the layer's, but at least 64.

    Raises:
        ValueError: a name or option is unknown. A call of :meth:`solve` also raises this error if the solver
            of the backward system adds noise.
    """

    def __init__(
        self, solver: Solver | str | Mapping[str, Any] | None = None, convergence: PolicySpec | None = None
    ) -> None:
        self.solver = None if solver is None else solvers.create(solver)
        self.convergence = None if convergence is None else policies.create(convergence)

    def __repr__(self) -> str:
        return f"ImplicitDifferentiation(solver={self.solver}, convergence={self.convergence})"

    def solve(self, problem: Problem) -> Solution:
        solver = self.solver or problem.solver
        if solver.random:
            raise ValueError(
                f"{solver} would add noise to the gradient: give the backward system another solver, such as "
                'ImplicitDifferentiation(solver="anderson")'
            )
        found = search(problem)
        z = found.z.detach().requires_grad_(_needs_gradient(problem))
        solution = steps(problem, 1, replace(found, z=z), "picard")
        if not z.requires_grad and solution.z.requires_grad:  # through a tensor that the map hides
            z = found.z.detach().requires_grad_()
            solution = steps(problem, 1, replace(found, z=z), "picard")
        if not z.requires_grad:
            return solution
        z0 = problem.z0
        rtol = max(1e-4, 8 * torch.finfo(z0.dtype).eps, 2 * torch.finfo(kernels.autocast_dtype(z0)).eps)
        policy = self.convergence or Residual(rtol=rtol, max_iter=max(64, problem.policy.max_iter))
        backward = Problem(
            map=_Adjoint(solution.z, z, problem.solvable, problem.causal),
            context=Context(),
            z0=found.z.detach(),
            options=SolveOptions(solver, policy),
            group=problem.group,
        )
        solution.z = _ImplicitFunction.apply(solution.z, backward, solution)  # type: ignore[no-untyped-call]
        return solution


def _needs_gradient(problem: Problem) -> bool:
    """Whether f(z) needs a gradient although z needs none, as far as the map shows its tensors."""
    used = [*problem.context.tokens, *tensors((problem.context.shared, problem.state))]
    parameters = getattr(problem.map, "parameters", list)
    return any(t.requires_grad for t in chain(used, parameters()))


class _Adjoint:
    """The map u -> v + (df/dz)^T u on the reversed sequence; v is the gradient with respect to f(z).

    On the reversed sequence, this map is causal if f is causal.
    """

    def __init__(self, fz: Tensor, z: Tensor, solvable: Tensor, causal: bool) -> None:
        self.causal = causal
        self.fz = fz
        self.z = z
        self.solvable = solvable  # (B, L) bool, the tokens to solve
        self.cotangent = torch.zeros_like(z)  # (B, L, D) v, reversed; set in the backward pass

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        (product,) = torch.autograd.grad(
            self.fz, self.z, z.flip(1), retain_graph=True, materialize_grads=True
        )
        return self.cotangent + product.flip(1), None


class _ImplicitFunction(torch.autograd.Function):
    """Returns f(z*) unchanged. Its backward pass solves u = v + (df/dz)^T u and returns u.

    Here v is the gradient that the backward pass receives.

    Autograd then propagates u through the last evaluation of f to inputs and parameters. Hooks on parameters
    (such as DDP's) run as usual.
    """

    @staticmethod
    def forward(ctx: Any, fz: Tensor, backward: Problem, solution: Solution) -> Tensor:
        ctx.problem = backward
        # Keep only a weak reference to the solution. A strong reference would make a cycle: the solution
        # holds the result, the autograd graph of the result holds ctx, and ctx would hold the solution.
        ctx.solution = weakref.ref(solution)
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
        padding = ~adjoint.solvable
        solution = ctx.solution()
        if solution is not None:
            solution.adjoint = Solution(
                z,
                residual.masked_fill(padding, 0),
                iterations.masked_fill(padding, 0),
                status.masked_fill(padding, int(Status.CONVERGED)),
                solved.nfe,
            )
        failed = ((status == Status.BUDGET_EXHAUSTED) | (status == Status.NON_FINITE)) & adjoint.solvable
        if int(failed.sum()) > _UNSOLVED_SHARE * int(adjoint.solvable.sum()):
            warnings.warn(_ADVICE, RuntimeWarning, stacklevel=2)
        return z, None, None
