"""Runs that are killed, damaged or started twice lose no work and report damaged files."""

import json
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from deqseq.tasks.common import command_line, seals
from deqseq.tasks.common.files import PART, locked
from deqseq.tasks.common.models import load_model
from deqseq.tasks.common.runs import RunFolder, check_model
from deqseq.tasks.common.seals import checkpoints, fault, rotate, seal
from deqseq.tasks.pretraining.data import TrainingOrder
from deqseq.tasks.pretraining.run_files import load_run
from deqseq.tasks.pretraining.settings import RunSettings
from deqseq.tasks.pretraining.shards import _load, wait_for
from deqseq.tasks.pretraining.train import arguments, pretrain
from deqseq.tasks.pretraining.trainer import PretrainTrainer

STEPS = 8
SMALL: dict[str, Any] = {
    "model": {"vocab_size": 300, "backbone": {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2}},
    "length": 16, "batch_tokens": 32, "per_device_batch_size": 2, "steps": STEPS, "passes": 100,
    "eval_rows": None, "eval_steps": 100, "save_steps": 2, "log_steps": 3, "spectral_every": 0, "workers": 0,
    "report_to": "none", "bf16": False,
    "stages": [  # those of llama-tiny, with shorter searches
        {"until": 0.8, "gradient": {"name": "phantom", "steps": 1},
         "convergence": {"name": "fixed", "iterations": 2}},
        {"until": 1.0, "gradient": {"name": "phantom", "steps": 2}, "adaptive_budget": 0.05,
         "convergence": {"name": "residual", "rtol": 0.05, "max_iter": 6}},
    ],
}  # fmt: skip


class KillError(BaseException):
    """Simulates a killed process: no code of the library catches this exception."""


@pytest.fixture
def settings(token_folder: Path) -> RunSettings:
    return load_run("llama-tiny", {**SMALL, "data": str(token_folder)})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, token_folder: Path) -> Path:
    """The folder of an uninterrupted run that kept all its checkpoints."""
    folder = tmp_path_factory.mktemp("faults") / "whole"
    pretrain(load_run("llama-tiny", {**SMALL, "data": str(token_folder), "keep": 9}), folder, progress=False)
    return folder


def train(settings: RunSettings, folder: Path) -> bytes:
    """Train to the end and return the bytes of the weights file."""
    return (pretrain(settings, folder, progress=False) / "model.safetensors").read_bytes()


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def cut(run: Path, folder: Path) -> Path:
    """Copy a run to ``folder``, as the run was before its model was saved."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "model")
    for name in ("training.json", seals.SEAL):
        (folder / name).unlink()
    return folder


def flip(file: Path, place: float = 0.7) -> None:
    """Flip one bit of the file. ``place`` is the bit's position, as a share of the file's length."""
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 4
    file.write_bytes(data)


def dies(name: str, at: Callable[[Path], bool]) -> Callable[..., None]:
    """Make a replacement for the function ``name`` of ``seals`` or ``shutil``.

    If ``at(path)`` is true, it removes one file in ``path`` and raises KillError. Otherwise it calls the
    original function.
    """
    original = getattr(seals, name, None) or getattr(shutil, name)

    def function(path: Path, *args: Any) -> None:
        if at(Path(path)):
            for file in [p for p in Path(path).iterdir() if p.is_file()][:1]:  # as if killed half-way
                file.unlink()
            raise KillError
        original(path, *args)

    return function


def test_a_kill_while_removing_and_one_before_sealing_lose_nothing(
    settings: RunSettings, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dies("rmtree", lambda path: path.name == "checkpoint-2"))
        with pytest.raises(KillError):
            pretrain(settings, tmp_path, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(
            "deqseq.tasks.common.trainer.seal", dies("seal", lambda path: path.name == "checkpoint-8")
        )
        with pytest.raises(KillError):
            pretrain(settings, tmp_path, progress=False)
    assert [path.name for path in checkpoints(tmp_path) if fault(path) is None] == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    assert train(settings, tmp_path) == weights(whole)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "checkpoint-6",
        "checkpoint-8",
    ]  # incomplete checkpoints are gone


def test_a_kill_while_the_seal_is_written_does_not_spoil_the_next_seal(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1")
    (tmp_path / f"{seals.SEAL}{PART}").write_text("{")
    seal(tmp_path)
    assert fault(tmp_path) is None


@pytest.mark.parametrize("name", ["_checksums", "_block_digest"])
def test_a_file_that_another_process_removes_during_the_check_is_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "part" / "weights"
    weights.parent.mkdir()
    weights.write_text("1")
    seal(tmp_path, [weights])
    check = getattr(seals, name)

    def after_removal(*args: Any) -> Any:
        weights.unlink()
        return check(*args)

    monkeypatch.setattr(seals, name, after_removal)
    assert fault(tmp_path) == "is damaged: part/weights is missing"


def test_rotation_counts_whole_checkpoints_by_number(tmp_path: Path) -> None:
    for step in (10, 9, 100, 20, 30):  # the order of writing is not the order of steps
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "weights").write_text(str(step))
        if step != 30:
            seal(tmp_path / f"checkpoint-{step}")
    rotate(tmp_path, 2)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-20", "checkpoint-100"]


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "config.json", seals.SEAL],
)
def test_a_flipped_bit_in_the_newest_checkpoint_is_noticed(
    settings: RunSettings, whole: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = cut(whole, tmp_path / "run")
    flip(run / f"checkpoint-{STEPS}" / name)
    assert train(settings, run) == weights(whole)
    assert f"checkpoint-{STEPS} is damaged" in caplog.text
    assert f"resuming from {run / f'checkpoint-{STEPS - 2}'}" in caplog.text


def test_a_file_of_another_step_is_noticed(settings: RunSettings, whole: Path, tmp_path: Path) -> None:
    run = cut(whole, tmp_path / "run")
    shutil.copy(run / "checkpoint-4" / "optimizer.pt", run / f"checkpoint-{STEPS}")
    assert train(settings, run) == weights(whole)


@pytest.mark.parametrize("name", ["model/model.safetensors", "training.json"])
def test_a_damaged_finished_run_is_repeated_from_its_last_checkpoint(
    settings: RunSettings, whole: Path, tmp_path: Path, name: str
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    flip(run / name)
    assert train(settings, run) == weights(whole) and fault(run) is None
    for path in checkpoints(run):
        shutil.rmtree(path)
    flip(run / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors .*no checkpoint is whole"):
        pretrain(settings, run, progress=False)


def test_a_run_killed_before_its_seal_is_not_finished(
    settings: RunSettings, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut(whole, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("deqseq.tasks.common.runs.seal", Mock(side_effect=KillError))
        with pytest.raises(KillError):
            pretrain(settings, run, progress=False)
    (run / "model" / "model.safetensors").write_bytes(b"")  # a kill before the sync may leave an empty file
    with pytest.raises(ValueError, match="run was not written to its end"):
        load_model(str(run / "model"))
    assert train(settings, run) == weights(whole)


def test_finished_runs_of_older_versions_have_no_seal(
    settings: RunSettings, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    record = json.loads((run / "training.json").read_text())
    (run / "training.json").write_text(json.dumps({k: v for k, v in record.items() if k != "sealed"}))
    (run / seals.SEAL).unlink()
    (run / "stage-1" / seals.SEAL).unlink()
    monkeypatch.setattr(PretrainTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
    assert train(settings, run) == weights(whole)
    check_model(run / "model")
    check_model(run / "stage-1")


def test_a_read_error_is_one_line_and_changes_nothing(
    settings: RunSettings, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def stale(*_: Any) -> None:
        raise OSError(116, "Stale file handle")

    run = cut(whole, tmp_path / "run")
    before = sorted(run.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(seals, "_checksums", stale)
        assert run_command(lambda: pretrain(settings, run, progress=False) and None) == 2
        patch.setattr(Path, "read_text", stale)
        rotate(run, 1)
    last = run / f"checkpoint-{STEPS}"
    assert f"error: {last} cannot be read: [Errno 116] Stale file handle\n" == capsys.readouterr().err
    assert sorted(run.rglob("*")) == before


def test_a_checkpoint_of_another_run_is_refused(settings: RunSettings, whole: Path, tmp_path: Path) -> None:
    run = cut(whole, tmp_path / "run")
    last = run / f"checkpoint-{STEPS}"
    copied = json.loads((last / "run_settings.json").read_text())
    (last / "run_settings.json").write_text(json.dumps({**copied, "seed": 7}))
    seal(last)
    with pytest.raises(ValueError, match=rf"{last} .* other settings \(seed: 7 there, .* remove {last.name}"):
        pretrain(settings, run, progress=False)
    (last / "run_settings.json").unlink()  # checkpoints of older versions have no such file
    seal(last)
    late = last.rename(run / "checkpoint-14")
    with pytest.raises(ValueError, match=f"{late} is not of this run, which has {STEPS} steps"):
        pretrain(settings, run, progress=False)
    late.rename(last)
    assert train(settings, run) == weights(whole)


def test_folders_and_links_of_others_stay(whole: Path, tmp_path: Path) -> None:
    run = cut(whole, tmp_path / "run")
    (run / "checkpoint-100").mkdir()
    (run / "checkpoint-100" / "notes.txt").write_text("mine")
    (run / "checkpoint-²").mkdir()
    target = (run / "checkpoint-4").rename(tmp_path / "elsewhere")
    (run / "checkpoint-4").symlink_to(target)
    rotate(run, 1)
    left = sorted(path.name for path in run.glob("checkpoint-*"))
    assert left == ["checkpoint-100", f"checkpoint-{STEPS}", "checkpoint-²"]
    assert fault(target) is None and (run / "checkpoint-100" / "notes.txt").exists()


def test_a_folder_in_the_place_of_a_file(settings: RunSettings, whole: Path, tmp_path: Path) -> None:
    run = cut(whole, tmp_path / "run")
    (run / f"checkpoint-{STEPS}" / seals.SEAL).unlink()
    (run / f"checkpoint-{STEPS}" / seals.SEAL).mkdir()
    (run / seals.SEAL).mkdir()
    with pytest.raises(ValueError, match=r"complete\.json is a folder, and training writes a file"):
        pretrain(settings, run, progress=False)
    (run / seals.SEAL).rmdir()
    assert train(settings, run) == weights(whole)


def test_a_run_that_another_process_has_begun_is_seen(tmp_path: Path) -> None:
    mine, other = (RunFolder(tmp_path, {"seed": seed}) for seed in (1, 5))
    with other.locked():
        other.start()
        (tmp_path / "checkpoint-1").mkdir()
        (tmp_path / "checkpoint-1" / "weights").write_text("1")
        seal(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match="seed: 5 there, 1 asked for"), mine.locked():
        pass


def test_a_run_that_starts_anew_over_an_old_folder_says_so(
    settings: RunSettings, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = cut(whole, tmp_path / "run")
    for path in checkpoints(run):
        (path / seals.SEAL).unlink()
    assert train(settings, run) == weights(whole)
    assert "has no whole checkpoint: training starts from step 0" in caplog.text


def test_a_damaged_start_is_refused(settings: RunSettings, whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for source in (f"checkpoint-{STEPS}", "model", "stage-1"):
        flip(run / source / "model.safetensors")
        if source == "stage-1":  # trains the last steps again, and leaves stage-1 damaged
            train(settings, run)
        begun = replace(settings, start_from=str(run / source))
        with pytest.raises(ValueError, match=r"is damaged: .*model\.safetensors .* copy it again"):
            pretrain(begun, tmp_path / "next", progress=False)
        with pytest.raises(ValueError, match="is damaged"):
            load_model(str(run / source))
    begun = replace(settings, start_from=str(cut(whole, tmp_path / "begun") / "stage-1"))
    (tmp_path / "begun" / "stage-1" / seals.SEAL).unlink()
    with pytest.raises(ValueError, match=r"stage-1 was not written to its end"):
        pretrain(begun, tmp_path / "next", progress=False)
    assert not (tmp_path / "next").exists()


def test_seconds_and_losses_are_those_of_the_whole_run(
    settings: RunSettings, whole: Path, tmp_path: Path
) -> None:
    def totals(run: Path) -> dict[str, Any]:
        record = json.loads((run / "training.json").read_text())
        return {**record, **next(line for line in record["log"] if "train_loss" in line)}

    run = cut(whole, tmp_path / "run")
    shutil.rmtree(run / f"checkpoint-{STEPS}")
    shutil.rmtree(run / f"checkpoint-{STEPS - 2}")
    train(settings, run)
    saved = json.loads((run / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    before = json.loads((whole / "checkpoint-4" / "trainer_state.json").read_text())
    assert totals(run)["train_loss"] == pytest.approx(totals(whole)["train_loss"], rel=1e-5)
    former, later = (
        state["stateful_callbacks"]["Totals"]["attributes"]["seconds"] for state in (before, saved)
    )
    assert 0 < former < later <= totals(run)["train_runtime"] <= totals(run)["seconds"] + 0.1


def test_a_run_that_has_saved_nothing_does_not_block_its_folder(tmp_path: Path) -> None:
    RunFolder(tmp_path, {"seed": 1}).start()
    RunFolder(tmp_path, {"seed": 2, "length": 8}).start()
    assert json.loads((tmp_path / "settings.json").read_text()) == {"seed": 2, "length": 8}
    with pytest.raises(ValueError, match="theme: dark there, None asked for"):  # another program's settings
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "settings.json").write_text('{"theme": "dark"}')
        RunFolder(tmp_path / "other", {"seed": 3})
    shutil.rmtree(tmp_path / "other")
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "weights").write_text("a part")
    RunFolder(tmp_path, {"seed": 3, "length": 8}).start()
    seal(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match="seed: 3 there, 4 asked for"):
        RunFolder(tmp_path, {"seed": 4, "length": 8})


def test_the_settings_that_differ_are_named(tmp_path: Path) -> None:
    there = {
        "guess": "noise",
        "size": {"width": 8, "depth": 2},
        "stages": [{"until": 0.5}, {"until": 1}],
        "old": 1,
    }
    here = {
        "guess": ["noise", "zero"],
        "size": {"width": 9},
        "stages": [{"until": 0.6}, {"until": 1}],
        "new": 2,
    }
    (tmp_path / "settings.json").write_text(json.dumps(there))
    (tmp_path / "training.json").write_text("{}")
    expected = "; ".join([
        "guess: noise there, ['noise', 'zero'] asked for", "size.width: 8 there, 9 asked for",
        "size.depth: 2 there, None asked for", "stages.0.until: 0.5 there, 0.6 asked for",
        "old: 1 there, None asked for", "new: None there, 2 asked for",
    ])  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(f"({expected})")):
        RunFolder(tmp_path, here)


def test_a_kill_in_the_first_checkpoint_does_not_block_the_folder(
    settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(settings, learning_rate=2 * settings.learning_rate)
    with monkeypatch.context() as patch:
        patch.setattr("deqseq.tasks.common.trainer.seal", dies("seal", lambda path: True))
        # The order of the rows has changed too since the run began.
        patch.setattr(TrainingOrder, "version", 1)
        with pytest.raises(KillError):
            pretrain(settings, tmp_path / "run", progress=False)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    assert train(other, tmp_path / "run") == train(other, tmp_path / "new")


def test_a_folder_is_trained_in_once_at_a_time(settings: RunSettings, tmp_path: Path) -> None:
    with locked(tmp_path, "trains in"), pytest.raises(ValueError, match="another process trains in"):
        pretrain(settings, tmp_path, progress=False)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("step", [3, 6])
def test_a_run_whose_folder_was_moved_ends_and_can_be_resumed(
    settings: RunSettings, tmp_path: Path, step: int
) -> None:
    """After step 3, the next write is a checkpoint. After step 6, it is the model of the first stage."""
    run, moved = tmp_path / "run", tmp_path / "moved"

    class Move(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                run.rename(moved)

    with pytest.raises(FileNotFoundError, match=f"{run} was moved or removed during training: move it back"):
        pretrain(settings, run, progress=False, callbacks=[Move()])
    assert not run.exists()
    moved.rename(run)
    assert train(settings, run) == train(settings, tmp_path / "whole")


def test_data_cannot_be_prepared_anew_while_a_run_reads_it(settings: RunSettings, tmp_path: Path) -> None:
    data = Path(str(settings.data))
    with locked(data, "prepares"), pytest.raises(ValueError, match="another process prepares"):
        pretrain(settings, tmp_path, progress=False)
    locks = []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            with locked(data, "prepares", shared=True):  # as another run
                pass
            with pytest.raises(ValueError, match="another process trains on"), locked(data, "trains on"):
                pass
            locks.append(True)

    pretrain(settings, tmp_path, progress=False, callbacks=[Look()])
    assert locks
    with locked(data, "trains on"):  # the lock ends with the run
        pass


def test_a_file_in_the_place_of_a_folder_is_reported_first(settings: RunSettings, tmp_path: Path) -> None:
    for name in ("model", "stage-1", "checkpoint-4"):
        (tmp_path / name).write_text("")
        with pytest.raises(ValueError, match=f"{name} is a file, and training writes a folder of this name"):
            pretrain(settings, tmp_path, progress=False)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("bf16", [False, True])
def test_the_run_decides_the_precision(
    settings: RunSettings, tmp_path: Path, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no" if bf16 else "bf16")  # as accelerate launch sets it
    args = arguments(replace(settings, bf16=bf16), tmp_path, progress=False)
    assert args.mixed_precision == ("bf16" if bf16 else "no")


def run_command(function: Callable[[], None]) -> int:
    return command_line.main("x", "", {"x": function}, ["x"], interrupted="it goes on")


@pytest.mark.parametrize(
    "error", [SafetensorError("I/O error: No space left on device"), RuntimeError("[enforce fail at x] disk"),
              Exception("No space left on device (os error 28)"), OSError(28, "No space left on device")],
)  # fmt: skip
def test_a_full_disk_is_one_line_and_loses_nothing(
    error: Exception, settings: RunSettings, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    original = PretrainTrainer._save_optimizer_and_scheduler

    def full(self: PretrainTrainer, folder: str) -> None:
        if folder.endswith("-6"):
            raise error
        original(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(PretrainTrainer, "_save_optimizer_and_scheduler", full)
        assert run_command(lambda: pretrain(settings, tmp_path, progress=False) and None) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line or "Traceback" in line]
    assert len(said) == 1 and said[0].startswith("error: ") and str(tmp_path / "checkpoint-6") in said[0]
    assert train(settings, tmp_path) == weights(whole)


def test_the_error_of_a_full_disk_names_the_file(
    settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sync of a run fails once. Each new start goes on after the last checkpoint."""
    sync, left = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal left
        left -= 1
        if left < 0 and stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    named = set()
    for syncs in range(0, 200, 7):
        left = syncs
        try:
            pretrain(settings, tmp_path, progress=False)
            break
        except OSError as error:
            assert "No space left on device" in str(error) and str(tmp_path) in str(error)
            named.add(Path(error.filename).name)
    assert {"settings.json", "checkpoint-2"} <= named and (tmp_path / "training.json").exists()


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(("form", "refused"), [("plain", ""), ("torch", " (posix.mkdir)")])
def test_a_refused_pickle_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, refused: str
) -> None:
    """The error says only why the file is refused. torch's message also says how to load the file anyway."""
    file = tmp_path / "optimizer.pt"
    file.write_bytes(pickle.dumps(os.getcwd)) if form == "plain" else torch.save(Harm(), file)
    assert run_command(lambda: torch.load(file, weights_only=True)) == 1
    said = capsys.readouterr().err.strip()
    assert said == f"error: a file is refused, because it has more than tensors{refused}"


@pytest.mark.parametrize("place", ["metadata", "bytes"])
def test_code_in_sharded_checkpoints_is_not_executed(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    state = {"model": model.state_dict(), "other": Harm() if place == "bytes" else 1}
    save(state, checkpoint_id=tmp_path / "shards", no_dist=True)
    loaded = {"model": model.state_dict(), "other": None}
    if place == "metadata":
        recwarn.clear()
        _load(loaded, tmp_path / "shards", no_dist=True)  # the undamaged checkpoint loads
        assert not recwarn
        (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(ValueError, match="shards cannot be read"):
        _load(loaded, tmp_path / "shards", no_dist=True)
    assert not (tmp_path / "harm").exists()


def test_shards_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    saving: Future[Any] = Future()
    full = OSError("No space left on device")
    saving.set_exception(CheckpointException("save", {1: (full, traceback.StackSummary())}))
    with pytest.raises(OSError, match="shards cannot be written: process 1: No space left on device"):
        wait_for(saving, tmp_path)


def test_sigterm_says_what_ctrl_c_says(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run_command(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 143
    # A shell starts programs in the background with SIGINT ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run_command(lambda: signal.raise_signal(signal.SIGINT)) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert capsys.readouterr().err == "terminated; it goes on\ninterrupted; it goes on\n"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_inside_del_is_not_lost(number: signal.Signals, status: int) -> None:
    class Last:
        def __del__(self) -> None:
            signal.raise_signal(number)  # Python drops the exception of the handler

    def command() -> None:
        Last()
        threading.Event().wait(timeout=60)  # the signal that is sent again ends this

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    hook = sys.unraisablehook
    try:
        assert run_command(command) == status
    finally:
        signal.signal(signal.SIGINT, handler)
    assert sys.unraisablehook == hook


def test_sigterm_to_the_workers_of_a_dataloader_too(capfd: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        batches: Any = iter(DataLoader(range(9), num_workers=1))
        next(batches)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            batches._workers[0].kill()
            batches._workers[0].join(timeout=60)

    before = signal.getsignal(signal.SIGCHLD)
    assert run_command(command) == 143
    assert capfd.readouterr().err == "terminated; it goes on\n"
    signal.signal(signal.SIGCHLD, before)


_SCRIPT = """
import ctypes, os, signal, threading
from deqseq.tasks.common import command_line, termination

mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
library.pthread_mutex_init(mutex, None)
library.pthread_mutex_lock(mutex)

def hang():
    library.pthread_mutex_lock(mutex)  # like a wait for a device: no signal ends it

def terminate(process):
    os.kill(process, signal.SIGTERM)

def command():
    {body}

termination._TIME_TO_END = 0.1
command_line.main("program", "", {{"run": command}}, ["run"], interrupted="it goes on")
print(signal.getitimer(signal.ITIMER_REAL)[0])
"""


@pytest.mark.parametrize(
    "body",
    [
        "threading.Timer(0.1, terminate, [os.getpid()]).start(); hang()",
        "try: terminate(os.getpid()); signal.pause()\n    finally: hang()",
    ],
)
def test_sigterm_ends_a_process_that_hangs(body: str) -> None:
    """A process hangs if it waits for another process of the run that is gone."""
    script = [sys.executable, "-c", _SCRIPT.format(body=body)]
    several = {**os.environ, "WORLD_SIZE": "2", "RANK": "1"}
    assert subprocess.run(script, env=several, timeout=60).returncode == -signal.SIGALRM


def test_sigterm_to_a_forked_process_does_not_end_its_parent() -> None:
    body = """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, b"!")
            signal.pause()
        finally:
            os._exit(0)
    os.read(read, 1)
    terminate(child)
    os.waitpid(child, 0)
    """
    script = [sys.executable, "-c", _SCRIPT.format(body=body)]
    several = {**os.environ, "WORLD_SIZE": "2", "RANK": "1"}
    done = subprocess.run(script, env=several, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("0.0\n"), done  # no alarm


def test_a_run_of_several_processes_ends_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    threads = threading.active_count()
    for _ in range(2):
        assert run_command(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 143
        assert signal.setitimer(signal.ITIMER_REAL, 0)[0] > 0  # the alarm is set
        assert capsys.readouterr().err.endswith(": terminated; it goes on\n")
    assert run_command(lambda: None) == 0 and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert threading.active_count() == threads and signal.set_wakeup_fd(-1) == -1


def test_sizes_are_planned_before_memory_is_taken(settings: RunSettings, whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole / "model", tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    config["backbone"]["n_layer"] = config["num_hidden_layers"] = 10**9
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="n_layer must be at most 4096, got 1000000000"):
        load_model(str(copy))
    wide = {**SMALL["model"], "vocab_size": 10**12}
    with pytest.raises(ValueError, match=r"parameters, .* GiB in float32, and this machine has"):
        pretrain(replace(settings, model=wide), tmp_path / "wide", progress=False)
