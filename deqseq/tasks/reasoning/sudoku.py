"""Generates random minimal Sudokus of size 4 and 9."""

from deqseq.tasks.reasoning.collect import CHUNK, collect, compiled
from deqseq.tasks.reasoning.puzzles import SUDOKU_SIZES, Puzzles


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
