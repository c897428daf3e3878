"""The command line: ``python -m deqseq.tasks.reasoning {data,train,evaluate,solve,demo}``.

The program checks the arguments before it imports transformers, because the import takes seconds.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from deqseq.tasks.common import command_line
from deqseq.tasks.common.results import ResultFolder, table
from deqseq.tasks.common.runs import read_record
from deqseq.tasks.common.settings import (
    NonNegativeInt,
    PositiveFinite,
    PositiveInt,
    Seed,
    build_changed,
    read_yaml,
)
from deqseq.tasks.reasoning import mazes, sudoku
from deqseq.tasks.reasoning.data import read
from deqseq.tasks.reasoning.files import read_csv, write_csv
from deqseq.tasks.reasoning.puzzles import Puzzles, Task
from deqseq.tasks.reasoning.settings import RUNS, TrainSettings
from deqseq.tasks.reasoning.verify import verify

_ABOUT = """\
Reasoning: complete Sudokus and mark paths through mazes. Every puzzle has one solution. Each cell of
the solution depends on cells all over the board."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    commands: dict[str, command_line.Command] = {
        "data": _data, "train": _train, "evaluate": _evaluate, "solve": _solve, "demo": _demo,
    }  # fmt: skip
    return command_line.main(
        "python -m deqseq.tasks.reasoning", _ABOUT, commands, arguments,
        interrupted="train resumes from its last checkpoint, if there is one, when you repeat its command",
        log_level=logging.INFO,
    )  # fmt: skip


def _train(
    run: str,
    *,
    output: Path,
    save_steps: PositiveInt | None = None,
    settings: Annotated[dict[str, Any], TrainSettings, partial(read_yaml, shipped=RUNS)],
) -> None:
    """Train a model and write it to a folder.

    RUN is a YAML file with settings, or the name of a shipped YAML file. The options below override the
    settings in the file. `train RUN --help` lists all settings with the values of RUN. --data is always
    needed. To resume after an interruption, run the same command again.

      python -m deqseq.tasks.reasoning data sudoku --size 4 --count 20000 --output sudoku4.csv
      python -m deqseq.tasks.reasoning train sudoku-small --data sudoku4.csv --output runs/sudoku4

    Args:
        run: YAML file with settings, or a shipped file: sudoku, maze, sudoku-small or maze-small
        output: folder of the run
        save_steps: number of steps between checkpoints; by default a quarter of the steps. The last two are
            kept. A checkpoint has the iterates of all batches: 2 GB with the file sudoku
    """
    found = build_changed(TrainSettings, read_yaml(run, RUNS), settings)
    from deqseq.tasks.reasoning.plots import plot_training
    from deqseq.tasks.reasoning.train import train

    train(found, output, save_steps=save_steps)
    record = read_record(output)
    plot_training(record["log"], output / "training.png")
    kept = f", weights of step {record['kept_step']}" if "kept_step" in record else ""
    print(f"trained in {record['seconds']:.0f} s{kept}; model, log and figure in {output}")


def _evaluate(
    run: Path,
    puzzles: Path,
    *,
    depth: list[PositiveInt] = [1, 2, 4, 8, 16, 32, 64],  # noqa: B006
    starts: PositiveInt | None = None,
    count: PositiveInt | None = None,
    rtol: PositiveFinite | None = None,
    max_iter: PositiveInt | None = None,
    solver: str | dict[str, Any] | None = None,
    guess: str | dict[str, Any] | None = None,
    symmetries: bool | None = None,
    batch_size: PositiveInt = 512,
    compile: bool = False,
    output: Path | None = None,
    force: bool = False,
) -> None:
    """Test a trained model at several depths, and with several starts. Writes JSON and a figure.

    A depth is a number of evaluations of the model's map f. A start is an initial value of the search. Every
    start but the first may also solve a symmetric copy of the puzzle (--symmetries). If a puzzle is solved
    from several starts, the start with the smallest residual gives the answer. The column exact has the share
    of right answers. The column vote has the share of puzzles for which the most frequent answer of all
    starts is right. In the second table, the depth is not fixed: each search ends when the residual of the
    board meets the tolerance. If a search has not met it after --max_iter evaluations, it is repeated from
    the next start. The rows of this table allow 1, 2, 4, ... and --starts starts. They are equal if all first
    searches meet the tolerance. The column evaluations is the mean over the boards, from all their starts.

    Args:
        run: folder of a trained model
        puzzles: CSV file, or a folder with the published arrays of mazes
        depth: depths, in increasing order
        starts: maximum number of starts for each puzzle; 1, 2, 4, ... starts are tested too. By default, the
            first table has 1 start, and the second as many as the setting starts of the run
        count: use only the first COUNT puzzles
        rtol: for the second table, relative residual of a board at which its search ends; by default the
            tolerance of the run
        max_iter: for the second table, maximum number of evaluations from each start; by default that of the
            run
        solver: solver that replaces the run's solver: a name (picard:0.7 is Picard with damping 0.7) or a
            mapping ("{name: anderson, memory: 1, scope: sequence}")
        guess: guess for this command, instead of the run's: a name (zero) or a mapping ("{name: noise, std:
            0.5}"). Without symmetries, several starts need noise, or another guess that varies
        symmetries: true: every start but the first solves a symmetric copy of the puzzle, and its answer is
            changed back. false: all starts solve the puzzle as it is. By default, the setting augment of the
            run
        batch_size: puzzles solved together
        compile: compile the map, on GPUs only; saves time at large depths and with many starts
        output: folder for results, by default RUN/evaluation
        force: overwrite an existing result that has other settings
    """
    from deqseq.tasks.common.models import solve_options
    from deqseq.tasks.reasoning.evaluate import (
        ADAPTIVE,
        COLUMNS,
        adaptive,
        breadths,
        evaluate,
        load,
        residuals,
    )
    from deqseq.tasks.reasoning.plots import plot_accuracy
    from deqseq.tasks.reasoning.search import check_starts

    model, settings = load(run, solver, guess, symmetries)
    tests = Puzzles(*(column[:count] for column in read(puzzles, settings.task)))
    if tests.questions.shape[1] != settings.size**2:
        raise ValueError(
            f"the model solves boards of {settings.size} x {settings.size} cells, {puzzles} has boards of "
            f"{tests.questions.shape[1]} cells"
        )
    starts, most = (1, settings.starts) if starts is None else (starts, starts)
    if not settings.explicit:
        check_starts(model, most)
    asked = {"puzzles": str(puzzles), "count": len(tests.ratings), "depth": depth}
    asked |= {"starts": starts if starts == most else [starts, most]}
    asked |= {
        "rtol": rtol,
        "max_iter": max_iter,
        "solver": solver,
        "guess": guess,
        "symmetries": model.symmetries,
    }
    solve = solve_options(model, rtol=rtol, max_iter=max_iter)
    if compile:
        model.compile_map(model.device)
    folder = ResultFolder(output or run / "evaluation", "evaluation", str(run), asked, force)
    found = evaluate(model, tests, depth, starts, batch_size, progress=True)
    print(table(COLUMNS, found))
    adapted = []
    if solve is not None:
        adapted = [adaptive(model, tests, replace(solve, window=None), batch_size, n) for n in breadths(most)]
        print(f"\nsearches that end at a tolerance:\n{table(ADAPTIVE, adapted)}")
    folder.write(found, model, adaptive=[asdict(row) for row in adapted])
    last = None if solve is None else (depth[-1], *residuals(model, tests, depth[-1], batch_size))
    plot_accuracy({"explicit" if solve is None else "implicit": found}, folder.figure, last)
    print(f"wrote {folder.json} and {folder.figure}")


def _solve(
    model: Path,
    puzzle: str,
    *,
    output: Path | None = None,
    starts: PositiveInt | None = None,
    rtol: PositiveFinite | None = None,
    max_iter: PositiveInt | None = None,
    solver: str | dict[str, Any] | None = None,
    guess: str | dict[str, Any] | None = None,
    symmetries: bool | None = None,
    figure: Path | None = None,
) -> None:
    """Solve a puzzle, the puzzles in a CSV file, or the puzzles in a folder of CSV files.

    The text of a puzzle has the characters of its board in reading order, with or without line breaks.
    Sudokus have digits, and dots for empty cells. Mazes have # for walls, spaces for free cells, S for the
    start and G for the goal. The answer to a maze marks the path with o. A CSV file (.csv or .csv.gz) has a
    column question, as in the data set sapientinc/sudoku-extreme. Other columns are not used.

    For every answer, the command says whether to trust the answer. The search must have converged, and the
    answer must keep the rules. A Sudoku must keep its clues, and have every digit in every row, column and
    box. In a maze, the marked cells must be a path from start to goal.

    Args:
        model: folder of a trained run
        puzzle: text of a puzzle, or a .csv or .csv.gz file of puzzles, or a folder with .csv or .csv.gz files
        output: CSV file for the answers; by default they are printed
        starts: maximum number of starts for a puzzle, by default that of the run. The next start is tried if
            an answer cannot be trusted
        rtol: relative residual of the board at which a search ends; by default as in the run
        max_iter: maximum number of evaluations per start; by default as in the run
        solver: solver that replaces the run's solver: a name (picard:0.7 is Picard with damping 0.7) or a
            mapping ("{name: anderson, memory: 1, scope: sequence}")
        guess: guess for this command, instead of the run's: a name (zero) or a mapping ("{name: noise, std:
            0.5}"). Without symmetries, several starts need noise, or another guess that varies
        symmetries: true: every start but the first solves a symmetric copy of the puzzle, and its answer is
            changed back. false: all starts solve the puzzle as it is. By default, the setting augment of the
            run
        figure: PNG file that shows the search for the first puzzle, from start 0; a GIF is written beside it
    """
    if output is not None and output.suffix.lower() != ".csv":
        raise ValueError(f"--output must end in .csv, got {output}")
    if figure is not None and figure.suffix.lower() != ".png":
        raise ValueError(f"--figure must end in .png, got {figure}")
    for path in (output, figure, None if figure is None else figure.with_suffix(".gif")):
        if path is not None:
            command_line.check_folder(path.parent, path.name)
    from deqseq.tasks.reasoning.solve import solve

    solve(
        model, puzzle, output, figure, solver=solver, guess=guess, starts=starts, symmetries=symmetries,
        rtol=rtol, max_iter=max_iter,
    )  # fmt: skip


def _data(
    task: Task,
    *,
    output: Path | None = None,
    check: Path | None = None,
    count: PositiveInt | None = None,
    tests: Path | None = None,
    test_count: PositiveInt | None = None,
    size: PositiveInt | None = None,
    rating: NonNegativeInt | None = None,
    lengths: list[PositiveInt] | None = None,
    seed: Seed | None = None,
    workers: PositiveInt | None = None,
) -> None:
    """Write puzzles to a CSV file, or check a CSV file of puzzles.

    A line is source,question,answer,rating, as in the data set sapientinc/sudoku-extreme. The same seed gives
    the same file.

    Every Sudoku has exactly one solution. If any clue is removed, it has several solutions. The rating of a
    Sudoku is the number of dead ends of a simple search. In a maze, exactly one path joins any two free
    cells. The rating of a maze is the number of steps from start to goal.

    Writing puzzles needs pip install 'deqseq[reason]'.

    Args:
        task: sudoku or maze
        output: CSV file to write; it is compressed if its name ends in .gz
        check: CSV file to verify; every puzzle is solved again
        count: number of puzzles (default 1000)
        tests: a second CSV file to write, with puzzles that are not in the first file
        test_count: number of puzzles in the second CSV file (default 1000)
        size: cells along a side; 4 or 9 for Sudokus (default 9), 5 to 1000 for mazes (default 30)
        rating: lowest allowed rating of Sudokus, 0 by default; about 1 in 100 Sudokus of size 9 is rated 10
            or more
        lengths: for mazes, the smallest and the largest allowed number of steps from start to goal; by
            default 100 140 for size 30, and in proportion to the area for other sizes
        seed: seed of the puzzles (default 0)
        workers: number of threads, by default and at most one for each CPU core
    """
    if (output is None) == (check is None):
        raise ValueError("give either --output or --check")
    name = "Sudokus" if task == "sudoku" else "mazes"
    if check is not None:
        command_line.refuse(
            "--check only reads a file", count=count, tests=tests, test_count=test_count, size=size,
            rating=rating, lengths=lengths, seed=seed, workers=workers,
        )  # fmt: skip
        found = read_csv(check, task)
        verify(task, found, progress=True)
        print(f"{check}: {len(found.ratings)} {name}, all are right")
        return
    assert output is not None
    files = [output] if tests is None else [output, tests]
    if tests is not None and tests.resolve() == output.resolve():
        raise ValueError(f"--tests and --output must be two files, got {tests} and {output}")
    if tests is None and test_count is not None:
        raise ValueError(f"--test-count {test_count} needs --tests, the file for these puzzles")
    for file in files:
        if file.exists():
            raise ValueError(f"{file} exists: choose another name")
        command_line.check_folder(file.parent)
    counts = [count or 1000, test_count or 1000][: len(files)]
    if task == "sudoku":
        if lengths is not None:
            raise ValueError("--lengths is for mazes; the difficulty of Sudokus is their --rating")
        found = sudoku.generate(
            sum(counts), size=size or 9, rating=rating or 0, seed=seed or 0, workers=workers, progress=True
        )
    else:
        if rating is not None:
            raise ValueError("--rating is for Sudokus; the difficulty of mazes is their --lengths")
        if lengths is not None and len(lengths) != 2:
            raise ValueError(f"--lengths must be two numbers, got {len(lengths)}")
        span = None if lengths is None else (lengths[0], lengths[1])
        found = mazes.generate(
            sum(counts), size=size or 30, lengths=span, seed=seed or 0, workers=workers, progress=True
        )
    for file, *columns in zip(files, *(column.split(counts) for column in found), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = Puzzles(*columns)
        write_csv(file, task, part)
        low, high = int(part.ratings.min()), int(part.ratings.max())
        print(f"wrote {len(part.ratings)} {name} rated {low} to {high} to {file}")


def _demo(*, task: Task = "maze", output: Path = Path("runs/reason-demo")) -> None:
    """Train a small implicit model of puzzles and its explicit twin, compare them, and draw a GIF.

    Makes 9 x 9 mazes or 4 x 4 Sudokus, trains for some minutes on two cores, and tests on 1,000 other
    puzzles. The twin applies the same map only once, and trains for the same number of steps. A second call
    loads both trained models and only tests them.

    Args:
        task: maze or sudoku
        output: folder of the puzzles, runs and figures
    """
    from deqseq.tasks.reasoning.demo import demo

    demo(task, output)


if __name__ == "__main__":
    sys.exit(main())
