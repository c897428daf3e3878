"""Pretraining gives the same results after it was killed and resumed, and on any number of processes.

One interpreter imports everything and forks all training processes. Otherwise imports would take longer than
the training.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deqseq.tasks import pretraining

SETTINGS: dict[str, Any] = {
    "model": {
        "vocab_size": 300, "backbone": {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2},
    },
    "length": 16, "batch_tokens": 64, "per_device_batch_size": 2, "learning_rate": 1e-2, "bf16": False,
    "steps": 12, "passes": 1000, "workers": 0, "log_steps": 1, "eval_steps": 100, "eval_rows": None,
    "report_to": "none", "spectral_every": 0, "save_steps": 3,
    "stages": [
        {"until": 0.5, "gradient": {"name": "phantom", "steps": 1},
         "convergence": {"name": "fixed", "iterations": 2}},
        {"until": 1.0, "gradient": {"name": "phantom", "steps": 2},
         "convergence": {"name": "residual", "rtol": 0.02, "max_iter": 20}},
    ],
}  # fmt: skip

# Helpers for SCRIPT. They fork the training processes from a process that has imported everything.
PRELUDE = """
import faulthandler, gc, json, os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from deqseq.tasks.pretraining import card
from deqseq.tasks.pretraining.settings import RunSettings
from deqseq.tasks.pretraining.train import pretrain
from deqseq.tasks.pretraining.trainer import PretrainTrainer

torch.set_num_threads(1)
card.plot_curves = lambda *_: False  # drawing takes longer than the training
gc.collect()
gc.freeze()
tmp, data = Path(sys.argv[1]), sys.argv[2]
SETTINGS = json.loads(sys.argv[3])
FSDP = json.loads(sys.argv[4])

def shard_on_cpus():
    '''Make accelerate shard on CPUs too. By default it shards on GPUs only, but its code works on both.'''
    from accelerate.state import AcceleratorState, DistributedType
    original = AcceleratorState.__init__
    def init(self, *args, fsdp_plugin=None, **options):
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if getattr(self, "fsdp_plugin", None) is not None:
            self.distributed_type = DistributedType.FSDP
    AcceleratorState.__init__ = init

def write_late(calls, total):
    '''Write all shards two steps late, and check that their checkpoint has no seal before.'''
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    original = FileSystemWriter.write_data
    def write_data(self, *args, **kwargs):
        end = min(len(calls) + 4, total)
        while len(calls) < end:
            time.sleep(0.001)
        assert not (Path(self.path).parent / "complete.json").exists()
        return original(self, *args, **kwargs)
    FileSystemWriter.write_data = write_data

def settings(**changes):
    return RunSettings(**{**SETTINGS, "data": data, **changes})

def forked(output, environment, settings):
    '''Fork a process that trains in the folder tmp / output. Returns its id.'''
    child = os.fork()
    if child:
        return child
    faulthandler.dump_traceback_later(60, exit=True)
    os.environ.update(environment, ACCELERATE_USE_CPU="true")
    try:
        if "FSDP_VERSION" in environment:
            shard_on_cpus()
        calls = []
        original = PretrainTrainer.compute_loss
        def watched(self, model, *args, **kwargs):
            found = original(self, model, *args, **kwargs)
            if model.training:
                calls.append(self.solves._nfe)
            if output == "stopped" and len(calls) == 10:
                raise ValueError("stopped")
            return found
        PretrainTrainer.compute_loss = watched
        if output in ("late", "stopped"):
            write_late(calls, 10 if output == "stopped" else settings.steps * 2)
        pretrain(settings, tmp / output, progress=False)
        (tmp / f"{output}-nfe-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(calls))
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)

def launch(output, processes=1, fsdp=False, **changes):
    '''Train on several processes. Returns their exit statuses.'''
    port = random.SystemRandom().randrange(20000, 60000)
    ranks, made = [], settings(**changes)  # made once: this takes a fifth of the training
    for rank in range(processes):
        environment = dict(FSDP) if fsdp else {}
        if processes > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(forked(output, environment, made))
    return [os.waitpid(rank, 0)[1] for rank in ranks]

def together(output, processes=1, fsdp=False, **changes):
    '''Train on several processes. Returns the losses in order.'''
    codes = launch(output, processes, fsdp, **changes)
    assert codes == [0] * processes, codes
    log = json.loads((tmp / output / "training.json").read_text())["log"]
    return [line["loss"] for line in log if "loss" in line]

def cut(whole, output, step):
    '''Copy a run, without its model, its record and the checkpoints after ``step``.'''
    shutil.copytree(tmp / whole, tmp / output)
    for path in (tmp / output).iterdir():
        if path.name in ("model", "training.json") or path.name.split("-")[-1].isdigit() and (
            path.name.startswith("checkpoint") and int(path.name.split("-")[1]) > step
        ):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
"""


# The script runs these experiments:
# 1. A run of two stages is killed at three random moments, and resumed.
# 2. One process and two processes train for 15 steps.
# 3. One process and two processes train for two steps in bfloat16.
# 4. Checkpoints are resumed with another number of processes.
# 5. Four processes resume a run of deterministic operations.
SCRIPT = """
first = together("whole", save_steps=1)[:1]
chance = random.Random(1)
killed = []
for target in (2, 6, 9):
    child = forked("cut", {}, settings(save_steps=1))
    while not (tmp / "cut" / f"checkpoint-{target}").exists() and os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    killed.append(sorted(path.name for path in (tmp / "cut").iterdir()))
together("cut", save_steps=1)
weights = lambda run: (tmp / run / "model" / "model.safetensors").read_bytes()

stages = [{**SETTINGS["stages"][0], "until": 0.2}, SETTINGS["stages"][1]]
long = {"steps": 15, "batch_tokens": 32, "stages": stages, "save_steps": 100}
losses = {"one": together("one", **long)}
for name, fsdp in (("ddp", False), ("fsdp", True)):
    losses[name] = together(name, 2, fsdp, per_device_batch_size=1, **long)
calls = {name: [json.loads((tmp / f"{name}-nfe-{rank}.json").read_text()) for rank in range(2)]
         for name in ("ddp", "fsdp")}

scores = {name: json.loads((tmp / name / "training.json").read_text())["validation"]["eval_loss"]
          for name in losses}

few = {"steps": 2, "bf16": True}
coarse = {"exact": first, "one": together("coarse", **few),
          "fsdp": together("coarse fsdp", 2, True, per_device_batch_size=1, **few)}

SETTINGS["per_device_batch_size"] = 1
moved = {"one": together("a", keep=9), "late": together("late", 2, True, keep=9)}
launch("stopped", 2, True)
sealed = [path.parent.name for path in (tmp / "stopped").glob("checkpoint-*/complete.json")]
sharded = sorted(path.name for path in (tmp / "late" / "checkpoint-6").iterdir())
for name, source, processes, fsdp in (
    ("late to one", "late", 1, False), ("late to four", "late", 4, True), ("one to fsdp", "a", 2, True),
    ("one to ddp", "a", 2, False)
):
    cut(source, name, 6)
    moved[name] = together(name, processes, fsdp)
together("steady", 4, steps=6, full_determinism=True, keep=9)
cut("steady", "steady again", 3)
together("steady again", 4, steps=6, full_determinism=True, keep=9)
print(json.dumps({"same": weights("cut") == weights("whole"),
                  "steady": weights("steady again") == weights("steady"),
                  "killed": killed, "losses": losses, "calls": calls, "coarse": coarse, "scores": scores,
                  "moved": moved, "sharded": sharded, "sealed": sealed}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, token_folder: Path) -> Any:
    """The results that SCRIPT prints. A process that takes over a minute dumps its stack and ends."""
    config = Path(pretraining.__file__).parent / "accelerate" / "fsdp2.yaml"
    sharding = yaml.safe_load(config.read_text())["fsdp_config"]
    fsdp = {"ACCELERATE_USE_FSDP": "true", **{name.upper(): str(value) for name, value in sharding.items()}}
    given = [str(tmp_path_factory.mktemp("scale")), str(token_folder), json.dumps(SETTINGS), json.dumps(fsdp)]
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + SCRIPT, *given],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_three_times_ends_with_the_same_weights(found: Any) -> None:
    """The weights equal those of an uninterrupted run, bit for bit. No kill came after the end of the run."""
    assert found["same"], found["killed"]
    assert not any("training.json" in names for names in found["killed"])


def test_sharded_models_compute_in_bfloat16_too(found: Any) -> None:
    """The loss of a sharded model must be that of bfloat16, not that of float32.

    accelerate does not enable autocast for sharded models, so our trainer enables it.
    """
    first = {name: losses[0] for name, losses in found["coarse"].items()}
    assert abs(first["fsdp"] - first["one"]) < 0.1 * abs(first["exact"] - first["one"]), first


def test_held_out_rows_count_once_each(found: Any) -> None:
    """Two processes must get the same validation loss as one process.

    They cannot share the seven held-out rows evenly. If a row counted twice, the losses would differ.
    """
    scores = found["scores"]
    assert [scores["ddp"], scores["fsdp"]] == pytest.approx([scores["one"]] * 2, abs=1e-4)


def test_ranks_give_the_losses_of_one_process(found: Any) -> None:
    """Two processes get the same losses as one process.

    With DDP, each process ends its solves on its own. With FSDP2, both end every solve after the same number
    of evaluations.
    """
    losses, calls = found["losses"], found["calls"]
    for name in ("ddp", "fsdp"):
        assert len(losses[name]) == 15
        assert losses[name] == pytest.approx(losses["one"], abs=1e-4)
    assert losses["one"][-1] < losses["one"][0] - 0.2
    assert calls["ddp"][0] != calls["ddp"][1]
    assert calls["fsdp"][0] == calls["fsdp"][1]


def test_checkpoint_goes_on_elsewhere(found: Any) -> None:
    """Resuming on more or fewer processes changes no loss, even if shards were written two steps late."""
    assert "shards" in found["sharded"]
    assert not {"model.safetensors", "optimizer.pt"} & set(found["sharded"])
    for name, losses in found["moved"].items():
        assert len(losses) == 12, name
        assert losses == pytest.approx(found["moved"]["one"], abs=1e-6), name


def test_an_error_waits_for_the_checkpoint_that_is_being_written(found: Any) -> None:
    assert found["sealed"] == ["checkpoint-3"]


def test_a_deterministic_run_resumes_exactly(found: Any) -> None:
    """Four processes end with the same weights. DDP must add the gradients in the same order again."""
    assert found["steady"]
