"""Perfect mazes: there is one path between any two free cells."""

from typing import Any

from deqseq.tasks.reasoning.collect import CHUNK, collect, compiled
from deqseq.tasks.reasoning.puzzles import Puzzles


def default_lengths(size: int) -> tuple[int, int]:
    """Shortest and longest path for a size: 100 and 140 for size 30, in proportion to the area for others."""
    return size * size // 9, size * size * 7 // 45


def generate(
    count: int,
    *,
    size: int = 30,
    lengths: tuple[int, int] | None = None,
    seed: int,
    workers: int | None = None,
    progress: bool = False,
) -> Puzzles:
    """Random perfect mazes, each with a start, a goal and the path between them.

    A board has ``size`` × ``size`` cells, which are walls or free. Free cells form a tree: rooms at odd rows
    and columns, counted from 0, and doors between neighbouring rooms. With an even size, the right and the
    bottom wall are two cells thick. Start and goal are rooms or doors.

    Args:
        count: number of mazes, P.
        size: cells along a side, n, at least 5.
        lengths: shortest and longest path, in steps from start to goal; by default :func:`default_lengths`.
            The length of each path is drawn uniformly.
        seed: in [0, 2³²). The same seed gives the same mazes, with any number of workers.
        workers: number of threads, by default the number of CPU cores.
        progress: show a progress bar.

    Raises:
        ValueError: a value out of range, numba is not installed, or no more mazes with such paths are found.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 5:
        raise ValueError(f"size must be a whole number >= 5, got {size!r}")
    shortest, longest = lengths = lengths or default_lengths(size)
    limit = 2 * ((size - 1) // 2) ** 2 - 2
    if not 1 <= shortest <= longest <= limit:
        raise ValueError(
            f"lengths must be two numbers in [1, {limit}], the shorter first, for mazes of size {size}, "
            f"got {lengths}"
        )
    carving = compiled("maze_carving")

    def make(chunk: int) -> tuple[Any, Any, Any]:
        found = carving.perfect_mazes(seed, chunk * CHUNK, CHUNK, size, shortest, longest)
        if (length := int(found[2][-1])) < 0:
            raise ValueError(
                f"1000 mazes of size {size} have no path of {-length} steps: use shorter lengths"
            )
        return found

    return collect(
        make, count, seed=seed, workers=workers, progress=progress,
        advice=f"lower the count, or allow more lengths than {shortest} to {longest}",
    )  # fmt: skip
