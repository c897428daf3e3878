"""Compares solvers and gradient strategies on puzzles. f is not causal: each cell depends on all cells.

Solvers: all solvers solve the same test puzzles with the same trained model. The columns:

    tolerance       a search ends when the relative residual of its board is at most this number
    evaluations     mean number of evaluations of f per puzzle
    converged       share of the puzzles whose search met the tolerance
    exact           share of the puzzles whose answer is right in every cell
    seconds         time for all puzzles; a board leaves the batch when it has converged

Gradient strategies: the script measures how long a step takes, and trains a new model with as many steps as
fit into --seconds. On GPUs, compilation takes more time; the column seconds includes it.

    persistent      a few iterations in each step; they start at the iterates of an earlier step
    one-batch       like persistent, with one batch and solved_steps 1
    segments        like persistent, with three iterations; only the last has an autograd graph
    published       like segments, with one batch of 768, solved_steps 1, budget 16, learning rate 1e-4,
                    and no hints
    unrolled-16     16 iterations from a random iterate, all with an autograd graph
    phantom-4       a search from a random iterate, then 4 iterations with an autograd graph
    implicit        a search from a random iterate, then implicit differentiation
    explicit        f is applied once; explicit-4-blocks: f is applied once and has 4 blocks

The papers of HRM (arXiv 2506.21734), TRM (arXiv 2510.04871) and EqR (arXiv 2605.21488) use segments.
"published" has EqR's settings, as we understand them.

The columns:

    steps           number of optimiser steps
    evaluations     mean number of evaluations of f in a step
    exact           share of the test puzzles that are solved in --depth evaluations, from random iterates
    raw             like exact, with the weights of the last step instead of their moving average. It is
                    measured on the first 512 test puzzles

The script writes every row as soon as it is measured. To resume an interrupted run, repeat its command.

    python benchmarks/puzzles.py                        # trains on 9 x 9 mazes; takes an hour on two cores
    python benchmarks/puzzles.py --quick
    python benchmarks/puzzles.py --device cuda --run sudoku --data train.csv --tests test.csv --model RUN
"""

import argparse
import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import common
import torch
from common import Row

from deqseq import Residual, SolveOptions
from deqseq.tasks.common.models import quiet_transformers
from deqseq.tasks.common.runs import read_record
from deqseq.tasks.common.settings import build, read_yaml
from deqseq.tasks.reasoning import mazes
from deqseq.tasks.reasoning.data import read
from deqseq.tasks.reasoning.evaluate import accuracy, adaptive, load
from deqseq.tasks.reasoning.files import write_csv
from deqseq.tasks.reasoning.puzzles import Puzzles
from deqseq.tasks.reasoning.settings import RUNS, TrainSettings
from deqseq.tasks.reasoning.train import train

SOLVERS: dict[str, str | dict[str, Any]] = {
    **{f"picard-{damping}": f"picard:{damping}" for damping in (1.0, 0.95, 0.7)},
    **{f"anderson-{memory}": f"anderson:{memory}" for memory in (2, 5)},
    "broyden-8": "broyden:8",
    "anderson-1-sequence": {"name": "anderson", "memory": 1, "scope": "sequence"},
    "anderson-5-sequence": {"name": "anderson", "memory": 5, "scope": "sequence"},
    "broyden-8-sequence": {"name": "broyden", "memory": 8, "scope": "sequence"},
    **{f"torchdeq-{name}": f"torchdeq:{name}" for name in ("fixed_point_iter", "anderson", "broyden")},
}
FRESH = {"budget": 1, "solved_steps": 1, "batches": 1}
ONE_BATCH = {"batches": 1, "solved_steps": 1}
SEGMENTS = {"gradient": {"name": "unrolled", "iterations": 1, "before": 2}}
FIXED = {"name": "fixed", "iterations": 16}
STRATEGIES: dict[str, dict[str, Any]] = {
    "persistent": {},
    "one-batch": ONE_BATCH,
    "segments": SEGMENTS,
    "published": {
        **SEGMENTS,
        **ONE_BATCH,
        "batch_size": 768,
        "budget": 16,
        "learning_rate": 1e-4,
        "hints": 0.0,
    },
    "unrolled-16": {"gradient": {"name": "unrolled", "iterations": 16}, **FRESH},
    "phantom-4": {"gradient": {"name": "phantom", "steps": 4, "damping": 0.95}, **FRESH},
    "implicit": {"gradient": {"name": "implicit", "solver": "picard:0.95", "convergence": FIXED}, **FRESH},
    "explicit": {"explicit": True},
    "explicit-4-blocks": {"explicit": True, "n_layer": 4},
}


def settings(options: argparse.Namespace, **changes: Any) -> TrainSettings:
    """The settings in the file ``options.run``, with ``changes`` applied."""
    fields = read_yaml(options.run, RUNS)
    if "n_layer" in changes:
        backbone, depth = fields["backbone"], {"n_layer": changes.pop("n_layer")}
        inner = {"map": {**backbone["map"], **depth}} if "map" in backbone else depth
        fields["backbone"] = {**backbone, **inner}
    return build(TrainSettings, {**fields, "data": str(options.data), "test": str(options.tests), **changes})


def make_puzzles(options: argparse.Namespace) -> None:
    """If ``--data`` is not given, write files with new 9 x 9 mazes, and set the options to these files."""
    if options.data is not None:
        return
    folder = options.output / "data"
    folder.mkdir(parents=True, exist_ok=True)
    options.data, options.tests = folder / "train.csv", folder / "test.csv"
    if not options.tests.exists():
        tests = 1_000
        found = mazes.generate((1_000 if options.quick else 20_000) + tests, size=9, seed=1, progress=True)
        write_csv(options.data, "maze", Puzzles(*(column[:-tests] for column in found)))
        write_csv(options.tests, "maze", Puzzles(*(column[-tests:] for column in found)))


def solve(options: argparse.Namespace, key: Mapping[str, Any]) -> Row:
    """Solve the test puzzles with one solver and one tolerance. Returns a row of the table."""
    model, run = load(options.model)
    tests = Puzzles(*(column[: options.count] for column in read(options.tests, run.task)))
    policy = Residual(rtol=key["tolerance"], max_iter=options.max_iter, scope="sequence")
    guess = model.layer.eval_solve.guess
    how = SolveOptions(SOLVERS[key["solver"]], policy, guess=guess)
    found = adaptive(model, tests, how)
    return {
        "evaluations": found.evaluations, "converged": found.converged, "exact": found.exact,
        "seconds": found.seconds,
    }  # fmt: skip


def step_seconds(options: argparse.Namespace, changes: Mapping[str, Any], folder: Path) -> float:
    """Train in ``folder`` for a few steps. Returns the mean duration of a step, without compilation."""
    every, few = (2, 6) if options.quick else (5, 25)
    tests = {"eval_steps": every, "eval_depth": 1, "eval_puzzles": 1}  # the log has a time for every test
    train(settings(options, **changes, **tests, steps=few), folder, save_steps=few)  # no earlier checkpoint
    times = {line["step"]: line["seconds"] for line in read_record(folder)["log"] if "accuracy" in line}
    return max(times[few] - times[every], 1e-3) / (few - every)


def learn(options: argparse.Namespace, key: Mapping[str, Any]) -> Row:
    """Train with one strategy for about ``options.seconds``, then test. Returns a row of the table."""
    changes = {**STRATEGIES[key["strategy"]], "seed": key["seed"]}
    with tempfile.TemporaryDirectory() as place:
        steps = max(5, round(options.seconds / step_seconds(options, changes, Path(place) / "trial")))
        asked = settings(options, **changes, steps=steps, eval_steps=steps, eval_depth=options.depth)
        model = train(asked, Path(place) / "run", save_steps=steps)
        record = read_record(Path(place) / "run")
    tests = Puzzles(*(column[: options.count] for column in read(options.tests, asked.task)))
    log = record["log"]
    evaluations = [1.0] if asked.explicit else [entry["nfe"] for entry in log if "nfe" in entry]
    return {
        "steps": steps, "seconds": record["seconds"],
        "evaluations": sum(evaluations) / len(evaluations) if evaluations else None,
        "exact": accuracy(model, tests, options.depth).share,
        "raw": next(entry["raw_accuracy"] for entry in reversed(log) if "raw_accuracy" in entry),
    }  # fmt: skip


def main() -> int:
    made = common.parser(__doc__, "puzzles")
    made.add_argument("--quick", action="store_true", help="shorter training, fewer mazes")
    made.add_argument("--run", default="maze-small", help="run file of the training (default: maze-small)")
    made.add_argument("--data", type=Path, help="CSV file of training puzzles (default: new 9 x 9 mazes)")
    made.add_argument("--tests", type=Path, help="CSV file of test puzzles (needed with --data)")
    made.add_argument("--model", type=Path, help="folder of a trained run (default: trained here)")
    made.add_argument(
        "--solvers", nargs="*", default=list(SOLVERS), help=f"default: all of {', '.join(SOLVERS)}"
    )
    made.add_argument(
        "--strategies", nargs="*", default=list(STRATEGIES), help="default: all of the list above"
    )
    made.add_argument("--tolerances", type=float, nargs="+", default=[1e-2, 1e-3], help="default: 0.01 0.001")
    made.add_argument(
        "--max-iter", type=int, default=256, help="largest number of evaluations of a search (default: 256)"
    )
    made.add_argument(
        "--depth", type=int, default=32, help="evaluations in the test of a strategy (default: 32)"
    )
    made.add_argument("--count", type=int, default=1000, help="number of test puzzles (default: 1000)")
    made.add_argument("--seconds", type=float, help="training time of each strategy (default: 240)")
    made.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="seeds of the strategies (default: 1)"
    )
    options = made.parse_args()
    if options.seconds is None:
        options.seconds = 20 if options.quick else 240
    if options.seconds <= 0:
        raise ValueError(f"--seconds must be positive, got {options.seconds}")
    if options.device == "cpu" and torch.cuda.is_available():
        raise ValueError("this script uses the GPU if there is one: set CUDA_VISIBLE_DEVICES= to use the CPU")
    if (options.data is None) != (options.tests is None):
        raise ValueError("give both --data and --tests, or neither")
    for chosen, known in ((options.solvers, SOLVERS), (options.strategies, STRATEGIES)):
        if unknown := sorted(set(chosen) - set(known)):
            raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    quiet_transformers()
    make_puzzles(options)
    if options.model is None and options.solvers:
        options.model = options.output / "model"
        train(settings(options, **({"steps": 20} if options.quick else {})), options.model)
    keys = [
        dict(zip(("solver", "tolerance"), key, strict=True))
        for key in product(options.solvers, options.tolerances)
    ]
    shared = {name: str(getattr(options, name)) for name in ("run", "data", "tests", "model", "count")}
    solved = common.measure_grid(
        options.output / "solvers.jsonl", keys, partial(solve, options),
        {**shared, "max_iter": options.max_iter},
    )  # fmt: skip
    common.print_table(f"solvers, {options.count} puzzles", solved)
    keys = [
        dict(zip(("strategy", "seed"), key, strict=True))
        for key in product(options.strategies, options.seeds)
    ]
    learned = common.measure_grid(
        options.output / "strategies.jsonl", keys, partial(learn, options),
        {**shared, "seconds": options.seconds, "depth": options.depth},
    )  # fmt: skip
    common.print_table(f"strategies, {options.seconds:g} s of training each", learned)
    common.write_results(options.output / "puzzles.json", options, solvers=solved, strategies=learned)
    return 0


if __name__ == "__main__":
    common.run(main)
