"""Symmetries of boards. After a symmetry, a puzzle is still valid and has as many solutions as before.

A symmetry of a Sudoku permutes the digits, the bands (rows of boxes), the rows within each band, the stacks
(columns of boxes) and the columns within each stack. It may also transpose the board. The rating may change a
little, because the search that rates Sudokus reads cells and digits in a fixed order. A symmetry of a maze
rotates or reflects the board.

Shapes: B boards, n cells along a side of a board (its size), C = n² cells, V tokens in the vocabulary.
"""

from dataclasses import dataclass
from math import inf, isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from deqseq.checks import check_count
from deqseq.tasks.reasoning.puzzles import CHARACTERS, Task, check_task, size_of

_TURNS = 8  # rotations and reflections of a square


@dataclass(frozen=True)
class Symmetries:
    """A symmetry for each of B boards, or one symmetry for any number of boards (B = 1).

    Attributes:
        cells: (B, C) int64. Cell i of the new board takes its token from the old board's cell
            ``cells[:, i]``.
        tokens: (B, V) int64. Then ``tokens[:, t]`` replaces the token t.
    """

    cells: Tensor
    tokens: Tensor

    def apply(self, boards: Tensor) -> Tensor:
        """Change the boards (B, C) int64.

        Raises:
            ValueError: the boards have another shape or type.
        """
        if boards.dtype != torch.int64:
            raise ValueError(f"boards must be int64, got {boards.dtype}")
        count, cells = self.cells.shape
        if boards.ndim != 2 or boards.shape[1] != cells or count not in (1, len(boards)):
            rule = f"({'B' if count == 1 else count}, {cells})"
            raise ValueError(f"boards must have shape {rule}, got {tuple(boards.shape)}")
        places, tokens = (permutation.expand(len(boards), -1) for permutation in (self.cells, self.tokens))
        return tokens.gather(1, boards.gather(1, places))

    def inverse(self) -> "Symmetries":
        """The symmetries that change the boards back."""
        return Symmetries(self.cells.argsort(1), self.tokens.argsort(1))


def random_symmetries(task: Task, size: int, count: int, generator: torch.Generator) -> Symmetries:
    """Draw a symmetry for each of ``count`` boards, uniformly from all symmetries.

    Args:
        task: ``"sudoku"`` or ``"maze"``.
        size: cells along a side of a board, n.
        generator: draws the symmetries, and its device holds them. With the same seed, different kinds of
            devices draw different symmetries.

    Raises:
        ValueError: the task is unknown, no board of it has this size, or ``count`` is below 1.
    """
    check_task(task)
    check_count("size", size)
    check_count("count", count)
    size_of(task, size**2)
    if task == "sudoku":
        return _of_sudokus(size, count, generator)
    choice = torch.randint(_TURNS, (count,), generator=generator, device=generator.device)
    return _of_mazes(size, choice)


def numbered_symmetry(task: Task, size: int, number: int) -> Symmetries:
    """Symmetry ``number`` (0, 1, ...) of boards of this size, on the CPU. Number 0 changes nothing.

    Mazes have eight symmetries, so their symmetry 8 is symmetry 0 again. Those of Sudokus are random, and
    some may be equal.
    """
    if task == "maze":
        return _of_mazes(size, torch.tensor([number % _TURNS], device="cpu"))
    if number == 0:
        return Symmetries(torch.arange(size**2)[None], torch.arange(size + 1)[None])
    return random_symmetries(task, size, 1, torch.Generator("cpu").manual_seed(number))


def different_symmetries(task: Task) -> float:
    """The number of numbers that :func:`numbered_symmetry` takes before its symmetries repeat."""
    return _TURNS if task == "maze" else inf


def _of_sudokus(n: int, count: int, generator: torch.Generator) -> Symmetries:
    b, device = isqrt(n), generator.device

    def permutations(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator, device=device).argsort(-1)

    def lines() -> Tensor:
        return (permutations(b)[:, :, None] * b + permutations(b, b)).flatten(1)

    cells = lines()[:, :, None] * n + lines()[:, None, :]
    transposed = torch.rand(count, 1, 1, generator=generator, device=device) < 0.5
    cells = torch.where(transposed, cells.transpose(1, 2), cells).flatten(1)
    return Symmetries(cells, F.pad(permutations(n) + 1, (1, 0)))  # token 0, an empty cell, stays


def _of_mazes(n: int, choice: Tensor) -> Symmetries:
    """Apply to each board one of eight rotations and reflections: ``choice`` (B,), from 0 to 7."""
    device = choice.device
    cells = torch.arange(n * n, device=device).view(n, n)
    turns = torch.stack([torch.rot90(board, k).flatten() for board in (cells, cells.T) for k in range(4)])
    tokens = torch.arange(len(CHARACTERS["maze"]), device=device).expand(len(choice), -1)
    return Symmetries(turns[choice], tokens)
