"""Sets of puzzles: how boards become tokens, and the rules that can be checked without a search.

Shapes: P puzzles, n cells along a side of a board (its size), C = n² cells.
"""

from collections.abc import Iterator
from functools import cache
from math import isqrt
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Task = Literal["sudoku", "maze"]
TASKS: tuple[Task, ...] = get_args(Task)
SUDOKU_SIZES = (4, 9)

WALL, FREE, START, GOAL, PATH = range(1, 6)
"""The tokens of mazes, as in the published data of HRM and EqR. In these data, token 0 is padding."""

CHARACTERS: dict[Task, str] = {"sudoku": ".123456789", "maze": "\0# SGo"}
"""The characters of boards in CSV files. Token i is the character with index i, counted from 0."""


class Puzzles(NamedTuple):
    """Questions with their answers. Cells are in reading order.

    The tokens of a Sudoku are 0 for an empty cell and 1 to n for digits. The tokens of a maze are ``WALL``,
    ``FREE``, ``START`` and ``GOAL``. In the answer to a maze, ``PATH`` replaces ``FREE`` on the path from
    start to goal.

    Attributes:
        questions: (P, C) uint8.
        answers: (P, C) uint8.
        ratings: (P,) int64. For a Sudoku, the number of dead ends in the search that rates it. For a maze,
            the number of steps from start to goal.
    """

    questions: Tensor
    answers: Tensor
    ratings: Tensor


def check_task(task: str) -> None:
    """Raise ``ValueError`` unless ``task`` is ``"sudoku"`` or ``"maze"``."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")


def size_of(task: Task, cells: int) -> int:
    """The size n of a board with ``cells`` cells.

    Raises:
        ValueError: no board of ``task`` has this number of cells.
    """
    n = isqrt(cells)
    if task == "sudoku" and (n * n != cells or n not in SUDOKU_SIZES):
        raise ValueError(f"a Sudoku must have 16 or 81 cells, got {cells}")
    if n * n != cells or n < 2:
        raise ValueError(f"a maze must be square, got {cells} cells")
    return n


@cache
def sudoku_units(n: int) -> Tensor:
    """The indices of the cells in every row, column and box of a Sudoku: (3n, n) int64."""
    b = isqrt(n)
    cells = torch.arange(n * n, device="cpu")
    boxes = cells.reshape(b, b, b, b).transpose(1, 2)
    return torch.cat([cells.reshape(n, n), cells.reshape(n, n).T, boxes.reshape(n, n)])


def broken_rules(task: Task, puzzles: Puzzles) -> list[tuple[int, str]]:
    """The index and the first broken rule of every puzzle that breaks a rule, by ascending index.

    Checks only rules that need no search:

    - Sudokus: the answer has every digit in every row, column and box, and keeps the clues.
    - Mazes: there is one start and one goal. The answer differs from the question only where free cells
      become path.
    """
    found: dict[int, str] = {}
    for rule, kept in _rules(task, *puzzles[:2]):
        for index in (~kept).nonzero().flatten().tolist():
            found.setdefault(index, rule)
    return sorted(found.items())


def _rules(task: Task, questions: Tensor, answers: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield every rule in words, with a tensor (P,) bool that is true for the puzzles that keep this rule."""
    n, device = size_of(task, questions.shape[1]), questions.device
    if task == "sudoku":
        yield f"the question must have digits up to {n} and dots", (questions <= n).all(1)
        units = answers[:, sudoku_units(n).to(device)].sort(-1).values
        full = (units == torch.arange(1, n + 1, device=device)).all(-1).all(-1)
        yield "the answer must have every digit in every row, column and box", full
        yield "the answer must keep the clues", ((questions == 0) | (questions == answers)).all(1)
        return
    yield (
        "the question must have walls, free cells, S and G only",
        ((questions > 0) & (questions < PATH)).all(1),
    )
    for name, token in (("start", START), ("goal", GOAL)):
        yield f"the question must have one {name}", (questions == token).sum(1) == 1
    marked = (questions == FREE) & (answers == PATH)
    yield "the answer must be the question with a path marked", (marked | (questions == answers)).all(1)
