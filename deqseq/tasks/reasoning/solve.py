"""Solves puzzles with a trained model, and says which of the answers can be trusted."""

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from deqseq.layer import ImplicitSequenceLayer
from deqseq.tasks.common.files import PART
from deqseq.tasks.common.models import solve_options
from deqseq.tasks.reasoning.evaluate import load
from deqseq.tasks.reasoning.files import BROKEN, open_csv
from deqseq.tasks.reasoning.model import BoardModel
from deqseq.tasks.reasoning.plots import plot_solving
from deqseq.tasks.reasoning.puzzles import (
    CHARACTERS,
    GOAL,
    PATH,
    START,
    Puzzles,
    Task,
    broken_rules,
    sudoku_units,
)
from deqseq.tasks.reasoning.search import Found, by_depth, search

_BATCH = 256  # boards solved together
_COLUMNS = ("source", "question", "answer", "residual", "evaluations", "trust")


@dataclass(frozen=True)
class Answer:
    """A model's answer to a puzzle.

    Attributes:
        board: the answer as text, in reading order.
        residual: relative residual of the whole board at the last evaluation; ``None`` for an explicit model.
        evaluations: number of evaluations of f from all starts; ``None`` for an explicit model.
        fault: the reason not to trust the answer: it breaks a rule, or the search did not converge. ``None``
            if the answer can be trusted.
    """

    board: str
    residual: float | None
    evaluations: int | None
    fault: str | None


def solve(
    model: Path, puzzle: str, output: Path | None, figure: Path | None, *,
    solver: str | dict[str, Any] | None, guess: str | dict[str, Any] | None, starts: int | None,
    symmetries: bool | None, **limits: Any,
) -> None:  # fmt: skip
    """Solve a puzzle or the puzzles in files. Prints the answers, or writes them to the CSV file ``output``.

    Args:
        figure: PNG file that shows the search for the first puzzle; a GIF is written beside it.
        solver, guess, symmetries: as for :func:`~deqseq.tasks.reasoning.evaluate.load`.
        starts: maximum number of starts for a puzzle; ``None`` means that of the run.
        limits: limits of each search, as for :func:`answer`.

    Raises:
        ValueError: as in :func:`questions` and :func:`answer`; there is no trained model; ``output`` is one
            of the files with puzzles.
    """
    if output is not None and output.resolve() in [file.resolve() for file in _files(puzzle)]:
        raise ValueError(f"--output would overwrite the puzzles in {output}: choose another name")
    network, settings = load(model, solver, guess, symmetries)
    found = list(questions(puzzle, settings.task, settings.size))
    if starts is None:
        starts = 1 if settings.explicit else settings.starts
    boards = [question for _, question in found]
    answers = answer(network, boards, starts=starts, progress=True, **limits)
    if output is not None:
        _write(output, found, answers, settings.task)
        trusted = sum(a.fault is None for a in answers)
        print(f"wrote {len(answers)} answers to {output}; {trusted} can be trusted")
    else:
        for (source, _), one in zip(found, answers, strict=True):
            print(_shown(source, one, settings.size))
    if figure is not None:
        _draw(network, found[0][1], figure)


def questions(puzzle: str, task: Task, size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tokens (C,) uint8 of each question in a text, a CSV file or a folder.

    C is the number of cells of a board.

    Raises:
        ValueError: a file cannot be read or has no column question, a folder has no CSV files, or a board has
            another size or other characters than the puzzles of ``task``.
    """
    files = _files(puzzle)
    for file in files:
        yield from _in_file(file, task, size)
    if not files:
        try:
            yield "", board(puzzle, task, size)
        except ValueError as error:
            named = "/" in puzzle or Path(puzzle).suffix[1:].isalpha()
            raise ValueError(f"{error}, and there is no file {puzzle}" if named else str(error)) from None


def _files(puzzle: str) -> list[Path]:
    """The CSV files that ``puzzle`` names. The list is empty if ``puzzle`` is the text of a board."""
    endings = (".csv", ".csv.gz")
    if os.path.isdir(puzzle):  # false if the text is too long to be a path
        found = sorted(path for path in Path(puzzle).iterdir() if path.name.lower().endswith(endings))
        if not found:
            raise ValueError(f"{puzzle} has no CSV files")
        return found
    if puzzle.lower().endswith(endings):
        return [Path(puzzle)]
    if os.path.isfile(puzzle):
        raise ValueError(f"a file of puzzles must end in .csv or .csv.gz, got {puzzle}")
    return []


def _in_file(file: Path, task: Task, size: int) -> Iterator[tuple[str, Tensor]]:
    count = 0
    with open_csv(file) as lines:
        reader = csv.DictReader(lines)
        try:
            names = list(reader.fieldnames or ())
            if names.count("question") != 1:
                raise ValueError(f"must have one column question, got {names}")
            for row in reader:
                count += 1
                yield f"{file.name}, puzzle {count}", board(row["question"] or "", task, size)
        except (ValueError, *BROKEN) as error:
            raise ValueError(f"{file}, line {max(1, reader.line_num)}: {error}") from error
    if not count:
        raise ValueError(f"{file} has no puzzles")


def board(text: str, task: Task, size: int) -> Tensor:
    """Convert the text of a board to tokens (C,) uint8, one for each of the C cells.

    Raises:
        ValueError: the text does not have ``size * size`` cells, or has a character that ``task`` does not
            use.
    """
    cells = text.replace("\r", "").replace("\n", "")
    if task == "sudoku":
        cells = "".join(cells.split()).replace("0", ".").replace("_", ".")
    allowed = CHARACTERS[task].lstrip("\0")
    if len(cells) != size * size:
        raise ValueError(
            f"the model solves boards of {size} x {size} = {size * size} cells, got {len(cells)} characters"
        )
    known = allowed[: size + 1] if task == "sudoku" else allowed.replace("o", "")
    if wrong := sorted(set(cells) - set(known)):
        raise ValueError(f"a board must have the characters {known!r} only, got {wrong[0]!r}")
    return torch.tensor([CHARACTERS[task].index(c) for c in cells], dtype=torch.uint8)


def answer(
    model: BoardModel, boards: Sequence[Tensor], *, starts: int = 1, rtol: float | None = None,
    max_iter: int | None = None, progress: bool = False,
) -> list[Answer]:  # fmt: skip
    """Solve the puzzles ``boards``. Each board has the tokens (C,) uint8 of its C cells.

    Args:
        starts: maximum number of starts for a puzzle. The next start is tried while the answer cannot be
            trusted. If no answer can be trusted, the one with the smallest residual is kept.
        rtol, max_iter: limits of each search. By default, the limits of the model.
        progress: show a progress bar.

    Raises:
        ValueError: ``starts`` or a limit is out of range, or is given for an explicit model; all starts would
            be equal.
    """
    options = solve_options(model, rtol=rtol, max_iter=max_iter)
    explicit = not isinstance(model.layer, ImplicitSequenceLayer)
    answers: list[Answer] = []

    def trusted(questions: Tensor, found: Found) -> Tensor:
        broken = _faults(model.task, questions, found.answers)
        return found.converged & torch.tensor([row not in broken for row in range(len(questions))])

    rows = torch.stack(list(boards)).split(_BATCH)
    for part in tqdm(rows, desc="puzzles", leave=False, disable=None if progress else True):
        found = search(model, part, starts, options, trusted)
        faults = _faults(model.task, part, found.answers)
        for row, cells in enumerate(found.answers.tolist()):
            unfinished = None if found.converged[row] else "the search did not converge"
            answers.append(Answer(
                "".join(CHARACTERS[model.task][c] if c else "?" for c in cells),
                None if explicit else float(found.residual[row]),
                None if explicit else int(found.evaluations[row]),
                faults.get(row, unfinished),
            ))  # fmt: skip
    return answers


def _faults(task: Task, questions: Tensor, answers: Tensor) -> dict[int, str]:
    """Find the answers that break a rule. Returns the row of each such answer, with the rule in words."""
    marked = Puzzles(questions, answers, torch.zeros(len(questions), dtype=torch.int64))
    more = _gaps(questions, answers) if task == "maze" else _clashes(questions)
    return dict(broken_rules(task, marked)) | more


def _clashes(questions: Tensor) -> dict[int, str]:
    """Find the Sudokus with equal clues in a row, column or box.

    Returns the row of each such Sudoku, with an error message.
    """
    n = math.isqrt(questions.shape[1])
    units = questions[:, sudoku_units(n)].sort(-1).values
    clash = ((units[..., 1:] == units[..., :-1]) & (units[..., 1:] > 0)).any(-1).any(-1)
    why = "the puzzle has equal clues in a row, column or box"
    return {row: why for row in clash.nonzero()[:, 0].tolist()}


def _gaps(questions: Tensor, answers: Tensor) -> dict[int, str]:
    """Find the mazes whose marked cells are not a path from start to goal.

    Returns the row of each such maze, with an error message.
    """
    n, found = math.isqrt(questions.shape[1]), {}
    for row, (question, answer) in enumerate(zip(questions.tolist(), answers.tolist(), strict=True)):
        ends = {i for i, token in enumerate(question) if token in (START, GOAL)}
        path = {i for i, token in enumerate(answer) if token == PATH} | ends
        degrees = [
            sum(i + step in path for step in _steps(i, n)) == (1 if i in ends else 2) for i in sorted(path)
        ]
        joined = not ends or _reached(min(ends), path, n) == path  # a board without ends breaks another rule
        if not (all(degrees) and joined):
            found[row] = "the marked cells are not a path from start to goal"
    return found


def _reached(start: int, cells: set[int], n: int) -> set[int]:
    """The cells of an n x n board that can be reached from ``start`` by steps inside ``cells``."""
    found, ahead = {start}, [start]
    while ahead:
        cell = ahead.pop()
        new = {cell + step for step in _steps(cell, n)} & cells - found
        found |= new
        ahead += new
    return found


def _steps(cell: int, n: int) -> list[int]:
    """Numbers to add to the index ``cell`` to get the indices of its neighbours, on an n x n board."""
    column = cell % n
    return [-n, n, *([-1] if column else []), *([1] if column < n - 1 else [])]


def _shown(source: str, one: Answer, size: int) -> str:
    lines = [one.board[i : i + size] for i in range(0, len(one.board), size)]
    said = "trust it: it keeps the rules" if one.fault is None else f"do not trust it: {one.fault}"
    if one.residual is not None:
        said += " and the search converged" if one.fault is None else ""
        said += f" (residual {one.residual:.1e} after {one.evaluations} evaluations)"
    return "\n".join([*([source] if source else []), *lines, said, ""])


def _write(path: Path, found: Sequence[tuple[str, Tensor]], answers: Sequence[Answer], task: Task) -> None:
    part = path.with_name(path.name + PART)
    path.parent.mkdir(parents=True, exist_ok=True)
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for (source, question), one in zip(found, answers, strict=True):
            text = "".join(CHARACTERS[task][c] for c in question.tolist())
            residual = "" if one.residual is None else f"{one.residual:.3e}"
            writer.writerow([source, text, one.board, residual, one.evaluations or "", one.fault or "yes"])
    part.replace(path)


def _draw(model: BoardModel, question: Tensor, path: Path) -> None:
    """Draw the model's answer at several depths, from 1 to 64 evaluations of f, from start 0."""
    depths = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64]
    with model.precision():
        steps = by_depth(model, question[None], depths)
        boards = [(s.depth, s.answers[0].cpu(), float(s.residual[0])) for s in steps]
    if plot_solving(model.task, question, boards, None, path):
        print(f"wrote {path} and {path.with_suffix('.gif')}")
