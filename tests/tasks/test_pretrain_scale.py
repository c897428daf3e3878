"""Pretraining that is killed, spread over processes, moved between them: the same numbers.

A test starts one interpreter, which forks the processes that train: imports cost more than all training here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SETTINGS: dict[str, Any] = {
    "model": {
        "vocab_size": 300, "backbone": {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2},
    },
    "length": 16, "batch_tokens": 64, "per_device_batch_size": 2, "learning_rate": 1e-2, "bf16": False,
    "steps": 12, "passes": 1000, "workers": 0, "log_steps": 1, "eval_steps": 100, "eval_rows": 4,
    "report_to": "none", "spectral_every": 0, "save_steps": 3,
    "stages": [
        {"until": 0.5, "gradient": {"name": "phantom", "steps": 1},
         "convergence": {"name": "fixed", "iterations": 2}},
        {"until": 1.0, "gradient": {"name": "phantom", "steps": 2},
         "convergence": {"name": "residual", "rtol": 0.02, "max_iter": 20}},
    ],
}  # fmt: skip

# Trains in processes forked from one that has imported everything.
PRELUDE = """
import faulthandler, json, os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from deqseq.tasks.pretraining.settings import RunSettings
from deqseq.tasks.pretraining.train import pretrain
from deqseq.tasks.pretraining.trainer import PretrainTrainer
from deqseq.tasks.evaluate.models import quiet_transformers

quiet_transformers()
torch.set_num_threads(1)
tmp, data = Path(sys.argv[1]), sys.argv[2]
SETTINGS = json.loads(sys.argv[3])
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}

def shard_on_cpus():
    '''accelerate shards on GPUs only; all that it does for that works on CPUs too.'''
    from accelerate.state import AcceleratorState, DistributedType
    original = AcceleratorState.__init__
    def init(self, *args, fsdp_plugin=None, **options):
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if getattr(self, "fsdp_plugin", None) is not None:
            self.distributed_type = DistributedType.FSDP
    AcceleratorState.__init__ = init

def forked(output, environment, changes):
    '''The id of a process that trains in folder tmp / output.'''
    child = os.fork()
    if child:
        return child
    faulthandler.dump_traceback_later(60, exit=True)
    os.environ.update(environment, ACCELERATE_USE_CPU="true")
    try:
        if os.environ.get("RANK", "0") != "0":
            sys.stderr.flush()
        if "FSDP_VERSION" in environment:
            shard_on_cpus()
        calls = []
        original = PretrainTrainer.compute_loss
        def watched(self, model, *args, **kwargs):
            found = original(self, model, *args, **kwargs)
            if model.training:
                calls.append(self.watch._nfe)
            return found
        PretrainTrainer.compute_loss = watched
        pretrain(RunSettings(**{**SETTINGS, "data": data, **changes}), tmp / output, progress=False)
        (tmp / f"{output}-nfe-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(calls))
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)

def together(output, processes=1, fsdp=False, **changes):
    '''Train on so many processes; the losses, in order.'''
    port = random.SystemRandom().randrange(20000, 60000)
    ranks = []
    for rank in range(processes):
        environment = dict(FSDP) if fsdp else {}
        if processes > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(forked(output, environment, changes))
    codes = [os.waitpid(rank, 0)[1] for rank in ranks]
    assert codes == [0] * processes, codes
    log = json.loads((tmp / output / "training.json").read_text())["log"]
    return [line["loss"] for line in log if "loss" in line]

def cut(whole, output, step):
    '''A copy of a run as it was after a step at which it was saved.'''
    shutil.copytree(tmp / whole, tmp / output)
    for path in (tmp / output).iterdir():
        if path.name in ("model", "training.json") or path.name.split("-")[-1].isdigit() and (
            path.name.startswith("checkpoint") and int(path.name.split("-")[1]) > step
        ):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
"""


def run(tmp: Path, data: Path, script: str, limit: float = 150, **changes: Any) -> Any:
    """What the script prints last, as JSON."""
    settings = json.dumps({**SETTINGS, **changes})
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(tmp), str(data), settings],
        capture_output=True, text=True, timeout=limit, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_three_times_ends_with_the_same_weights(tmp_path: Path, token_folder: Path) -> None:
    """Kill -9 at random moments, in both stages: bit-equal weights, and a torn checkpoint is passed over."""
    script = """
together("whole")
chance = random.Random(1)
killed = []
for target in (1, 5, 8):  # of 12 steps, 6 a stage: killed at some moment after this one
    child = forked("cut", {}, {})
    while not (tmp / "cut" / f"checkpoint-{target + 1}").exists() and os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (tmp / "cut" / "training.json").exists()
    killed.append(sorted(p.name for p in (tmp / "cut").glob("checkpoint-*")))
together("cut")
same = [(tmp / run / "model" / "model.safetensors").read_bytes() for run in ("whole", "cut")]
print(json.dumps({"same": same[0] == same[1], "killed": killed}))
"""
    found = run(tmp_path, token_folder, script, save_steps=1)
    assert found["same"], found["killed"]


def test_ranks_give_the_losses_of_one_process(tmp_path: Path, token_folder: Path) -> None:
    """DDP and FSDP2 on two processes over 50 steps, on rows that need different numbers of iterations."""
    script = """
losses = {"one": together("one")}
for name, fsdp in (("ddp", False), ("fsdp", True)):
    losses[name] = together(name, 2, fsdp, per_device_batch_size=1)
calls = {name: [json.loads((tmp / f"{name}-nfe-{rank}.json").read_text()) for rank in range(2)]
         for name in ("ddp", "fsdp")}
print(json.dumps([losses, calls]))
"""
    stages = [{**SETTINGS["stages"][0], "until": 0.2}, SETTINGS["stages"][1]]
    losses, calls = run(
        tmp_path, token_folder, script, steps=50, batch_tokens=32, stages=stages, save_steps=100
    )
    for name in ("ddp", "fsdp"):
        assert len(losses[name]) == 50
        assert losses[name] == pytest.approx(losses["one"], abs=1e-4)
    assert losses["one"][-1] < losses["one"][0] - 0.2
    assert calls["ddp"][0] != calls["ddp"][1]  # each rank stops by itself
    assert calls["fsdp"][0] == calls["fsdp"][1]  # all together


def test_checkpoint_goes_on_elsewhere(tmp_path: Path, token_folder: Path) -> None:
    """Of two processes' FSDP in one, and back: the same losses as without a move."""
    script = """
losses = {"one": together("one", keep=9), "fsdp": together("fsdp", 2, True, keep=9)}
cut("fsdp", "fsdp to one", 6)
losses["fsdp to one"] = together("fsdp to one")
cut("one", "one to fsdp", 6)
losses["one to fsdp"] = together("one to fsdp", 2, True)
cut("one", "one to ddp", 6)
losses["one to ddp"] = together("one to ddp", 2)
print(json.dumps(losses))
"""
    losses = run(tmp_path, token_folder, script, per_device_batch_size=1)
    for name, found in losses.items():
        assert len(found) == 12, name
        assert found == pytest.approx(losses["one"], abs=1e-4), name
