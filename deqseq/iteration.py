"""Two ways to iterate: :func:`search` iterates until convergence, :func:`steps` a given number of times.

Gradient strategies are built from these two functions.

Shapes: B sequences, L tokens, D width.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deqseq import graphs
from deqseq.backbone import Context
from deqseq.checks import check_instance
from deqseq.compact import CompactingRunner, compactable
from deqseq.loop import Runner, drive
from deqseq.policy import FixedIterations
from deqseq.problem import Problem, SolveOptions
from deqseq.solution import Solution
from deqseq.solver import Progress, Solver, SolverState, solvers
from deqseq.status import Status


def search(problem: Problem) -> Solution:
    """Iterate until every token has converged or used up its iterations. Records no autograd graph.

    Returns f(z) of the last evaluation. With the policy ``FixedIterations(n)``, the search does n iterations
    and returns the solver's last iterate.

    Raises:
        ValueError: ``problem`` is no :class:`~deqseq.Problem`.
    """
    check_instance("problem", problem, Problem, "a Problem")
    with torch.no_grad():
        if problem.window is not None and graphs.can_record_passes(problem):
            return drive(graphs.WindowRunner(problem))
        return drive((CompactingRunner if compactable(problem) else Runner)(problem))


def steps(
    problem: Problem,
    count: int,
    start: Solution | None = None,
    solver: Solver | str | Mapping[str, Any] | None = None,
    checkpoint: bool = False,
) -> Solution:
    """Do ``count`` iterations on all tokens at once. Returns the last iterate.

    Evaluations record an autograd graph if gradients are enabled.

    Args:
        problem: the problem to iterate on. Its policy and window are ignored.
        count: number of iterations. Each iteration evaluates f once on all tokens.
        start: the solution of a search; the iteration begins at ``start.z``. The result keeps the residual,
            iterations, status and state of ``start``. By default the iteration begins at ``problem.z0``.

            In evaluation (``problem.training`` is false), the result's z has the value of ``start.z``. Only
            its gradient is that of the last iterate.

            If a token in ``start`` is not finite, this token and all later tokens of its sequence are not
            iterated. In the result, they keep their z from ``start``. During the iteration, their z and
            their context are set to zero, because NaN would spread to earlier tokens through matrix products,
            and to the gradients of parameters. So f must be differentiable there. After a search with
            ``FixedIterations`` and without a window, tokens are not checked.
        solver: proposes the iterates; the problem's solver by default.
        checkpoint: recompute every step in the backward pass instead of storing its activations.

    Raises:
        ValueError: ``problem`` is no :class:`~deqseq.Problem`; ``count`` is below 1; ``solver`` is unknown.
    """
    check_instance("problem", problem, Problem, "a Problem")
    solver = problem.solver if solver is None else solvers.create(solver)
    checkpoint = problem.checkpoint or checkpoint
    if start is None:
        options = SolveOptions(solver, FixedIterations(count))
        return drive(Runner(replace(problem, options=options, checkpoint=checkpoint)))
    unchecked = problem.fixed and problem.window is None  # the check would make the host wait
    z0, excluded = start.z, None if unchecked else _excluded(start)
    if excluded is not None:
        z0, solver = _zeroed(z0, excluded), _ZeroAt(solver, excluded)
        problem = replace(problem, context=_without(problem.context, excluded))
    options = SolveOptions(solver, FixedIterations(count))
    found = drive(
        Runner(replace(problem, z0=z0, options=options, checkpoint=checkpoint, returns_state=False))
    )
    z = found.z if excluded is None else torch.where(excluded[..., None], start.z.detach(), found.z)
    if not problem.training:
        z = _WithValue.apply(z, start.z.detach())  # type: ignore[no-untyped-call]
    return replace(start, z=z, nfe=start.nfe + found.nfe)


class _WithValue(torch.autograd.Function):
    """Returns ``value``, with the gradient of ``z``."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _excluded(found: Solution) -> Tensor | None:
    """(B, L) bool, true at the first non-finite token of each sequence and at all tokens after it.

    ``None`` if all tokens are finite.
    """
    excluded = (found.status == Status.NON_FINITE).cumsum(1) > 0
    return excluded if bool(excluded.any()) else None


def _zeroed(z: Tensor, tokens: Tensor) -> Tensor:
    return z.where(~tokens[..., None], z.new_zeros(()))


def _without(context: Context, tokens: Tensor) -> Context:
    """The context with zeros where ``tokens`` (B, L) is true."""

    def zeroed(t: Tensor) -> Tensor:
        # The context of a map that is not causal may have tensors of another shape than (B, L, ...).
        if not t.is_floating_point() or t.shape[:2] != tokens.shape:
            return t
        return t.masked_fill(tokens.view(*tokens.shape, *[1] * (t.dim() - 2)), 0)

    return replace(context, tokens=tuple(map(zeroed, context.tokens)))


class _ZeroAt(Solver):
    """Wraps a solver. Sets its iterates to zero where ``tokens`` (B, L) is true."""

    def __init__(self, inner: Solver, tokens: Tensor) -> None:
        self._inner, self._tokens = inner, tokens

    def init(self, z: Tensor) -> SolverState:
        return self._inner.init(z)

    def step(
        self, z: Tensor, fz: Tensor, state: SolverState, progress: Progress
    ) -> tuple[Tensor, SolverState]:
        proposal, state = self._inner.step(z, fz, state, progress)
        return _zeroed(proposal, self._tokens), state
