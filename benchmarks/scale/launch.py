"""Starts pretraining on some of the GPUs of this machine, with torchrun, for benchmarks/scaling.py."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
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

_PLAN = "plan.json"
_MEASURE = Path(__file__).with_name("measure.py")
_FSDP = Path(deqseq.tasks.pretraining.__file__).parent / "accelerate" / "fsdp2.yaml"
_MINUTES = 30  # a run that takes longer counts as hanging


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
    """

    folder: Path
    name: str
    gpus: int
    fields: dict[str, Any]
    sharded: bool = False
    profiled: Sequence[int] = ()
    title: dict[str, Any] = field(default_factory=dict)

    @property
    def records(self) -> list[Path]:
        return [self.folder / f"rank-{rank}.json" for rank in range(self.gpus)]

    @property
    def finished(self) -> bool:
        return all(file.exists() for file in self.records)

    def start(self, devices: Sequence[int], program: Sequence[str] = ()) -> "Process":
        """Start the run on the GPUs with these numbers, counted among the visible ones.

        Args:
            program: what torchrun starts; by default, the program that records every step.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        plan = self.folder / _PLAN
        write_json(plan, self._plan())
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
        # One process needs no torchrun, which would wrap its model in DDP.
        begin = [sys.executable, *(torchrun if self.gpus > 1 else ())]
        return Process([*begin, *(program or (str(_MEASURE), str(plan)))], self._environment(devices), self)

    def _plan(self) -> dict[str, Any]:
        plan = {
            "run": self.name, "fields": self.fields, "output": str(self.folder / "run"),
            "profiled": list(self.profiled), "gpus": self.gpus, "sharded": self.sharded, "title": self.title,
        }  # fmt: skip
        return dict(json.loads(json.dumps(plan)))

    def check(self) -> None:
        """Raise ``ValueError`` if the machine has too few GPUs, or the folder holds another run."""
        if torch.cuda.is_available() and self.gpus > size_of_machine():
            raise ValueError(f"gpus must be at most {size_of_machine()} on this machine, got {self.gpus}")
        if (self.folder / _PLAN).exists():
            # The output folder may have moved.
            plans = ({**plan, "output": None} for plan in (read_json(self.folder / _PLAN), self._plan()))
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
    """A started run. Its output goes to ``log.txt`` in the folder of the run."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], run: Run) -> None:
        self.run, self.log = run, run.folder / "log.txt"
        with self.log.open("a") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

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

    def wait(self) -> int:
        """Wait until the run has ended. Returns its exit status. After 30 minutes, end it."""
        try:
            return self.process.wait(_MINUTES * 60)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            return self.process.wait()

    def failure(self) -> str:
        """The last line of the output that names an error."""
        lines = [line for line in self.log.read_text().replace("\r", "\n").splitlines() if line.strip()]
        named = [line for line in lines if "rror: " in line]
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


def all_of(runs: Sequence[Run], gpus: int) -> list[str]:
    """Carry out the runs that have no records yet, several at the same time if the machine has GPUs for them.

    Runs on one GPU come first. Returns a line for every run that failed.
    """
    waiting = sorted((run for run in runs if not run.finished), key=lambda run: run.gpus)
    failed, started = [], list[Process]()
    try:
        with tqdm(total=len(waiting), unit="run") as bar:
            while waiting:
                size = waiting[0].gpus
                together = [run for run in waiting if run.gpus == size][: max(1, gpus // size)]
                waiting = waiting[len(together) :]
                bar.set_postfix_str(", ".join(f"{run.name} on {size}" for run in together))
                started = [run.start(range(n * size, (n + 1) * size)) for n, run in enumerate(together)]
                for process in started:
                    if status := process.wait():
                        failed.append(f"{process.run.folder} (status {status}): {process.failure()}")
                    bar.update()
    finally:
        for process in started:
            process.process.terminate()  # does nothing if it has ended
    return failed


def read_records(run: Run) -> list[dict[str, Any]]:
    """The records of a run, one of each rank."""
    return [json.loads(file.read_text()) for file in run.records]
