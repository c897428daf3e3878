"""The one loop that evaluates f.

Every solve, forward and backward, training, evaluation and generation, runs through :func:`iterate`, so
that evaluations are counted, tokens frozen, non-finite values caught and processes stopped together in
one place.

Shapes: B sequences, L tokens, W tokens in the window (W = L without one), D width.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from deqseq.backbone import Context, State, Trace, take_tokens
from deqseq.convergence import ConvergencePolicy
from deqseq.graphs import capture, copied, map_tensors, overwrite, tensors
from deqseq.ops.freeze import freeze
from deqseq.solution import Solution
from deqseq.solver import Solver
from deqseq.tokens import Tokens


class Map(Protocol):
    """A fixed-point map; every :class:`~deqseq.backbone.Backbone` is one.

    Solving in a window, or carrying state, takes the backbone's state methods too.
    """

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        """f(z) and the trace it leaves."""
        ...


class StatefulMap(Map, Protocol):
    """A map over a state that can move on; methods as in :class:`~deqseq.backbone.Backbone`."""

    def initial_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> State: ...

    def reserve(self, state: State, z: Tensor) -> State: ...

    def advance(self, trace: Trace, state: State, count: Tensor) -> State: ...


@dataclass(frozen=True)
class Problem:
    """A fixed-point problem and how to solve it; gradient strategies derive their solves from it.

    Attributes:
        map: the map f.
        context: what ``map.evaluate`` needs besides z.
        z0: (B, L, D) the initial guess.
        solver, policy: the next iterate, and when to stop.
        window: tokens solved at a time; ``None``: all of them.
        lengths: (B,) int64 number of real tokens, which come first; ``None``: all are real.
        state: backbone state before the first token; ``None``: the sequences start here. It is read only.
        room: the state has room for all tokens already, so that nobody need look.
        compact: sequences that have settled leave the batch, once they are half of it.
        carry: return the state after the last token of solves that start from one.
        group: process group whose members stop together; ``None``: each stops on its own.
    """

    map: Map
    context: Context
    z0: Tensor
    solver: Solver
    policy: ConvergencePolicy
    window: int | None = None
    lengths: Tensor | None = None
    state: State | None = None
    room: bool = False
    compact: bool = False
    carry: bool = False
    group: dist.ProcessGroup | None = None

    @property
    def valid(self) -> Tensor:
        """(B, L) bool, tokens that are not padding."""
        batch, length, _ = self.z0.shape
        if self.lengths is None:
            return torch.ones(batch, length, dtype=torch.bool, device=self.z0.device)
        return torch.arange(length, device=self.z0.device) < self.lengths[:, None]


def iterate(problem: Problem) -> Solution:
    """Iterate to the fixed point of ``problem``.

    Evaluate, judge, step, until every token has settled. A token settles when it and every token before
    it have converged in the same evaluation, or when its budget has ended. Its input z is frozen from
    then on, and what it returns is f(z) at that z, so it depends on nothing after it. In a window,
    settled tokens leave on the left: the trace of the very evaluation that settled them moves the
    backbone's state on, at no further evaluation, and as many new tokens enter on the right.

    With a policy that tests no residual the solver's last iterate is returned instead of f(z), so that
    a fixed number of damped steps is what its name says.

    Whether the evaluations carry a graph is the caller's choice (``torch.no_grad`` around the call).
    """
    if problem.window is None or problem.window >= problem.z0.shape[1]:
        return _iterate_all(problem)
    return _iterate_window(problem)


def _iterate_all(problem: Problem) -> Solution:
    policy = problem.policy
    run = Together(problem)
    left: list[tuple[Tensor, Solution]] = []  # sequences that have left the batch
    for passes in itertools.count(1):
        ends = passes == policy.max_iter
        # A fixed number of iterations needs no verdict on the way: nothing settles before its end.
        run.evaluate(judged=policy.tests_residual or ends)
        if policy.tests_residual:
            if ends or _stop(run.settled, passes, problem):
                break
            if _looks(run.settled, passes, problem) and _shrinks(problem):
                settled = run.settled.all(1)
                if 2 * int(settled.sum()) >= len(settled):  # fewer are not worth the copies
                    gone, stay = settled.nonzero()[:, 0], (~settled).nonzero()[:, 0]
                    left.append((run.rows[gone], _taken(run.solution(passes), gone)))
                    run.select(stay)
        run.step()
        if ends:
            break
    last = run.solution(passes)
    return _joined([*left, (run.rows, last)]) if left else last


def _shrinks(problem: Problem) -> bool:
    """Whether sequences that have settled may leave the batch."""
    alone = problem.state is None and problem.group is None
    return problem.compact and problem.solver.windowed and alone and not torch.is_grad_enabled()


def _taken(value: Any, rows: Tensor) -> Any:
    """The sequences ``rows`` (int64 indices) of nested tensors (B, ...)."""
    return map_tensors(lambda t: t[rows], value)


def _joined(parts: list[tuple[Tensor, Solution]]) -> Solution:
    """The solution of the whole batch, of those of its ``parts``, the last of which took longest."""
    order = torch.cat([rows for rows, _ in parts]).argsort()
    pieces = zip(*(tensors(solution) for _, solution in parts), strict=True)
    joined: Solution = map_tensors(lambda _: torch.cat(next(pieces))[order], parts[-1][1])
    return joined


def _iterate_window(problem: Problem) -> Solution:
    run = Window(problem)
    for passes in itertools.count(1):
        run.evaluate()
        if _stop(run.settled, passes, problem):
            return run.solution(passes)
        run.step()
        if passes == 2 * BLOCK and recordable(problem):  # few do not pay
            break
    run.variables = copied(run.variables)  # memory that nothing else looks at
    (replay,) = capture(problem.z0.device, run.block)
    passes += BLOCK
    between_looks = max(1, (problem.policy.check_every or BLOCK) // BLOCK)
    while not bool(run.settled.all()):
        for _ in range(between_looks):
            replay()
        passes += between_looks * BLOCK
    return run.solution(passes)


BLOCK = 4
"""Passes of a window that are recorded as one CUDA graph."""


def recordable(problem: Problem) -> bool:
    """Whether passes of the loop may be recorded, and are worth it."""
    parts = (problem.map, problem.solver, problem.policy)
    return (
        problem.z0.is_cuda
        and all(getattr(part, "capturable", False) for part in parts)
        and problem.policy.tests_residual
        and problem.group is None
        and not torch.is_grad_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


class Together:
    """All tokens at once: settled ones stay in place, frozen."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.z = problem.z0
        self.valid = problem.valid
        self.tokens = Tokens.enter(self.valid)
        self.memory = problem.solver.init(self.z)  # the solver's
        self.rows = torch.arange(self.z.shape[0], device=self.z.device)  # where they are in the whole batch
        self.fz = self.z  # the last evaluation

    def select(self, rows: Tensor) -> None:
        """Go on with the sequences ``rows`` (int64 indices) only, which have just been evaluated."""
        problem = self.problem
        z0, lengths, per_token = _taken((problem.z0, problem.lengths, problem.context.tokens), rows)
        context = replace(problem.context, tokens=per_token)
        self.problem = replace(problem, context=context, z0=z0, lengths=lengths)
        self.z, self.fz, self.valid, self.rows = (t[rows] for t in (self.z, self.fz, self.valid, self.rows))
        self.tokens, self.memory = _taken((self.tokens, self.memory), rows)

    @property
    def settled(self) -> Tensor:
        return self.tokens.settled

    @property
    def variables(self) -> tuple[Any, ...]:
        """All that goes from one pass to the next."""
        return self.z, self.tokens, self.memory

    @variables.setter
    def variables(self, values: tuple[Any, ...]) -> None:
        self.z, self.tokens, self.memory = values

    def evaluate(self, judged: bool = True) -> None:
        """Evaluate f, and find out who settles."""
        problem = self.problem
        fz, self.trace = problem.map.evaluate(self.z, problem.context, problem.state)
        self.fz = fz.to(self.z.dtype)  # autocast
        self.tokens = self.tokens.counted()
        if judged:
            self.tokens = self.tokens.judged(self.z, self.fz, problem.policy)

    def step(self) -> None:
        """On to the next iterate, where tokens have not settled; it may take f(z)'s memory."""
        problem = self.problem
        progress = self.tokens.progress(problem.policy)
        proposal, self.memory = problem.solver.step(self.z, self.fz, self.memory, progress)
        self.z = freeze(self.tokens.hold, self.z, proposal) if problem.policy.tests_residual else proposal

    def solution(self, passes: int) -> Solution:
        problem = self.problem
        value = self.fz if problem.policy.tests_residual else self.z
        if problem.lengths is not None:
            value = value.where(self.valid[..., None], value.new_zeros(()))
        end = None
        if problem.carry and problem.state is not None:
            stateful = cast(StatefulMap, problem.map)
            own = problem.state if problem.room else stateful.reserve(problem.state, self.z)
            end = stateful.advance(self.trace, own.copy(), self.valid.sum(1)).detach()
        return self.tokens.solution(value, self.valid, passes, end)


class Window:
    """W tokens at a time, each sequence with a window position of its own."""

    def __init__(self, problem: Problem) -> None:
        if not problem.solver.windowed:
            raise ValueError(f"{problem.solver} solves whole sequences only: use window=None")
        assert problem.window is not None
        z0, state, width = problem.z0, problem.state, problem.window
        self.problem = problem
        self.map = cast(StatefulMap, problem.map)
        if state is None:
            state = self.map.initial_state(z0.shape[0], device=z0.device, dtype=z0.dtype)
        if problem.state is None or not problem.room:
            state = self.map.reserve(state, z0)
        self.state = state.copy()
        self.valid = problem.valid
        self.ends = self.valid.sum(1)
        self.start = torch.zeros_like(self.ends)
        self.offsets = torch.arange(width, device=z0.device)
        self.z = take_tokens(z0, self._place())
        self.tokens = Tokens.enter(self._inside())
        self.memory = problem.solver.init(self.z)  # the solver's
        self.record = _Record(z0, width)

    def _place(self) -> Tensor:
        """Where in the sequence (B, W) the window's tokens are; the last one again behind its end."""
        return (self.start[:, None] + self.offsets).clamp_max(self.problem.z0.shape[1] - 1)

    def _inside(self) -> Tensor:
        """(B, W) bool, tokens of the window that exist."""
        return self.start[:, None] + self.offsets < self.ends[:, None]

    @property
    def settled(self) -> Tensor:
        """(B,) bool, sequences that have come to their end."""
        return self.start >= self.ends

    def evaluate(self) -> None:
        """Evaluate f, find out who settles, and move the state past those who leave."""
        problem = self.problem
        fz, trace = self.map.evaluate(self.z, problem.context.take(self._place()), self.state)
        fz = fz.to(self.z.dtype)  # autocast
        self.tokens = tokens = self.tokens.counted().judged(self.z, fz, problem.policy)
        progress = tokens.progress(problem.policy)
        self.proposal, self.memory = problem.solver.step(self.z, fz, self.memory, progress)
        value = fz if problem.policy.tests_residual else self.proposal
        self.record.write(self.start[:, None] + self.offsets, value, tokens)
        self.leaving = (tokens.settled & self._inside()).sum(1)
        self.state = self.map.advance(trace, self.state, self.leaving)
        self.start = self.start + self.leaving

    def step(self) -> None:
        """On to the next iterate and, where tokens have left, to the next tokens."""
        width = self.offsets.shape[0]
        z = freeze(self.tokens.hold, self.z, self.proposal)
        moved = self.offsets + self.leaving[:, None]
        stays, source = moved < width, moved.clamp_max(width - 1)
        entering = take_tokens(self.problem.z0, self._place())
        self.z = torch.where(stays[..., None], take_tokens(z, source), entering)
        self.tokens = self.tokens.slide(source, stays, self._inside())
        self.memory = map_tensors(lambda t: take_tokens(t, source), self.memory)

    @property
    def variables(self) -> tuple[Any, ...]:
        """All that goes from one pass to the next."""
        return self.start, self.z, self.tokens, self.memory, self.state

    @variables.setter
    def variables(self, values: tuple[Any, ...]) -> None:
        self.start, self.z, self.tokens, self.memory, self.state = values

    def block(self) -> None:
        """Some passes in a row, which end in the memory they began in."""
        begun = self.variables
        for _ in range(BLOCK):
            self.evaluate()
            self.step()
        overwrite(begun, self.variables)
        self.variables = begun

    def solution(self, passes: int) -> Solution:
        z, tokens = self.record.read(self.problem.z0.shape[1])
        z = z.where(self.valid[..., None], z.new_zeros(()))
        end = self.state.detach() if self.problem.carry and self.problem.state is not None else None
        return tokens.solution(z, self.valid, passes, end)


class _Record:
    """What tokens had when they left the window.

    Every pass writes the whole window: what stands at a token in the end is from its last pass there.
    """

    def __init__(self, z: Tensor, width: int) -> None:
        batch, length, depth = z.shape
        self._z = z.new_zeros(batch, length + width, depth)
        everywhere = torch.ones(batch, length + width, dtype=torch.bool, device=z.device)
        self._tokens = Tokens.enter(everywhere)

    def write(self, index: Tensor, z: Tensor, tokens: Tokens) -> None:
        self._z.scatter_(1, index[..., None].expand_as(z), z.to(self._z.dtype))
        for name in ("iterations", "residual", "status"):
            getattr(self._tokens, name).scatter_(1, index, getattr(tokens, name))

    def read(self, length: int) -> tuple[Tensor, Tokens]:
        fields = {name: value[:, :length] for name, value in vars(self._tokens).items()}
        return self._z[:, :length], Tokens(**fields)


def _looks(done: Tensor, passes: int, problem: Problem) -> bool:
    """Whether the host looks at the device after this pass."""
    return passes % (problem.policy.check_every or (1 if done.device.type == "cpu" else 4)) == 0


def _stop(done: Tensor, passes: int, problem: Problem) -> bool:
    """Whether everything is ``done``, on all ranks of the group; looked at every few passes."""
    if not _looks(done, passes, problem):
        return False
    finished = done.all()
    if problem.group is not None:
        # Ranks that stop at different passes would wait for each other's collectives for ever.
        finished = finished.to(torch.int32)
        dist.all_reduce(finished, op=dist.ReduceOp.MIN, group=problem.group)
    return bool(finished)
