"""Starts pretraining on some of the GPUs of this machine, with torchrun, for benchmarks/scaling.py."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm.auto import tqdm

import deqseq.tasks.pretraining
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.results import changes
from deqseq.tasks.common.runs import read_json
from deqseq.tasks.common.settings import flat
from deqseq.tasks.pretraining.data import open_data
from deqseq.tasks.pretraining.run_files import load_run

PLAN, RESULT = "plan.json", "result.json"
_MEASURE = Path(__file__).with_name("measure.py")
_FSDP = Path(deqseq.tasks.pretraining.__file__).parent / "accelerate" / "fsdp2.yaml"
_MINUTES = 30  # a run that takes longer counts as hanging


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that a run has written after a step."""

    run: "Run"
    step: int

    @property
    def path(self) -> Path:
        return self.run.folder / "run" / f"checkpoint-{self.step}"

    def copy_to(self, run: "Run") -> None:
        """Make the folder of a run that continues from here. The files are hard links."""
        to = run.folder / "run"
        shutil.copytree(self.path, to / self.path.name, copy_function=os.link)
        shutil.copy(self.path.with_name("settings.json"), to)


@dataclass(frozen=True)
class Run:
    """A training run on ``gpus`` GPUs, or as many processes on the CPU.

    Attributes:
        folder: folder of the plan, the records and the log. The training run is in ``folder/run``.
        name: the run file, such as llama-130m.
        fields: changed settings of the run file.
        sharded: whether FSDP2 shards the model. Otherwise every GPU has a copy (DDP).
        profiled: steps to profile.
        title: what the report says of this run, as JSON types.
        source: the checkpoint from which the run continues; ``None`` for a new run.
    """

    folder: Path
    name: str
    gpus: int
    fields: dict[str, Any]
    sharded: bool = False
    profiled: Sequence[int] = ()
    title: dict[str, Any] = field(default_factory=dict)
    source: "Checkpoint | None" = None

    @property
    def records(self) -> list[Path]:
        return [self.folder / f"rank-{rank}.json" for rank in range(self.gpus)]

    @property
    def finished(self) -> bool:
        """Whether all processes have written their records."""
        return all(file.exists() for file in self.records)

    def discard(self) -> None:
        """Remove the records, the result, the models and the checkpoints of the run."""
        for file in (*self.records, self.folder / RESULT):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "run", ignore_errors=True)

    def start(self, devices: Sequence[int], program: Sequence[str] = ()) -> "Process":
        """Start the run on the GPUs with these numbers, counted among the visible ones.

        Args:
            program: what torchrun starts; by default, the program that records every step.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        plan = self.folder / PLAN
        write_json(plan, self._plan())
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
        # One process needs no torchrun, which would wrap its model in DDP.
        begin = [sys.executable, *(torchrun if self.gpus > 1 else ())]
        command = [*begin, *(program or (str(_MEASURE), str(plan)))]
        return Process(command, self._environment(devices), self.folder)

    def _plan(self) -> dict[str, Any]:
        plan = {
            "run": self.name, "fields": self.fields, "output": str(self.folder / "run"),
            "profiled": list(self.profiled), "gpus": self.gpus, "sharded": self.sharded, "title": self.title,
        }  # fmt: skip
        return dict(json.loads(json.dumps(plan)))

    def check(self) -> None:
        """Check the run before it starts.

        Raises:
            ValueError: there are too few GPUs, data are missing, settings do not fit, or the folder has
                results of other settings.
        """
        if torch.cuda.is_available() and self.gpus > size_of_machine():
            raise ValueError(f"gpus must be at most {size_of_machine()} on this machine, got {self.gpus}")
        settings = load_run(self.name, self.fields)
        settings.accumulation(self.gpus)
        open_data(settings).fitted(settings.config())
        results = (*self.records, self.folder / RESULT, self.folder / "run" / "training.json")
        if (self.folder / PLAN).exists() and any(file.exists() for file in results):
            # The output folder may have moved.
            plans = ({**plan, "output": None} for plan in (read_json(self.folder / PLAN), self._plan()))
            before, now = (dict(flat(plan)) for plan in plans)
            if different := changes(before, now):
                raise ValueError(
                    f"{self.folder} was measured with other settings ({'; '.join(different)}): repeat the "
                    "options, or name another output"
                )

    def _environment(self, devices: Sequence[int]) -> dict[str, str]:
        processors = (os.cpu_count() or 1) // max(1, torch.cuda.device_count())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = [visible[number] for number in devices] if visible[0] else map(str, devices)
        made = {
            **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names),
            "OMP_NUM_THREADS": str(max(1, min(16, processors))), "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        if not torch.cuda.is_available():
            made |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        if self.sharded:
            sharding = yaml.safe_load(_FSDP.read_text())["fsdp_config"]
            made |= {"ACCELERATE_USE_FSDP": "true", **{k.upper(): str(v) for k, v in sharding.items()}}
        return made


class Process:
    """A started run. Its output goes to ``log.txt`` in the folder of the run.

    As a context manager, it ends the run when the context ends.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.txt"
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def ranks(self) -> dict[int, int]:
        """The process ids of the ranks that run now, by rank. Needs Linux."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = {}
        for child in map(int, children):
            with_zeros = Path(f"/proc/{child}/environ").read_bytes()
            values = dict(line.split(b"=", 1) for line in with_zeros.split(b"\0") if b"=" in line)
            if b"RANK" in values:
                found[int(values[b"RANK"])] = child
        return found

    def finish(self) -> None:
        """Wait until the run has ended. Raises ``OSError`` if it fails, or takes more than 30 minutes."""
        try:
            status = self.process.wait(_MINUTES * 60)
        except subprocess.TimeoutExpired:
            raise OSError(f"{self.folder} has not ended after {_MINUTES} minutes") from None
        if status:
            raise OSError(f"{self.folder} (status {status}): {self.error()}")

    def error(self) -> str:
        """The last line of the output that names an error."""
        text = self.log.read_bytes()[self._begin :].decode(errors="replace")
        lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
        # torchrun's own error does not name the cause.
        named = [line for line in lines if re.search(r"rror: \S", line) and "ChildFailedError" not in line]
        return (named or lines or ["no output"])[-1].strip()


def size_of_machine() -> int:
    """The number of GPUs of this machine. Without a GPU, the number of processes to start: 2."""
    return torch.cuda.device_count() or 2


def numbers_up_to_all(first: int) -> list[int]:
    """The numbers ``first``, 2 ``first``, 4 ``first``, ... up to the number of GPUs."""
    numbers = [first]
    while 2 * numbers[-1] <= size_of_machine():
        numbers.append(2 * numbers[-1])
    return numbers


def all_of(runs: Sequence[Run], together: bool = False) -> list[str]:
    """Carry out the runs that have no records yet. Runs on few GPUs come first.

    Returns a line for every run that failed.

    Args:
        together: whether runs take place at the same time, on different GPUs. They then share the processor.
    """
    waiting = sorted((run for run in runs if not run.finished), key=lambda run: run.gpus)
    failed = []
    with tqdm(total=len(waiting), unit="run", disable=not waiting) as bar:
        while waiting:
            size = waiting[0].gpus
            count = max(1, size_of_machine() // size) if together else 1
            chosen = [run for run in waiting if run.gpus == size][:count]
            waiting = waiting[len(chosen) :]
            bar.set_postfix_str(", ".join(f"{run.name} on {size}" for run in chosen))
            with ExitStack() as stack:
                started = []
                for number, run in enumerate(chosen):
                    run.discard()
                    if run.source is not None:
                        run.source.copy_to(run)
                    process = run.start(range(number * size, (number + 1) * size))
                    started.append(stack.enter_context(process))
                for process in started:
                    try:
                        process.finish()
                    except OSError as error:
                        failed.append(str(error))
                    bar.update()
    return failed


def read_records(run: Run) -> list[dict[str, Any]]:
    """The records of a run, one of each rank."""
    return [json.loads(file.read_text()) for file in run.records]
