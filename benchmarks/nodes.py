"""Test restarts: kill one process of a training run on two nodes, and check the losses after the restart.

The script trains a small model with two processes (ranks) on each of two nodes. Both nodes are on this
machine and use the CPU. The script starts the same processes as two ``torchrun`` commands (--nnodes 2
--nproc-per-node 2 --max-restarts 3), with the environment variables of docs/clusters.md. At a random time,
the script kills one of the four ranks with signal 9. torchrun's two agents (one per node) then restart all
ranks. Three conditions must hold:

- No loss differs by more than 1e-6 from the loss of an uninterrupted run. Small differences are allowed,
  because DDP sums the gradients of the first step after a start in another order than in later steps.
- The ranks print at most one error message in total, and no traceback.
- If an undamaged checkpoint exists at the kill, training does not start again from step 0.

    python benchmarks/nodes.py
    python benchmarks/nodes.py --runs 3

Ranks run in forked processes. The folders of failed runs are kept.
"""

import contextlib
import gc
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import common
import torch
from common import Row
from faults import Program, conclude, programs, whole_checkpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tqdm.auto import tqdm

from deqseq.tasks.common.runs import read_record

NODES = RANKS = 2  # two nodes with two ranks each
_WAIT = 180  # seconds after which a run counts as hanging


def rank(program: Program, place: Path) -> None:
    """Train as one rank. The process writes its id to ``place/RANK.pid`` and its output to ``ranks.txt``."""
    with (place / "ranks.txt").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    part = place / f"{os.environ['RANK']}.part"
    part.write_text(str(os.getpid()))
    part.replace(part.with_suffix(".pid"))
    status = program.main([*program.arguments, "--output", str(place / "output")])
    sys.stdout.flush()
    if status:
        sys.exit(status)


def node(program: Program, place: Path, port: int) -> int:
    """Fork an agent, which starts and restarts the ranks of one node. Returns the agent's process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with (place / "agents.txt").open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        config = LaunchConfig(
            min_nodes=NODES, max_nodes=NODES, nproc_per_node=RANKS, run_id="faults", rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port}", max_restarts=3, start_method="fork",
        )  # fmt: skip
        elastic_launch(config, rank)(program, place)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def run(program: Program, place: Path, step: int | None, chance: random.Random) -> Row:
    """Train on all nodes, and kill one rank soon after the checkpoint of ``step`` appears.

    If ``step`` is 0, kill the rank soon after it starts. If ``step`` is ``None``, kill no rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [node(program, place, port) for _ in range(NODES)]
    left, statuses, row = set(agents), [], {"killed": None, "had a checkpoint": False}
    victim = place / f"{chance.randrange(NODES * RANKS)}.pid"
    start, end, moment = time.monotonic(), time.monotonic() + _WAIT, None
    sign = place / "output" / f"checkpoint-{step}" if step else victim
    while left:
        for agent in list(left):
            done, status = os.waitpid(agent, os.WNOHANG)
            if done:
                left.remove(agent)
                statuses.append(os.waitstatus_to_exitcode(status))
        now = time.monotonic()
        if moment is None and step is not None and sign.exists():
            moment = now + chance.uniform(0, 0.5)
        if moment is not None and now > moment and left:
            row = {"killed": victim.stem, "had a checkpoint": whole_checkpoint(place / "output")}
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(victim.read_text()), signal.SIGKILL)
            step = moment = None
        if now > end:
            for agent in left:
                os.kill(agent, signal.SIGTERM)
            end = float("inf")
            row["hangs"] = True
        time.sleep(0.005)
    return {**row, "statuses": statuses, "seconds": round(time.monotonic() - start, 1)}


def losses(place: Path) -> list[float]:
    """The training losses of a finished run in the order of steps, then the validation loss."""
    record = read_record(place / "output")
    return [*(line["loss"] for line in record["log"] if "loss" in line), record["validation"]["eval_loss"]]


def difference(found: list[float], reference: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, reference, strict=True))


def judge(row: Row, place: Path, reference: list[float]) -> Row:
    """Add to ``row``: the outcome, the largest difference of a loss from ``reference``, the ranks' errors."""
    said = (place / "ranks.txt").read_text().replace("\r", "\n").splitlines()
    lines = [line for line in said if line.startswith("process ")]
    if row.get("hangs") or any(row["statuses"]):
        outcome = "hangs" if row.get("hangs") else "fails"
    elif difference(losses(place), reference) > 1e-6:
        outcome = "different"
    elif any("Traceback" in line for line in said) or len(lines) > 1:
        outcome = "equal, but says more than a line"
    elif row["had a checkpoint"] and any("starts from step 0" in line for line in said):
        outcome = "equal, but started from step 0"
    else:
        outcome = "equal" if row["killed"] is not None else "equal, ended before the kill"
    if not any(row["statuses"]):
        row["largest difference"] = difference(losses(place), reference)
    return {**row, "outcome": outcome, "lines": lines}


def main() -> int:
    made = common.parser(__doc__, "nodes.json", device="cpu")
    made.add_argument("--runs", type=int, default=20, help="runs in which a rank is killed (default: 20)")
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    import deqseq.tasks.pretraining.train  # noqa: F401 - once here, not in every forked process

    os.environ.update(
        TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    chance = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="nodes-"))
    program = programs(folder)["pretrain"]
    fields = ["--per_device_batch_size", "1", "--batch_tokens", "64", "--save_steps", "1", "--log_steps", "1"]
    program = Program(program.name, program.main, [*program.arguments, *fields], program.results)
    whole = folder / "whole"
    whole.mkdir()
    gc.collect()
    gc.freeze()  # the ranks collect garbage; without what was imported, this is faster
    took = run(program, whole, None, chance)
    if any(took["statuses"]):
        sys.exit((whole / "ranks.txt").read_text() + (whole / "agents.txt").read_text())
    rows, reference = [], losses(whole)
    for _ in tqdm(range(options.runs), desc="runs"):
        place = Path(tempfile.mkdtemp(dir=folder))
        row = run(program, place, chance.randrange(8), chance)
        rows.append(judge(row, place, reference))
        if rows[-1]["outcome"].startswith("equal") and "but" not in rows[-1]["outcome"]:
            shutil.rmtree(place)
        else:
            tqdm.write(f"{place}: {rows[-1]}")
    summary: list[Row] = [
        {"outcome": outcome, "runs": count} for outcome, count in Counter(r["outcome"] for r in rows).items()
    ]
    wrong = any("but" in row["outcome"] or not row["outcome"].startswith("equal") for row in rows)
    return conclude("a rank of two nodes is killed", options, rows, summary, folder, wrong)


if __name__ == "__main__":
    common.run(main)
