"""Pretraining of tiny models: run files, the plan, data, logs, saved models and the command line."""

import json
import math
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.tasks import prepare
from deqseq.tasks.common.corpus import TokenFolder
from deqseq.tasks.common.runs import names_of
from deqseq.tasks.common.settings import yaml_value
from deqseq.tasks.pretrain import main
from deqseq.tasks.pretraining.card import write_card
from deqseq.tasks.pretraining.data import TrainingOrder, open_data, shuffled
from deqseq.tasks.pretraining.faults import Diverged, Faults
from deqseq.tasks.pretraining.plan import describe, learning_rates, plan_stages, saved_bytes
from deqseq.tasks.pretraining.run_files import load_run, shipped
from deqseq.tasks.pretraining.settings import RunSettings
from deqseq.tasks.pretraining.train import arguments, check_start, make_trainer, pretrain
from deqseq.tasks.pretraining.trainer import PretrainTrainer, batch_of
from deqseq.tasks.pretraining.watch import Advice, Flops

SMALL = [
    ("model", "{vocab_size: 300, backbone: {name: llama, d_model: 16, n_layer: 1, n_head: 2}}"),
    ("length", "16"), ("batch_tokens", "64"), ("per_device_batch_size", "2"), ("steps", "10"),
    ("passes", "100"), ("eval_rows", "4"), ("eval_steps", "5"), ("save_steps", "5"), ("log_steps", "2"),
    ("spectral_every", "2"),
]  # fmt: skip
PEAK = 1e6  # peak FLOP/s of an imaginary device: so few that their utilisation has many digits


def changed(name: str, *changes: tuple[str, str]) -> RunSettings:
    """The settings of a run file. ``changes`` replace single fields, as flags on the command line do."""
    return load_run(name, {name: yaml_value(text, name) for name, text in changes})


def small(*changes: tuple[str, str]) -> RunSettings:
    return changed("llama-tiny", *SMALL, *changes)


def flags(*pairs: tuple[str, str]) -> list[str]:
    return [word for name, value in (*SMALL, *pairs) for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, token_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deqseq.tasks.pretraining.train.peak_flops", lambda device: PEAK)
        pretrain(small(("data", str(token_folder)), ("eval_at", "[7]")), folder, progress=False)
    return folder


def test_runs_are_compared(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rendered_figures: Callable[[Path], bool]
) -> None:
    figure = tmp_path / "figures" / "compare.png"
    assert main(["compare", str(run), "--output", str(figure)]) == 0
    scores = [e for e in json.loads((run / "training.json").read_text())["log"] if "eval_loss" in e]
    table = capsys.readouterr().out
    assert rendered_figures(figure)
    last, everything = scores[-2:]  # at the last step: first on eval_rows rows, then on all held-out rows
    assert last["step"] == everything["step"] and last["eval_loss"] != everything["eval_loss"]
    assert f"{last['eval_perplexity']:.2f}" in table.splitlines()[2]  # the row of the second stage
    other = tmp_path / "fewer-rows"
    other.mkdir()
    shutil.copy(run / "training.json", other)
    settings = json.loads((run / "settings.json").read_text())
    (other / "settings.json").write_text(json.dumps(settings | {"eval_rows": settings["eval_rows"] + 1}))
    assert "comparable" not in table
    assert main(["compare", str(run), str(other), "--output", str(figure)]) == 0
    assert "may not be comparable" in capsys.readouterr().out
    assert main(["compare", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["compare", str(run), str(run)]) == 2
    assert f"{run} is given twice" in capsys.readouterr().err


def test_runs_with_equal_folder_names_have_longer_names() -> None:
    assert names_of(["study/a/seed-1", "/runs/b"]) == ["seed-1", "b"]
    assert names_of(["study/a/seed-1", "study/b/seed-1"]) == ["a/seed-1", "b/seed-1"]
    assert names_of(["/a", "/x/a"]) == ["/a", "x/a"]
    assert names_of([".."]) == [Path.cwd().parent.name]
    with pytest.raises(ValueError, match=r"a/\.\./b is given twice"):
        names_of(["b", "a/../b"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("settings.json", "[]", "must be a mapping"), ("training.json", '{"log', "cannot be read"),
     ("training.json", "{}", "it has no log")],
)  # fmt: skip
def test_damaged_runs_are_named(
    run: Path, tmp_path: Path, name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("settings.json", "training.json"):
        (tmp_path / file).write_text(text if file == name else (run / file).read_text())
    assert main(["compare", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / name) in error and message in error


# Run files


@pytest.mark.parametrize("name", shipped())
def test_shipped_runs_are_valid(name: str) -> None:
    settings, twin = load_run(name), load_run(f"{name}-explicit")
    assert settings.config().implicit and not twin.config().implicit
    curriculum = settings.curriculum()
    assert curriculum is not None and [stage.until for stage in curriculum.stages] == [0.8, 1.0]
    assert twin.curriculum() is None
    assert replace(twin, explicit=False) == settings
    injected = load_run(f"{name}-injected")
    assert injected.config().form == "injected" and injected.curriculum() is None
    assert replace(injected, model=twin.model) == twin
    if "tiny" not in name:
        assert settings.total_steps * settings.batch_tokens == pytest.approx(207e9, rel=1e-4)


def test_fields_are_changed_by_dotted_names_and_values_are_yaml() -> None:
    settings = changed(
        "mamba2-130m",
        ("learning_rate", "3e-4"), ("stages.0.until", "{steps: 50}"), ("model.backbone.n_layer", "2"),
        ("steps", "100"), ("model.solver", "{name: picard, damping: 0.7}"),
    )  # fmt: skip
    assert settings.learning_rate == 3e-4 and settings.tokens is None and settings.total_steps == 100
    assert settings.config().backbone["n_layer"] == 2 and settings.config().backbone["d_model"] == 768
    assert settings.config().solver == {"name": "picard", "damping": 0.7}
    curriculum = settings.curriculum()
    assert curriculum is not None and curriculum.end(curriculum.stages[0], 100) == 50
    tokens = changed("mamba2-130m", ("stages.0.until", "{tokens: 100e9}")).curriculum()
    assert tokens is not None and tokens.stages[0].until == pytest.approx(100 / 207, rel=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("learning_rat", "1")], "did you mean learning_rate"),
        ([("model.n_layer", "1")], "unknown settings n_layer"),
        ([("stages.0.untl", "1")], "did you mean stages.0.until"),
        ([("stages.7.until", "1")], "entries 0 to 1, got '7'"),
        ([("model.backbone.n_layr", "1")], "n_layr"),
        ([("model", "mamba3-130m")], "unknown preset 'mamba3-130m'"),
        ([("model.backbone.n_head", "5")], "n_head must divide"),
        ([("stages.0.until", "1.5")], "until must increase"),
        ([("stages.0.until", "{epochs: 1}")], "a share of the training"),
        ([("stages.0.until", "{tokens: .inf}")], "a share of the training"),
        ([("stages.0.until", "0.001")], r"stages\.0 would have none"),
        ([("stages.0.until", "0.999")], r"stages\.1 would have none"),
        ([("stages.1.convergence.rtol", "-1")], "tolerance|rtol"),
        ([("passes", ".inf")], "passes must be a positive, finite number"),
        ([("batch_tokens", "100")], "a multiple of length = 16, got 100; the nearest is 96"),
        ([("tokens", "10"), ("steps", "null")], "at least batch_tokens"),
        ([("steps", "null")], "either tokens or steps"),
        ([("warmup_share", "0.9")], "at most 1"),
        ([("min_learning_rate", "1")], "min_learning_rate must be in"),
        ([("activation_budget", "0.5")], "compile: true"),
        ([("keep", "1")], "at least 2"),
        ([("documents", "mixed")], "documents must be one of .*'joined', 'separate', got mixed"),
        ([("stages", "5")], "^stages must be a list"),
        ([("stages.1.gradient.steps", "0")], r"^stages\.1: steps must be a whole number >= 1, got 0"),
        ([("model.backbone", "null")], "model needs a preset"),
        ([("per_device_batch_size", "0")], "per_device_batch_size must be a whole number >= 1"),
        ([("length", "1")], "at least 2"),
        ([("learning_rate", "fast")], "learning_rate must be a positive, finite number.*fast"),
        ([("bf16", "1")], "bf16 must be true or false, got 1"),
        ([("learning_rate", ".inf")], "learning_rate must be a positive, finite number"),
        ([("weight_decay", ".inf")], "weight_decay must be a finite number >= 0"),
        ([("data", "{name: x}")], r"did you mean data\.dataset"),
        ([("data", "{files: [x]}")], "data.dataset is missing"),
        ([("data", "{dataset: x, validation_share: y}")], "data.validation_share.*y"),
        ([("data", "{dataset: x, validation_share: 1}")], "data.validation_share.*1"),
        ([("data", "{dataset: x}"), ("eval_rows", "null")], "eval_rows must be a number"),
    ],
)
def test_wrong_fields_are_named(overrides: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(*overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not valid YAML"), ("- 1", "mapping of fields"),
     ("lr: 1\nzz: 2", "the run file run.yaml: unknown field lr"),
     ("steps: &a [*a]", "model is missing"),
     ("steps: 1\nstages:\n- {until: 1,\n   until: 2}", "run.yaml sets until twice, again in line 4"),
     ("model: llama-130m", "learning_rate is missing"),
     ("base: run.yaml", "must not be their own base: run.yaml -> run.yaml")],
)  # fmt: skip
def test_broken_run_files_are_named(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_run("run.yaml")


def test_a_base_need_not_have_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("below.yaml").write_text("steps: 3\nlearning_rate: 1e-3")
    Path("run.yaml").write_text("base: below.yaml\nmodel: {preset: mamba2-130m, window: 4}")
    settings = load_run("run.yaml")
    assert settings.steps == 3 and settings.config().window == 4
    Path("run.yaml").write_text("base: below.yaml\nmodel: {window: 4}")
    with pytest.raises(ValueError, match="model needs a preset"):
        load_run("run.yaml").config()


def test_a_base_is_named_relative_to_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("below.yaml").write_text("base: llama-tiny\nseed: 5")
    Path("mine/run.yaml").write_text("base: ../below.yaml\nsteps: 7")
    settings = load_run("mine/run.yaml")
    assert (settings.seed, settings.steps) == (5, 7)
    Path("below.yaml").write_text("base: nowhere.yaml")
    with pytest.raises(
        ValueError, match=r"the base of .*below\.yaml: the file .*nowhere\.yaml cannot be read"
    ):
        load_run("mine/run.yaml")
    Path("below.yaml").write_text("base: mine/run.yaml")
    with pytest.raises(ValueError, match="must not be their own base"):
        load_run("mine/run.yaml")


def test_a_tilde_in_a_run_file_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "below.yaml").write_text("base: llama-tiny\nstart_from: ~/model\nseed: 5")
    run = tmp_path / "mine" / "run.yaml"
    run.parent.mkdir()
    run.write_text("base: ~/below.yaml\ndata: ~/shards")
    found = load_run(str(run))
    assert (found.data, found.start_from) == (str(tmp_path / "shards"), str(tmp_path / "model"))
    run.write_text("base: ~/below.yaml\ndata: ~")  # the null of YAML
    assert load_run(str(run)).data is None and found.seed == 5


def test_rows_divide_among_processes_or_it_says_what_would() -> None:
    settings = load_run("llama-1.3b")
    assert [settings.accumulation(n) for n in (1, 2, 8)] == [128, 64, 16]
    with pytest.raises(ValueError, match=r"512 rows of 2048 tokens.*use 1, 2 or 4 processes, or"):
        settings.accumulation(3)
    with pytest.raises(ValueError, match="use per_device_batch_size 2, 4 or 8"):
        replace(settings, per_device_batch_size=5).accumulation(8)


# Plan


def test_plan_covers_the_steps_and_follows_the_library_s_schedule() -> None:
    settings = changed("mamba2-130m", ("model.backbone.n_layer", "1"), ("model.backbone.d_model", "128"))
    bounded, free = plan_stages(settings)
    assert (bounded.first, bounded.last, free.last) == (1, 157928, 197410) and free.first == 157929
    assert (bounded.evaluations, free.evaluations, free.with_graph) == (5, 28, 4)
    steps, rates = learning_rates(settings)
    at = dict(zip(steps, rates, strict=True))
    assert at[0] == pytest.approx(1e-5) and max(rates) == settings.learning_rate
    assert rates[len(rates) // 2] == settings.learning_rate
    middle = rates[round(0.9 * (len(rates) - 1))]  # half-way through the decay
    assert middle == pytest.approx(1e-5 + (3e-3 - 1e-5) * (1 - 0.5**0.5), rel=0.02)


def test_flops_are_those_of_the_matrices() -> None:
    config = small().config()
    d, hidden, length = 16, 42, 32
    matrices = 4 * d * d + 3 * d * hidden
    attention = 2 * length * d
    assert Flops(config, length).evaluation == 2 * length * (matrices + attention)
    assert Flops(config, length).rest == 2 * length * (3 * d * d + d * 300)
    plain = {"name": "mamba2", "d_model": d, "n_layer": 1, "d_state": 4, "headdim": 8, "injection": False}
    options = {"vocab_size": 300, "implicit": False}
    normed, other = (ImplicitConfig(backbone={**plain, "weight_norm": w}, **options) for w in (True, False))
    assert Flops(normed, length).evaluation == Flops(other, length).evaluation > 0
    options["backbone"] = {**plain, "n_layer": 2, "injection": True}
    forms = [Flops(ImplicitConfig(**{**options, "implicit": implicit}), length) for implicit in (True, False)]
    rows = 2 * 2 * d + 2 * 4 + 2 * d // 8  # of in_proj: gate and x, B and C, dt
    assert forms[0].evaluation - forms[1].evaluation == 2 * (length - 1) * d * rows  # one token of zeros
    assert saved_bytes(config, 64) == pytest.approx(2 * saved_bytes(config, 32), rel=0.5)


def test_run_files_build_on_others(tmp_path: Path) -> None:
    """A run file overrides single fields of its base file.

    If the run file sets ``steps``, the base's ``tokens`` no longer holds.
    """
    file = tmp_path / "mine.yaml"
    file.write_text("base: llama-130m\nsteps: 40\nmodel: {backbone: {n_layer: 2}}")
    settings = changed(str(file), ("tokens", "1e9"), ("steps", "null"))
    assert (settings.tokens, settings.steps) == (10**9, None)
    assert load_run(str(file)).total_steps == 40
    backbone = load_run(str(file)).config().backbone
    assert (backbone["n_layer"], backbone["d_model"]) == (2, 768)
    file.write_text("base: mamba2-tiny\nmodel: {backbone: {name: llama, d_model: 32, n_layer: 1, n_head: 2}}")
    config = load_run(str(file)).config()
    assert config.vocab_size == 1024 and "d_state" not in config.backbone


def test_policies_hold_until_a_stage_names_its_own() -> None:
    gradient = {"name": "phantom", "steps": 1}
    stages: list[Any] = [
        {"until": 0.5, "gradient": gradient, "convergence": {"name": "fixed", "iterations": 3}}
    ]
    settings = small(("stages", json.dumps([*stages, {"until": 1.0, "gradient": gradient}])))
    curriculum = settings.curriculum()
    assert curriculum is not None
    assert (
        curriculum.stages[1].convergence == curriculum.stages[0].convergence == settings.config().convergence
    )


def test_dry_run_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rendered_figures: Callable[[Path], bool]
) -> None:
    plot = tmp_path / "schedule.png"
    assert main(["llama-tiny", "--dry-run", "--plot", str(plot), *flags(("data", "null"))]) == 0
    shown = capsys.readouterr().out
    for word in (
        "none yet",
        "parameters",
        "640 in rows of 16",
        "10 of 64 tokens",
        "FLOPs",
        "GiB",
        "4 + 1 evaluations",
    ):
        assert word in shown, shown
    assert rendered_figures(plot) and [path.name for path in tmp_path.iterdir()] == ["schedule.png"]
    assert "sharded over 2" in describe(small(), 2)


@pytest.mark.parametrize(
    "command", [["llama-tiny", "--dry-run", "--data", "null", "--plot"], ["compare", "run", "--output"]]
)
def test_a_figure_never_replaces_another_kind_of_file(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("precious")
    assert main([*command, str(text)]) == 2
    assert f"{command[-1]} must end in .png, got {text}" in capsys.readouterr().err
    assert text.read_text() == "precious"


def test_the_schedule_of_a_run_in_the_working_directory_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert main(["llama-tiny", "--dry-run", "--output", ".", *flags(("data", "null"))]) == 0
    assert [path.name for path in tmp_path.rglob("*.png")] == ["mine-schedule.png"]


def test_dry_run_ends_with_the_error_of_a_real_run_if_the_data_are_not_ready(
    tmp_path: Path, token_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "run")]
    ready = ["llama-tiny", *output, *flags(("data", str(token_folder))), "--dry-run"]
    plot = ["--plot", str(tmp_path / "new" / "schedule.png")]
    unready = {
        "no token shards": [("data", str(tmp_path))],
        "allow --passes": [("data", str(token_folder)), ("passes", "0.1")],
        "257 tokens, the model 200": [("data", str(token_folder)), ("model.vocab_size", "200")],
    }
    for message, given in unready.items():
        assert main(["llama-tiny", *output, *flags(*given), "--dry-run", *plot]) == 2
        planned = capsys.readouterr()
        assert "NOT READY" in planned.out and "FLOPs" in planned.out and message in planned.err
        assert main(["llama-tiny", *output, *flags(*given)]) == 2
        assert capsys.readouterr().err == planned.err and planned.err.count("\n") == 1
    for message, given in {
        "no model to start from in nowhere": ["--start_from", "nowhere"],
        "), got 'nobody'": ["--report_to", "nobody"],
    }.items():
        assert main([*ready, *given, *plot]) == 2 and message in capsys.readouterr().err
        assert main([*ready[:-1], *given]) == 2 and message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(ready) == 0 and "NOT READY" not in capsys.readouterr().out


def test_a_run_with_a_checkpoint_needs_no_model_to_start_from() -> None:
    settings = replace(small(), start_from="nowhere", report_to="none")
    check_start(settings, Path("checkpoint-1"))
    with pytest.raises(ValueError, match="no model to start from in nowhere"):
        check_start(settings, None)


# Data


def test_every_pass_has_every_row_once_in_an_order_of_its_own() -> None:
    order = TrainingOrder(list(range(7)), 20, seed=3)
    rows: list[Any] = [order[i] for i in range(20)]
    assert sorted(rows[:7]) == sorted(rows[7:14]) == list(range(7)) and rows[:7] != rows[7:14]
    assert [TrainingOrder(list(range(7)), 20, seed=3)[i] for i in (15, 2)] == [rows[15], rows[2]]
    assert [TrainingOrder(list(range(7)), 20, seed=4)[i] for i in range(20)] != rows


@pytest.mark.parametrize("size", [*range(1, 40), 64, 65, 99, 100, 101, 1000, 4097])
def test_shuffles_are_permutations(size: int) -> None:
    for key in (b"0 0", b"0 1", b"1 0"):
        assert sorted(shuffled(i, size, key) for i in range(size)) == list(range(size))


def test_shuffles_differ_by_pass_and_seed_and_are_uniform() -> None:
    size, keys = 5, 2400
    found = Counter(
        tuple(shuffled(i, size, f"{k} {k % 3}".encode()) for i in range(size)) for k in range(keys)
    )
    assert len(found) == 120 and max(found.values()) < 20 + 6 * 20**0.5  # all 5! orders, about equally often
    large = 10**5
    moves = [shuffled(i, large, b"7 0") for i in range(4000)]
    assert np.mean(moves) == pytest.approx(large / 2, rel=0.05)
    tenths = Counter(10 * move // large for move in moves)  # the rows come from all parts of the data
    assert all(abs(tenths[i] - 400) < 120 for i in range(10))
    assert abs(np.corrcoef(moves[:-1], moves[1:])[0, 1]) < 0.1
    same = sum(shuffled(i, large, b"7 1") == move for i, move in enumerate(moves))
    assert same < 10


def test_any_row_of_a_long_run_is_found_without_those_before() -> None:
    order = TrainingOrder(range(10**8), 3 * 10**8, seed=0)
    tracemalloc.start()
    rows = [order[i] for i in range(0, len(order), 10**6)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 and len(set(rows)) > 290
    assert all(0 <= row < 10**8 for row in rows)  # type: ignore[operator]


def test_a_run_with_its_rows_in_another_order_is_refused(
    run: Path, token_folder: Path, tmp_path: Path
) -> None:
    old = Path(shutil.copytree(run, tmp_path / "run"))
    settings = json.loads((old / "settings.json").read_text())
    assert settings.pop("order") == TrainingOrder.version
    # A run with version 1 of the order has no entry "order".
    (old / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"order of version 1, this program in one of version 2: finish"):
        pretrain(small(("data", str(token_folder))), old, progress=False)


def test_data_that_does_not_fit_is_refused(token_folder: Path, tmp_path: Path) -> None:
    data = ("data", str(token_folder))
    with pytest.raises(ValueError, match=r"are asked for, but .* allow --passes"):
        open_data(small(data, ("passes", "0.1")))
    with pytest.raises(ValueError, match=r"257 tokens, the model 200"):
        pretrain(small(data, ("model.vocab_size", "200")), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match="no data"):
        pretrain(small(("data", "null")), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match="none"):
        pretrain(small(("data", str(tmp_path / "none"))), tmp_path / "run", progress=False)


def test_corrupted_shard_is_named(token_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(token_folder, tmp_path / "data"))
    shard = next(folder.glob("train*.bin"))
    shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
    with pytest.raises(ValueError, match=shard.name):
        pretrain(small(("data", str(folder))), tmp_path / "run", progress=False)
    # The failed run has recorded nothing, so it can start once the shard is repaired.
    assert not (tmp_path / "run" / "settings.json").exists()


def test_changed_tokenizer_is_named(token_folder: Path, tmp_path: Path) -> None:
    """The ids of two tokens are swapped in the tokenizer's file. Training must refuse this tokenizer.

    With this tokenizer, the model's output would be decoded to wrong words.
    """
    shutil.copytree(token_folder, tmp_path / "data")
    TokenFolder(tmp_path / "data").verify()
    file = tmp_path / "data" / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False))
    with pytest.raises(ValueError, match=r"tokenizer\.json is corrupted"):
        pretrain(small(("data", str(tmp_path / "data"))), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "settings.json").exists()
    file.unlink()
    with pytest.raises(ValueError, match="missing"):
        TokenFolder(tmp_path / "data").verify()


def test_shard_that_broke_meanwhile_is_not_trained_on(run: Path, token_folder: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(token_folder, tmp_path / "data"))
    half = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("training.json")))
    settings = json.loads((half / "settings.json").read_text()) | {"data": str(data)}
    (half / "settings.json").write_text(json.dumps(settings))
    shard = next(data.glob("train*.bin"))
    shard.write_bytes(bytes(len(shard.read_bytes())))
    with pytest.raises(ValueError, match="corrupted"):
        pretrain(small(("data", str(data))), half, progress=False)


def streamed(tmp_path: Path, token_folder: Path, documents: int = 60, **more: Any) -> tuple[str, str]:
    lines = [json.dumps({"text": f"{i} is a number " * 8}) for i in range(documents)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = {"dataset": "json", "files": [str(tmp_path / "rows.jsonl")], "validation_share": 0.2,
            "tokenizer": str(token_folder / "tokenizer"), **more}  # fmt: skip
    return "data", json.dumps(data)


@pytest.mark.parametrize("split", [None, "train"])
def test_streams_hold_out_what_they_do_not_train_on(
    split: str | None, tmp_path: Path, token_folder: Path
) -> None:
    settings = small(streamed(tmp_path, token_folder, validation_split=split))
    data = open_data(settings)
    train, held_out = (
        {tuple(row["input_ids"].tolist()) for row in rows} for rows in (data.train, data.validation)
    )
    assert train and held_out and not train & held_out
    share = streamed(tmp_path, token_folder, validation_split=split, validation_share=0.3)
    assert open_data(small(share)).fingerprint != data.fingerprint
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text() + "\n")
    assert open_data(settings).fingerprint != data.fingerprint


def test_streamed_datasets_train(tmp_path: Path, token_folder: Path) -> None:
    data = streamed(tmp_path, token_folder)
    pretrain(small(data, ("steps", "4")), tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "model" / "README.md").exists()
    with pytest.raises(ValueError, match=r"did you mean data\.column"):
        open_data(small(streamed(tmp_path, token_folder, colum="text")))


def test_stream_that_ends_says_so(tmp_path: Path, token_folder: Path) -> None:
    """If the stream has too few rows for all steps, training raises an error.

    If a second pass is allowed, training finishes, and a resumed run gives the same weights bit for bit.
    """
    data = streamed(tmp_path, token_folder, documents=8)
    rows = sum(1 for _ in open_data(small(data, ("passes", "1"))).train)
    steps = ("steps", str(rows // 4 + 3))
    with pytest.raises(ValueError, match=rf"ended after {rows // 4} of {rows // 4 + 3} steps"):
        pretrain(small(data, steps, ("passes", "1"), ("save_steps", "1000")), tmp_path / "a", progress=False)
    often = ("save_steps", str(rows // 4 + 1)), ("spectral_every", str(rows // 4 + 2))
    whole = small(data, steps, ("passes", "2"), ("log_steps", "1"), *often)
    pretrain(whole, tmp_path / "whole", progress=False)
    record = tmp_path / "whole" / "training.json"
    log = [sorted(line) for line in json.loads(record.read_text())["log"]]
    record.unlink()
    before = Path(shutil.move(tmp_path / "whole" / "model", tmp_path / "model"))
    for late in sorted((tmp_path / "whole").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))[1:]:
        shutil.rmtree(late)
    pretrain(whole, tmp_path / "whole", progress=False)
    after = tmp_path / "whole" / "model" / "model.safetensors"
    assert (before / "model.safetensors").read_bytes() == after.read_bytes()
    assert [sorted(line) for line in json.loads(record.read_text())["log"]] == log
    assert sum("spectral_radius" in line for line in log) == 1


# Training


def test_run_leaves_a_model_a_card_and_a_log(run: Path) -> None:
    record = json.loads((run / "training.json").read_text())
    lines = [line for line in record["log"] if "loss" in line]
    assert {
        "grad_norm",
        "iterations",
        "residual",
        "residual_p99",
        "share_converged",
        "tokens_per_second",
    } <= set(lines[-1])
    assert any("spectral_radius" in line for line in lines)
    flops = Flops(small().config(), 16)
    for line in lines:
        with_graph = 1 if line["step"] <= 8 else 4  # phantom steps
        used = line["tokens_per_second"] / 16 * flops.step(line["nfe"], with_graph)
        assert line["mfu"] == pytest.approx(used / PEAK, rel=1e-3)
    evaluated = {line["step"]: line for line in record["log"] if "eval_loss" in line}
    assert set(evaluated) == {5, 7, 8, 10}  # every 5 steps, eval_at and the ends of the stages
    assert evaluated[5]["eval_iterations"] == 5  # the first stage's ``eval_convergence``: 5 iterations
    card = (run / "model" / "README.md").read_text()
    assert "perplexity" in card and "batch_tokens: 64" in card and "curves.png" in card
    bounded, final = (ImplicitForCausalLM.from_pretrained(run / name) for name in ("stage-1", "model"))
    assert bounded.config.convergence == {"name": "fixed", "iterations": 4}
    assert final.config.convergence["name"] == "residual"
    assert (
        final.config.eos_token_id
        == TokenFolder(json.loads((run / "settings.json").read_text())["data"]).end_of_text
    )


def test_the_last_evaluation_is_on_all_rows_and_runs_once(tmp_path: Path, token_folder: Path) -> None:
    """If evaluations during training are on all rows, the one after the last step is not repeated."""
    folder = tmp_path / "run"

    def evaluations(eval_rows: str) -> list[dict[str, Any]]:
        settings = small(("data", str(token_folder)), ("steps", "4"), ("eval_rows", eval_rows))
        rows = len(open_data(settings).validation)
        pretrain(settings, folder, progress=False)
        record = json.loads((folder / "training.json").read_text())
        found = [line for line in record["log"] if "eval_loss" in line and line["step"] == 4]
        assert record["validation"].items() <= found[-1].items()
        assert record["validation"]["eval_rows"] == rows > 4
        return found

    (whole,) = evaluations("null")
    # A run that resumes from its last checkpoint does not evaluate again, unless on more rows.
    (folder / "training.json").unlink()
    assert evaluations("null") == [whole]
    shutil.rmtree(folder)
    few, again = evaluations("4")
    assert few["eval_rows"] == 4 and again["eval_loss"] == whole["eval_loss"] != few["eval_loss"]
    (folder / "training.json").unlink()
    few, again = evaluations("null")
    assert few["eval_rows"] == 4 and again["eval_loss"] == whole["eval_loss"]


def test_model_generates_and_is_evaluated(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deqseq.tasks import generate
    from deqseq.tasks.evaluate.__main__ import main as evaluate

    assert generate.main([str(run / "model"), "aaa", "--max-new-tokens", "3"]) == 0
    (tmp_path / "text.txt").write_text("abc " * 40)
    report = ["perplexity", str(run / "model"), "--text", str(tmp_path / "text.txt"), "--length", "16"]
    assert evaluate(report) == 0
    assert "perplexity" in capsys.readouterr().out


def test_finished_run_is_left_alone_and_other_settings_are_refused(
    run: Path, token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ("data", str(token_folder))
    monkeypatch.setattr(PretrainTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
    assert pretrain(small(data), run, progress=False) == run / "model"
    assert pretrain(small(data, ("per_device_batch_size", "4")), run, progress=False)  # may differ on resume
    moved = Path(shutil.copytree(token_folder, tmp_path / "moved"))
    assert pretrain(small(("data", str(moved))), run, progress=False)
    with pytest.raises(
        ValueError, match=r"learning_rate: 0\.002 there, 0\.1 asked for; stages\.0\.until: 0\.8"
    ):
        pretrain(small(data, ("learning_rate", "0.1"), ("stages.0.until", "0.5")), run, progress=False)
    other = moved.parent / "other.txt"
    other.write_text("".join(f"other text {i}\n" for i in range(400)))
    words = ["--tokenizer", str(moved / "tokenizer"), "--validation-share", "0.1", "--documents", "line"]
    assert prepare.main([str(other), "--output", str(moved), *words, "--force"]) == 0
    with pytest.raises(ValueError, match="fingerprint"):
        pretrain(small(("data", str(moved))), run, progress=False)


def test_finished_run_without_its_model_makes_it_again(run: Path, token_folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(run, again)
    shutil.rmtree(again / "model")
    made = pretrain(small(("data", str(token_folder))), again, progress=False)
    assert (made / "model.safetensors").read_bytes() == (run / "model" / "model.safetensors").read_bytes()


def test_free_stage_starts_from_a_bounded_model(run: Path, token_folder: Path, tmp_path: Path) -> None:
    free = [
        ("stages", json.dumps([{**small().stages[1], "until": 1.0}])),
        ("start_from", str(run / "stage-1")),
    ]
    settings = small(("data", str(token_folder)), *free)
    trainer = make_trainer(settings, open_data(settings), arguments(settings, tmp_path, progress=False))
    bounded = ImplicitForCausalLM.from_pretrained(run / "stage-1")
    for name, weight in bounded.state_dict().items():
        assert torch.equal(weight, trainer.model.state_dict()[name]), name
    assert trainer.model.config.convergence["name"] == "residual"
    with pytest.raises(ValueError, match="no model to start from in nowhere"):
        make_trainer(
            replace(settings, start_from="nowhere"), open_data(settings), arguments(settings, tmp_path, False)
        )


def test_numbers_that_are_not_finite_stop_training(
    run: Path, token_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    original, calls = PretrainTrainer.compute_loss, []

    def spoilt(self: PretrainTrainer, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if model.training:
            calls.append(1)
            if len(calls) == 14:  # in step 7, because each step calls this method twice
                next(iter(model.parameters())).data.fill_(torch.nan)
        return original(self, model, inputs, *args, **options)

    monkeypatch.setattr(PretrainTrainer, "compute_loss", spoilt)
    output = tmp_path / "run"
    command = ["llama-tiny", "--output", str(output), *flags(("data", str(token_folder)))]
    assert main(command) == 1
    message = capsys.readouterr().err
    assert "step 7: the loss is nan on process 0" in message and "no finite equilibrium" in message
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-5"]
    saved = ImplicitForCausalLM.from_pretrained(output / "checkpoint-5")
    assert all(weight.isfinite().all() for weight in saved.parameters())
    monkeypatch.undo()
    assert main(command) == 0  # resumes from checkpoint-5
    finished = [(folder / "model" / "model.safetensors").read_bytes() for folder in (output, run)]
    assert finished[0] == finished[1]


def test_training_keeps_no_logits(run: Path) -> None:
    model = ImplicitForCausalLM.from_pretrained(run / "model")
    rows = [{"input_ids": torch.arange(8)}, {"input_ids": torch.arange(8) + 1}]
    batch = batch_of(rows)
    out = model(**batch, skip_logits=True)
    assert out.logits is None and torch.equal(out.loss, model(**batch).loss)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "fault, message",
    [
        ((math.nan, 0.0, 0.5), "the loss is nan on process 1"),
        ((2.0, 3.0, 0.5), "3 tokens have no finite equilibrium on process 1"),
        ((2.0, 0.0, math.inf), "the gradient's norm is inf"),
    ],
)
def test_a_step_with_faults_changes_no_weight(
    fused: bool, fault: tuple[float, float, float], message: str
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    faults = Faults(torch.device("cpu"))

    def step(number: int, found: tuple[float, float, float]) -> None:
        weight.grad = torch.ones(3)
        norm = torch.tensor(0.5)
        faults.end_step(
            number, norm, lambda mine: torch.cat([mine, torch.tensor([found])]), optimizer if fused else None
        )
        optimizer.step()

    step(1, (1.0, 0.0, 0.5))
    before = weight.detach().clone()
    assert before.ne(1).all()
    with pytest.raises(Diverged, match=f"step 2: {message}. The step did not change the weights"):
        step(2, fault)
        assert fused  # without a fused optimiser, the error comes before the optimiser's step
        step(3, (1.0, 0.0, 0.5))
    assert torch.equal(weight, before)
    faults.check()  # gives each error once


def advised(lines: list[tuple[float, float]], tolerance: float | None = 0.05) -> list[str]:
    advice = Advice()
    return [
        text
        for residual, exhausted in lines
        for text in advice.read({"residual": residual, "share_budget_exhausted": exhausted}, tolerance)
    ]


def test_advice_is_given_once_and_only_where_it_is_due() -> None:
    assert not advised([(0.04, 0.0)] * 30)
    assert not advised([(1.0 / n, 0.0) for n in range(1, 30)])
    (stuck,) = advised([(0.5, 0.0)] * 30)
    assert "does not fall: 0.500, then 0.500" in stuck and "damp" in stuck
    assert not advised([(0.2, 0.0)] * 30, tolerance=None) and advised([(0.5, 0.0)] * 30, tolerance=None)
    (advice,) = advised([(0.04, 0.03 * n) for n in range(30)])
    assert "fewer tokens converge" in advice and "max_iter" in advice


# The command


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nothing"], "there is no 'nothing'"),
        ([__file__], "test_pretrain.py' is not a YAML file"),
        ([""], "'' is not a YAML file"),
        (["llama-tiny", "--learning_rat", "1"], "did you mean learning_rate"),
        (["llama-tiny", "--learning_rate"], "expected one argument"),
        (["llama-tiny", "stray"], "unrecognized arguments: stray"),
        (["llama-tiny", "--stages.0.until"], "needs a value"),
        (["llama-tiny", "--stages.0.untl", "1"], "did you mean stages.0.until"),
        (["llama-tiny", "--data", "/nowhere"], "/nowhere"),
        (["llama-tiny", "--model.vocab_size", "x"], "vocab_size"),
        (["llama-tiny", "--plot", "new/schedule.png"], "--plot is for a dry run only: also give --dry-run"),
        (["llama-tiny", "--processes", "2"], "--processes is for a dry run only: also give --dry-run, or "),
        (["llama-tiny", "--dry-run", "--processes", "0"], "processes must be a whole number >= 1"),
    ],
)
def test_user_errors_are_one_line(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*command, "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "run").exists()


def test_card_of_an_explicit_model_has_no_search(tmp_path: Path, token_folder: Path) -> None:
    settings = changed("llama-tiny-explicit", *SMALL, ("data", str(token_folder)))
    log = [
        {"step": 2, "train_seconds": 1.0, "loss": 2.0},
        {"step": 2, "train_seconds": 1.0, "eval_loss": 2.0, "eval_perplexity": 7.389},
    ]
    (tmp_path / "run" / "model").mkdir(parents=True)
    record = {"log": log, "parameters": 5, "validation": {"eval_loss": 2.0}}
    write_card(tmp_path / "run" / "model", settings, record)
    card = " ".join((tmp_path / "run" / "model" / "README.md").read_text().split())
    assert "Explicit language model" in card and "| 2 | 128 | 7.39 | - | - |" in card


def test_the_spectral_radius_is_of_documents_as_they_were_solved(
    tmp_path: Path, token_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], int]] = []

    def radius(model: Any, ids: torch.Tensor, z: torch.Tensor) -> float:
        seen.append((ids[0].tolist(), z.shape[1]))
        return 0.5

    monkeypatch.setattr("deqseq.tasks.pretraining.trainer.model_radius", radius)
    settings = small(("data", str(token_folder)), ("documents", "separate"), ("spectral_every", "1"),
                     ("log_steps", "1"), ("length", "64"), ("batch_tokens", "128"))  # fmt: skip
    data = open_data(settings)
    pretrain(settings, tmp_path / "run", progress=False)
    assert all(len(ids) == length for ids, length in seen)
    assert all(data.end_of_text not in ids[:-1] for ids, _ in seen)
    assert any(length < 64 for _, length in seen)
