"""How does pretraining scale over the GPUs of one machine?

    speed      130M models, with a copy on every GPU (DDP): tokens per second on 1, 2, 4, ... GPUs. The
               report also shows how long a GPU computes, communicates and is idle, and how much of the
               communication is waiting for the slowest GPU. Every GPU gets the same number of tokens in a
               step (weak scaling). There are three stages: bounded, with 4+1 evaluations (search + gradient);
               free with 14+4 evaluations; and free as in the run file, where a search ends when its tokens
               have converged
    sharded    1.3B models, sharded over the GPUs (FSDP2): tokens per second and memory. Also: how long a
               sharded checkpoint takes, and whether other numbers of GPUs continue from it with equal losses
    kill       kills one process with signal 9: how long until all processes have ended, and whether the same
               command resumes with equal losses
    report     tables, a JSON file and a figure of the finished runs

    python -m deqseq.tasks.prepare --installed --tokenizer train:50277 --validation-share 0.0005 --output DATA
    python benchmarks/scaling.py speed --data DATA
    python benchmarks/scaling.py sharded --data DATA
    python benchmarks/scaling.py kill --data DATA
    python benchmarks/scaling.py report

To resume, repeat a command: finished runs are not repeated. Without a GPU, the processes run on the CPU;
there, use `--models llama-tiny --tokens 1024 --rows 4`, and data with `--tokenizer train:1024`."""

import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scale import kills, results
from scale.launch import Checkpoint, Run, all_of, numbers_up_to_all, read_records, size_of_machine
from tqdm.auto import tqdm

from deqseq.tasks.common import command_line
from deqseq.tasks.common.files import locked
from deqseq.tasks.common.settings import PositiveInt, Seed
from deqseq.tasks.pretraining.run_files import load_run

_OUTPUT = Path("runs/scaling")
_WARM_UP = 3  # steps of a stage that are not timed: the first ones compile
_PROFILED = 2  # steps at the end of a stage


def speed(
    *,
    data: str,
    output: Path = _OUTPUT,
    models: list[str] = ["mamba2-130m", "llama-130m"],  # noqa: B006
    gpus: list[PositiveInt] = [],  # noqa: B006
    tokens: PositiveInt = 131072,
    rows: PositiveInt | None = None,
    steps: PositiveInt = 5,
    runs: PositiveInt = 2,
    together: bool = False,
) -> None:
    """Measure tokens per second with a copy of the model on every GPU.

    Args:
        data: folder made by deqseq.tasks.prepare
        output: folder of the results
        models: names of run files
        gpus: numbers of GPUs; by default 1, 2, 4, ... up to all
        tokens: tokens per GPU and step
        rows: rows in one forward pass of a GPU; by default ``per_device_batch_size`` of the run file
        steps: timed steps of a stage
        runs: number of repetitions
        together: several runs take place at the same time, on different GPUs. This is faster, but they
            share the processor, which makes runs on few GPUs slower
    """
    count = _WARM_UP + steps + _PROFILED
    todo = []
    for name in dict.fromkeys(models):
        stages = _stages(name)
        profiled = [n * count - k for n in range(1, len(stages) + 1) for k in range(_PROFILED)]
        for number in dict.fromkeys(gpus or numbers_up_to_all(1)):
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
                title = {
                    "kind": "ddp", "tokens_per_gpu": tokens, "repetition": repetition, "together": together,
                }  # fmt: skip
                todo.append(Run(folder, name, number, fields, profiled=profiled, title=title))
    with locked(output, "measures in"):
        for run in todo:
            run.check()
        failed = all_of(todo, together)
        for run in todo:
            if run.finished:
                if results.read(run.folder) is None:
                    results.write(run, stages=results.stages(run, list(_stages(run.name)), _WARM_UP))
                _clear(run)
    _end(failed, output)


def sharded(
    *,
    data: str,
    output: Path = _OUTPUT,
    models: list[str] = ["mamba2-1.3b", "llama-1.3b"],  # noqa: B006
    gpus: list[PositiveInt] = [],  # noqa: B006
    tokens: PositiveInt = 32768,
    rows: PositiveInt | None = None,
    steps: PositiveInt = 5,
) -> None:
    """Measure models that are sharded over the GPUs, their checkpoints, and runs that continue from these.

    Args:
        data: folder made by deqseq.tasks.prepare
        output: folder of the results
        models: names of run files
        gpus: numbers of GPUs; by default 2, 4, ... up to all. The run on the largest number saves the
            checkpoint from which runs on all these numbers continue
        tokens: tokens per GPU and step
        rows: rows in one forward pass of a GPU; by default ``per_device_batch_size`` of the run file
        steps: timed steps before the checkpoint. Two more steps follow it
    """
    numbers = sorted({*(gpus or numbers_up_to_all(2))})
    at, new, continued = _WARM_UP + steps, list[Run](), list[tuple[Run, Checkpoint]]()
    for name in dict.fromkeys(models):
        for number in numbers:
            fields = {
                **_fields(data, rows, at + 2), "batch_tokens": tokens * number, "save_steps": at,
                "stages": [{**_stages(name)["free, 14+4"], "until": 1.0}],
            }  # fmt: skip
            folder = output / "sharded" / name / f"{number}-gpus"
            new.append(Run(folder, name, number, fields, sharded=True, title={"kind": "fsdp2"}))
        largest = new[-1]
        for number in numbers:
            folder = largest.folder.with_name(f"from-{largest.gpus}-to-{number}-gpus")
            title = {"kind": "continued", "saved_on": largest.gpus}
            source = Checkpoint(largest, at)
            run = replace(largest, folder=folder, gpus=number, title=title, source=source)
            continued.append((run, source))
    with locked(output, "measures in"):
        for run in (*new, *(run for run, _ in continued)):
            run.check()
        for run, source in continued:
            if not (run.finished or source.path.exists()):
                source.run.discard()  # train it again, for its checkpoint
        failed = all_of(new, together=True)
        for run in new:
            if run.finished and results.read(run.folder) is None:
                (stage,) = results.stages(run, ["free, 14+4"], _WARM_UP)
                saved = results.of_checkpoint(Checkpoint(run, at))
                results.write(run, stages=[stage], checkpoint=saved)
        failed += all_of([run for run, source in continued if source.path.exists()], together=True)
        for run, source in continued:
            if run.finished and results.read(run.folder) is None:
                (anew,) = (n for n in new if (n.name, n.gpus) == (run.name, run.gpus))
                results.write(
                    run, steps=2, seconds_to_start=_start(run), seconds_to_start_anew=_start(anew),
                    largest_difference=results.largest_difference(run, source.run, at),
                )  # fmt: skip
        if not failed:
            for run in (*new, *(run for run, _ in continued)):
                _clear(run)
    _end(failed, output)


def kill(
    *,
    data: str,
    output: Path = _OUTPUT,
    models: list[str] = ["llama-130m"],  # noqa: B006
    gpus: PositiveInt | None = None,
    tokens: PositiveInt = 32768,
    rows: PositiveInt | None = None,
    runs: PositiveInt = 1,
    seed: Seed = 0,
) -> None:
    """Kill one process of a run with signal 9, and repeat the command of the run.

    All runs use deterministic operations only. The result has the largest difference of a loss from a run
    without a kill, and this difference between two runs without a kill. Needs Linux.

    Args:
        data: folder made by deqseq.tasks.prepare
        output: folder of the results
        models: names of run files
        gpus: number of GPUs; by default all
        tokens: tokens per GPU and step
        rows: rows in one forward pass of a GPU; by default ``per_device_batch_size`` of the run file
        runs: number of runs in which a process is killed
        seed: seed of the choice of the process and the moment
    """
    number = gpus or size_of_machine()
    if number < 2:
        raise ValueError(f"gpus must be at least 2, so that other processes are left, got {number}")
    failed = []
    for name in dict.fromkeys(models):
        fields = {
            **_fields(data, rows, 12), "batch_tokens": tokens * number, "save_steps": 4,
            "stages": [{**_stages(name)["bounded"], "until": 1.0}], "full_determinism": True,
        }  # fmt: skip
        parent = output / "kill" / name / f"{number}-gpus"
        whole = Run(parent / "whole", name, number, fields, title={"kind": "whole"})
        again = replace(whole, folder=parent / "whole-again")
        killed = [
            replace(whole, folder=parent / f"run-{n}", title={"kind": "kill", "repetition": n, "seed": seed})
            for n in range(1, runs + 1)
        ]
        with locked(output, "measures in"):
            for run in (whole, again, *killed):
                run.check()
            try:
                for run in (whole, again):
                    if not (run.folder / "run" / "training.json").exists():
                        kills.finish(run)
                for run in tqdm(killed, unit="run"):
                    if results.read(run.folder) is None:
                        _kill(run, whole, again)
            except OSError as error:
                failed.append(str(error))
            else:
                for run in (whole, again, *killed):
                    _clear(run)
    _end(failed, output)


def _kill(run: Run, whole: Run, again: Run) -> None:
    run.discard()  # what is left of an interrupted measurement
    found = kills.kill(run, " ".join(map(str, run.title.values())))
    resumed_from = kills.last_checkpoint(run)
    kills.finish(run)
    results.write(
        run, **found, resumed_from=resumed_from, largest_difference=results.largest_difference(run, whole, 0),
        largest_difference_without_a_kill=results.largest_difference(again, whole, 0),
    )  # fmt: skip


def report(folder: Path = _OUTPUT, *, output: Path = Path("runs/scaling/report")) -> None:
    """Print tables of all finished runs, and write a JSON file and a figure.

    Args:
        folder: folder of the results
        output: path of the JSON file and the figure, without a suffix
    """
    command_line.check_stem("--output", output)
    found = results.collect(folder)
    for title, text in results.tables(found).items():
        print(f"{title}\n\n{text}\n")
    print(f"wrote {', '.join(map(str, results.save(found, output)))}")


def _stages(name: str) -> dict[str, dict[str, Any]]:
    """The measured stages of a run file by name, without ``until``."""
    settings = load_run(name)
    stages = settings.stages or []
    if settings.explicit or len(stages) < 2:
        raise ValueError(f"models must be implicit and have two stages, like llama-130m; got {name}")
    bounded, free = ({k: v for k, v in stages[n].items() if k != "until"} for n in (0, -1))
    dropped = ("convergence", "eval_convergence", "adaptive_budget")
    fixed = {name: value for name, value in free.items() if name not in dropped}
    fixed["convergence"] = {"name": "fixed", "iterations": 14}
    return {"bounded": bounded, "free, 14+4": fixed, "free": free}


def _fields(data: str, rows: int | None, steps: int) -> dict[str, Any]:
    """The fields that all runs change."""
    return {
        **({} if rows is None else {"per_device_batch_size": rows}), "data": str(Path(data).resolve()),
        "passes": 1000.0, "steps": steps, "log_steps": 1, "eval_steps": 10**6, "eval_rows": 8,
        "save_steps": 10**6, "spectral_every": 0, "report_to": "none",
    }  # fmt: skip


def _start(run: Run) -> float:
    """Seconds from the end of the imports to the first step, of the slowest process."""
    return max(record["seconds_to_start"] for record in read_records(run))


def _clear(run: Run) -> None:
    """Remove the models and checkpoints of a run. Its log and its settings stay."""
    for made in (run.folder / "run").glob("*/"):
        shutil.rmtree(made)


def _end(failed: Sequence[str], output: Path) -> None:
    """Say where the results are. Raises ``OSError`` if runs have failed."""
    if failed:
        raise OSError(f"failed, with a log.txt in the folder: {'; '.join(failed)}")
    print(f"the results are in {output}; the command report shows them")


def main() -> int:
    commands = {"speed": speed, "sharded": sharded, "kill": kill, "report": report}
    return command_line.main(
        "scaling.py", __doc__ or "", commands, None,
        interrupted="repeat the command to resume", log_level=logging.WARNING,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
