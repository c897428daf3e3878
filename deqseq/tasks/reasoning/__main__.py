"""The command line: ``python -m deqseq.tasks.reasoning {data}``."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from deqseq.tasks.common import command_line
from deqseq.tasks.common.settings import NonNegativeInt, PositiveInt, Seed
from deqseq.tasks.reasoning import mazes, sudoku
from deqseq.tasks.reasoning.files import read_csv, write_csv
from deqseq.tasks.reasoning.puzzles import Task
from deqseq.tasks.reasoning.verify import verify

_ABOUT = """\
Reasoning: complete Sudokus and mark paths through mazes. Every puzzle has one solution. Each cell of
the solution depends on cells all over the board."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    commands: dict[str, command_line.Command] = {"data": _data}
    return command_line.main(
        "python -m deqseq.tasks.reasoning", _ABOUT, commands, arguments,
        interrupted="run the same command again", log_level=logging.INFO,
    )  # fmt: skip


def _data(
    task: Task,
    *,
    output: Path | None = None,
    check: Path | None = None,
    count: PositiveInt = 1000,
    size: PositiveInt | None = None,
    rating: NonNegativeInt | None = None,
    lengths: list[PositiveInt] | None = None,
    seed: Seed = 0,
    workers: PositiveInt | None = None,
) -> None:
    """Write puzzles to a CSV file, or check such a file.

    A line is source,question,answer,rating, as in the data set sapientinc/sudoku-extreme. Sudokus have one
    solution, and every clue is needed: if one is removed, there are several solutions. Their rating is the
    number of dead ends of a simple search. Mazes are perfect: they have one path between any two free cells.
    Their rating is the number of steps from start to goal. The same seed gives the same file.

    Writing puzzles needs pip install 'deqseq[reason]'.

    Args:
        task: sudoku or maze
        output: CSV file to write; it is compressed if its name ends in .gz
        check: CSV file to verify; every puzzle is solved again
        count: number of puzzles
        size: cells along a side; 4 or 9 for Sudokus (default 9), at least 5 for mazes (default 30)
        rating: least rating of Sudokus, 0 by default; about 1 in 100 Sudokus of size 9 is rated 10 or more
        lengths: steps of the shortest and of the longest path in mazes; by default 100 140 for size 30, in
            proportion to the area for other sizes
        seed: seed of the puzzles
        workers: threads; by default one for each CPU core
    """
    if (output is None) == (check is None):
        raise ValueError("give either --output or --check")
    name = "Sudokus" if task == "sudoku" else "mazes"
    if check is not None:
        found = read_csv(check, task)
        verify(task, found, progress=True)
        print(f"{check}: {len(found.ratings)} {name}, all are right")
        return
    assert output is not None
    if output.exists():
        raise ValueError(f"{output} exists: choose another name")
    command_line.check_folder(output.parent)
    if task == "sudoku":
        if lengths is not None:
            raise ValueError("--lengths is for mazes; the difficulty of Sudokus is their --rating")
        found = sudoku.generate(
            count, size=size or 9, rating=rating or 0, seed=seed, workers=workers, progress=True
        )
    else:
        if rating is not None:
            raise ValueError("--rating is for Sudokus; the difficulty of mazes is their --lengths")
        if lengths is not None and len(lengths) != 2:
            raise ValueError(f"--lengths must be two numbers, got {len(lengths)}")
        span = None if lengths is None else (lengths[0], lengths[1])
        found = mazes.generate(
            count, size=size or 30, lengths=span, seed=seed, workers=workers, progress=True
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_csv(output, task, found)
    low, high = int(found.ratings.min()), int(found.ratings.max())
    print(f"wrote {count} {name} rated {low} to {high} to {output}")


if __name__ == "__main__":
    sys.exit(main())
