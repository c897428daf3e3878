"""The benchmark scripts run, detect wrong results and write their files."""

import io
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from deqseq import iteration
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.loop import Runner
from deqseq.solvers import Broyden, Picard
from deqseq.tasks import prepare
from deqseq.tasks.common.seals import seal
from deqseq.tasks.common.settings import read_yaml
from deqseq.tasks.pretraining.data import open_data
from deqseq.tasks.pretraining.train import arguments, make_trainer
from deqseq.tasks.reasoning.settings import RUNS
from deqseq.tasks.state_tracking.settings import TrainSettings
from deqseq.tasks.state_tracking.train import train

pytestmark = pytest.mark.usefixtures("quick_figures")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in this process. A new process would have to import torch and transformers again."""
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


def test_help_comes_before_the_import_of_transformers() -> None:
    imports = "import faults, loop_overhead, nodes, solvers, sys, warm_start"
    code = f"{imports}; print('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_puzzles(tmp_path: Path) -> None:
    """Rows are kept, but not for other options. The explicit model of four blocks has four blocks."""
    pytest.importorskip("numba", reason="numba is not installed: pip install 'deqseq[reason]'")
    small = read_yaml("maze-small", RUNS)
    small |= {"backbone": {**small["backbone"], "d_model": 16}, "batch_size": 8}
    (tmp_path / "small.yaml").write_text(json.dumps(small))
    options = ["--output", str(tmp_path), "--run", str(tmp_path / "small.yaml"), "--quick", "--count", "20"]
    options += ["--solvers", "picard-1.0", "--tolerances", "0.1", "--seconds", "0.1"]
    options += ["--max-iter", "4", "--depth", "2"]
    found = run("puzzles.py", *options, "--strategies", "explicit-4-blocks", "persistent")
    assert found.returncode == 0, found.stderr
    rows = json.loads((tmp_path / "puzzles.json").read_text())
    assert [row["strategy"] for row in rows["strategies"]] == ["explicit-4-blocks", "persistent"]
    assert [row["evaluations"] for row in rows["strategies"]] == [1, 3]
    again = run("puzzles.py", *options[:-1], "3", "--strategies", "persistent")
    assert again.returncode == 2 and "were measured with another depth" in again.stderr
    with patch.object(sys, "path", [str(BENCHMARKS), *sys.path]):
        script = runpy.run_path(str(BENCHMARKS / "puzzles.py"))
    sizes = []
    for name in ("explicit", "explicit-4-blocks"):
        asked = script["argparse"].Namespace(run="sudoku", data="x", tests="y")
        with torch.device("meta"):
            made = script["settings"](asked, **script["STRATEGIES"][name]).model()
        sizes.append(len(made.layer.backbone.layers))
    assert sizes == [2, 4]


def test_the_time_of_a_step(tmp_path: Path) -> None:
    """The first five steps, with compilation, do not count. The steps that count write no checkpoint."""

    def train(asked: Any, folder: Path, save_steps: int) -> None:
        assert folder == tmp_path and save_steps == asked.steps == 25 and asked.eval_steps == 5

    log = [{"step": 5, "accuracy": 0, "seconds": 30.0}, {"step": 25, "accuracy": 0, "seconds": 50.0}]
    with patch.object(sys, "path", [str(BENCHMARKS), *sys.path]):
        script = runpy.run_path(str(BENCHMARKS / "puzzles.py"))
    function = script["step_seconds"]
    asked = script["argparse"].Namespace(run="maze-small", data="x", tests="y", quick=False)
    changes = {"train": train, "read_record": lambda _: {"log": [{"step": 25, "loss": 1.0}, *log]}}
    with patch.dict(function.__globals__, changes):
        assert function(asked, {}, tmp_path) == 1.0


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
    assert "threads: " in found["machine"] and {"deqseq", "python", "torch"} <= set(found["versions"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    settings = TrainSettings(
        group="S3", length=8, min_length=4, unrolled_length=4, d_model=16, d_state=4, headdim=8,
        steps=150, batch_size=16, max_iter=10,
    )  # fmt: skip
    train(settings, folder)
    return folder


def test_solvers(trained: Path, tmp_path: Path, rendered_figures: Callable[[Path], bool]) -> None:
    arguments = ["--model", str(trained), "--models", str(tmp_path), "--output", str(tmp_path / "out")]
    arguments += ["--batch", "2", "--length", "6", "--tolerances", "1e-3", "--windows", "all", "2"]
    arguments += ["--device", "cpu", "--dtypes", "float32", "--solvers", "picard-0.7", "anderson-2"]
    arguments += ["anderson-5-sequence", "torchdeq-anderson", "--max-iter", "256"]
    done = run("solvers.py", *arguments)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert len(rows) == 7  # two windows for three solvers; torchdeq supports only "all"
    causal = [row for row in rows if row["solver"] in ("picard-0.7", "anderson-2")]
    assert all(row["leak"] == 0 and row["converged"] == 1 and row["problem"] is None for row in causal)
    assert all(row["leak"] > 0 for row in rows if row not in causal)
    assert all(0 < row["distance"] < 0.1 and 0 < row["residual"] < 3e-3 for row in causal)
    # picard-0.7 needs fewer evaluations per token in the window of 2 tokens than without a window.
    assert causal[1]["evaluations"] < causal[0]["evaluations"]
    for figure in (f"heat-{trained.name}-float32.png", "pareto.png"):
        assert rendered_figures(tmp_path / "out" / figure)

    measured = (tmp_path / "out" / "rows.jsonl").read_text()
    done = run("solvers.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "rows.jsonl").read_text() == measured  # nothing was measured again
    other = run("solvers.py", *arguments, "--batch", "3")
    assert other.returncode == 2 and "other settings" in other.stderr


def test_a_row_that_raises_or_is_wrong_names_its_problem(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", str(trained), "--models", str(tmp_path), "--output", str(tmp_path / "out")]
    arguments += ["--batch", "1", "--length", "4", "--windows", "all"]
    arguments += ["--solvers", "picard-0.7", "broyden-4"]
    arguments += ["--device", "cpu", "--dtypes", "float32", "--tolerances", "1e-2"]
    monkeypatch.setattr(Picard, "causal", True)
    monkeypatch.setattr(Picard, "step", lambda self, z, fz, state, progress: (fz.flip(1), state))
    with monkeypatch.context() as broken:
        broken.setattr(Broyden, "step", lambda *_: torch.zeros(2) @ torch.zeros(3))
        done = run("solvers.py", *arguments)
    assert done.returncode == 0, done.stderr
    leaks, raises = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert "leak" in leaks["problem"]  # the leak is found even in a batch of one sequence
    assert raises["problem"].startswith("RuntimeError")

    file = tmp_path / "out" / "rows.jsonl"
    (line,) = file.read_text().splitlines()
    file.write_text(f'{line}\n{{"case": "to')  # an interrupted script may leave such a line
    done = run("solvers.py", *arguments)
    assert done.returncode == 0, done.stderr
    first, second = file.read_text().splitlines()
    assert first == line and json.loads(second)["problem"] is None  # the failed row was measured again
    file.write_text(f"no row\n{line}\n")
    done = run("solvers.py", *arguments)
    assert done.returncode == 2 and f"{file} cannot be read, line 1" in done.stderr


def test_rows_are_of_one_model(trained: Path, tmp_path: Path) -> None:
    mine = tmp_path / "run"
    shutil.copytree(trained, mine)
    small = ["--models", str(tmp_path), "--device", "cpu", "--batch", "2", "--length", "4"]
    one = [*small, "--dtypes", "float32", "--tolerances", "0.05", "--windows", "all"]
    one += ["--solvers", "picard-0.7", "--output", str(tmp_path / "out")]
    two = [*small, "--gradients", "phantom-1-1.0", "--train-steps", "0", "--output", str(tmp_path / "two")]
    scripts = [("solvers.py", one), ("gradients.py", two)]
    for script, words in scripts:
        done = run(script, "--model", str(mine), *words)
        assert done.returncode == 0, done.stderr
    weights = load_file(mine / "model.safetensors")
    changed = {name: 1.01 * values for name, values in weights.items()}
    save_file(changed, mine / "model.safetensors", metadata={"format": "pt"})
    seal(mine)
    anew, refused = (run(script, "--model", str(mine), *words) for script, words in scripts)
    assert anew.returncode == 0, anew.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert len({row["checksum"] for row in rows}) == len(rows) == 2
    assert refused.returncode == 2 and "other settings (checksum" in refused.stderr
    same = run("solvers.py", "--model", str(mine), str(trained), *one)
    assert same.returncode == 2 and "different names" in same.stderr
    assert run("solvers.py", "--model", str(mine), *one, "--windows", "0").returncode == 2


def test_gradients(trained: Path, tmp_path: Path, rendered_figures: Callable[[Path], bool]) -> None:
    arguments = ["--model", str(trained), "--models", str(tmp_path), "--output", str(tmp_path / "out")]
    arguments += ["--batch", "3", "--length", "6", "--device", "cpu", "--group", "Z3", "--train-steps", "1"]
    arguments += ["--gradients", "phantom-1-1.0", "phantom-8-0.8", "implicit-0.0001-anderson"]
    done = run("gradients.py", *arguments, "--trained", "phantom-1-1.0")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["error of the exact gradient"] < 1e-3
    jfb, phantom, implicit = found["rows"]
    assert jfb["cosine"] < phantom["cosine"] < implicit["cosine"]
    assert implicit["cosine"] > 0.9999 and implicit["problem"] is None
    assert jfb["graph MiB"] < phantom["graph MiB"] / 4
    (after,) = found["trained"]
    assert after["gradient"] == "phantom-1-1.0" and 0 < after["loss"] < 3
    assert rendered_figures(tmp_path / "out" / "gradients.png")


def test_warm_start(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    small = ["--length", "8", "--sequences", "4", "--tolerances", "1e-5"]
    done = run("warm_start.py", "--run", str(trained), *small, "--output", str(output))
    assert done.returncode == 0, done.stderr + done.stdout
    zero, previous = json.loads(output.read_text())["rows"]
    assert zero["accuracy"] == previous["accuracy"]
    assert zero["evaluations a token"] != previous["evaluations a token"]


def test_wavefront(tmp_path: Path, token_folder: Path) -> None:
    torch.manual_seed(0)
    backbone = {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2}
    model = ImplicitForCausalLM(ImplicitConfig(vocab_size=300, backbone=backbone, initializer_range=0.5))
    model.save_pretrained(tmp_path / "model")
    shutil.copy(token_folder.parent / "tokenizer.json", tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 4)
    output = tmp_path / "out.json"
    few = ["--prompts", "2", "--prompt-tokens", "8", "--tokens", "6", "--windows", "3", "--rtol", "1e-4"]
    few += ["--solver", "anderson"]  # needs a quarter of the evaluations
    arguments = [str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--device", "cpu"]
    done = run("wavefront.py", *arguments, *few, "--output", str(output))
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(output.read_text())
    plain, wave = found["rows"]
    assert plain["equal tokens"] == wave["equal tokens"] == 1
    assert wave["passes a token"] < plain["passes a token"]
    assert found["agreement"][-1] >= found["agreement"][0]
    wrong = run(
        "wavefront.py", *arguments, *few, "--tokens", "9", "--windows", "16"
    )  # eight tokens in a window
    assert wrong.returncode == 2 and "prompt-tokens must differ" in wrong.stderr
    wrong = run("wavefront.py", *arguments, *few, "--text", str(tmp_path / "missing.txt"))
    assert wrong.returncode == 2 and "missing.txt does not exist" in wrong.stderr


def test_speed(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    chosen = ["state-tracking", "evaluation", "decode"]
    small = ["--quick", "--device", "cpu", "--repeats", "1", "--sections", *chosen]
    done = run("speed.py", *small, "--output", str(output))
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    sections = found["sections"]
    assert list(sections) == ["correctness", *chosen] and found["implementations"] == ["torch"]
    assert all(row["right"] for row in sections["correctness"]["relative errors"])
    rows = [row for tables in sections.values() for table in tables.values() for row in table]
    assert all("failed" not in row for row in rows)
    (steps,) = sections["state-tracking"].values()
    assert [row["evaluations"] for row in steps[:3]] == [4, 15, 21]
    assert all(row["ms"] > 0 and row["tokens/s"] > 0 for row in steps)
    limits = sections["evaluation"]["limits of f"]
    for case in {row["case"] for row in limits}:
        *counted, total = [row["GB"] for row in limits if row["case"] == case]
        assert total == pytest.approx(sum(counted)) and min(counted) > 0


@pytest.fixture(scope="module")
def text_folder(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared data folder with one token per byte. Its held-out text fills several rows of 128 tokens."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("".join(f"The square of {i} is {i * i}.\n" for i in range(400)))
    made = ["--output", str(folder / "data"), "--tokenizer", str(token_folder.parent / "tokenizer.json")]
    options = ["--documents", "line", "--validation-share", "0.1", "--workers", "1"]
    assert prepare.main([str(folder / "text.txt"), *made, *options]) == 0
    return folder / "data"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"perplexity": "6"}, "perplexity must be 6.0, got '6'"),
        ({"perplexity": float("nan")}, "perplexity must be a positive, finite number, got nan"),
        ({"unit": "hours"}, "unit must be one of 'tokens', 'seconds', got hours"),
        ({"form": ["free"]}, "form must be text"),
        ({"curve": None}, "curve must not be null"),
        (
            {"curve": [{"tokens": 1, "perplexity": 2.0}]},
            "a point of the curve has no seconds: {'tokens': 1, ",
        ),
    ],
)
def test_a_damaged_result_names_its_file(
    changed: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from iteration.results import read

    file = tmp_path / "result.json"
    study = BENCHMARKS.parent / "docs" / "results" / "what-iteration-buys.json"
    one = json.loads(study.read_text())["runs"][0]
    file.write_text(json.dumps(one))
    assert read(file).perplexity == one["perplexity"]
    file.write_text(json.dumps({**one, **changed}))
    with pytest.raises(ValueError, match=re.escape(f"{file} is not a result of this study: {said}")):
        read(file)


@pytest.mark.parametrize("script", ["what_iteration_buys.py", "scaling.py"])
@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("x.json", "--output must be the path of files without .json and .png, got x.json"),
        ("x.PNG", "--output must be the path of files without .json and .png, got x.PNG"),
        (".", "--output must be the path of files without .json and .png, got ."),
        ("a/..", "--output must be the path of files without .json and .png, got a/.."),
        ("folder", "folder.json is a folder"),
    ],
)
def test_the_output_of_a_report_is_checked_before_the_results_are_read(
    script: str, output: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    done = run(script, "report", "nowhere", "--output", output)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def test_what_iteration_buys(
    text_folder: Path, tmp_path: Path, rendered_figures: Callable[[Path], bool]
) -> None:
    model = ["--size", "tiny", "--changes", "{model.backbone.d_model: 48, model.backbone.n_layer: 1}"]
    study = ["--data", str(text_folder), "--output", str(tmp_path / "study"), *model]
    train = ["train", *study, "--timed-steps", "1", "--eval-rows", "1", "--points", "2"]
    forms = ["--forms", "transformers", "growth"]
    done = run("what_iteration_buys.py", *train, *forms, "--budget-tokens", "5120")
    assert done.returncode == 0, done.stderr
    speed = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "study" / "speed").iterdir()}
    assert set(speed) == {"transformers", "1", "1+1", "2+1", "free"}
    taken = ["time", "--data", str(text_folder), *model, "--runs", str(tmp_path / "study")]
    done = run("what_iteration_buys.py", *taken, "--output", str(tmp_path / "again"), *forms)
    assert done.returncode == 0, done.stderr
    again = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "again" / "speed").iterdir()}
    assert {name: one["setting"]["stages"] for name, one in again.items()} == {
        name: one["setting"]["stages"] for name, one in speed.items()
    }
    assert all(len(one["runs"]) == 1 and one["seconds"] > 0 for one in again.values())
    done = run("what_iteration_buys.py", *taken, "--output", str(tmp_path / "again"), "--forms", "4+1")
    assert done.returncode == 2 and "has the stage 4+1" in done.stderr
    taken += ["--output", str(tmp_path / "other"), "--forms", "transformers"]
    record = next((tmp_path / "study").rglob("training.json"))
    whole = record.read_text()
    line = {"step": 1, "tokens_per_second": 9.0}
    for log in ([], [{}], [3], [{**line, "tokens_per_second": "x"}], [{**line, "tokens_per_second": 0}]):
        record.write_text(json.dumps({**json.loads(whole), "log": log}))
        done = run("what_iteration_buys.py", *taken)
        assert done.returncode == 2 and f"the run in {record.parent} are damaged" in done.stderr
    record.write_text(whole)
    for other in (["--model", "mamba2"], ["--rows", "1"]):
        done = run("what_iteration_buys.py", *taken, *other)
        assert done.returncode == 2 and "of this study and machine" in done.stderr
    shutil.rmtree(tmp_path / "again")
    # Replace the measured times: they decide how many steps a budget of seconds has.
    for stage, seconds in (("1", 1), ("1+1", 2), ("2+1", 3), ("free", 10)):
        file = tmp_path / "study" / "speed" / f"{stage}.json"
        del speed[stage]["setting"]["full_determinism"]  # as in a file of an older version
        file.write_text(json.dumps({**speed[stage], "seconds": seconds}))
    done = run("what_iteration_buys.py", *train, "--forms", "growth", "--budget-seconds", "20")
    assert done.returncode == 0, done.stderr

    timed = ["time", *study, "--timed-steps", "1", "--timed-search", "3", "--forms", "adaptive"]
    done = run("what_iteration_buys.py", *timed, "--changes", "{length: 64}")
    assert done.returncode == 0, done.stderr
    setting = json.loads((tmp_path / "study" / "speed" / "adaptive.json").read_text())["setting"]
    (stage,) = setting["stages"]
    assert stage["convergence"] == {"name": "fixed", "iterations": 3} and "adaptive_budget" not in stage
    assert setting["length"] == 64
    (tmp_path / "study" / "speed" / "adaptive.json").write_text("{}")
    done = run("what_iteration_buys.py", *timed, "--changes", "{length: 64}")
    assert done.returncode == 2 and "holds no time of a step" in done.stderr

    written = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    done = run("what_iteration_buys.py", *train, *forms, "--budget-tokens", "5120")
    assert done.returncode == 0, done.stderr
    assert written == {file: file.stat().st_mtime_ns for file in written}  # nothing was trained again
    assert not list(tmp_path.rglob("*.safetensors"))  # models of finished runs are removed
    done = run("what_iteration_buys.py", *train, *forms, "--budget-tokens", "5120", "--model", "mamba2")
    assert done.returncode == 2 and "measured with other settings" in done.stderr

    done = run("what_iteration_buys.py", "report", str(tmp_path / "study"), "--output", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    seconds, *tokens = found["runs"]
    assert [r["form"] for r in tokens] == ["growth", "transformers"] and {r["steps"] for r in tokens} == {5}
    assert all(math.isfinite(r["perplexity"]) for r in found["runs"])
    # A step takes 0.25 * 1 + 0.25 * 2 + 0.3 * 3 + 0.2 * 10 = 3.65 s on average. Stages end at whole steps.
    assert seconds["steps"] == 5 and seconds["seconds"] == 1 * 1 + 1 * 2 + 2 * 3 + 1 * 10
    for title, text in found["tables"].items():
        assert title in done.stdout and text in done.stdout
    assert rendered_figures(tmp_path / "r.png")
    shutil.copytree(tmp_path / "study", tmp_path / "copy")
    done = run("what_iteration_buys.py", "report", str(tmp_path / "study"), str(tmp_path / "copy"))
    assert done.returncode == 2 and "hold the same run" in done.stderr
    done = run("what_iteration_buys.py", "report", str(tmp_path / "study"), str(tmp_path / "stduy"))
    assert done.returncode == 2 and f"no finished run in {tmp_path / 'stduy'}\n" in done.stderr
    # With other data, these are other runs. Every run is compared with the control of its own data.
    changed = {
        "growth": {"form": "2+1", "perplexity": 9.0},
        "transformers": {"form": "injected", "perplexity": 10.0},
    }
    for file in (tmp_path / "copy").rglob("result.json"):
        result = json.loads(file.read_text())
        file.write_text(json.dumps({**result, "data": "f00dcafe", **changed[result["form"]]}))
    two = [str(tmp_path / "study"), str(tmp_path / "copy"), "--output", str(tmp_path / "two")]
    done = run("what_iteration_buys.py", "report", *two)
    assert done.returncode == 0, done.stderr
    both = json.loads((tmp_path / "two.json").read_text())["tables"]
    assert len(both) == 2 * len(found["tables"])
    assert [text for title, text in both.items() if "f00dcafe" not in title] == list(found["tables"].values())
    (compared,) = (text for title, text in both.items() if "f00dcafe, 5,120 tokens" in title)
    assert "-10.0%" in compared and "-10.0%" not in "".join(found["tables"].values())


def test_scaling(text_folder: Path, tmp_path: Path, rendered_figures: Callable[[Path], bool]) -> None:
    """On the CPU, with one process. Measured runs are not repeated, nor mixed with other settings."""
    speed = ["speed", "--data", str(text_folder), "--output", str(tmp_path / "out"), "--models", "llama-tiny"]
    speed += ["--gpus", "1", "--rows", "2", "--steps", "1", "--runs", "1"]
    done = run("scaling.py", *speed, "--tokens", "256")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("result.json")
    result = json.loads(file.read_text())
    assert [stage["evaluations"] for stage in result["stages"]][:2] == [4 + 1, 14 + 4]
    for stage in result["stages"]:
        assert stage["tokens_per_second"] == 256 / stage["seconds"] and len(stage["seconds_of_steps"]) == 1
    assert not list(tmp_path.rglob("*.safetensors"))
    written = file.stat().st_mtime_ns
    assert run("scaling.py", *speed, "--tokens", "256").returncode == 0
    assert file.stat().st_mtime_ns == written
    done = run("scaling.py", *speed, "--tokens", "512")
    assert done.returncode == 2 and "fields.batch_tokens 256, now 512" in done.stderr
    done = run("scaling.py", *speed, "--tokens", "500")
    assert done.returncode == 2 and "batch_tokens must be a multiple of length = 128" in done.stderr
    done = run("scaling.py", *speed, "--models", "llama-tiny-explicit")
    assert done.returncode == 2 and "must be implicit" in done.stderr
    done = run("scaling.py", "kill", "--data", str(text_folder), "--gpus", "1")
    assert done.returncode == 2 and "gpus must be at least 2" in done.stderr

    # The same run on two GPUs, twice as fast, and profiled.
    two = tmp_path / "out" / "two"
    two.mkdir()
    stages = [{**s, "tokens_per_second": 2 * s["tokens_per_second"], "parts": {"idle": 0.001}}
              for s in result["stages"]]  # fmt: skip
    stages[-1]["evaluations"] *= 2
    (two / "result.json").write_text(json.dumps({**result, "gpus": 2, "stages": stages}))
    done = run("scaling.py", "report", str(tmp_path / "out"), "--output", str(tmp_path / "report"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    for title, text in found["tables"].items():
        assert title in done.stdout and text in done.stdout
    ratios = [line.split("|")[5].strip() for line in found["tables"]["Tokens per second"].splitlines()]
    # On one GPU, the last stage is said to have needed half as many evaluations: no ratio.
    assert ratios[2:] == ["1.00", "2.00"] * 2 + ["1.00", "-"]
    assert rendered_figures(tmp_path / "report.png")


def test_speeds_of_steps_with_other_evaluations_have_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from scale.results import _ratios

    def rows(speed: float, *evaluations: float) -> list[dict[str, float]]:
        return [{"tokens_per_second": speed, "evaluations": number} for number in evaluations]

    assert _ratios({1: rows(10, 5, 5), 2: rows(19, 5, 5.04)}) == {1: [1, 1], 2: [1.9, 1.9]}
    assert _ratios({1: rows(10, 5, 5), 2: rows(19, 4, 6)}) == {1: [1, 1]}  # their mean is 5


def test_forms_are_compared_with_the_control_of_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from iteration.results import Result, changes

    def run_of(form: str, seed: int, *perplexities: float, rate: float = 1e-3) -> Result:
        curve = [{"tokens": 10.0 * i, "seconds": 1.0, "perplexity": p} for i, p in enumerate(perplexities, 1)]
        return Result(
            model="llama", form=form, unit="tokens", amount=20, learning_rate=rate, seed=seed, parameters=1,
            steps=1, tokens=20, seconds=1.0, run_seconds=None, perplexity=perplexities[-1], iterations=None,
            curve=curve, data="d", versions={}, machine="m", date="2026-01-01",
        )  # fmt: skip

    runs = [run_of("injected", 1, 10, 8), run_of("injected", 2, 20, 16), run_of("4+1", 1, 11, 6)]
    runs += [run_of("4+1", 2, 24, 16), run_of("4+1", 3, 1, 1), run_of("4+1", 1, 1, 1, rate=2e-3)]
    found = changes(runs)
    assert list(found) == [("4+1", 20, 1e-3)]  # seed 3 and the other learning rate have no control
    assert [tokens for tokens, _ in found["4+1", 20, 1e-3]] == [10, 20]
    assert [change for _, change in found["4+1", 20, 1e-3]] == pytest.approx([0.15, -0.125])


def test_times_of_a_step_that_differ_are_not_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from iteration.training import steady

    assert steady([0.1]) and steady([0.1] * 18 + [0.5] * 2)
    assert not steady([0.1] * 17 + [0.5] * 3)
    assert not steady([0.1] * 10 + [0.13] * 10)


def test_the_parts_of_a_profiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from scale.measure import parts

    gpu, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(name: str, start: float, end: float, device: object = gpu, note: bool = False) -> object:
        time_range = SimpleNamespace(start=1e6 * start, end=1e6 * end)
        return SimpleNamespace(name=name, time_range=time_range, device_type=device, is_user_annotation=note)

    events = [
        event("matmul", 0, 2), event("add", 1, 3), event("ncclDevKernel_AllReduce", 2.5, 5),
        event("matmul", 6, 7), event("cudaLaunchKernel", 0, 10, cpu), event("step", 0, 10, note=True),
    ]  # fmt: skip
    assert parts(events, 10) == {"computing": 4, "communicating": 2, "idle": 4}


@pytest.mark.parametrize(
    "name", ["steps", "data", "seed", "stages", "model.implicit", "model.backbone.injection", 1]
)
def test_changes_that_the_study_or_the_form_decides_are_refused(
    name: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from iteration.forms import Study

    with pytest.raises(ValueError, match=f"changes may set length, .*; got {name}"):
        Study(data="data", output="out", size="tiny", changes={name: None})  # type: ignore[dict-item]
    study = Study(data="data", output="out", size="tiny", changes={"model.backbone.n_layer": 1, "length": 64})
    assert study.title == "llama-tiny, length 64, model.backbone.n_layer 1"


def test_budgets_are_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from iteration.forms import Budget

    ends, times = [0.25, 0.5, 0.8, 1.0], [1.0, 2.0, 3.0, 10.0]
    plan = Budget("seconds", 3650).plan(ends, times, batch_tokens=64, points=4)
    assert plan["steps"] == 1000

    def spent(step: int) -> float:
        return sum(
            t * (min(step, 1000 * e) - 1000 * b)
            for b, e, t in zip([0, *ends], ends, times, strict=False)
            if step > 1000 * b
        )

    assert [spent(step) for step in plan["eval_at"]] == pytest.approx([912.5, 1825, 2737.5, 3650], abs=10)
    assert spent(round(1000 * (1 - plan["decay_share"]))) == pytest.approx(3650 / 2, abs=10)
    plan = Budget("tokens", 64_000).plan(ends, times, batch_tokens=64, points=4)
    assert plan == {"steps": 1000, "decay_share": 0.5, "eval_at": [250, 500, 750, 1000]}
    with pytest.raises(ValueError, match="3 steps, too few for 4 stages"):
        Budget("tokens", 192).plan(ends, times, batch_tokens=64, points=4)


def test_stages_of_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage evaluates f once, as the form injected. No stage has an adaptive budget."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from iteration.forms import Study

    study = Study(data="data", output=str(tmp_path), size="tiny")
    settings = study.settings(study.stages("growth"), steps=100)
    curriculum = settings.curriculum()
    assert curriculum is not None
    first, *others = curriculum.stages
    assert first.solver == "picard" and all(stage.solver == settings.config().solver for stage in others)
    assert first.convergence == first.eval_convergence == {"name": "fixed", "iterations": 1}
    assert all(stage.adaptive_budget is None for stage in curriculum.stages)


@pytest.mark.parametrize("model", ["llama", "mamba2"])
def test_transformers_model_starts_as_itself(
    model: str, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the form transformers starts with the logits of the transformers model it is made from."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from iteration.forms import Study
    from iteration.training import initialise

    study = Study(data=str(text_folder), output=str(tmp_path), model=model, size="tiny")  # type: ignore[arg-type]
    fields = {"steps": 8, "seed": 3, "learning_rate": 1e-3}
    settings = study.settings(study.stages("transformers"), **fields, start_from=str(tmp_path / "start"))
    theirs = initialise(settings, tmp_path / "start").eval()
    args = arguments(settings, tmp_path / "run", progress=False)
    ours = make_trainer(settings, open_data(settings), args).model.eval()
    ids = torch.randint(257, (2, 12), generator=torch.Generator(torch.get_default_device()).manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)


def test_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests the arm static. tests/vllm tests adaptive. Only the first measurement is in a new process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the script sets it; this restores it afterwards
    monkeypatch.setattr(Runner, "proceed", Runner.proceed)  # the arm replaces both
    monkeypatch.setattr(iteration, "drive", vars(iteration)["drive"])
    small = ["--backbones", "mamba2", "--arms", "static", "--requests", "5", "--prompt", "2", "6"]
    small += ["--new", "1", "4", "--rate", "100", "--output", str(tmp_path)]
    done = run("serving.py", *small, "--batch", "2")
    assert done.returncode == 0, done.stderr
    with patch("concurrent.futures.ProcessPoolExecutor", lambda number, _: ThreadPoolExecutor(number)):
        done = run("serving.py", *small, "--batch", "1")
    assert done.returncode == 0, done.stderr
    measured = (tmp_path / "rows.jsonl").read_text()
    done = run("serving.py", *small, "--batch", "2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rows.jsonl").read_text() == measured  # nothing was measured again
    together, alone = map(json.loads, measured.splitlines())
    assert together["answers"] == alone["answers"]
    assert together["counted"] > alone["counted"] == alone["needed"]
    (line,) = json.loads((tmp_path / "serving.json").read_text())["lines"]
    assert line["over static"] == "1.00" and line["equal"] == "1.000"
    for wrong in (["--rate", "0"], ["--new", "4", "2"], ["--arms", "fixed"], ["--model", str(tmp_path)]):
        assert run("serving.py", *small, *wrong).returncode == 2
