"""Random perfect mazes. A maze is perfect if it has one path between any two free cells."""

from typing import Any

from deqseq.tasks.reasoning.collect import CHUNK, collect, compiled
from deqseq.tasks.reasoning.puzzles import Puzzles

_LARGEST = 1000  # a thread holds CHUNK questions and answers: 128 MB at this size


def default_lengths(size: int) -> tuple[int, int]:
    """The default lengths of the shortest and of the longest path, in steps.

    They are 100 and 140 for mazes of size 30. For other sizes they are in proportion to the board's area.
    """
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
    """Generate random perfect mazes, each with a start, a goal and the path between them.

    A board has ``size`` × ``size`` cells. A cell is a wall or free. Free cells are rooms and doors. Rooms are
    at odd rows and columns, counted from 0. A door is a cell between two neighbouring rooms. Start and goal
    may be rooms or doors. If ``size`` is even, the right and the bottom wall are two cells thick.

    Args:
        count: number of mazes, P.
        size: cells along a side, n, from 5 to 1,000.
        lengths: shortest and longest path, in steps from start to goal; by default :func:`default_lengths`.
            The length of each path is drawn uniformly.
        seed: in [0, 2³²). The same seed gives the same mazes, with any number of workers.
        workers: number of threads, by default and at most the number of CPU cores.
        progress: show a progress bar.

    Raises:
        ValueError: a value is out of range, numba is not installed, or fewer than ``count`` different mazes
            with such paths are found.
    """
    if isinstance(size, bool) or not isinstance(size, int) or not 5 <= size <= _LARGEST:
        raise ValueError(f"size must be a whole number in [5, {_LARGEST}], got {size!r}")
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
