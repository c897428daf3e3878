"""Test recovery: kill programs or damage their files, run them again, and check the results.

Kills: the script starts a program (training or data preparation) and kills it with signal 9, one to three
times. The kill comes at a random time, or when the program writes, renames or removes a file. Then the
program runs to its end. The results must equal those of an uninterrupted run. While an undamaged checkpoint
exists, training must not start from step 0.

Flips: the script inverts one random bit of a checkpoint, a finished run or prepared data. Then it runs the
program. The program must either stop with a one-line error, or end with the results of an undamaged run.

    python benchmarks/faults.py
    python benchmarks/faults.py --kills 20 --flips 20 --programs pretrain

Programs run in forked processes, on the CPU with one thread. The folders of failed runs are kept.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from common import Row
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm

from deqseq.tasks import prepare, pretrain
from deqseq.tasks.catbabi import __main__ as catbabi
from deqseq.tasks.common.seals import SEAL, checkpoints, fault
from deqseq.tasks.state_tracking import __main__ as state_tracking

_CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.truncate"}
_WAIT = 120  # seconds after which a program counts as hanging

Main = Callable[[list[str]], int]


@dataclass(frozen=True)
class Program:
    """A program and its arguments. The program writes its results to a folder."""

    name: str
    main: Main
    arguments: list[str]
    results: tuple[str, ...]  # glob patterns of the result files

    def run(self, output: Path, log: Path, changes: int | None = None, seconds: float | None = None) -> int:
        """Run the program in a forked process, and append what it prints to ``log``. Returns the exit status.

        Args:
            changes: kill the process when it changes a file in ``output`` for the ``changes``-th time.
            seconds: kill the process after this time. By default, kill it after ``_WAIT`` seconds, because
                the process then counts as hanging.
        """
        child = os.fork()
        if child == 0:
            with log.open("a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if changes is not None:
                _kill_at(changes, output)
            status = 1
            try:
                status = self.main([*self.arguments, "--output", str(output)])
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        end = time.monotonic() + (seconds if seconds is not None else _WAIT)
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -signal.SIGKILL if seconds is not None else -signal.SIGALRM

    def result(self, folder: Path) -> dict[str, str]:
        """The checksum of every result file in ``folder``."""
        files = sorted(file for pattern in self.results for file in folder.glob(pattern))
        return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def _kill_at(count: int, folder: Path) -> None:
    """Kill this process when it changes a file in ``folder`` for the ``count``-th time."""
    left = count

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in _CHANGES and isinstance(arguments[0], (str, os.PathLike)):
            reads = event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
            if not reads and os.fspath(arguments[0]).startswith(str(folder)):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def whole_checkpoint(folder: Path) -> bool:
    return any(fault(path) is None for path in checkpoints(folder))


def kill(program: Program, place: Path, chance: random.Random, seconds: float, changes: int) -> Row:
    """Start a program and kill it, one to three times. Then run the program to its end.

    A kill comes at a random file change up to the number ``changes``, or after a random time up to
    ``seconds``. Returns a row that says what happened. Its entry "from step 0" is true if a run started from
    step 0 although an undamaged checkpoint existed.
    """
    output, log, killed, anew = place / "output", place / "log.txt", 0, False
    for _ in range(chance.randint(1, 3)):
        before, size = whole_checkpoint(output), log.stat().st_size if log.exists() else 0
        if chance.random() < 0.7:
            status = program.run(output, log, changes=chance.randint(1, changes))
        else:
            status = program.run(output, log, seconds=chance.uniform(0.02, seconds))
        killed += status == -signal.SIGKILL
        anew |= before and "starts from step 0" in log.read_text()[size:]
    before, size = whole_checkpoint(output), log.stat().st_size
    status = program.run(output, log)
    anew |= before and "starts from step 0" in log.read_text()[size:]
    return {"program": program.name, "kills": killed, "status": status, "from step 0": anew}


def flip_bit(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def flip(program: Program, place: Path, chance: random.Random, whole: Path, damaged: Path) -> Row:
    """Flip one random bit of a file, then run the program.

    ``damaged`` is either a folder with prepared data or the folder ``whole`` of a finished run. In prepared
    data, the file may be any file. A finished run is copied first, and the file belongs to the copy. The
    function chooses one of two kinds of fault at random:

    - "finished run": the file belongs to no checkpoint.
    - "checkpoint": the file belongs to the newest checkpoint. The function also removes the trained model,
      its record and its seal from the copy, so the program has to continue from a checkpoint.
    """
    output, log = place / "output", place / "log.txt"
    if damaged != whole:
        target, kind = damaged, "data"
        pool = [file for file in damaged.rglob("*") if file.is_file()]
    else:
        shutil.copytree(whole, output)
        kind = chance.choice(["checkpoint", "checkpoint", "finished run"])
        if kind == "checkpoint":
            for name in ("model", "training.json", SEAL, "model.safetensors"):
                path = output / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        target = checkpoints(output)[-1] if kind == "checkpoint" else output
        pool = [
            f
            for f in target.rglob("*")
            if f.is_file() and (kind == "checkpoint" or "checkpoint" not in str(f))
        ]
    pool = [file for file in pool if file.stat().st_size]
    # Choose a file. Half of the time, its probability is in proportion to its size. Otherwise all files are
    # equally likely, so that small files are chosen too.
    weights = [file.stat().st_size for file in pool] if chance.random() < 0.5 else None
    file = chance.choices(pool, weights)[0]
    former = file.read_bytes()
    flip_bit(file, chance)
    status = program.run(output, log)
    if kind == "data":
        file.write_bytes(former)
    return {"program": program.name, "kind": kind, "file": str(file.relative_to(target)), "status": status}


def judge(row: Row, program: Program, place: Path, reference: dict[str, str]) -> Row:
    """Add the outcome to the row: "equal", "refused in one line", or a description of the failure."""
    said = (place / "log.txt").read_text()
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    if "Traceback (most recent call last)" in said:
        outcome = "traceback"
    elif row["status"] == 0:
        outcome = "equal" if program.result(place / "output") == reference else "silently different"
        outcome = "started from step 0" if row.get("from step 0") else outcome
    else:
        outcome = (
            "refused in one line" if row["status"] == 2 and len(lines) == 1 else f"status {row['status']}"
        )
    return {**row, "outcome": outcome, "said": lines[-1] if lines else ""}


def corpus(folder: Path) -> Path:
    """Write a text, a byte-level tokenizer, and stories of twenty bAbI tasks to ``folder``.

    Returns the path of the text.
    """
    chance = random.Random(0)
    text = folder / "text.txt"
    text.write_text("".join("".join(chance.choices("abc defgh", k=40)) + "\n" for _ in range(400)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "babi").mkdir()
    for split in ("train", "valid", "test"):
        for task in range(1, 21):
            lines = []
            for _ in range(6):
                where = chance.choice(["garden", "kitchen", "hall"])
                lines += [f"1 Mary went to the {where}.", f"2 Where?\t{where}\t1"]
            (folder / "babi" / f"qa{task}_{split}.txt").write_text("\n".join(lines) + "\n")
    return text


def programs(folder: Path) -> dict[str, Program]:
    """Write small input data to ``folder``. Returns the programs to test, by name."""
    text = corpus(folder)
    shards = ["--tokenizer", str(folder / "tokenizer.json"), "--documents", "line", "--workers", "1"]
    few = ["--validation-share", "0.1", "--shard-tokens", "3000"]
    data, stories = str(folder / "data"), str(folder / "stories")
    prepare.main([str(text), *shards, *few, "--output", data])
    catbabi.main(["build", "--data-dir", str(folder / "babi"), "--output", stories])
    model = {"vocab_size": 300, "backbone": {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2}}
    run: Row = {
        "data": data, "model": model, "length": 16, "batch_tokens": 32, "per_device_batch_size": 2,
        "steps": 8, "passes": 100, "eval_rows": 4, "eval_steps": 100, "save_steps": 2, "log_steps": 3,
        "spectral_every": 0, "workers": 0, "report_to": "none", "bf16": False,
    }  # fmt: skip
    fields = [
        word
        for name, value in run.items()
        for word in (f"--{name}", value if isinstance(value, str) else json.dumps(value))
    ]
    tiny = ["--d-model", "16", "--d-state", "4", "--headdim", "8", "--steps", "8", "--batch-size", "4",
            "--max-iter", "8", "--save-steps", "2"]  # fmt: skip
    words = ["--group", "S3", "--length", "8", "--min-length", "4", "--unrolled-length", "4"]
    made = [
        Program("pretrain", pretrain.main, ["llama-tiny", *fields], ("model/*.safetensors",)),
        Program("state tracking", state_tracking.main, ["train", *tiny, *words], ("*.safetensors",)),
        Program("catbabi", catbabi.main, ["train", "--data", stories, *tiny], ("*.safetensors",)),
        Program("prepare", prepare.main, [str(text), *shards, *few], ("*.bin", "manifest.json")),
    ]
    return {program.name: program for program in made}


def main() -> int:
    made = common.parser(__doc__, "faults.json", device="cpu")
    made.add_argument("--kills", type=int, default=200, help="runs that are killed (default: 200)")
    made.add_argument("--flips", type=int, default=500, help="bits of training runs (default: 500)")
    made.add_argument("--data-flips", type=int, default=500, help="bits of prepared data (default: 500)")
    made.add_argument(
        "--programs", nargs="+", help="pretrain, state tracking, catbabi, prepare (default: all)"
    )
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    import deqseq.tasks.pretraining.train  # noqa: F401 - once here, not in every forked process

    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    chance, rows = random.Random(options.seed), []
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    found = programs(folder)
    chosen = [found[name] for name in options.programs or found]
    references, costs = {}, {}
    for program in chosen:
        output, start = folder / f"whole {program.name}", time.perf_counter()
        if program.run(output, folder / f"{program.name}.txt"):
            sys.exit((folder / f"{program.name}.txt").read_text())
        seconds = time.perf_counter() - start
        references[program.name] = program.result(output)
        changes = 1
        while changes < 4096:  # double until the run ends before it is killed
            with tempfile.TemporaryDirectory() as place:
                if program.run(Path(place) / "output", Path(place) / "log.txt", changes=changes) == 0:
                    break
            changes *= 2
        costs[program.name] = seconds, changes
    trained = [program for program in chosen if program.name != "prepare"]
    trials = [("kill", chosen[i % len(chosen)]) for i in range(options.kills)]
    trials += [("flip", trained[i % len(trained)]) for i in range(options.flips if trained else 0)]
    if found["pretrain"] in chosen:
        trials += [("data", found["pretrain"])] * options.data_flips
    for what, program in tqdm(trials, desc="faults"):
        place = Path(tempfile.mkdtemp(dir=folder))
        whole = folder / f"whole {program.name}"
        if what == "kill":
            row = kill(program, place, chance, *costs[program.name])
        else:
            row = flip(program, place, chance, whole, folder / "data" if what == "data" else whole)
        rows.append(judge({"fault": what, **row}, program, place, references[program.name]))
        if rows[-1]["outcome"] in ("equal", "refused in one line"):
            shutil.rmtree(place)
        else:
            tqdm.write(f"{place}: {rows[-1]}")
    table = Counter((row["fault"], row["program"], row["outcome"]) for row in rows)
    summary = [
        dict(zip(("fault", "program", "outcome"), key, strict=True), runs=n) for key, n in table.items()
    ]
    wrong = any(row["outcome"] not in ("equal", "refused in one line") for row in rows)
    return conclude("faults", options, rows, summary, folder, wrong)


def conclude(
    title: str, options: argparse.Namespace, rows: list[Row], summary: list[Row], folder: Path, wrong: bool
) -> int:
    """Print ``summary`` and write all rows. Keep ``folder`` only if ``wrong`` is true.

    Returns the exit status: 1 if ``wrong`` is true, else 0.
    """
    common.print_table(f"\n{title}", summary)
    common.write_results(options.output, options, rows=rows, summary=summary)
    if not wrong:
        shutil.rmtree(folder, ignore_errors=True)
    return int(wrong)


if __name__ == "__main__":
    common.run(main)
