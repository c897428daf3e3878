"""Searches for the answers to boards: from one start, or from more until the answers can be trusted.

Start 0 solves a board as it is. If :attr:`BoardModel.symmetries` is true, every other start solves a
symmetric copy of the board, and its answer is changed back. A start has the same symmetry for all boards. So
the answer to a board does not depend on the other boards of its batch.

Shapes: B boards, C cells of a board, D width of z.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.checks import check_count
from deqseq.layer import ImplicitSequenceLayer
from deqseq.loop import Runner
from deqseq.policies import Residual
from deqseq.policy import FixedIterations
from deqseq.problem import Problem, SolveOptions
from deqseq.status import Status
from deqseq.tasks.reasoning.model import BoardModel
from deqseq.tasks.reasoning.symmetries import Symmetries, different_symmetries, numbered_symmetry


@dataclass
class Found:
    """Answers to B boards, on the CPU.

    Attributes:
        answers: (B, C) uint8.
        residual: (B,) relative residual of the whole board at the last evaluation; zero for an explicit
            model.
        evaluations: (B,) number of evaluations of f from all starts; one for an explicit model.
        converged: (B,) bool, the search met its tolerance; true for an explicit model.
    """

    answers: Tensor
    residual: Tensor
    evaluations: Tensor
    converged: Tensor


Trusted = Callable[[Tensor, Found], Tensor]
"""A function of the questions (B, C) and what was found. Returns (B,) bool: which answers can be trusted."""


@torch.no_grad()
def search(
    model: BoardModel, questions: Tensor, starts: int = 1, solve: SolveOptions | None = None,
    trusted: Trusted = lambda _, found: found.converged,
) -> Found:  # fmt: skip
    """Solve boards from start 0, then those whose answers cannot be trusted from start 1, and so on.

    For each board, the first answer that can be trusted is kept. If there is none, the answer with the
    smallest residual is kept. :func:`deqseq.solve_with_restarts` does the same for any sequences, but it has
    no symmetric copies, and it trusts every search that converged.

    Args:
        questions: (B, C) tokens.
        starts: maximum number of starts.
        solve: solve options; by default the layer's ``eval_solve``.
        trusted: decides which answers can be trusted; by default, those of searches that converged.

    Raises:
        ValueError: the model is in training mode. There are several starts, but the convergence policy is
            ``FixedIterations``, which has no tolerance. Also those of :func:`check_starts`.
    """
    if model.training:
        raise ValueError("a search is for evaluation: call model.eval() first")
    check_starts(model, starts, solve)
    if starts > 1 and isinstance(policy := _options(model, solve).convergence, FixedIterations):
        raise ValueError(f"several starts need a policy with a tolerance, got {policy}")
    found = from_start(model, questions, 0, solve)
    if starts == 1:
        return found
    good = trusted(questions, found).clone()
    for number in range(1, starts):
        rows = (~good).nonzero()[:, 0]
        if not len(rows):
            break
        new = from_start(model, questions[rows], number, solve)
        found.evaluations[rows] += new.evaluations
        good[rows] = trusted(questions[rows], new)
        better = good[rows] | (_size(new.residual) < _size(found.residual[rows]))
        for name in ("answers", "residual", "converged"):
            getattr(found, name)[rows[better]] = getattr(new, name)[better]
    return found


def _size(residual: Tensor) -> Tensor:
    """The residuals, with infinity for NaN."""
    return residual.nan_to_num(torch.inf, torch.inf)


@torch.no_grad()
def from_start(model: BoardModel, questions: Tensor, number: int, solve: SolveOptions | None = None) -> Found:
    """Solve the boards ``questions`` (B, C) once, from start ``number``.

    A board leaves the batch when it has converged. So easy boards cost less.

    Args:
        solve: solve options; by default the layer's ``eval_solve``.
    """
    symmetry = _symmetry(model, number)
    tokens, z0 = _changed(questions, symmetry, model.device), None
    with model.precision(), _compacting(model):
        if number and isinstance(model.layer, ImplicitSequenceLayer):
            z0 = _options(model, solve).guess.propose(model.inputs(tokens), number, None)
        out = model(tokens, z0=z0, solve=solve)
    answers, solution = _changed_back(out.logits, symmetry).cpu(), out.solution
    if solution is None:
        ones = torch.ones(len(answers), dtype=torch.int64)
        return Found(answers, torch.zeros(len(answers)), ones, ones.bool())
    residual = solution.residual.float().square().mean(1).sqrt()
    converged = (solution.status == Status.CONVERGED).all(1)
    return Found(answers, residual.cpu(), solution.iterations.amax(1).cpu(), converged.cpu())


class Solved(NamedTuple):
    """The results of one start for B boards, after ``depth`` evaluations, on the device of the model.

    Attributes:
        depth: number of evaluations of f so far.
        answers: (B, C) uint8.
        residual: (B,) relative residual of the whole board at the last evaluation; zero for an explicit
            model.
        z: (B, C, D) iterates. If this start solves symmetric copies, they are those of the copies.
    """

    depth: int
    answers: Tensor
    residual: Tensor
    z: Tensor


@torch.no_grad()
def by_depth(
    model: BoardModel, questions: Tensor, depths: Sequence[int], number: int = 0
) -> Iterator[Solved]:
    """Solve ``questions`` (B, C) from start ``number``. Yields the boards at every depth of ``depths``.

    The depths must increase. There is one search, which continues from depth to depth. It uses the layer's
    solver for evaluation. An explicit model ignores ``depths`` and yields its boards once.
    """
    symmetry = _symmetry(model, number)
    tokens = _changed(questions, symmetry, model.device)
    layer = model.layer
    if not isinstance(layer, ImplicitSequenceLayer):
        out = model(tokens)
        zeros = torch.zeros(len(tokens), device=model.device)
        yield Solved(1, _changed_back(out.logits, symmetry), zeros, out.z)
        return
    x = model.inputs(tokens)
    solve = replace(layer.eval_solve, convergence=FixedIterations(depths[-1]))
    board = Residual(rtol=1, scope="sequence")  # measures whole boards; its tolerance is not used
    runner = Runner(Problem(layer.backbone, layer.backbone.prepare(x), model.start(x, number), solve))
    runner.begin()
    for depth in depths:
        while runner.passes < depth:
            runner.proceed()
        carry = runner.carry
        assert carry.fz is not None
        z = carry.proposal.clone()  # the next pass may overwrite the proposal
        everywhere = torch.ones_like(carry.tokens.settled)
        residual = board.judge(carry.z, carry.fz, carry.tokens.iterations, everywhere).residual[:, 0]
        yield Solved(depth, _changed_back(model.answers(z), symmetry), residual, z)


def check_starts(model: BoardModel, starts: int, solve: SolveOptions | None = None) -> None:
    """Raise an error unless ``model`` can search from ``starts`` different starts.

    Args:
        solve: solve options; by default the layer's ``eval_solve``.

    Raises:
        ValueError: ``starts`` is below 1; or it is above 1, and the model is explicit, or starts would be
            equal.
    """
    check_count("starts", starts)
    layer = model.layer
    if starts == 1:
        return
    if not isinstance(layer, ImplicitSequenceLayer):
        raise ValueError(f"an explicit model has one start, got {starts} starts: give --starts 1")
    guess = _options(model, solve).guess
    if guess.varies:
        return
    if not model.symmetries:
        raise ValueError(
            f"{starts} starts would all be equal with the guess {guess} and without symmetries: give "
            "--starts 1, or a guess that varies, such as noise, or --symmetries true"
        )
    if starts > different_symmetries(model.task):
        raise ValueError(
            f"with the guess {guess}, a {model.task} has at most {different_symmetries(model.task)} "
            f"different starts, one for each symmetry, got {starts}: give fewer, or a guess that varies, "
            "such as noise"
        )


def _options(model: BoardModel, solve: SolveOptions | None) -> SolveOptions:
    """``solve``, or by default the solve options of an implicit model for evaluation."""
    assert isinstance(model.layer, ImplicitSequenceLayer)
    return model.layer.eval_solve if solve is None else solve


def _symmetry(model: BoardModel, number: int) -> Symmetries | None:
    """The symmetry of start ``number``; ``None`` if the model does not solve symmetric copies."""
    if not model.symmetries:
        return None
    found = numbered_symmetry(model.task, model.config.size, number)
    return Symmetries(found.cells.to(model.device), found.tokens.to(model.device))


def _changed(questions: Tensor, symmetry: Symmetries | None, device: torch.device) -> Tensor:
    """The tokens (B, C) int64 of ``questions`` (B, C) after ``symmetry``."""
    tokens = questions.long().to(device)
    return tokens if symmetry is None else symmetry.apply(tokens)


def _changed_back(logits: Tensor, symmetry: Symmetries | None) -> Tensor:
    """The tokens (B, C) uint8 with the highest ``logits`` (B, C, V), changed back from ``symmetry``."""
    tokens = logits.argmax(-1)
    return (tokens if symmetry is None else symmetry.inverse().apply(tokens)).to(torch.uint8)


@contextmanager
def _compacting(model: BoardModel) -> Iterator[None]:
    """A context in which boards that have converged leave the batch of an implicit model."""
    layer = model.layer
    if not isinstance(layer, ImplicitSequenceLayer):
        yield
        return
    before, layer.compact = layer.compact, True
    try:
        yield
    finally:
        layer.compact = before
