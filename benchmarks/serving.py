"""Compares ways to serve an implicit language model: static batches with ``generate``, and vLLM.

All arms serve the same requests, greedily, in float32, on the CPU, at most --batch requests at a time.
Prompts are random tokens. The lengths of prompts and answers are uniform between two limits. The arms:

    static         ImplicitForCausalLM.generate, in batches in order of arrival, padded on the left; a batch
                   runs until its longest request ends, and surplus tokens of the other requests are dropped
    adaptive       vLLM; every token is solved to the model's tolerance
    no-compaction  like adaptive, but a request that has converged stays in the batch until the step ends
    fixed          vLLM; all tokens get as many evaluations as the slowest token needed in the arm adaptive
    explicit       vLLM with the explicit twin, which evaluates the same stack once, without injection
    injected       vLLM with the injected form, which evaluates f once

Each arm runs in a process of its own. Loading, compiling and a short warm-up are not counted. The columns:

    tokens / CPU s      requested tokens, divided by the user and system time of all processes
    over static         tokens / CPU s, divided by the tokens / CPU s of static
    tokens / s          requested tokens, divided by the wall-clock time
    first, ms           time from the arrival of a request to its first token: median and 95th percentile
    between, ms         time between two tokens of a request: median and 95th percentile
    counted / needed    tokens in the batch, summed over all evaluations of f; divided by the sum that would
                        result if every request left the batch as soon as it converged; padding does not count
    equal               share of the requests that get the same tokens as in static

By default, two random models are served, a Llama and a Mamba2. A fifth of their tokens has weak embeddings.
After such a token, f contracts slowly. So the requests of a batch need different numbers of evaluations.

The script writes every row as soon as it is measured. To resume an interrupted run, repeat its command. The
script needs vLLM; docs/serving.md shows how to install it. With --eager, vLLM does not compile.

    python benchmarks/serving.py
    python benchmarks/serving.py --rate 2                            # requests arrive at random, two a second
    python benchmarks/serving.py --model MODEL --arms static adaptive
    python benchmarks/serving.py --backbones llama --requests 16 --new 4 16 --eager
"""

import argparse
import importlib.util
import math
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import common
import torch
from common import Row
from serving_arms import Request, static, vllm
from serving_models import BACKBONES, load, make_model, save

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.checks import check_count
from deqseq.tasks.common.figures import save_figure
from deqseq.tasks.common.models import quiet_transformers

ARMS = ("static", "adaptive", "no-compaction", "fixed", "explicit", "injected")
SOLVED = ("static", "adaptive", "no-compaction", "fixed")
"""The arms that evaluate f several times."""


def make_requests(options: argparse.Namespace, vocabulary: int) -> list[Request]:
    """Random requests in order of arrival. The gaps between arrivals are exponential (a Poisson process)."""
    chance, now, requests = random.Random(options.seed), 0.0, []
    for _ in range(options.requests):
        now += chance.expovariate(options.rate) if options.rate else 0
        length, new = chance.randint(*options.prompt), chance.randint(*options.new)
        requests.append(Request(now, chance.choices(range(vocabulary), k=length), new))
    return requests


@dataclass
class Case:
    """A model in three forms, and the requests to it.

    Attributes:
        folder: holds a folder for each form: implicit, explicit, injected.
        checksum: identifies the model and the requests; every row stores it.
    """

    folder: Path
    requests: list[Request]
    checksum: str


def identity(model: ImplicitForCausalLM, requests: Sequence[Request]) -> str:
    """A checksum of the model's weights and settings, and of the requests."""
    settings = {
        name: getattr(model.config, name) for name in ("backbone", "solver", "eval_convergence", "guess")
    }
    return common.checksum(model, torch.tensor(list(repr((settings, requests)).encode())))


def serve(cases: Mapping[str, Case], options: argparse.Namespace, key: Mapping[str, Any]) -> Row:
    """Serve the requests with one arm, in a new process. Returns a row of the table."""
    case, arm = cases[key["model"]], key["arm"]
    folder = str(case.folder / ("implicit" if arm in SOLVED else arm))
    call = partial(static if arm == "static" else vllm, folder, case.requests, options.batch)
    if arm != "static":
        call = partial(call, eager=options.eager)
    if arm == "no-compaction":
        call = partial(call, additional_config={"compact": False})
    if arm == "fixed":
        if key["depth"] is None:
            raise ValueError("fixed takes its number of evaluations from adaptive, which failed")
        depth = {"name": "fixed", "iterations": key["depth"]}
        call = partial(call, hf_overrides={"eval_convergence": depth})
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(call).result()


def measure(options: argparse.Namespace, cases: Mapping[str, Case]) -> list[Row]:
    """Measure all arms on all models, ``options.repeats`` times. The repeats of an arm are far apart."""
    shared = {name: getattr(options, name) for name in ("batch", "threads", "eager")}

    def rows_of(arms: Sequence[str], **more: Any) -> list[Row]:
        keys = [
            {"model": n, "arm": arm, "checksum": cases[n].checksum, "repeat": i, **shared, **more.get(n, {})}
            for i, n, arm in product(range(options.repeats), cases, arms)
        ]
        return common.measure_grid(options.output / "rows.jsonl", keys, partial(serve, cases, options))

    rows = rows_of([arm for arm in options.arms if arm != "fixed"])
    if "fixed" in options.arms:
        most = {row["model"]: {"depth": row.get("most")} for row in best(rows) if row["arm"] == "adaptive"}
        rows += rows_of(["fixed"], **most)
    return rows


def best(rows: Sequence[Row]) -> list[Row]:
    """For every model and arm, the repeat with the fewest CPU seconds. The rows are in the table's order."""
    kept: dict[tuple[str, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.get("CPU seconds", math.inf)):
        kept.setdefault((row["model"], ARMS.index(row["arm"])), row)
    names = list(dict.fromkeys(row["model"] for row in rows))
    return [kept[key] for key in sorted(kept, key=lambda key: (names.index(key[0]), key[1]))]


def milliseconds(row: Row, name: str) -> str | None:
    """Median and 95th percentile of a duration, as the text of one cell."""
    values = [row[f"{name}, {which}"] for which in ("median", "95 %")]
    return None if None in values else " ".join(f"{1e3 * value:.0f}" for value in values)


def line(rows: Sequence[Row], row: Row) -> Row:
    """A line of the printed table. ``rows``: all rows of the same model."""
    if "problem" in row:
        return {"model": row["model"], "arm": row["arm"], "problem": row["problem"]}
    arms = {each["arm"]: each for each in rows if "problem" not in each}
    first, speed = arms.get("static"), row["tokens a CPU second"]
    needed = [arms[name]["needed"] for name in ("adaptive", "no-compaction") if name in arms]
    cells = {
        "model": row["model"], "arm": row["arm"], "tokens / CPU s": f"{speed:.1f}",
        "over static": f"{speed / first['tokens a CPU second']:.2f}" if first else None,
        "tokens / s": f"{row['tokens a second']:.1f}",
        "first, ms": milliseconds(row, "seconds to the first token"),
        "between, ms": milliseconds(row, "seconds between tokens"),
    }  # fmt: skip
    if row["arm"] in SOLVED and needed:
        cells["counted / needed"] = f"{row['counted'] / needed[0]:.2f}"
    if row["arm"] in SOLVED and first:
        same = sum(a == b for a, b in zip(row["answers"], first["answers"], strict=True))
        cells["equal"] = f"{same / len(first['answers']):.3f}"
    return cells


def draw(rows: Sequence[Row], axes: list[Any]) -> None:
    """Draw bars: tokens per CPU second of every arm, for every model."""
    models, arms = (list(dict.fromkeys(row[name] for row in rows)) for name in ("model", "arm"))
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        speeds = {row["model"]: row["tokens a CPU second"] for row in rows if row["arm"] == arm}
        places = [models.index(model) + (number - (len(arms) - 1) / 2) * width for model in speeds]
        axes[0].bar(places, list(speeds.values()), width, label=arm)
    axes[0].set(ylabel="tokens a CPU second", xticks=range(len(models)), xticklabels=models)
    axes[0].grid(visible=False, axis="x")
    axes[0].legend()


def check(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options that contradict each other or do not work on this machine."""
    if options.device != "cpu":
        raise ValueError("this benchmark counts CPU seconds: use --device cpu")
    for name in ("requests", "batch", "threads", "repeats"):
        check_count(f"--{name}", getattr(options, name))
    for name in ("prompt", "new"):
        least, most = getattr(options, name)
        if not 1 <= least <= most:
            raise ValueError(f"--{name} needs two numbers with 1 <= MIN <= MAX, got {least} {most}")
    if options.rate is not None and not 0 < options.rate < math.inf:
        raise ValueError(f"--rate must be positive and finite, got {options.rate}")
    if "fixed" in options.arms and "adaptive" not in options.arms:
        raise ValueError("fixed takes its number of evaluations from adaptive: choose both arms")
    if set(options.arms) != {"static"} and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed here; docs/serving.md shows how, and --arms static needs none"
        )
    names = [folder.resolve().name for folder in options.model or ()]
    if len(set(names)) < len(names):
        raise ValueError(f"models must be in folders of different names, got {', '.join(names)}")


def main() -> int:
    made = common.parser(__doc__, "serving", device="cpu")
    add = made.add_argument
    add("--model", nargs="+", type=Path, metavar="FOLDER", help="implicit models (default: two random ones)")
    add(
        "--backbones",
        nargs="+",
        choices=BACKBONES,
        default=list(BACKBONES),
        help="backbones of the random models (default: all)",
    )
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    add("--requests", type=int, default=200, metavar="N", help="number of requests (default: 200)")
    add("--rate", type=float, metavar="R", help="requests per second (default: all arrive at once)")
    add("--prompt", nargs=2, type=int, default=[4, 64], metavar=("MIN", "MAX"),
        help="tokens of a prompt (default: 4 64)")  # fmt: skip
    add("--new", nargs=2, type=int, default=[4, 128], metavar=("MIN", "MAX"),
        help="tokens of an answer (default: 4 128)")  # fmt: skip
    add("--batch", type=int, default=8, metavar="N", help="requests served at a time (default: 8)")
    add("--threads", type=int, default=1, metavar="N", help="threads of an arm (default: 1)")
    add("--repeats", type=int, default=1, metavar="N",
        help="measure every arm N times and show the run with the fewest CPU seconds (default: 1); other "
        "programs on the machine make a run slower")  # fmt: skip
    add("--eager", action="store_true", help="vLLM does not compile")
    add("--seed", type=int, default=0, help="seed of the requests and of the random models (default: 0)")
    options = made.parse_args()
    check(options)
    quiet_transformers()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # the processes of the arms read it
    with tempfile.TemporaryDirectory() as place:
        cases: dict[str, Case] = {}
        for name in options.model or options.backbones:
            model = load(Path(name)) if options.model else make_model(name, options.seed)
            name = Path(name).resolve().name if options.model else name
            requests = make_requests(options, model.config.vocab_size)
            cases[name] = Case(Path(place, name), requests, identity(model, requests))
            save(model, cases[name].folder)
        rows = measure(options, cases)
    shown = best(rows)
    lines = [line([each for each in shown if each["model"] == row["model"]], row) for row in shown]
    common.print_table(f"serving, {common.machine_name(options.device)}", lines)
    if measured := [row for row in shown if "problem" not in row]:
        save_figure(options.output / "serving.png", partial(draw, measured))
    short = [{name: value for name, value in row.items() if name != "answers"} for row in rows]
    common.write_results(options.output / "serving.json", options, lines=lines, rows=short)
    return int(any("problem" in row for row in rows))


if __name__ == "__main__":
    common.run(main)
