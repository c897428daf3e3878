"""Evaluation on puzzles, at any depth and breadth.

Depth is the number of evaluations of f in a search. Breadth is the number of starts: searches for the same
puzzle, or symmetric copies of it, from different initial guesses.

Shapes: P puzzles, C cells of a board.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from tqdm.auto import tqdm

from deqseq.checks import check_count
from deqseq.layer import ImplicitSequenceLayer
from deqseq.policies import Residual
from deqseq.problem import SolveOptions
from deqseq.tasks.common.models import needed_layer
from deqseq.tasks.common.results import Column, column
from deqseq.tasks.common.runs import check_model, read_record, read_settings
from deqseq.tasks.common.settings import build
from deqseq.tasks.reasoning.model import BoardModel, check_guess
from deqseq.tasks.reasoning.puzzles import Puzzles
from deqseq.tasks.reasoning.search import by_depth, check_starts, search
from deqseq.tasks.reasoning.settings import TrainSettings


@dataclass
class Evaluation:
    """The result of a model on a set of puzzles, at one depth and breadth. Shares are in [0, 1].

    Attributes:
        depth: number of evaluations of f for each start; ``None`` for an explicit model.
        starts: number of starts. The start with the smallest residual gives the answer to a puzzle.
        exact: share of puzzles whose answer is right in every cell.
        vote: share of puzzles for which the most frequent answer of all starts is right.
        cells: share of right cells.
        residual: median over the puzzles of the board's relative residual; ``None`` for an explicit model.
        auroc: probability that a right answer has a smaller residual than a wrong answer. ``None`` for an
            explicit model, or if all answers are right, or if all answers are wrong.
    """

    depth: int | None
    starts: int
    exact: float
    vote: float
    cells: float
    residual: float | None
    auroc: float | None


@dataclass
class Adaptive:
    """The result of searches that end when the board's residual meets a tolerance.

    Attributes:
        tolerance: relative residual of the board at which a search ends.
        max_iter: maximum number of evaluations from each start.
        starts: maximum number of starts. A search that does not meet the tolerance is repeated from the next.
        exact: share of puzzles whose answer is right in every cell.
        converged: share of puzzles for which a search met the tolerance.
        exact_if_converged: share of right answers among these puzzles; ``None`` if there are none.
        auroc: probability that a right answer has a smaller residual than a wrong answer. ``None`` if all
            answers are right, or if all answers are wrong.
        evaluations: mean number of evaluations for a puzzle, from all its starts.
        seconds: duration.
    """

    tolerance: float
    max_iter: int
    starts: int
    exact: float
    converged: float
    exact_if_converged: float | None
    auroc: float | None
    evaluations: float
    seconds: float


COLUMNS: tuple[Column, ...] = (
    column("depth"), column("starts"), column("exact", ".4f"), column("vote", ".4f"), column("cells", ".4f"),
    column("residual", ".2e"), column("auroc", ".4f"),
)  # fmt: skip
ADAPTIVE: tuple[Column, ...] = (
    column("tolerance", "g"), column("max_iter"), column("starts"), column("exact", ".4f"),
    column("converged", ".4f"), column("exact_if_converged", ".4f"), column("auroc", ".4f"),
    column("evaluations", ".1f"), column("seconds", ".1f"),
)  # fmt: skip


def load(
    path: str | Path, solver: Any = None, guess: Any = None, symmetries: bool | None = None
) -> tuple[BoardModel, TrainSettings]:
    """Load a trained model and the settings of its run. The model is put on the GPU if there is one.

    Args:
        path: folder of the run.
        solver, guess: name or mapping of a solver or a guess that replaces the run's for evaluation; ``None``
            keeps it.
        symmetries: if true, every start but the first solves a symmetric copy of a puzzle. ``None`` means the
            setting ``augment`` of the run.

    Raises:
        ValueError: ``path`` holds no finished run of this task, or its model is damaged or cannot be read; a
            solver, a guess or ``symmetries`` is given for an explicit model; a solver or a guess is unknown,
            or has a value out of range; the guess is ``previous``.
    """
    try:
        settings = build(TrainSettings, read_settings(path))
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded as a run of this task: {error}") from error
    read_record(path)
    check_model(path)
    try:
        model: Any = BoardModel.from_pretrained(path)
    except Exception as error:  # transformers and safetensors raise many classes of errors
        raise ValueError(f"the model in {path} cannot be read: {error}") from error
    given = {name: part for name, part in (("solver", solver), ("guess", guess)) if part is not None}
    for name in [*given, *([] if symmetries is None else ["symmetries"])]:
        needed_layer(model, f"--{name}")
    if given:
        model.layer.eval_solve = replace(model.layer.eval_solve, **given)
        check_guess(model.layer)
    model.symmetries = settings.augment if symmetries is None else symmetries
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model.eval(), settings


class Accuracy(NamedTuple):
    """The share of solved puzzles, in [0, 1], and the number of puzzles that it is measured on."""

    share: float
    puzzles: int


def accuracy(
    model: BoardModel, puzzles: Puzzles, depth: int, batch_size: int = 512, least: float | None = None
) -> Accuracy:
    """The share of puzzles solved from start 0 in ``depth`` evaluations. Calls ``model.eval()``.

    Args:
        least: a share in [0, 1], or ``None``. With a share, the test can end after any batch: if no puzzle
            has been solved, or if the share of all puzzles can no longer reach ``least``. The result is
            then the share of the puzzles tried so far.
    """
    count, tried, right = len(puzzles.questions), 0, 0
    for _, solved in _residuals(model, puzzles, depth, batch_size):
        tried += len(solved)
        right += int(solved.sum())
        if least is not None and (right == 0 or (count - tried + right) / count < least):
            break
    return Accuracy(right / tried, tried)


def residuals(
    model: BoardModel, puzzles: Puzzles, depth: int, batch_size: int = 512
) -> tuple[Tensor, Tensor]:
    """Solve every puzzle from start 0 in ``depth`` evaluations. Calls ``model.eval()``.

    Returns the relative residual of each board, (P,), and whether its answer is right, (P,) bool.
    """
    batches = list(_residuals(model, puzzles, depth, batch_size))
    residual, right = (torch.cat(column) for column in zip(*batches, strict=True))
    return residual, right


def _residuals(
    model: BoardModel, puzzles: Puzzles, depth: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The results of :func:`residuals`, batch by batch."""
    model.eval()
    for questions, answers in zip(*(t.split(batch_size) for t in puzzles[:2]), strict=True):
        with model.precision():
            (found,) = by_depth(model, questions, [depth])
        yield found.residual.float(), (found.answers == answers.to(model.device)).all(1)


@torch.no_grad()
def evaluate(
    model: BoardModel, puzzles: Puzzles, depths: Sequence[int], starts: int = 1, batch_size: int = 512,
    progress: bool = False,
) -> list[Evaluation]:  # fmt: skip
    """Solve the puzzles at every depth, and with several numbers of starts: 1, 2, 4, ... and ``starts``.

    Args:
        depths: numbers of evaluations, increasing.
        starts: maximum number of starts. Start n begins at the guess with number n, counted from 0.
        batch_size: number of puzzles solved together. Larger batches need more memory.
        progress: show a progress bar.

    Raises:
        ValueError: the depths do not increase, a number is below 1, all starts would be equal, or the
            answers do not fit into this machine's memory.
    """
    depths = list(depths)
    if not depths or depths[0] < 1 or depths != sorted(set(depths)):
        raise ValueError(f"depths must increase and be at least 1, got {depths}")
    check_count("batch_size", batch_size)
    check_starts(model, starts)
    explicit = not isinstance(model.layer, ImplicitSequenceLayer)
    depths = depths[:1] if explicit else depths
    size, memory = len(depths) * starts * puzzles.answers.numel(), psutil.virtual_memory().total
    if size > memory:
        raise ValueError(
            f"the answers of {starts} starts take {size / 2**30:,.0f} GiB, and this machine has "
            f"{memory / 2**30:,.0f} GiB of memory: choose fewer starts, depths or puzzles"
        )
    model.eval()
    answers = torch.empty(len(depths), starts, *puzzles.answers.shape, dtype=torch.uint8)
    residuals = torch.empty(len(depths), starts, len(puzzles.ratings))
    rows = torch.arange(len(puzzles.ratings)).split(batch_size)
    bar = tqdm(total=starts * len(rows), desc="solves", leave=False, disable=None if progress else True)
    for part in rows:
        for number in range(starts):
            with model.precision():
                searched = by_depth(model, puzzles.questions[part], depths, number)
                for place, found in enumerate(searched):
                    answers[place, number, part] = found.answers.cpu()
                    residuals[place, number, part] = found.residual.float().cpu()
            bar.update()
    bar.close()
    return [
        _judged(None if explicit else depth, answers[i, :n], residuals[i, :n], puzzles.answers)
        for i, depth in enumerate(depths)
        for n in breadths(starts)
    ]


def breadths(starts: int) -> list[int]:
    """The numbers of starts to test: 1, 2, 4, ... and ``starts``."""
    return [2**i for i in range(starts.bit_length()) if 2**i < starts] + [starts]


def _judged(depth: int | None, answers: Tensor, residuals: Tensor, right: Tensor) -> Evaluation:
    """Compare the ``answers`` (S, P, C) of S starts with the ``right`` answers (P, C).

    For each puzzle, the answer with the smallest residual counts. ``residuals`` is (S, P).
    """
    starts, puzzles = residuals.shape
    residual, best = residuals.nan_to_num(torch.inf).min(0)
    chosen = answers[best, torch.arange(puzzles)]
    cells = chosen == right
    exact = cells.all(1)
    voted = exact
    if starts > 1:
        votes = torch.stack([_vote(answers[:, p]) for p in range(puzzles)])
        voted = (votes == right).all(1)
    return Evaluation(
        depth, starts, exact.double().mean().item(), voted.double().mean().item(),
        cells.double().mean().item(), None if depth is None else residual.median().item(),
        None if depth is None else auroc(residual, exact),
    )  # fmt: skip


def _vote(answers: Tensor) -> Tensor:
    """The most frequent of the ``answers`` (S, C) of S starts. If several are equally frequent, the first."""
    first = Counter(row.numpy().tobytes() for row in answers).most_common(1)[0][0]
    return torch.frombuffer(bytearray(first), dtype=torch.uint8)


def auroc(residual: Tensor, right: Tensor) -> float | None:
    """Probability that a ``right`` (P,) answer has a smaller ``residual`` (P,) than a wrong answer.

    A pair with equal residuals counts half. A residual that is NaN counts as infinite. ``None`` if all
    answers are right, or if all are wrong.
    """
    residual = residual.double().where(~residual.isnan(), torch.inf)
    good, bad = residual[right], residual[~right]
    if not len(good) or not len(bad):
        return None
    bad = bad.sort().values
    # For each right answer, count the wrong answers with a smaller or equal residual.
    at_most = torch.searchsorted(bad, good, right=True)
    equal = at_most - torch.searchsorted(bad, good)
    return float((len(bad) - at_most + 0.5 * equal.double()).sum() / (len(good) * len(bad)))


def adaptive(
    model: BoardModel, puzzles: Puzzles, solve: SolveOptions | None = None, batch_size: int = 512,
    starts: int = 1,
) -> Adaptive:  # fmt: skip
    """Solve each puzzle until its residual meets the tolerance.

    Boards that have converged leave the batch, so easy boards cost less.

    Args:
        solve: solve options with the policy ``Residual``; by default the layer's ``eval_solve``.
        batch_size: number of puzzles solved together.
        starts: maximum number of starts for a puzzle.

    Raises:
        ValueError: the model is explicit, the policy is not ``Residual`` with scope ``"sequence"``, or all
            starts would be equal.
    """
    layer = model.layer
    if not isinstance(layer, ImplicitSequenceLayer):
        raise ValueError("an explicit model applies the map once, so its depth cannot adapt")
    check_count("batch_size", batch_size)
    solve = solve or layer.eval_solve
    policy = solve.convergence
    if not isinstance(policy, Residual) or policy.scope != "sequence":
        raise ValueError(f"the depth adapts with the policy Residual of scope sequence only, got {policy}")
    model.eval()
    parts: list[tuple[Tensor, ...]] = []
    begin = time.perf_counter()
    for questions, answers in zip(*(t.split(batch_size) for t in puzzles[:2]), strict=True):
        found = search(model, questions, starts, solve)
        right = (found.answers == answers).all(1)
        parts.append((right, found.converged, found.evaluations, found.residual))
    right, converged, evaluations, residual = (torch.cat(column) for column in zip(*parts, strict=True))
    return Adaptive(
        policy.rtol, policy.max_iter, starts, right.double().mean().item(), converged.double().mean().item(),
        right[converged].double().mean().item() if converged.any() else None,
        auroc(residual, right), evaluations.double().mean().item(),
        time.perf_counter() - begin,
    )  # fmt: skip
