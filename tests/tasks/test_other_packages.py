"""Backbones, solvers, policies and gradient strategies of other packages work in every task by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deqseq.tasks.catbabi.__main__ import main as catbabi
from deqseq.tasks.catbabi.data import build
from deqseq.tasks.pretrain import main as pretrain
from deqseq.tasks.state_tracking.__main__ import main as state_tracking

PARTS = '''
import torch
from torch import nn
from deqseq import Phantom, Residual
from deqseq.backbone import Backbone, Context, State
from deqseq.solver import Solver


class Leaky(Backbone):
    """A decaying sum of the inputs; its state is the sum."""

    def __init__(self, d_model, width=8, injection=True):
        super().__init__()
        self.d_model, self.injects = d_model, injection
        self.up, self.down = nn.Linear(d_model, width), nn.Linear(width, d_model)

    def prepare(self, x, position_ids=None):
        return Context((x if self.injects else torch.zeros_like(x),))

    def evaluate(self, z, context, state=None):
        inputs = self.up(z + context.tokens[0])
        total = inputs.new_zeros(inputs[:, 0].shape) if state is None else state.layers[0][0].to(inputs.dtype)
        sums = []
        for token in inputs.unbind(1):
            total = 0.5 * total + token
            sums.append(total)
        sums = torch.stack(sums, 1)
        return 0.1 * self.down(sums.tanh()), sums

    def initial_state(self, batch_size, device=None, dtype=None):
        total = torch.zeros(batch_size, self.up.out_features, device=device, dtype=dtype)
        return State(torch.zeros(batch_size, dtype=torch.int64, device=device), ((total,),))

    def advance(self, trace, state, count):
        last = trace.gather(1, (count - 1).clamp_min(0)[:, None, None].expand(-1, 1, trace.shape[2]))[:, 0]
        total = torch.where(count[:, None] > 0, last.to(state.layers[0][0].dtype), state.layers[0][0])
        return State(state.seen + count, ((total,),))


class Mann(Solver):
    def __init__(self, start=1.0):
        self.start = start

    def init(self, z):
        return 0

    def step(self, z, fz, state, progress):
        return z + self.start / (1 + 0.1 * state) * (fz - z), state + 1


class Twice(Phantom):
    pass


class Strict(Residual):
    pass
'''
ENTRY_POINTS = """
[deqseq.backbones]
leaky = other_parts:Leaky
[deqseq.solvers]
mann = other_parts:Mann
[deqseq.gradients]
twice = other_parts:Twice
[deqseq.policies]
strict = other_parts:Strict
"""


@pytest.fixture(autouse=True)
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that announces a part of every kind."""
    site = tmp_path / "site"
    info = site / "other_parts-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "other_parts.py").write_text(PARTS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    yield
    sys.modules.pop("other_parts", None)


SMALL = ["--d_model", "8", "--steps", "2", "--batch_size", "2", "--max_iter", "4", "--eval_max_iter", "4"]
MANN = ["--solver", "{name: mann, start: 0.5}"]


def config(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


@pytest.mark.parametrize("backbone", [["--backbone", "leaky"], ["--backbone", "{name: leaky, width: 4}"]])
def test_state_tracking(backbone: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert state_tracking(["train", "--output", str(run), "--group", "S3", *SMALL, *backbone, *MANN]) == 0
    assert config(run)["backbone"] == {
        "name": "leaky",
        "d_model": 8,
        **({"width": 4} if "{" in backbone[1] else {}),
    }
    assert config(run)["solver"] == {"name": "mann", "start": 0.5}
    assert (
        state_tracking(["evaluate", str(run), "--sequences", "2", "--length", "4", "--window", "all", "2"])
        == 0
    )


def test_options_by_dotted_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    command = ["train", "--output", str(run), "--group", "S3", *SMALL, "--backbone", "leaky"]
    assert state_tracking([*command, "--backbone.width", "4", "--solver.damping", "0.3"]) == 0
    assert config(run)["backbone"]["width"] == 4
    assert config(run)["solver"] == {"name": "picard", "damping": 0.3}
    assert state_tracking([*command, "--solver", "mann", "--damping", "0.3"]) == 2
    assert "damping is Picard's, got 0.3 with solver mann" in capsys.readouterr().err
    assert state_tracking([*command, "--backbone.widht", "4"]) == 2
    assert "it takes (d_model, width=8" in capsys.readouterr().err


def test_catbabi(tmp_path: Path) -> None:
    story = ["mary", "moved", "to", "the", "garden", ".", "where", "is", "mary", "?", "garden"]
    build(lambda split, task: [story] * 4, tmp_path / "data")
    run = tmp_path / "run"
    command = ["train", "--data", str(tmp_path / "data"), "--output", str(run), "--cut", "5", *SMALL]
    assert catbabi([*command, "--backbone", "leaky", *MANN]) == 0
    assert config(run)["backbone"] == {"name": "leaky", "d_model": 8}
    assert catbabi(["evaluate", str(run)]) == 0


def test_pretrain(token_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {
        "--model": "{vocab_size: 300, backbone: {name: leaky, d_model: 8}, solver: mann}",
        "--stages.0.gradient": "{name: twice, steps: 1}",
        "--stages.1.convergence": "{name: strict, rtol: 0.1, max_iter: 4}",
        "--stages.0.until": "0.5", "--length": "16", "--batch_tokens": "32", "--per_device_batch_size": "2",
        "--steps": "2", "--data": str(token_folder), "--eval_rows": "2", "--log_steps": "1",
    }  # fmt: skip
    command = [
        "llama-tiny",
        "--output",
        str(tmp_path / "run"),
        *(word for pair in parts.items() for word in pair),
    ]
    assert pretrain([*command, "--dry-run"]) == 0
    assert "implicit leaky" in capsys.readouterr().out
    assert pretrain(command) == 0
    assert config(tmp_path / "run" / "model")["backbone"]["name"] == "leaky"
    assert config(tmp_path / "run" / "model")["solver"] == "mann"
    assert config(tmp_path / "run" / "model")["convergence"]["name"] == "strict"
