"""The benchmark scripts run, check what they compare, and write what they say."""

from __future__ import annotations

import io
import json
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from deqseq.tasks.state_tracking.settings import TrainSettings
from deqseq.tasks.state_tracking.train import train

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in this process: another one would import torch and transformers anew."""
    argv = [str(BENCHMARKS / script), *arguments]
    streams = [io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2)]
    status = 0
    with (
        redirect_stdout(streams[0]), redirect_stderr(streams[1]), patch.object(sys, "argv", argv),
        patch.object(sys, "path", [str(BENCHMARKS), *sys.path]),
    ):  # fmt: skip
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(argv, status, out, err)


def test_loop_overhead(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    small = ["--d-model", "32", "--length", "16", "--batch", "2", "--iterations", "3", "--rounds", "1"]
    done = run("loop_overhead.py", *small, "--output", str(output))
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert {"picard", "anderson, memory 5"} <= {row["solver"] for row in rows}
    assert all(row["over bare evaluations"] > 0 for row in rows)


def test_learning(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    small = ["--kernels", "torch", "--steps", "2", "--batch", "2", "--length", "3", "--device", "cpu"]
    done = run("learning.py", *small, "--output", str(output))
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert list(found["curves"]) == ["torch, seed 1", "torch, seed 2"]
    assert found["distances"]["torch, seed 2"] > 0


def test_data_speed(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    done = run("data_speed.py", "--seconds", "0.01", "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert all(row["Mtokens/s"] > 0 for row in json.loads(output.read_text())["rows"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    settings = TrainSettings(
        group="S3", length=8, min_length=4, unrolled_length=4, d_model=16, d_state=4, headdim=8,
        steps=150, batch_size=16, max_iter=10,
    )  # fmt: skip
    train(settings, folder, progress=False)
    return folder


def test_window(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    small = ["--lengths", "12", "--windows", "all", "4", "1", "--sequences", "16", "--tolerance", "1e-4"]
    done = run("window.py", "--run", str(trained), *small, "--output", str(output))
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    evaluations = [row["evaluations a token"] for row in rows]
    assert evaluations[0] > evaluations[1] > evaluations[2]
    assert output.with_suffix(".png").stat().st_size > 0


def test_window_without_a_run_says_so(tmp_path: Path) -> None:
    done = run("window.py", "--run", str(tmp_path))
    assert done.returncode == 2 and "holds no run" in done.stderr


def test_leak(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    done = run("leak.py", "--length", "16", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert all((row["leak"] == 0) == row["causal"] for row in rows)


def test_warm_start(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    small = ["--length", "8", "--sequences", "4", "--tolerances", "1e-5"]
    done = run("warm_start.py", "--run", str(trained), *small, "--output", str(output))
    assert done.returncode == 0, done.stderr + done.stdout
    zero, previous = json.loads(output.read_text())["rows"]
    assert zero["accuracy"] == previous["accuracy"]
    assert zero["evaluations a token"] != previous["evaluations a token"]


def test_speed(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    chosen = ["state-tracking", "evaluation", "loop", "decode"]
    small = ["--quick", "--device", "cpu", "--repeats", "1", "--sections", *chosen]
    done = run("speed.py", *small, "--output", str(output))
    assert done.returncode == 0, done.stderr
    sections = json.loads(output.read_text())["sections"]
    assert list(sections) == ["correctness", *chosen]
    assert all(row["right"] for row in sections["correctness"]["errors"])
    rows = [row for tables in sections.values() for table in tables.values() for row in table]
    assert all("failed" not in row for row in rows if "torchdeq" not in row.get("case", ""))
    (steps,) = sections["state-tracking"].values()
    assert [row["evaluations"] for row in steps[:2]] == [4, 21]
    assert all(row["ms"] > 0 and row["tokens/s"] > 0 for row in steps)
    limits = sections["evaluation"]["limits of f"]
    for case in {row["case"] for row in limits}:
        *counted, total = [row["GB"] for row in limits if row["case"] == case]
        assert total == pytest.approx(sum(counted)) and min(counted) > 0
