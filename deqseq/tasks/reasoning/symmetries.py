"""Symmetries of boards: changes after which a puzzle is still valid and has as many solutions as before.

A Sudoku has six kinds: permute the digits; permute the bands (rows of boxes); permute the rows within each
band; permute the stacks (columns of boxes); permute the columns within each stack; transpose the board. The
rating of a Sudoku may change a little, because the search that rates it reads cells and digits in a fixed
order. A maze can be rotated and reflected.

Shapes: B boards, n cells along a side of a board (its size), C = n² cells, V tokens in the vocabulary.
"""

from dataclasses import dataclass
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from deqseq.checks import check_count
from deqseq.tasks.reasoning.puzzles import CHARACTERS, Task, check_task, size_of


@dataclass(frozen=True)
class Symmetries:
    """A symmetry for each of B boards, or one symmetry for any number of boards (B = 1).

    Attributes:
        cells: (B, C) int64. Cell i of a changed board has the token of cell ``cells[:, i]``, changed too.
        tokens: (B, V) int64. Token t becomes ``tokens[:, t]``.
    """

    cells: Tensor
    tokens: Tensor

    def apply(self, boards: Tensor) -> Tensor:
        """Change the boards (B, C) int64."""
        cells, tokens = self._expanded(len(boards))
        return tokens.gather(1, boards.gather(1, cells))

    def undo(self, boards: Tensor) -> Tensor:
        """Change the boards (B, C) int64 back: ``undo(apply(boards))`` equals ``boards``."""
        cells, tokens = (permutation.argsort(1) for permutation in self._expanded(len(boards)))
        return tokens.gather(1, boards).gather(1, cells)

    def _expanded(self, count: int) -> tuple[Tensor, Tensor]:
        return self.cells.expand(count, -1), self.tokens.expand(count, -1)


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
    check_count("count", count)
    n = size_of(task, size**2)
    draw = _of_sudokus if task == "sudoku" else _of_mazes
    return draw(n, count, generator)


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


def _of_mazes(n: int, count: int, generator: torch.Generator) -> Symmetries:
    device = generator.device
    cells = torch.arange(n * n, device=device).view(n, n)
    turns = torch.stack([torch.rot90(board, k).flatten() for board in (cells, cells.T) for k in range(4)])
    choice = torch.randint(8, (count,), generator=generator, device=device)
    tokens = torch.arange(len(CHARACTERS["maze"]), device=device).expand(count, -1)
    return Symmetries(turns[choice], tokens)
