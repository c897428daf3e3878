"""The command line: ``python -m deqseq.tasks.state_tracking {train,evaluate,study,data,jacobian,demo}``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from transformers.hf_argparser import HfArgumentParser
from transformers.utils import logging as transformers_logging

from deqseq.checks import check_count
from deqseq.tasks.common.command_line import run
from deqseq.tasks.common.runs import read_record
from deqseq.tasks.state_tracking.algebra import algebra
from deqseq.tasks.state_tracking.data import WordProblemDataset, algebra_of_csv, read_csv, write_csv
from deqseq.tasks.state_tracking.demo import demo
from deqseq.tasks.state_tracking.evaluate import Evaluation, evaluate, evaluate_fresh, load, save, table
from deqseq.tasks.state_tracking.jacobian import report
from deqseq.tasks.state_tracking.plots import plot_by_position, plot_training
from deqseq.tasks.state_tracking.settings import TrainSettings, run_fields
from deqseq.tasks.state_tracking.study import STUDIES, conduct, load_study, summary
from deqseq.tasks.state_tracking.train import train

_ABOUT = """\
State tracking: read elements of a group, say after each what their product so far is.

The word problem of A5 (60 elements) is out of reach of linear recurrences and of attention of a fixed
depth; one implicit layer learns it. Sequences draw the identity with probability p, so the share of
tokens that matter is 1 - p.

  train     train a model in a folder (goes on where an interrupted run stopped)
  evaluate  test the model of a folder at any length, in any window; writes JSON and a figure
  study     train and test variants of a run with several seeds, side by side (resumable)
  data      write word problems in the benchmark's CSV format, or check such a file
  jacobian  does the state mix its entries? Theorem 1 of the paper, checked on random and trained layers
  demo      train an implicit Mamba2 and its explicit twin on A5, compare them at 1x and 4x the length

`... COMMAND --help` explains each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    commands = {
        "train": _train, "evaluate": _evaluate, "study": _study, "data": _data, "jacobian": _jacobian,
        "demo": _demo,
    }  # fmt: skip
    parser = argparse.ArgumentParser(
        prog="python -m deqseq.tasks.state_tracking",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=commands)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    return run(
        lambda: commands[parsed.command](f"{parser.prog} {parsed.command}", parsed.arguments),
        interrupted="train and study go on from their last checkpoint, with the same command",
        log_level=logging.INFO,
    )


def _train(prog: str, arguments: Sequence[str]) -> None:
    parser = HfArgumentParser(
        cast(Any, TrainSettings),
        prog=prog,
        description="Train a model. The defaults are those of the demo: A5 at length 16, minutes on a "
        "laptop. --run takes those of a file: a5xm, the paper's task at full size, takes minutes on a GPU. "
        "Run the same command again to go on after an interruption.",
    )
    parser.add_argument(
        "--run", metavar="FILE", help="YAML with other defaults of the fields below, or a name of ours: a5xm"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the run")
    parser.add_argument(
        "--save_steps", "--save-steps", type=int, default=500, help="steps between checkpoints"
    )
    chosen, _ = parser.parse_known_args(list(arguments))
    if chosen.run is not None:
        parser.set_defaults(**run_fields(chosen.run))
    settings, rest = parser.parse_args_into_dataclasses(args=list(arguments))
    train(settings, rest.output, save_steps=rest.save_steps)
    output = Path(rest.output)
    record = read_record(output)
    plot_training(record["log"], output / "training.png")
    print(f"trained in {record['seconds']:.0f} s; model, log and figure in {output}")


def _window(text: str) -> int | None:
    if text in ("all", "none", "None"):
        return None
    return int(text)


def _evaluate(prog: str, arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Test the model of a run on fresh sequences, or on a CSV file of the word-problem "
        "benchmark. Every length is tested in every window.",
    )
    parser.add_argument("run", help="folder of a finished run")
    parser.add_argument("--length", type=int, nargs="+", help="tokens of a sequence (default: 1x, 4x)")
    parser.add_argument(
        "--window", type=_window, nargs="+", default=[8],
        help="tokens solved at a time: 'all', 1 for one by one, or a number (default: 8). The answer "
        "is the same; the work is not",
    )  # fmt: skip
    parser.add_argument("--sequences", type=int, default=512, help="how many (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="of the sequences (default: 0)")
    parser.add_argument(
        "--identity-probability", type=float, nargs="+", metavar="P", help="default: as in training"
    )
    parser.add_argument("--tolerance", type=float, help="relative residual (default: the model's)")
    parser.add_argument("--max-iter", type=int, help="evaluations a token may take (default: the model's)")
    parser.add_argument(
        "--damping", type=float, help="of the solver, in (0, 1]; 1 is none (default: the model's)"
    )
    parser.add_argument("--batch-size", type=int, default=256, help="solved together (default: 256)")
    parser.add_argument("--csv", metavar="FILE", help="test on this file instead")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for results, which replace what is there (default: RUN/evaluation)",
    )
    options = parser.parse_args(list(arguments))
    model, settings = load(options.run)
    name = "explicit" if settings.explicit else "implicit"
    if settings.explicit and not options.tolerance is options.max_iter is options.damping is None:
        raise ValueError("an explicit model is not solved: it takes no tolerance, max-iter or damping")
    windows = [None] if settings.explicit else options.window
    search = {
        "tolerance": options.tolerance, "max_iter": options.max_iter, "damping": options.damping,
        "batch_size": options.batch_size, "progress": True,
    }  # fmt: skip
    check_count("sequences", options.sequences)
    folder = Path(options.output or Path(options.run) / "evaluation")
    asked = {name: getattr(options, name) for name in ("tolerance", "max_iter", "damping", "csv")}
    if not options.csv:
        asked |= {"sequences": options.sequences, "seed": options.seed}
    rows: list[tuple[str, Evaluation]] = []

    def keep(found: Evaluation) -> None:  # at once: the next test may take an hour
        rows.append((name, found))
        save(rows, folder / "evaluation.json", asked)

    if options.csv:
        if algebra_of_csv(options.csv).name != settings.algebra.name:
            raise ValueError(
                f"{options.csv} is of {algebra_of_csv(options.csv).name}, the model of {settings.group}"
            )
        tokens, targets, _ = read_csv(options.csv, algebra_of_csv(options.csv))
        for window in windows:
            keep(evaluate(model, tokens, targets, window, **search))
    else:
        for p in options.identity_probability or [settings.identity_probability]:
            for length in options.length or (settings.length, 4 * settings.length):
                for window in windows:
                    test = (length, options.sequences, options.seed, p)
                    keep(evaluate_fresh(model, settings, *test, window=window, **search))
    print(table(rows))
    plot_by_position(rows, folder / "by_position.png", settings.algebra.chance, settings.length)
    print(f"wrote {folder / 'evaluation.json'} and {folder / 'by_position.png'}")


def _study(prog: str, arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train and test variants of a run, each with several seeds, and show them side by side. "
        "What is there already is not done again, so the same command goes on after an interruption.",
    )
    parser.add_argument(
        "study",
        help=f"YAML file, or one of ours: {', '.join(sorted(p.stem for p in STUDIES.glob('*.yaml')))}",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the study")
    parser.add_argument(
        "--variants", nargs="+", metavar="NAME",
        help="train and test these only, beside what is there of the others (default: all)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="likewise (default: all)")
    options = parser.parse_args(list(arguments))
    output = Path(options.output)
    print(summary(conduct(load_study(options.study), output, options.variants, options.seeds)))
    print(f"wrote study.json, by_length.png and by_position.png in {output}")


def _data(prog: str, arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write sequences and their running products as GROUP=LENGTH.csv, the format of the "
        "word-problem benchmark; or, with --check, verify every product in such a file.",
    )
    parser.add_argument("file", help="CSV file, named like A5=20.csv: the group, and tokens of a sequence")
    parser.add_argument("--check", action="store_true", help="verify instead of writing")
    parser.add_argument("--sequences", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument(
        "--identity-probability", type=float, default=0.0,
        help="probability of the identity (default: 0); the share of hard tokens is one minus it",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args(list(arguments))
    group, length = algebra_of_csv(options.file), int(Path(options.file).stem.rpartition("=")[2])
    if options.check:
        tokens, _, _ = read_csv(options.file, group)
        if tokens.shape[1] != length:
            raise ValueError(f"{options.file} must hold sequences of {length}, they are of {tokens.shape[1]}")
        print(f"{options.file}: {len(tokens)} sequences of {tokens.shape[1]}, all products right")
        return
    fresh = WordProblemDataset.generate(
        algebra(group.name),
        sequences=options.sequences,
        length=length,
        identity_probability=options.identity_probability,
        seed=options.seed,
    )
    if Path(options.file).exists():
        raise ValueError(f"{options.file} exists: choose another name")
    write_csv(options.file, fresh.tokens, fresh.targets, options.seed)
    print(f"wrote {len(fresh)} sequences of {length} to {options.file}")


def _jacobian(prog: str, arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="The Jacobian of the state from one token to the next, in float64, of random explicit "
        "and implicit layers and of trained ones of one block: by the formula of the paper's Theorem 1, and "
        "by solving anew from states that differ in one entry. Fails if the two disagree by more than 1e-6.",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folders of finished runs (default: none)")
    parser.add_argument("--length", type=int, default=8, help="tokens of the sequence (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (default: 0)")
    parser.add_argument("--output", default="runs/jacobian", help="folder (default: runs/jacobian)")
    options = parser.parse_args(list(arguments))
    check_count("length", options.length)
    rows = report(options.runs, options.length, options.seed, Path(options.output))
    worst = max(row.disagreement for row in rows)
    if not worst <= 1e-6:
        raise ValueError(f"formula and finite differences must agree to 1e-6, they differ by {worst:.1e}")
    print(f"agreement to {worst:.0e}; wrote jacobian.json and jacobian.png in {options.output}")


def _demo(prog: str, arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train a one-layer implicit Mamba2 and its explicit twin on A5 at length 16, test "
        "both at 16 and 64. A few minutes on two cores; repeated, it shows what it has.",
    )
    parser.add_argument("--output", default="runs/demo", help="folder (default: runs/demo)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="default: 1")
    options: Any = parser.parse_args(list(arguments))
    demo(Path(options.output), options.seeds)


if __name__ == "__main__":
    sys.exit(main())
