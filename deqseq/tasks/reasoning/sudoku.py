"""Sudokus of size 4 and 9: random minimal puzzles, and the symmetries that keep them valid."""

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
    """Random minimal Sudokus: they have one solution, but several if any one of their clues is removed.

    Every puzzle starts from its own random grid. Its clues are removed in random order. A clue stays if the
    puzzle would have a second solution without it. Puzzles rated below ``rating`` are dropped.

    The rating is the number of dead ends of a search. The search fills naked singles (cells with one
    candidate) and hidden singles (digits with one place in a row, column or box) until no single is left.
    Then it guesses at the first cell with the fewest candidates, smallest digit first. A board is a dead end
    if a cell has no candidate, or if a digit has no place in a row, column or box.

    Args:
        count: number of puzzles, P.
        size: 4 or 9.
        rating: least rating. About 1 puzzle of size 9 in 100 reaches 10.
        seed: in [0, 2³²). The same seed gives the same puzzles, with any number of workers.
        workers: number of threads, by default the number of CPU cores.
        progress: show a progress bar.

    Raises:
        ValueError: a value out of range, numba is not installed, or no more puzzles of this rating are found.
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
    """Apply random symmetries: a Sudoku stays a Sudoku, and keeps its number of solutions.

    The symmetries are: permute the digits; permute the bands (rows of boxes), and the rows within each band;
    permute the columns of boxes, and the columns within each; transpose. For each puzzle, a combination of
    them is drawn uniformly. The rating may change a little, because the search that defines it reads cells
    and digits in a fixed order.

    Args:
        questions: (B, n²) int64, 0 for empty cells.
        answers: (B, n²) int64.
        generator: on the device of the tensors. Devices draw different symmetries from the same seed.

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

    # cells: for each new cell, the old cell that it copies. digits: for each old digit, the new digit.
    cells = lines()[:, :, None] * n + lines()[:, None, :]
    transposed = torch.rand(batch, 1, 1, generator=generator, device=device) < 0.5
    cells = torch.where(transposed, cells.transpose(1, 2), cells).flatten(1)
    digits = torch.nn.functional.pad(permutations(n) + 1, (1, 0))
    return digits.gather(1, questions.gather(1, cells)), digits.gather(1, answers.gather(1, cells))
