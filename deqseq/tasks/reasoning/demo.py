"""The demo: a small implicit model of puzzles, its explicit twin, and a figure of a board being solved."""

from pathlib import Path

from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.results import table
from deqseq.tasks.common.runs import read_record
from deqseq.tasks.common.settings import build, read_yaml
from deqseq.tasks.reasoning import mazes, sudoku
from deqseq.tasks.reasoning.evaluate import COLUMNS, Evaluation, evaluate, residuals
from deqseq.tasks.reasoning.files import read_csv, write_csv
from deqseq.tasks.reasoning.plots import plot_accuracy, plot_solving
from deqseq.tasks.reasoning.puzzles import Puzzles, Task
from deqseq.tasks.reasoning.search import by_depth
from deqseq.tasks.reasoning.settings import RUNS, TrainSettings
from deqseq.tasks.reasoning.train import train

_PUZZLES, _TESTS = 20_000, 1000
_DEPTHS = (1, 2, 4, 8, 16, 32, 64)


def demo(task: Task, output: Path) -> None:
    """Train an implicit model and its explicit twin on small puzzles, compare them, and draw a GIF."""
    run = f"{task}-small"
    fields = read_yaml(run, RUNS)
    output.mkdir(parents=True, exist_ok=True)
    files = {name: output / f"{task}-{name}.csv" for name in ("train", "test")}
    if not all(file.exists() for file in files.values()):
        print(f"making {_PUZZLES + _TESTS} puzzles (numba compiles the generator first)")
        generate = mazes.generate if task == "maze" else sudoku.generate
        found = generate(_PUZZLES + _TESTS, size=fields["size"], seed=1, progress=True)
        write_csv(files["test"], task, Puzzles(*(column[_PUZZLES:] for column in found)))
        write_csv(files["train"], task, Puzzles(*(column[:_PUZZLES] for column in found)))
    tests = read_csv(files["test"], task)
    rows: dict[str, list[Evaluation]] = {}
    seconds, last = [], None
    for name in ("implicit", "explicit"):
        settings = build(TrainSettings, {
            **fields, "data": str(files["train"]), "test": str(files["test"]), "explicit": name == "explicit",
        })  # fmt: skip
        folder = output / f"{task}-{name}"
        print(f"\n{name}, {settings.steps} steps of {settings.batch_size} puzzles: {folder}")
        model = train(settings, folder)
        rows[name] = evaluate(model, tests, _DEPTHS, progress=True)
        print(table(COLUMNS, rows[name]))
        seconds.append(f"{name}: {read_record(folder)['seconds']:.0f} s of training")
        if name == "implicit":
            with model.precision():
                steps = by_depth(model, tests.questions[:1], [*range(1, 17), 20, 24, 28, 32])
                boards = [(s.depth, s.answers[0].cpu(), float(s.residual[0])) for s in steps]
            last = (_DEPTHS[-1], *residuals(model, tests, _DEPTHS[-1]))
            plot_solving(task, tests.questions[0], boards, tests.answers[0], output / f"{task}.png")
    write_json(output / f"{task}.json", {name: [vars(e) for e in found] for name, found in rows.items()})
    plot_accuracy(rows, output / f"{task}-accuracy.png", last)
    print("; ".join(seconds))
    print(f"wrote {task}.gif, {task}.png, {task}-accuracy.png and {task}.json in {output}")
