"""Sudokus of size 4 and 9: generates random minimal puzzles, and applies symmetries that keep them valid."""

from math import isqrt

import torch
from torch import Tensor

from deqseq.tasks.reasoning.collect import CHUNK, collect, compiled
from deqseq.tasks.reasoning.puzzles import SUDOKU_SIZES, Puzzles, size_of


def generate(
    count: int,
    *,
    size: int = 9,
    rating: int = 0,
    seed: int,
    workers: int | None = None,
    progress: bool = False,
) -> Puzzles:
    """Generate random minimal Sudokus.

    A minimal Sudoku has one solution, and would have several if any of its clues were removed. Every puzzle
    starts as a full random grid. Its clues are removed in random order. A clue stays if the puzzle would have
    a second solution without it. Puzzles with a rating below ``rating`` are dropped.

    The rating of a puzzle is the number of dead ends of a search. The search first fills naked singles
    (cells with one candidate) and hidden singles (the only possible cell for a digit in a row, column or box)
    until no single is left. Then it takes the first of the cells with the fewest candidates, and guesses the
    digit of this cell. Smaller digits are tried first. A board is a dead end if a cell has no candidate, or
    if a digit has no possible cell in a row, column or box.

    Args:
        count: number of puzzles, P.
        size: 4 or 9.
        rating: smallest rating of a puzzle. Of 100 puzzles of size 9, about one has a rating of 10 or more.
        seed: in [0, 2³²). The same seed gives the same puzzles, with any number of workers.
        workers: number of threads, by default and at most the number of CPU cores.
        progress: show a progress bar.

    Raises:
        ValueError: a value is out of range, numba is not installed, or fewer than ``count`` different puzzles
            with such a rating are found.
    """
    if size not in SUDOKU_SIZES:
        raise ValueError(f"size must be 4 or 9, got {size!r}")
    if isinstance(rating, bool) or not isinstance(rating, int) or rating < 0:
        raise ValueError(f"rating must be a whole number >= 0, got {rating!r}")
    search = compiled("sudoku_search")
    geometry = search.geometry(size)
    return collect(
        lambda chunk: search.minimal_puzzles(seed, chunk * CHUNK, CHUNK, rating, geometry),
        count, seed=seed, workers=workers, progress=progress,
        advice=f"lower the count or the rating (now {rating}), or raise the size (now {size})",
    )  # fmt: skip


def augment(questions: Tensor, answers: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Apply random symmetries. A changed Sudoku is still valid, and has as many solutions as before.

    There are six symmetries: permute the digits; permute the bands (rows of boxes); permute the rows within
    each band; permute the stacks (columns of boxes); permute the columns within each stack; transpose the
    board. A combination of all symmetries is drawn uniformly for each puzzle. The rating of a puzzle may
    change a little, because the search that rates it reads cells and digits in a fixed order.

    Args:
        questions: (B, n²) int64, 0 for empty cells.
        answers: (B, n²) int64.
        generator: random generator on the device of the tensors. With the same seed, different kinds of
            devices draw different symmetries.

    Returns:
        The changed questions and answers, both (B, n²) int64.

    Raises:
        ValueError: wrong shapes, types or devices.
    """
    if questions.shape != answers.shape or questions.ndim != 2:
        shapes = f"{tuple(questions.shape)} and {tuple(answers.shape)}"
        raise ValueError(f"questions and answers must have the same shape (B, n²), got {shapes}")
    if questions.dtype != torch.int64 or answers.dtype != torch.int64:
        raise ValueError(f"boards must be int64, got {questions.dtype} and {answers.dtype}")
    device = questions.device
    if answers.device != device or generator.device.type != device.type:
        raise ValueError(f"answers and generator must be on {device}, like the questions")
    batch, n = len(questions), size_of("sudoku", questions.shape[1])
    b = isqrt(n)

    def permutations(*shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=generator, device=device).argsort(-1)

    def lines() -> Tensor:
        return (permutations(b)[:, :, None] * b + permutations(b, b)).flatten(1)

    # ``cells`` maps every new cell to the old cell whose digit it takes. ``digits`` maps old to new digits.
    cells = lines()[:, :, None] * n + lines()[:, None, :]
    transposed = torch.rand(batch, 1, 1, generator=generator, device=device) < 0.5
    cells = torch.where(transposed, cells.transpose(1, 2), cells).flatten(1)
    digits = torch.nn.functional.pad(permutations(n) + 1, (1, 0))
    return digits.gather(1, questions.gather(1, cells)), digits.gather(1, answers.gather(1, cells))
