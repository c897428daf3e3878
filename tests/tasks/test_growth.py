"""Runs that grow: training begins with one evaluation of f, and later stages add iterations."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deqseq.curriculum import Curriculum
from deqseq.solvers import Picard
from deqseq.tasks.common.runs import read_record
from deqseq.tasks.common.settings import yaml_value
from deqseq.tasks.pretrain import main
from deqseq.tasks.pretraining.data import open_data
from deqseq.tasks.pretraining.run_files import load_run, shipped
from deqseq.tasks.pretraining.settings import RunSettings
from deqseq.tasks.pretraining.train import arguments, make_trainer, pretrain

SMALL = {
    "model.vocab_size": 300, "model.backbone.d_model": 16, "model.backbone.n_layer": 1,
    "model.backbone.n_head": 2, "length": 16, "batch_tokens": 64, "per_device_batch_size": 2, "steps": 10,
    "passes": 100, "eval_rows": 4, "eval_steps": 2, "save_steps": 5, "log_steps": 1,
}  # fmt: skip


def small(name: str, data: Path, **changes: Any) -> RunSettings:
    return load_run(name, {**SMALL, "data": str(data), **changes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, token_folder: Path) -> dict[str, Path]:
    """The folders of a growing run and of a run of the injected form. llama-tiny's solver damps."""
    folder = tmp_path_factory.mktemp("growth")
    for form in ("growth", "injected"):
        pretrain(small(f"llama-tiny-{form}", token_folder), folder / form, progress=False)
    return {form: folder / form for form in ("growth", "injected")}


@pytest.mark.parametrize("name", shipped())
def test_every_run_file_can_grow(name: str) -> None:
    growth, settings = load_run(f"{name}-growth"), load_run(name)
    assert replace(growth, stages=settings.stages) == settings
    curriculum = growth.curriculum()
    assert curriculum is not None and settings.stages is not None
    assert growth.stages is not None and growth.stages[-1] == settings.stages[-1]
    first, *_, last = curriculum.stages
    assert first.solver == "picard" and last.solver == settings.config().solver == growth.config().solver


def test_the_shares_are_settings(tmp_path: Path) -> None:
    growth = load_run(
        "llama-tiny-growth", {"stages.0.until": 0.5, "stages.1.until": yaml_value("{steps: 240}", "until")}
    )
    assert growth.stage_ends == [200, 240, 320, 400]
    file = tmp_path / "mine.yaml"
    file.write_text("base: llama-tiny-growth\nsteps: 100")
    assert load_run(str(file)).stage_ends == [60, 70, 80, 100]


def test_the_first_stage_is_the_injected_form(runs: dict[str, Path]) -> None:
    """Until stage 1 ends after step 6, all losses are equal bit for bit, and f is evaluated once."""
    logs = [read_record(runs[form])["log"] for form in ("growth", "injected")]
    for name in ("loss", "eval_loss"):
        growth, injected = (
            [(e["step"], e[name]) for e in log if name in e and e["step"] <= 6] for log in logs
        )
        assert growth == injected and len(growth) == (6 if name == "loss" else 3)
    nfe = {entry["step"]: entry["nfe"] for entry in logs[0] if "nfe" in entry}
    assert [nfe[step] for step in range(1, 9)] == [1] * 6 + [2, 3] and nfe[10] > 4
    nfe = {entry["step"]: entry["eval_nfe"] for entry in logs[0] if "eval_nfe" in entry}
    assert [nfe[step] for step in (2, 4, 6, 7, 8)] == [1, 1, 1, 2, 3] and nfe[10] > 3


@pytest.mark.parametrize("form", ["growth", "injected"])
def test_one_evaluation_is_one_call_of_the_map(
    form: str, token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small(f"llama-tiny-{form}", token_folder)
    trainer = make_trainer(settings, open_data(settings), arguments(settings, tmp_path, progress=False))
    layer, curriculum, calls = trainer.model.model.layer, settings.curriculum(), []
    if curriculum is not None:
        Curriculum.apply(curriculum.stages[0], layer)
    evaluate = layer.backbone.evaluate
    monkeypatch.setattr(layer.backbone, "evaluate", lambda *a, **k: (calls.append(1), evaluate(*a, **k))[1])
    inputs = {name: torch.ones(2, 16, dtype=torch.int64) for name in ("input_ids", "labels")}
    trainer.compute_loss(trainer.model.train(), inputs).backward()
    assert len(calls) == 1
    with torch.no_grad():
        trainer.compute_loss(trainer.model.eval(), inputs)
    assert len(calls) == 2


def test_stages_undo_the_solver_of_the_first(runs: dict[str, Path]) -> None:
    from deqseq.causal_lm import ImplicitForCausalLM

    folders = {"stage-1": Picard(), "stage-2": Picard(0.7), "model": Picard(0.7)}
    for name, solver in folders.items():
        model = ImplicitForCausalLM.from_pretrained(runs["growth"] / name)
        assert model.model.layer.eval_solve.solver == solver


def test_comparisons_and_plans_show_the_stages(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, runs.values()), "--output", str(tmp_path / "a.png")]) == 0
    budgets = [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:6]]
    assert budgets == ["0+1", "1+1", "2+1", "12+4", "0+1"]
    assert main(["llama-tiny-growth", "--dry-run", "--data", "null", "--plot", str(tmp_path / "b.png")]) == 0
    shown = capsys.readouterr().out
    for number, text in enumerate(("0 + 1", "1 + 1", "2 + 1", "12 + 4"), 1):
        assert f"stage {number}" in shown and f": {text} evaluations" in shown


def test_a_resumed_run_continues_with_its_budget(
    token_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs resumed after step 4, 7 or 8 end with the same weights and budgets as the whole run."""
    stages = load_run("llama-tiny").stages
    assert stages is not None
    stages[0]["until"], stages[1]["adaptive_budget"] = 0.4, 0.2
    settings = small("llama-tiny", token_folder, stages=stages, steps=10, save_steps=1, keep=9, eval_steps=99)
    with caplog.at_level("INFO"):
        whole = pretrain(settings, tmp_path / "whole", progress=False)
    assert "stage 1, steps 1 to 4: 4 + 1 evaluations at most" in caplog.messages
    log = read_record(tmp_path / "whole")["log"]
    budgets = {entry["step"]: entry["max_iter"] for entry in log if "max_iter" in entry}
    assert [*budgets] == [5, 6, 7, 8, 9, 10] and budgets[5] == 11 and len(set(budgets.values())) > 2
    for step in (4, 7, 8):
        cut = tmp_path / f"cut-{step}"
        cut.mkdir()
        shutil.copy(tmp_path / "whole" / "settings.json", cut)
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", cut / f"checkpoint-{step}")
        model = pretrain(settings, cut, progress=False)
        assert (model / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        log = read_record(cut)["log"]
        assert {entry["step"]: entry["max_iter"] for entry in log if "max_iter" in entry} == budgets


def test_evaluations_ignore_the_adaptive_budget(token_folder: Path, tmp_path: Path) -> None:
    settings = small("llama-tiny", token_folder, **{"stages.1.adaptive_budget": 0.5})
    assert settings.config().convergence["max_iter"] == 12
    assert settings.config().eval_convergence["max_iter"] == 64
    with pytest.raises(ValueError, match="max_iter can change"):
        small("llama-tiny", token_folder, **{"stages.0.adaptive_budget": 0.5})
