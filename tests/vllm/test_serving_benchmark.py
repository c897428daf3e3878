"""benchmarks/serving.py runs, and all ways to serve write the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-vllm")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving.py"


def test_serving(tmp_path: Path) -> None:
    """Static batches and vLLM write the same tokens. vLLM evaluates f for fewer tokens."""
    small = ["--backbones", "llama", "--requests", "6", "--batch", "3", "--eager", "--rate", "20"]
    lengths = ["--prompt", "2", "8", "--new", "2", "12"]
    arms = ["--arms", "static", "adaptive", "--output", str(tmp_path)]
    command = [sys.executable, str(SCRIPT), *small, *lengths, *arms]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "serving.json").read_text())
    assert [(line["arm"], line["equal"]) for line in found["lines"]] == [
        ("static", "1.000"), ("adaptive", "1.000")
    ]  # fmt: skip
    batches, vllm = found["rows"]
    assert batches["counted"] > vllm["counted"] >= vllm["needed"] > 0
    assert batches["needed"] > vllm["needed"]  # batches also solve tokens that nobody asked for
