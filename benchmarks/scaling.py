"""How does pretraining scale over the GPUs of one machine?

    speed      130M models, a copy on every GPU (DDP): tokens per second on 1, 2, 4, ... GPUs, and where the
               time goes. Every GPU gets the same number of tokens in a step (weak scaling). Three stages:
               bounded (4+1 evaluations), free with 14+4 evaluations, and free as in the run file, where a
               search ends when its tokens have converged
    sharded    1.3B models, sharded over the GPUs (FSDP2): tokens per second and memory; how long a sharded
               checkpoint takes; whether a run continues with equal losses on other numbers of GPUs
    kill       kill a rank with signal 9: how long until all processes end, and whether the same command
               resumes with equal losses
    report     tables, one JSON file and a figure from the finished runs

To use all GPUs, runs on fewer GPUs are carried out at the same time, on different GPUs.

    python -m deqseq.tasks.prepare --installed --tokenizer train:50277 --validation-share 0.0005 --output DATA
    python benchmarks/scaling.py speed --data DATA
    python benchmarks/scaling.py sharded --data DATA
    python benchmarks/scaling.py kill --data DATA
    python benchmarks/scaling.py report

To resume, repeat a command: finished runs are not repeated. Without a GPU, processes run on the CPU; use
`--models llama-tiny` there."""

import json
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scale import results
from scale.launch import Run, all_of, numbers_up_to_all, read_records, size_of_machine

from deqseq.tasks.common import command_line
from deqseq.tasks.common.runs import read_record
from deqseq.tasks.common.seals import SEAL
from deqseq.tasks.common.settings import PositiveInt
from deqseq.tasks.pretraining.run_files import load_run

_OUTPUT = Path("runs/scaling")
_WARM_UP = 3  # steps of a stage that are not timed: the first ones compile
_PROFILED = 2  # steps at the end of a stage
_END = 30  # seconds in which all processes must have ended after a kill


def speed(
    *,
    data: str,
    output: Path = _OUTPUT,
    models: list[str] = ["mamba2-130m", "llama-130m"],  # noqa: B006
    gpus: list[PositiveInt] = [],  # noqa: B006
    tokens: PositiveInt = 131072,
    rows: PositiveInt = 8,
    steps: PositiveInt = 5,
    runs: PositiveInt = 2,
) -> None:
    """Measure tokens per second with a copy of the model on every GPU.

    Args:
        data: folder made by deqseq.tasks.prepare
        output: folder of the results
        models: names of run files
        gpus: numbers of GPUs; by default 1, 2, 4, ... up to all
        tokens: tokens of a step on every GPU
        rows: rows in one forward pass of a GPU
        steps: timed steps of a stage
        runs: number of repetitions
    """
    count = _WARM_UP + steps + _PROFILED
    todo = []
    for name in models:
        stages = _stages(name)
        profiled = [n * count - k for n in range(1, len(stages) + 1) for k in range(_PROFILED)]
        for number in gpus or numbers_up_to_all(1):
            for repetition in range(1, runs + 1):
                fields = {
                    **_fields(data, rows, len(stages) * count), "batch_tokens": tokens * number,
                    "log_steps": 10**6,
                    "stages": [
                        {**stage, "until": {"steps": (n + 1) * count}}
                        for n, stage in enumerate(stages.values())
                    ],
                }  # fmt: skip
                folder = output / "speed" / name / f"{number}-gpus" / f"run-{repetition}"
                title = {"kind": "ddp", "tokens_of_a_gpu": tokens, "repetition": repetition}
                todo.append(Run(folder, name, number, fields, profiled=profiled, title=title))
    _begin(todo)
    failed = all_of(todo, size_of_machine())
    for run in todo:
        if run.finished and results.read(run.folder) is None:
            results.write(run, stages=results.stages(run, list(_stages(run.name)), _WARM_UP))
            _clear(run)
    _fail(failed)


def sharded(
    *,
    data: str,
    output: Path = _OUTPUT,
    models: list[str] = ["mamba2-1.3b", "llama-1.3b"],  # noqa: B006
    gpus: list[PositiveInt] = [],  # noqa: B006
    tokens: PositiveInt = 32768,
    rows: PositiveInt = 4,
    steps: PositiveInt = 5,
) -> None:
    """Measure models that are sharded over the GPUs, their checkpoints, and runs continued from these.

    Args:
        data: folder made by deqseq.tasks.prepare
        output: folder of the results
        models: names of run files
        gpus: numbers of GPUs; by default 2, 4, ... up to all. The last one saves the checkpoint from which
            runs on every number of GPUs continue
        tokens: tokens of a step on every GPU
        rows: rows in one forward pass of a GPU
        steps: timed steps before the checkpoint; two more follow
    """
    numbers = sorted(gpus or numbers_up_to_all(2))
    at, todo = _WARM_UP + steps, []
    for name in models:
        for number in numbers:
            free = {**_stages(name)["free, 14+4"], "until": 1.0}
            fields = {
                **_fields(data, rows, at + 2), "batch_tokens": tokens * number, "save_steps": at,
                "stages": [free],
            }  # fmt: skip
            folder, title = output / "sharded" / name / f"{number}-gpus", {"kind": "fsdp2"}
            todo.append(Run(folder, name, number, fields, sharded=True, title=title))
    _begin(todo)
    failed = all_of(todo, size_of_machine())
    sources = [run for run in todo if run.finished]
    continued: list[tuple[Run, Run]] = []
    for source in sources:
        if results.read(source.folder) is None:
            (stage,) = results.stages(source, ["free, 14+4"], _WARM_UP)
            results.write(source, stages=[stage], checkpoint=results.checkpoint(source, at))
        if source.gpus == numbers[-1]:
            for number in numbers:
                folder = source.folder.with_name(f"from-{source.gpus}-to-{number}-gpus")
                run = replace(source, folder=folder, gpus=number, title={"kind": "continued"})
                if not run.finished:
                    _copy(source, run, at)
                continued.append((source, run))
    failed += all_of([run for _, run in continued], size_of_machine())
    for source, run in continued:
        if run.finished:
            results.write(
                run, saved_on=source.gpus, steps=2, seconds_to_start=_start(run),
                seconds_to_start_anew=_start(source),
                largest_difference=results.largest_difference(run, source, at),
            )  # fmt: skip
            _clear(run)
    if not failed:
        for source in sources:
            _clear(source)
    _fail(failed)


def kill(
    *,
    data: str,
    output: Path = _OUTPUT,
    models: list[str] = ["llama-130m"],  # noqa: B006
    gpus: PositiveInt | None = None,
    tokens: PositiveInt = 32768,
    rows: PositiveInt = 8,
    runs: PositiveInt = 1,
    seed: int = 0,
) -> None:
    """Kill one rank of a run with signal 9, and repeat the command of the run.

    Args:
        data: folder made by deqseq.tasks.prepare
        output: folder of the results
        models: names of run files
        gpus: number of GPUs; by default all
        tokens: tokens of a step on every GPU
        rows: rows in one forward pass of a GPU
        runs: number of runs in which a rank is killed
        seed: seed of the choice of the rank and the moment
    """
    number, chance, failed = gpus or size_of_machine(), random.Random(seed), list[str]()
    if number < 2:
        raise ValueError(f"gpus must be at least 2: a killed rank and another one, got {number}")
    for name in models:
        stage = {**_stages(name)["bounded"], "until": 1.0}
        fields = {
            **_fields(data, rows, 12), "batch_tokens": tokens * number, "stages": [stage], "save_steps": 4
        }  # fmt: skip
        whole = Run(output / "kill" / name / f"{number}-gpus" / "whole", name, number, fields)
        for repetition in range(runs + 1):
            folder = whole.folder.with_name(f"run-{repetition}") if repetition else whole.folder
            run = replace(whole, folder=folder, title={"kind": "kill", "repetition": repetition})
            run.check()
            try:
                _kill(run, whole, chance) if repetition else _finish(run)
            except OSError as error:
                failed.append(str(error))
    _fail(failed)


def _command(run: Run) -> list[str]:
    """The command of a run, without the program that starts it."""
    words = ["-m", "deqseq.tasks.pretrain", run.name, "--output", str(run.folder / "run")]
    for name, value in run.fields.items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def _finish(run: Run) -> None:
    """Carry out a run to its end. Raises ``OSError`` if it fails."""
    process = run.start(range(run.gpus), _command(run))
    if status := process.wait():
        raise OSError(f"{run.folder} (status {status}): {process.failure()}")


def _kill(run: Run, whole: Run, chance: random.Random) -> None:
    if results.read(run.folder):
        return
    shutil.rmtree(run.folder / "run", ignore_errors=True)  # of an interrupted measurement
    process = run.start(range(run.gpus), _command(run))
    sign = run.folder / "run" / "checkpoint-4" / SEAL
    while not sign.exists():
        if process.process.poll() is not None:
            raise OSError(f"{run.folder} ended before a rank was killed: {process.failure()}")
        time.sleep(0.05)
    time.sleep(chance.uniform(0, 1))
    ranks = process.ranks()
    killed = chance.randrange(run.gpus)
    os.kill(ranks[killed], 9)
    began = time.monotonic()
    while (process.process.poll() is None or _alive(ranks.values())) and time.monotonic() < began + 2 * _END:
        time.sleep(0.05)
    ended, left = time.monotonic() - began, len(_alive(ranks.values()))
    checkpoints = sorted(int(seal.parent.name.split("-")[1]) for seal in sign.parents[1].glob(f"*/{SEAL}"))
    _finish(run)
    results.write(
        run, killed=killed, seconds_to_end=ended, left=left, resumed_from=checkpoints[-1],
        resumed=read_record(run.folder / "run")["resumed"],
        largest_difference=results.largest_difference(run, whole, 0),
    )  # fmt: skip


def _alive(processes: Iterable[int]) -> list[int]:
    return [number for number in processes if Path(f"/proc/{number}").exists()]


def report(folder: Path = _OUTPUT, *, output: Path = Path("runs/scaling/report")) -> None:
    """Print tables of all finished runs, and write a JSON file and a figure.

    Args:
        folder: folder of the results
        output: path of the JSON file and the figure, without a suffix
    """
    found = results.collect(folder)
    for title, text in results.tables(found).items():
        print(f"{title}\n\n{text}\n")
    print(f"wrote {', '.join(map(str, results.save(found, output)))}")


def _stages(name: str) -> dict[str, dict[str, Any]]:
    """The measured stages of a run file by name, without ``until``."""
    first, *_, last = load_run(name).stages or [None]
    if first is None:
        raise ValueError(f"{name} has no stages: name a run file with stages, such as llama-130m")
    bounded, free = ({k: v for k, v in stage.items() if k != "until"} for stage in (first, last))
    dropped = ("convergence", "eval_convergence", "adaptive_budget")
    fixed = {name: value for name, value in free.items() if name not in dropped}
    fixed["convergence"] = {"name": "fixed", "iterations": 14}
    return {"bounded": bounded, "free, 14+4": fixed, "free": free}


def _fields(data: str, rows: int, steps: int) -> dict[str, Any]:
    """The fields that all runs change."""
    return {
        "data": data, "passes": 1000.0, "per_device_batch_size": rows, "steps": steps, "log_steps": 1,
        "eval_steps": 10**6, "eval_rows": 8, "save_steps": 10**6, "spectral_every": 0, "report_to": "none",
    }  # fmt: skip


def _begin(runs: Sequence[Run]) -> None:
    """Check the runs. Remove unfinished training: its first steps were not recorded."""
    for run in runs:
        run.check()
    for run in runs:
        if not run.finished:
            shutil.rmtree(run.folder / "run", ignore_errors=True)


def _start(run: Run) -> float:
    """Seconds from the start of the program, after its imports, to the first step."""
    return max(record["seconds_to_start"] for record in read_records(run))


def _copy(source: Run, run: Run, step: int) -> None:
    """Make a run that continues ``source`` from the checkpoint of a step. Files are hard links."""
    shutil.rmtree(run.folder, ignore_errors=True)
    made = run.folder / "run"
    name = f"checkpoint-{step}"
    shutil.copytree(source.folder / "run" / name, made / name, copy_function=os.link)
    shutil.copy(source.folder / "run" / "settings.json", made)


def _clear(run: Run) -> None:
    """Remove the models and checkpoints of a run."""
    for made in (run.folder / "run").glob("*/"):
        shutil.rmtree(made)


def _fail(failed: Sequence[str]) -> None:
    """Raise ``OSError`` if runs have failed."""
    if failed:
        raise OSError(f"{len(failed)} runs failed; their folders have log.txt: {'; '.join(failed)}")


def main() -> int:
    commands = {"speed": speed, "sharded": sharded, "kill": kill, "report": report}
    return command_line.main(
        "scaling.py", __doc__ or "", commands, None,
        interrupted="repeat the command to resume", log_level=logging.WARNING,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
