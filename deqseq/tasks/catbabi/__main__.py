"""The command line: ``python -m deqseq.tasks.catbabi {build,train,evaluate,compare}``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers.hf_argparser import HfArgumentParser

from deqseq.tasks.catbabi import compare
from deqseq.tasks.catbabi.data import build, load
from deqseq.tasks.catbabi.evaluate import evaluate, load_run
from deqseq.tasks.catbabi.settings import TrainSettings
from deqseq.tasks.catbabi.stories import SPLITS, read_dataset, read_folder
from deqseq.tasks.catbabi.train import train
from deqseq.tasks.common.command_line import run
from deqseq.tasks.common.models import Window, quiet_transformers, solve_options
from deqseq.tasks.common.results import column, table
from deqseq.tasks.common.runs import read_record

_ABOUT = """\
CatbAbI: the twenty bAbI tasks as streams of stories with questions and answers in line. A model reads 200
tokens at a time and carries its state; in qa mode it learns the answers, in lm mode every token.

  build     encode bAbI's files, or a Hugging Face dataset
  train     train a model in a folder (goes on where an interrupted run stopped)
  evaluate  read a split once: accuracy of the answers, by task; perplexity in lm mode
  compare   evaluated runs side by side, by task, and drawn

`... COMMAND --help` explains each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    quiet_transformers()
    commands = {"build": _build, "train": _train, "evaluate": _evaluate, "compare": _compare}
    parser = argparse.ArgumentParser(
        prog="python -m deqseq.tasks.catbabi",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=commands)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    return run(
        lambda: commands[parsed.command](f"{parser.prog} {parsed.command}", parsed.arguments),
        interrupted="train goes on from its last checkpoint",
        log_level=logging.INFO,
    )


def _build(prog: str, arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog=prog, description="Encode bAbI: ten seconds for its largest form.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data-dir", metavar="DIR", help="folder of qa1_train.txt to qa20_test.txt")
    source.add_argument("--dataset", metavar="NAME", help="Hugging Face dataset, such as facebook/babi_qa")
    parser.add_argument(
        "--config", default="en-valid-10k", metavar="NAME",
        help="form of the dataset, to which -qa1 to -qa20 are added (default: en-valid-10k)",
    )  # fmt: skip
    parser.add_argument("--revision", help="of the dataset, such as refs/convert/parquet")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--drop-last", action="store_true",
        help="without the last story of every file, as the original publication's data (default: all)",
    )  # fmt: skip
    options = parser.parse_args(list(arguments))
    if options.data_dir:
        read = partial(read_folder, options.data_dir)
    else:
        read = partial(read_dataset, options.dataset, options.config, revision=options.revision)
    manifest = build(read, options.output, options.drop_last)
    rows = [argparse.Namespace(split=split, **counts) for split, counts in manifest["splits"].items()]
    print(table([column("split"), *(column(n, ",") for n in ("stories", "tokens", "questions"))], rows))
    print(f"{len(load(options.output).vocabulary)} words; wrote {options.output}")


def _train(prog: str, arguments: Sequence[str]) -> None:
    parser = HfArgumentParser(
        cast(Any, TrainSettings),
        prog=prog,
        description="Train a model. The defaults are the paper's settings, hours on a GPU; docs/catbabi.md "
        "has smaller ones. Run the same command again to go on after an interruption.",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the run")
    parser.add_argument(
        "--save_steps", "--save-steps", type=int, default=500, help="steps between checkpoints"
    )
    settings, rest = parser.parse_args_into_dataclasses(args=list(arguments))
    train(settings, rest.output, save_steps=rest.save_steps)
    record = read_record(rest.output)
    print(f"trained in {record['seconds']:.0f} s; model and log in {rest.output}")


def _evaluate(prog: str, arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Read a split once, on the tasks that the run was trained on. Writes "
        "RUN/evaluation/SPLIT.json.",
    )
    parser.add_argument("run", help="folder of a finished run")
    parser.add_argument("--split", nargs="+", choices=SPLITS, default=["test"], help="default: test")
    parser.add_argument("--data", metavar="DIR", help="folder that build made (default: the run's)")
    parser.add_argument("--tolerance", type=float, help="relative residual (default: the model's)")
    parser.add_argument("--max-iter", type=int, help="evaluations a token may take (default: the model's)")
    parser.add_argument("--batch-size", type=int, default=256, help="streams (default: 256)")
    parser.add_argument(
        "--window", type=int, help="tokens solved at a time (default: all); the answers are the same"
    )
    options = parser.parse_args(list(arguments))
    trained = load_run(options.run)
    model, settings, _ = trained
    data = load(options.data or settings.data)
    window: Window = "model" if options.window is None else options.window
    solve = solve_options(model, window, options.tolerance, options.max_iter)
    name = Path(options.run).name
    rows = []
    for split in options.split:
        found = evaluate(trained, data, split, options.batch_size, solve, progress=True)
        compare.save(
            found, compare.file_of(options.run, split), vocabulary=data.vocabulary_sum,
            settings=asdict(settings),
            policy=None if solve is None else repr(solve.convergence), window=options.window,
            batch_size=options.batch_size,
            device=str(model.device),
        )  # fmt: skip
        rows.append((f"{name} {split}", found))
    print(compare.by_task(rows))
    print(compare.summary(rows))


def _compare(prog: str, arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Evaluated runs of the same data and tasks side by side: a table, its JSON, a figure "
        "of bars by task, and the tasks on which implicit runs are above explicit ones.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of evaluated runs")
    parser.add_argument("--split", choices=SPLITS, default="test", help="default: test")
    parser.add_argument(
        "--output", default="runs/catbabi-compare", metavar="DIR", help="default: %(default)s"
    )
    options = parser.parse_args(list(arguments))
    rows = [compare.read(run, options.split) for run in options.runs]
    if len({name for name, _ in rows}) < len(rows):
        raise ValueError(f"runs need different folder names, got {', '.join(options.runs)}")
    compare.check_comparable(rows)
    above = compare.better(rows)
    print(compare.by_task(rows))
    print(compare.summary(rows))
    for name, others in above.items():
        for other, tasks in others.items():
            print(f"{name} is above {other} on {len(tasks)} tasks: {', '.join(map(str, tasks)) or 'none'}")
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"split": options.split, "runs": {name: asdict(e) for name, e in rows}, "above": above}
    (folder / "compare.json").write_text(json.dumps(record, indent=2) + "\n")
    compare.plot(rows, folder / "compare.png")
    print(f"wrote {folder}")


if __name__ == "__main__":
    sys.exit(main())
