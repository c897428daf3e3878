"""Kills a process of a training run, and repeats the command of the run, for benchmarks/scaling.py."""

import json
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scale.launch import Process, Run

from deqseq.tasks.common.seals import SEAL, step_of

_AT = 4  # the process is killed soon after the checkpoint of this step
_WAIT = 1800  # seconds in which this checkpoint must appear
_END = 60  # seconds after which processes that still run count as hanging


def command(run: Run) -> list[str]:
    """The command of a run, without the program that starts it."""
    words = ["-m", "deqseq.tasks.pretrain", run.name, "--output", str(run.folder / "run")]
    for name, value in run.fields.items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def finish(run: Run) -> None:
    """Carry out a run to its end. Raises ``OSError`` if it fails."""
    with run.start(range(run.gpus), command(run)) as process:
        process.finish()


def kill(run: Run, seed: str) -> dict[str, Any]:
    """Start a run, and kill a random process of it. Returns its rank, and how long the others still ran.

    Raises:
        OSError: the run ends before the kill, or processes still run a minute after it.
    """
    chance = random.Random(seed)
    with run.start(range(run.gpus), command(run)) as process:
        seal = run.folder / "run" / f"checkpoint-{_AT}" / SEAL
        _wait_for(seal, process)
        time.sleep(chance.uniform(0, 1))
        ranks = process.ranks()
        if len(ranks) < run.gpus:
            raise OSError(f"{run.folder} ended before a process was killed: {process.error()}")
        killed = chance.randrange(run.gpus)
        os.kill(ranks[killed], signal.SIGKILL)
        begin = time.monotonic()
        while process.process.poll() is None or _running(ranks.values()):
            if time.monotonic() > begin + _END:
                left = ", ".join(map(str, [process.process.pid, *_running(ranks.values())]))
                raise OSError(f"{run.folder}: processes still run {_END} s after the kill: {left}")
            time.sleep(0.05)
        return {"killed": killed, "seconds_to_end": time.monotonic() - begin}


def last_checkpoint(run: Run) -> int:
    """The step of the last complete checkpoint of a run."""
    return max(step_of(seal.parent) for seal in (run.folder / "run").glob(f"checkpoint-*/{SEAL}"))


def _wait_for(seal: Path, process: Process) -> None:
    end = time.monotonic() + _WAIT
    while not seal.exists():
        if process.process.poll() is not None:
            raise OSError(f"{process.folder} ended before a process was killed: {process.error()}")
        if time.monotonic() > end:
            raise OSError(f"{process.folder} has no checkpoint after {_WAIT} s")
        time.sleep(0.05)


def _running(processes: Iterable[int]) -> list[int]:
    """Those of the processes that still run. Needs Linux."""
    found = []
    for number in processes:
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        if state != "Z":
            found.append(number)
    return found
