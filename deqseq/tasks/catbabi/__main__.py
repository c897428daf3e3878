"""The command line: ``python -m deqseq.tasks.catbabi {build,train,evaluate,compare}``.

The program checks the arguments before it imports transformers, because the import takes seconds.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from deqseq.tasks.catbabi.data import build, load
from deqseq.tasks.catbabi.settings import TrainSettings
from deqseq.tasks.catbabi.stories import read_dataset, read_folder
from deqseq.tasks.common import command_line
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.results import column, table
from deqseq.tasks.common.runs import names_of, read_record
from deqseq.tasks.common.settings import PositiveFinite, PositiveInt, build_changed

Split = Literal["train", "valid", "test"]

_ABOUT = """\
CatbAbI: the twenty bAbI tasks as streams of stories that contain questions and answers. A model reads 200
tokens at a time and keeps its state. In qa mode it learns to predict the answers, in lm mode every token."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    commands: dict[str, Any] = {"build": _build, "train": _train, "evaluate": _evaluate, "compare": _compare}
    return command_line.main(
        "python -m deqseq.tasks.catbabi", _ABOUT, commands, arguments,
        interrupted="the same command of train resumes from the last checkpoint, if there is one",
        log_level=logging.INFO,
    )  # fmt: skip


def _build(
    *,
    output: Path,
    data_dir: Path | None = None,
    dataset: str | None = None,
    config: str = "en-valid-10k",
    revision: str | None = None,
    drop_last: bool = False,
) -> None:
    """Build CatbAbI from bAbI's files or from a Hugging Face dataset.

    Args:
        output: folder to write
        data_dir: folder with bAbI's files qa1_train.txt to qa20_test.txt
        dataset: Hugging Face dataset, such as facebook/babi_qa; give either --dataset or --data-dir
        config: name of the dataset's configurations, without the endings -qa1 to -qa20
        revision: revision of the dataset, such as refs/convert/parquet
        drop_last: leave out the last story of every file, as in the original CatbAbI
    """
    if data_dir is not None and dataset is None:
        read: Any = partial(read_folder, data_dir)
    elif dataset is not None and data_dir is None:
        read = partial(read_dataset, dataset, config, revision=revision)
    else:
        raise ValueError("give either --data-dir or --dataset")
    manifest = build(read, output, drop_last)
    rows = [SimpleNamespace(split=split, **counts) for split, counts in manifest["splits"].items()]
    print(table([column("split"), *(column(n, ",") for n in ("stories", "tokens", "questions"))], rows))
    print(f"{len(load(output).vocabulary)} words; wrote {output}")


def _train(
    *, output: Path, save_steps: PositiveInt = 500, settings: Annotated[dict[str, Any], TrainSettings]
) -> None:
    """Train a model and write it to a folder.

    The defaults are the settings of Schöne et al. (2025) and take hours on a GPU. docs/catbabi.md has smaller
    settings. To resume after an interruption, run the same command again.

    Args:
        output: folder of the run
        save_steps: steps between checkpoints
    """
    found = build_changed(TrainSettings, {}, settings)
    from deqseq.tasks.catbabi.train import train

    train(found, output, save_steps=save_steps)
    record = read_record(output)
    print(f"trained in {record['seconds']:.0f} s; model and log in {output}")


def _evaluate(
    run: Path,
    *,
    split: list[Split] = ["test"],  # noqa: B006
    data: Path | None = None,
    tolerance: PositiveFinite | None = None,
    max_iter: PositiveInt | None = None,
    batch_size: PositiveInt = 256,
    window: PositiveInt | None = None,
) -> None:
    """Measure the accuracy of a model's answers, in total and by task.

    Models trained in lm mode (on every token) also get a perplexity. The command uses the tasks that the
    model was trained on. It writes RUN/evaluation/SPLIT.json.

    Args:
        run: folder of a finished run
        split: splits to evaluate
        data: folder written by the build command; the run's data by default
        tolerance: relative residual at which a token has converged; the model's by default
        max_iter: maximum number of evaluations per token; the model's by default
        batch_size: number of streams that are read in parallel
        window: number of tokens solved at a time; the model's by default. It does not change the answers
    """
    from deqseq.tasks.catbabi import compare
    from deqseq.tasks.catbabi.evaluate import evaluate, load_run
    from deqseq.tasks.common.models import Window, solve_options

    trained = load_run(run)
    command_line.check_folder(run / "evaluation", *(f"{name}.json" for name in split))
    model, settings, _ = trained
    stories = load(data or settings.data)
    size: Window = "model" if window is None else window
    solve = solve_options(model, size, tolerance, max_iter)
    rows = []
    for name in split:
        found = evaluate(trained, stories, name, batch_size, solve, progress=True)
        compare.save(
            found, run, vocabulary=stories.vocabulary_sum,
            settings=asdict(settings), policy=None if solve is None else repr(solve.convergence),
            window=window, batch_size=batch_size, device=str(model.device),
        )  # fmt: skip
        rows.append((f"{run.name} {name}", found))
    print(compare.tables(rows))


def _compare(runs: list[Path], *, split: Split = "test", output: Path = Path("runs/catbabi-compare")) -> None:
    """Compare the accuracy of several evaluated runs by task, in a table and a bar chart.

    All runs must have the same data and tasks. The command also lists the tasks on which an implicit run is
    better than an explicit run. It writes compare.json and compare.png.

    Args:
        runs: folders of evaluated runs
        split: split that the runs were evaluated on
        output: folder for results
    """
    command_line.check_folder(output, "compare.json", "compare.png")
    from deqseq.tasks.catbabi import compare

    rows = [(name, compare.read(run, split)) for name, run in zip(names_of(runs), runs, strict=True)]
    compare.check_comparable(rows)
    above = compare.better(rows)
    print(compare.tables(rows))
    for name, others in above.items():
        for other, tasks in others.items():
            print(f"{name} beats {other} on {len(tasks)} tasks: {', '.join(map(str, tasks)) or 'none'}")
    output.mkdir(parents=True, exist_ok=True)
    record = {"split": split, "runs": {name: asdict(e) for name, e in rows}, "above": above}
    write_json(output / "compare.json", record)
    compare.plot(rows, output / "compare.png")
    print(f"wrote {output}")


if __name__ == "__main__":
    sys.exit(main())
