"""Tests of Theorem 1: the Jacobian dh_t/dh_{t-1} of the state h is diagonal only in explicit layers.

The theorem is from Schöne et al., *Implicit Language Models are RNNs*, ICML 2025, arXiv 2502.07827.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deqseq import ExplicitSequenceLayer, ImplicitSequenceLayer
from deqseq.backbones import Mamba2Backbone
from deqseq.tasks.state_tracking import __main__ as state_tracking
from deqseq.tasks.state_tracking import jacobian
from deqseq.tasks.state_tracking.settings import TrainSettings
from deqseq.tasks.state_tracking.train import train

SIZES: dict[str, Any] = {"n_layer": 1, "d_state": 2, "expand": 1, "headdim": 4}


def test_implicit_layers_mix_the_entries_of_their_state_as_the_formula_says() -> None:
    layer = ImplicitSequenceLayer(Mamba2Backbone(8, **SIZES))
    found = list(jacobian.inspect("implicit", layer, torch.randn(1, 2, 8)))
    assert [matrix.shape for _, matrix in found] == [(16, 16)] * 2
    for row, matrix in found:
        assert row.disagreement < 1e-6
        off = matrix - matrix.diag().diag()
        assert row.off_diagonal == off.abs().max() > 1e-5
        assert 0 < row.off_diagonal_mass < 1
        # Entries of different heads also affect each other. Only the equilibrium connects the two heads.
        assert off.view(2, 8, 2, 8)[0, :, 1].abs().max() > 1e-6


def test_explicit_layers_do_not_to_the_bit() -> None:
    layer = ExplicitSequenceLayer(Mamba2Backbone(8, injection=False, **SIZES))
    for row, matrix in jacobian.inspect("explicit", layer, torch.randn(1, 3, 8)):
        assert row.off_diagonal == row.off_diagonal_mass == 0 < row.diagonal < 1
        assert torch.equal(matrix, matrix.diag().diag()) and row.disagreement < 1e-6


def test_other_layers_are_refused() -> None:
    two = ImplicitSequenceLayer(Mamba2Backbone(8, **{**SIZES, "n_layer": 2}))
    with pytest.raises(ValueError, match="one block of Mamba2, got 2"):
        next(jacobian.inspect("mine", two, torch.randn(1, 2, 8)))
    large = ImplicitSequenceLayer(Mamba2Backbone(64, **{**SIZES, "d_state": 64}))
    with pytest.raises(ValueError, match="may have at most 2048 entries, got 4096"):
        next(jacobian.inspect("mine", large, torch.randn(1, 3, 64)))


def tiny(**changes: Any) -> TrainSettings:
    sizes: dict[str, Any] = {"length": 4, "min_length": 2, "unrolled_length": 2, "d_model": 8, "d_state": 2}
    return TrainSettings(group="S3", steps=2, batch_size=2, expand=1, headdim=4, **{**sizes, **changes})


def test_an_lstm_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny(backbone="lstm", explicit=True), tmp_path / "mine")
    assert state_tracking.main(["jacobian", str(tmp_path / "mine"), "--length", "1"]) == 2
    assert "mine must have one block of Mamba2, got lstm" in capsys.readouterr().err


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    rendered_figures: Callable[[Path], bool],
) -> None:  # fmt: skip
    train(tiny(), tmp_path / "run")
    for same in ("run-2", "other/run-2"):
        shutil.copytree(tmp_path / "run", tmp_path / same)
    runs = [str(tmp_path / name) for name in ("run", "run-2", "other/run-2")]
    command = ["jacobian", *runs, "--length", "1", "--output", str(tmp_path / "out")]
    assert state_tracking.main(command) == 0
    rows = json.loads((tmp_path / "out" / "jacobian.json").read_text())["rows"]
    labels = [f"{tmp_path.name}/run", f"{tmp_path.name}/run-2", "other/run-2"]
    trained = [f"implicit, S3, {label}" for label in labels]
    assert [row["model"] for row in rows] == ["explicit, random", "implicit, random", *trained]
    assert rows[0]["off_diagonal_mass"] == 0 < rows[1]["off_diagonal_mass"]
    assert rendered_figures(tmp_path / "out" / "jacobian.png")
    wrong = jacobian.Jacobian("implicit", 1, 64, 1.0, 0.1, 0.5, disagreement=2e-6)
    monkeypatch.setattr(jacobian, "inspect", lambda *_: [(wrong, torch.eye(1))])
    command = ["jacobian", runs[0], "--length", "1", "--output", str(tmp_path / "wrong")]
    assert state_tracking.main(command) == 2 and "must agree to 1e-6" in capsys.readouterr().err
