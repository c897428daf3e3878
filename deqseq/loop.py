"""The loop that solves fixed-point problems z = f(z).

Every solve runs in :func:`drive`: in forward and backward passes, training, evaluation and generation. It
repeats :func:`one_pass` until every token has settled, which means that the token's result is final. One pass
evaluates f once. Only this loop counts evaluations, freezes tokens, detects non-finite values, and makes all
processes stop after the same pass.

A :class:`Runner` runs passes one by one. The runners in :mod:`deqseq.graphs` and :mod:`deqseq.replay` compute
the same passes, but record several of them as a CUDA graph.

Shapes: B sequences, L tokens, W tokens in the window (W = L without a window), D width.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deqseq.backbone import Backbone, Context, State, Trace, take_tokens
from deqseq.ops.residual import freeze
from deqseq.problem import Map, Problem
from deqseq.solution import Solution
from deqseq.solver import SolverState
from deqseq.status import Status
from deqseq.tokens import Tokens
from deqseq.trees import map_tensors, tensors


class Carry(NamedTuple):
    """The values that one pass of the loop hands to the next pass."""

    z: Tensor  # (B, W, D) the iterates
    proposal: Tensor  # (B, W, D) the iterates that the solver proposes for the next pass
    tokens: Tokens
    solver_state: SolverState
    # Only without a window:
    fz: Tensor | None = None  # (B, L, D) f(z) of the last evaluation
    trace: Trace = None  # data of the last evaluation from which the backbone computes its next state
    # Only with a window:
    state: State | None = None  # the backbone's state after all tokens before ``start``
    start: Tensor | None = None  # (B,) position of the window's first token
    # (B,) number of tokens that settled in the last pass. ``start`` is already the position after them. The
    # next pass first shifts z, ``tokens`` and ``solver_state``, so that these tokens leave the window.
    leaving: Tensor | None = None
    # z, iterations, residual and status of every token: (B, L + W, ...), the last W places are padding.
    results: tuple[Tensor, ...] = ()


def begin(problem: Problem) -> Carry:
    """The values with which the first pass begins."""
    z = problem.z0
    if problem.window is None:
        return Carry(z, z, Tokens.enter(problem.solvable), problem.solver.init(z))
    if not problem.solver.windowed:
        raise ValueError(f"{problem.solver} solves whole sequences only: use window=None")
    if not problem.causal:
        raise ValueError("a map that is not causal needs all tokens at once: use window=None")
    backbone, state = cast(Backbone, problem.map), problem.state
    if state is None:
        state = backbone.initial_state(z.shape[0], device=z.device, dtype=z.dtype)
    if problem.state is None or not problem.state_has_capacity:
        state = backbone.reserve(state, z)
    batch, length, width = z.shape
    everywhere = torch.ones(batch, length + problem.window, dtype=torch.bool, device=z.device)
    tokens = Tokens.enter(everywhere)
    results = (z.new_zeros(*everywhere.shape, width), tokens.iterations, tokens.residual, tokens.status)
    start = torch.zeros_like(problem.sequence_lengths)
    first = take_tokens(z, _places(problem, start))
    tokens = Tokens.enter(_solvable(problem, start))
    solver_state = problem.solver.init(first)
    for values in tensors(solver_state):  # every pass moves them along the window
        if values.shape[:2] != first.shape[:2]:
            raise ValueError(
                f"{type(problem.solver).__name__}.init must return tensors of the shape (B, W, ...), here "
                f"({first.shape[0]}, {first.shape[1]}, ...), got {tuple(values.shape)}"
            )
    return Carry(
        first, first, tokens, solver_state, state=state.copy(), start=start, leaving=start, results=results
    )


def one_pass(problem: Problem, carry: Carry, judge: bool = True) -> Carry:
    """Run one pass: evaluate f at the proposed iterates, judge convergence, and propose the next iterates.

    With a window, the tokens that settled in the previous pass leave the window at its start. The same number
    of new tokens enters at its end. After evaluating f, the pass moves the backbone's state past the tokens
    that settled in this pass.

    If gradients are disabled, the pass may overwrite ``carry.proposal``. Do not use ``carry`` after the pass.
    A pass never makes the host wait for the device.

    Args:
        judge: whether to call the convergence policy, which decides which tokens have converged. With
            :class:`~deqseq.FixedIterations` and without a window, only the last pass needs this decision.
    """
    z = carry.proposal
    if not problem.fixed or problem.window is not None:
        z = freeze(carry.tokens.frozen, carry.z, carry.proposal)
    carry = carry._replace(z=z)
    if problem.window is not None:
        carry = _slide(problem, carry)
    return _evaluate(problem, carry, judge)


def _slide(problem: Problem, carry: Carry) -> Carry:
    """Move the window: remove the settled tokens at its start, and add the next tokens at its end."""
    assert carry.start is not None and carry.leaving is not None
    window = carry.z.shape[1]
    moved = problem.offsets + carry.leaving[:, None]
    stays, source = moved < window, moved.clamp_max(window - 1)
    entering = take_tokens(problem.z0, _places(problem, carry.start))
    return carry._replace(
        z=torch.where(stays[..., None], take_tokens(carry.z, source), entering),
        tokens=carry.tokens.slide(source, stays, _solvable(problem, carry.start)),
        solver_state=map_tensors(lambda t: take_tokens(t, source), carry.solver_state),
    )


def _evaluate(problem: Problem, carry: Carry, judge: bool) -> Carry:
    z, start = carry.z, carry.start
    context, state = problem.context, problem.state
    if start is not None:
        context, state = context.take(_places(problem, start)), carry.state
    fz, trace = evaluate(problem.map, z, context, state, problem.checkpoint, z.shape)
    fz = fz.to(z.dtype)  # autocast may have changed the dtype
    tokens = carry.tokens.after_evaluation()
    if judge:
        tokens = tokens.judged(z, fz, problem.policy, problem.causal)
    step = problem.solver.step(z, fz, carry.solver_state, tokens.progress(problem.policy))
    proposal, solver_state = _checked(step, z.shape, problem.solver, "step", "(next z, state)")
    proposal = proposal.to(z.dtype)  # a solver may compute in another dtype
    carry = carry._replace(proposal=proposal, tokens=tokens, solver_state=solver_state)
    if start is None or state is None:
        return carry._replace(fz=fz, trace=trace)
    # Store the results of all tokens in the window. Every pass overwrites them, so a token keeps the results
    # of its last pass.
    place = start[:, None] + problem.offsets
    values = (proposal if problem.fixed else fz, tokens.iterations, tokens.residual, tokens.status)
    for result, value in zip(carry.results, values, strict=True):
        index = place if value.dim() == 2 else place[..., None].expand_as(value)
        result.scatter_(1, index, value.to(result.dtype))
    leaving = (tokens.settled & _solvable(problem, start)).sum(1)
    state = cast(Backbone, problem.map).advance(trace, state, leaving)
    return carry._replace(state=state, start=start + leaving, leaving=leaving)


def _checked(found: object, shape: torch.Size, part: object, method: str, pair: str) -> tuple[Tensor, Any]:
    """``found``, the result of a method of ``part``: a ``pair`` whose tensor must have this shape."""
    name = f"{type(part).__name__}.{method}"
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor):
        raise ValueError(f"{name} must return {pair}, got {type(found).__name__}")
    if found[0].shape != shape:
        shapes = f"{tuple(shape)}, got {tuple(found[0].shape)}"
        raise ValueError(f"{name} must return {pair} with a tensor of the shape of z, {shapes}")
    return found


def evaluate(
    map: Map, z: Tensor, context: Context, state: State | None, recompute: bool, shape: torch.Size
) -> tuple[Tensor, Trace]:
    """Returns f(z) and the trace. With ``recompute``, the backward pass recomputes the activations.

    Raises:
        ValueError: the map returns something else or ``z`` itself, or f(z) does not have this ``shape``.
    """
    if recompute and torch.is_grad_enabled():
        found = checkpoint(map.evaluate, z, context, state, use_reentrant=False)
    else:
        found = map.evaluate(z, context, state)
    fz, trace = _checked(found, shape, map, "evaluate", "(f(z), trace)")
    if fz is z:  # as of an operation in place; the residual would be zero
        raise ValueError(f"{type(map).__name__}.evaluate must return a new tensor and keep z, got z itself")
    return fz, trace


def _places(problem: Problem, start: Tensor) -> Tensor:
    """Positions (B, W) int64 of the window's tokens. Places after the end of the input get L - 1."""
    return (start[:, None] + problem.offsets).clamp_max(problem.z0.shape[1] - 1)


def _solvable(problem: Problem, start: Tensor) -> Tensor:
    """(B, W) bool, the tokens of the window that are to be solved; false after the end of a sequence."""
    return start[:, None] + problem.offsets < problem.sequence_lengths[:, None]


def finish(problem: Problem, carry: Carry, passes: int) -> Solution:
    """Make the solution from ``carry``, the result of the last pass. ``passes`` counts all passes."""
    solvable, state = problem.solvable, problem.state if problem.returns_state else None
    if carry.start is None:
        z = carry.proposal if problem.fixed or carry.fz is None else carry.fz
        _, iterations, residual, status, *_ = carry.tokens
        if state is not None:
            backbone = cast(Backbone, problem.map)
            state = state if problem.state_has_capacity else backbone.reserve(state, z)
            state = state if problem.overwrites_state else state.copy()
            state = backbone.advance(carry.trace, state, problem.sequence_lengths).detach()
    else:
        z, iterations, residual, status = (result[:, : solvable.shape[1]] for result in carry.results)
        state = None if state is None or carry.state is None else carry.state.detach()
    if problem.lengths is not None:
        z = z.where(solvable[..., None], z.new_zeros(()))
    return Solution(
        z=z,
        residual=residual.where(solvable, residual.new_zeros(())),
        iterations=iterations * solvable,
        status=status.where(solvable, torch.full_like(status, int(Status.CONVERGED))),
        nfe=passes,
        state=state,
    )


class Runner:
    """Runs the passes of a solve one by one.

    Attributes:
        passes: number of passes that have been run.
        check_every: number of passes between two checks whether the solve has ended. A check makes the host
            wait for the device.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.passes = 0
        self.check_every = problem.policy.check_every or (1 if problem.z0.device.type == "cpu" else 4)

    def begin(self) -> None:
        self.carry = begin(self.problem)

    def proceed(self) -> None:
        """Run the next pass. Subclasses may run several passes."""
        self.passes += 1
        judge = self.problem.window is not None or not self.problem.fixed or self._at_budget
        self.carry = one_pass(self.problem, self.carry, judge)

    def has_ended(self) -> bool:
        """Whether the solve has ended, on all processes of the group."""
        if self.problem.window is None and (self.problem.fixed or self._at_budget):
            return self._at_budget  # without a window, all tokens reach their budget in the same pass
        if self.passes % self.check_every:
            return False
        finished = self.settled()
        if self.problem.group is not None:
            # End only when all processes have finished. If one ended earlier, the others would wait forever.
            finished = finished.to(torch.int32)
            dist.all_reduce(finished, op=dist.ReduceOp.MIN, group=self.problem.group)
        return bool(finished)

    def settled(self) -> Tensor:
        """Whether all tokens have settled, as a bool tensor without dimensions."""
        start = self.carry.start
        return (self.carry.tokens.settled if start is None else start >= self.problem.sequence_lengths).all()

    def finish(self) -> Solution:
        return finish(self.problem, self.carry, self.passes)

    @property
    def _at_budget(self) -> bool:
        return self.passes >= self.problem.policy.max_iter


def drive(runner: Runner) -> Solution:
    """Run passes until every token has settled, which means that its result is final.

    A token settles when the token and all unsettled tokens before it converge in the same evaluation. If f is
    not causal, all tokens of a sequence must converge in the same evaluation. A token also settles when it
    has used up its budget of evaluations. The loop no longer changes the z of a settled token, and returns
    f(z) for it. With a causal f, a token's result therefore does not depend on later tokens. With
    :class:`~deqseq.FixedIterations`, the loop returns the last iterate instead of f(z).

    Evaluations record an autograd graph if gradients are enabled.
    """
    runner.begin()
    while True:
        runner.proceed()
        if runner.has_ended():
            return runner.finish()
