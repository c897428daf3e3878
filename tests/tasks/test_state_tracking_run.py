"""State tracking: training, resuming, evaluation and the command line, on tiny models."""

import fcntl
import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.tasks.common.files import locked, write_json
from deqseq.tasks.common.runs import RunFolder
from deqseq.tasks.common.seals import SEAL, seal
from deqseq.tasks.common.settings import build, read_yaml
from deqseq.tasks.common.trainer import AlignedTrainer
from deqseq.tasks.state_tracking import evaluate as evaluation
from deqseq.tasks.state_tracking import study as study_module
from deqseq.tasks.state_tracking.__main__ import main
from deqseq.tasks.state_tracking.evaluate import Evaluation, evaluate, held_out, load
from deqseq.tasks.state_tracking.phases import Batches, Progress, phases
from deqseq.tasks.state_tracking.settings import RUNS, TrainSettings
from deqseq.tasks.state_tracking.study import STUDIES, conduct, load_study, summary
from deqseq.tasks.state_tracking.train import train

SMALL: dict[str, Any] = {
    "group": "S3", "length": 8, "min_length": 4, "unrolled_length": 4, "d_model": 16, "d_state": 4,
    "headdim": 8, "steps": 12, "batch_size": 8, "max_iter": 8,
}  # fmt: skip


def small(**changes: Any) -> TrainSettings:
    return build(TrainSettings, {**SMALL, **changes})


def weights(model: ImplicitForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stream(settings: TrainSettings) -> Batches:
    return Batches(settings, torch.device("cpu"), Progress(settings))


def interrupt(
    patch: pytest.MonkeyPatch, step: int, output: Path, settings: TrainSettings | None = None,
    save_steps: int = 2,
) -> None:  # fmt: skip
    """Train with checkpoints, and interrupt training in step ``step``, as Ctrl-C does."""
    calls = 0
    original = AlignedTrainer.compute_loss

    def interrupted(self: AlignedTrainer, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with patch.context() as context:
        context.setattr(AlignedTrainer, "compute_loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(settings or small(), output, save_steps=save_steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after an uninterrupted run."""
    return weights(train(small(), tmp_path_factory.mktemp("uninterrupted") / "run", save_steps=2))


@pytest.mark.parametrize("stopped_at", [3, 7, 11])
def test_resumed_run_equals_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, torch.Tensor], stopped_at: int
) -> None:
    interrupt(monkeypatch, stopped_at, tmp_path / "cut")
    with pytest.raises(ValueError, match="no finished run"):
        load(tmp_path / "cut")
    resumed = weights(train(small(), tmp_path / "cut", save_steps=2))
    assert json.loads((tmp_path / "cut" / "training.json").read_text())["resumed"]
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_a_run_with_a_tuple_in_its_settings_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints store tuples as lists. Also, the numbers of iterations that are drawn continue."""
    settings = small(gradient={"name": "unrolled", "iterations": 1, "before": (0, 2)})
    whole = weights(train(settings, tmp_path / "whole", save_steps=2))
    interrupt(monkeypatch, 7, tmp_path / "cut", settings)
    resumed = weights(train(settings, tmp_path / "cut", save_steps=2))
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_a_resumed_run_goes_on_in_its_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run continues in the phase in which the run was interrupted, and gets the same weights.

    Because ``grow_at`` is 0, phases end early here: after 20 batches, whatever the accuracy.
    """
    grows = small(
        grow_at=0.0, steps=60, unrolled_share=0.9, short_share=1.0, unrolled_length=2, min_length=8,
        d_model=8, batch_size=4,
    )  # fmt: skip
    whole = weights(train(grows, tmp_path / "whole", save_steps=100))
    interrupt(monkeypatch, 40, tmp_path / "cut", grows, save_steps=15)
    resumed = weights(train(grows, tmp_path / "cut", save_steps=100))
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    log = json.loads((tmp_path / "cut" / "training.json").read_text())["log"]
    assert log[0]["longest"] == 4 and 0 <= log[0]["accuracy"] <= 1


def test_torn_checkpoint_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, torch.Tensor]
) -> None:
    interrupt(monkeypatch, 8, tmp_path / "cut")
    torn = tmp_path / "cut" / "checkpoint-6"
    (torn / "trainer_state.json").unlink()
    (torn / "model.safetensors").write_bytes(b"half")
    assert RunFolder(tmp_path / "cut", asdict(small())).last_checkpoint() == (
        tmp_path / "cut" / "checkpoint-4"
    )
    resumed = weights(train(small(), tmp_path / "cut", save_steps=2))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_damaged_model_is_refused_and_its_run_repeats_no_step(tmp_path: Path) -> None:
    whole = weights(train(small(), tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\x00\x00\x00\x00")
    with pytest.raises(ValueError, match=r"is damaged: .*model\.safetensors"):
        load(tmp_path)
    before = sorted(tmp_path.glob("checkpoint-*"))
    again = weights(train(small(), tmp_path))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert sorted(tmp_path.glob("checkpoint-*")) == before


def test_training_learns_and_logs_the_search(tmp_path: Path) -> None:
    settings = small(group="Z3", steps=60, batch_size=16, learning_rate=2e-2, label_smoothing=0.0)
    train(settings, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "training.json").read_text())
    logged = [entry for entry in record["log"] if "loss" in entry]
    assert logged[-1]["loss"] < 1.0 < torch.tensor(3.0).log().item()
    assert logged[-1]["iterations"] >= 1 and logged[-1]["residual"] > 0


def test_finished_run_is_loaded_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights(train(small(), tmp_path / "run"))
    monkeypatch.setattr(AlignedTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
    second = weights(train(small(), tmp_path / "run"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_folder_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", asdict(small())).start()
    (tmp_path / "run" / "checkpoint-1").mkdir()
    write_json(tmp_path / "run" / "checkpoint-1" / SEAL, {})
    before = (tmp_path / "run" / "settings.json").read_text()
    with pytest.raises(ValueError, match=r"other settings \(seed: 1 there, 2 asked for; group: S3"):
        RunFolder(tmp_path / "run", asdict(small(group="A5", seed=2)))
    assert (tmp_path / "run" / "settings.json").read_text() == before


def test_runs_from_before_a_setting_existed_resume_with_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, torch.Tensor]
) -> None:
    interrupt(monkeypatch, 8, tmp_path / "cut")
    for file in (tmp_path / "cut").rglob("*settings.json"):
        file.write_text(
            json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "rehearsal"})
        )
    with pytest.raises(ValueError, match=r"dt_min: 0\.001 there, 0\.01 asked for"):
        train(small(dt_min=0.01), tmp_path / "cut", save_steps=2)
    before = (tmp_path / "cut" / "settings.json").read_text()
    resumed = weights(train(small(), tmp_path / "cut", save_steps=2))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert json.loads((tmp_path / "cut" / "settings.json").read_text()) == json.loads(before)


def test_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="holds no run"):
        RunFolder(tmp_path, asdict(small()))
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group", "B7"), ("length", 0), ("min_length", 9), ("unrolled_length", 1), ("steps", -1),
        ("identity_probability", 1.5), ("learning_rate", 0.0),
        ("learning_rate", float("inf")), ("tolerance", 0.0), ("max_iter", 0),
        ("phantom_steps", 0), ("phantom_damping", 1.2), ("damping", 0.0), ("label_smoothing", 1.0),
        ("unrolled_share", 2.0), ("train_window", 0), ("headdim", 7), ("batch_size", 0), ("short_share", 0.2),
        ("short_identity_probability", -0.5), ("backbone", "lstm"), ("eval_max_iter", 0), ("rehearsal", 1.5),
        ("rehearsal", 0.25), ("dt_min", 0.7), ("explicit", "no, thanks"), ("bf16", 1), ("d_model", 16.5),
        ("learning_rate", float("nan")), ("weight_decay", -1.0), ("max_grad_norm", "x"), ("seed", -1),
        ("seed", 2**32),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(name: str, value: Any) -> None:
    for make in (small, lambda **changes: TrainSettings(**{**SMALL, **changes})):
        with pytest.raises(ValueError, match=str(value)):
            make(**{name: value})


def test_the_form_of_a_model_has_a_name() -> None:
    injected = {"explicit": True, "backbone": {"name": "mamba2", "injection": True}}
    forms = ({}, injected, {"explicit": True}, {"explicit": True, "backbone": "lstm"})
    assert [small(**form).form for form in forms] == ["implicit", "injected", "explicit", "lstm"]


def test_text_for_numbers_and_truth_is_read_or_refused() -> None:
    assert not small(explicit="false").explicit and small(steps="3").steps == 3
    with pytest.raises(ValueError, match="explicit must be False, got 'false'"):
        TrainSettings(explicit="false")  # type: ignore[arg-type]


def test_short_sequences_are_as_long_as_unrolled_ones() -> None:
    with pytest.raises(ValueError, match="short_length must be between 4 and length = 8, got 3"):
        small(short_length=3, short_share=0.7)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(small(steps=60), folder)
    return folder


def test_windows_agree_and_batch_size_does_not_matter(run: Path) -> None:
    model, settings = load(run)
    fresh = held_out(settings, 8, sequences=2, seed=0)
    results = [
        evaluate(model, fresh.tokens, fresh.targets, window, 1e-4, 1000, batch_size=batch_size)
        for window, batch_size in ((None, 2), (3, 2), (1, 2), (3, 1))
    ]
    assert all(e.converged == 1 for e in results)
    for other in results[1:]:
        assert other.accuracy_by_position == results[0].accuracy_by_position
    assert results[1].iterations_by_position == pytest.approx(results[3].iterations_by_position)


def test_evaluation_leaves_the_model_alone(run: Path) -> None:
    model, settings = load(run)
    before = model.model.layer.eval_solve
    fresh = held_out(settings, 4, sequences=2, seed=0)
    evaluate(model, fresh.tokens, fresh.targets, tolerance=0.1, max_iter=3, damping=0.2)
    assert model.model.layer.eval_solve is before


def test_damping_changes_the_way_and_not_the_answer(run: Path) -> None:
    model, settings = load(run)
    fresh = held_out(settings, 6, sequences=2, seed=0)
    plain, damped = (
        evaluate(model, fresh.tokens, fresh.targets, tolerance=1e-4, max_iter=1000, damping=damping)
        for damping in (settings.damping, 0.2)
    )
    assert plain.converged == damped.converged == 1
    assert damped.iterations > 1.5 * plain.iterations
    assert damped.accuracy_by_position == plain.accuracy_by_position


def test_evaluate_refuses_wrong_input(run: Path) -> None:
    model, _ = load(run)
    with pytest.raises(ValueError, match="one shape"):
        evaluate(model, torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"damping must be in \(0, 1\], got 1\.5"):
        evaluate(model, *torch.zeros(2, 2, 3, dtype=torch.long), damping=1.5)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(model, torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="batch_size must be a whole number >= 1, got 0"):
        evaluate(model, *torch.zeros(2, 2, 3, dtype=torch.long), batch_size=0)
    with pytest.raises(ValueError, match="token 6 is outside"):
        evaluate(model, torch.full((2, 3), 6), torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize("damage", ["truncate", "foreign", "config"])
def test_damaged_checkpoint_is_reported(run: Path, tmp_path: Path, damage: str) -> None:
    for file in ("settings.json", "training.json", "config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((run / file).read_bytes())
    if damage == "truncate":
        (tmp_path / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes()[:100])
    elif damage == "foreign":
        other = small(n_layer=2).model()
        other.save_pretrained(tmp_path / "other")
        (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    else:
        (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="checkpoint"):
        load(tmp_path)


def test_command_line_from_training_to_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rendered_figures: Callable[[Path], bool]
) -> None:
    flags = [f"--{name}={value}" for name, value in {**SMALL, "steps": 4}.items()]
    assert main(["train", "--output", str(tmp_path / "run"), *flags]) == 0
    assert rendered_figures(tmp_path / "run" / "training.png")
    command = ["evaluate", str(tmp_path / "run"), "--length", "8", "12", "--window", "all", "3"]
    assert main([*command, "--sequences", "4"]) == 0
    rows = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    assert [(row["length"], row["window"]) for row in rows] == [(8, None), (8, 3), (12, None), (12, 3)]
    assert rendered_figures(tmp_path / "run" / "evaluation" / "by_position.png")
    capsys.readouterr()
    csv = str(tmp_path / "S3=9.csv")
    assert main(["data", csv, "--sequences", "5"]) == 0
    assert main(["data", csv, "--check"]) == 0
    assert "5 sequences of 9, all products are right" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "run"), "--csv", csv]) == 0
    (row,) = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    assert row["csv"] == csv and row["tolerance"] is None
    other = str(Path(csv).replace(tmp_path / "S3=10.csv"))
    assert main(["data", other, "--check"]) == 2
    assert "must hold sequences of 10 tokens, got 9" in capsys.readouterr().err
    as_large = str(tmp_path / "Z6=4.csv")
    assert main(["data", as_large, "--sequences", "2"]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--csv", as_large]) == 2
    assert "has products in Z6, but the model learned S3" in capsys.readouterr().err


def test_an_interrupted_evaluation_keeps_the_tests_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [f"--{name}={value}" for name, value in {**SMALL, "steps": 2}.items()]
    assert main(["train", "--output", str(tmp_path), *flags]) == 0
    whole = evaluation.evaluate_fresh

    def interrupted(model: Any, settings: Any, length: int, *rest: Any, **options: Any) -> Evaluation:
        if length == 12:
            raise KeyboardInterrupt
        return whole(model, settings, length, *rest, **options)

    monkeypatch.setattr(evaluation, "evaluate_fresh", interrupted)
    command = ["evaluate", str(tmp_path), "--length", "8", "12", "--window", "3", "--sequences", "4"]
    assert main(command) == 130
    (row,) = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert (row["length"], row["window"]) == (8, 3)


def test_explicit_twin_trains_and_has_no_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", "--explicit", "--output", str(tmp_path), *(f"--{k}={v}" for k, v in SMALL.items())])
        == 0
    )
    model, settings = load(tmp_path)
    fresh = held_out(settings, 8, sequences=4, seed=0)
    result = evaluate(model, fresh.tokens, fresh.targets)
    assert settings.explicit and result.iterations is None and result.window is None
    for option in ("--window=32", "--tolerance=0.1", "--max-iter=4", "--damping=0.5"):
        assert main(["evaluate", str(tmp_path), option]) == 2
        said = f"an explicit model has no solver: leave out {option.partition('=')[0]}"
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--output", "{tmp}/new", "--group", "B7"],
        ["evaluate", "{tmp}/nothing"],
        ["evaluate", "{run}", "--tolerance", "-1"],
        ["evaluate", "{run}", "--window", "0"],
        ["evaluate", "{run}", "--sequences", "0"],
        ["data", "{tmp}/nameless.csv"],
    ],
)
def test_errors_end_with_a_sentence_and_status_2(
    command: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part.format(tmp=tmp_path, run=run) for part in command]) == 2
    assert capsys.readouterr().err.splitlines()[-1].lstrip().startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("data A5=5.csv --check --seed 0", "--check only reads a file: leave out --seed"),
        (
            "data A5=5.csv --check --sequences 9 --identity-probability 0",
            "--sequences, --identity-probability",
        ),
        (
            "evaluate run --csv A5=5.csv --length 8",
            "--csv tests on the sequences in a file: leave out --length",
        ),
        ("evaluate run --csv A5=5.csv --sequences 9 --seed 0", "leave out --sequences, --seed"),
    ],
)
def test_options_without_effect_are_refused(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert said in capsys.readouterr().err


def test_data_makes_its_folder_and_whole_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "folder" / "A5=5.csv"

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", interrupted)
        assert main(["data", str(path)]) == 130
    assert not path.exists()
    assert main(["data", str(path)]) == 0
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    (tmp_path / "file").touch()
    assert main(["data", str(tmp_path / "file" / "A5=5.csv")]) == 2
    assert f"error: {tmp_path / 'file'} is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["train"], ["study", "words"], ["evaluate", "{run}"], ["jacobian"]])
def test_an_output_that_is_a_file_is_named_before_any_work(
    command: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [part.format(run=run) for part in command]
    for name in ("settings.json", "settings.json/a/b"):
        assert main([*words, "--output", str(run / name)]) == 2
        said = capsys.readouterr()
        assert said.err == f"error: {run / 'settings.json'} is not a folder\n" and not said.out


@pytest.mark.parametrize(
    ("command", "name"),
    [(["evaluate", "{run}"], "evaluation.json"), (["jacobian"], "jacobian.json"),
     (["study", "words"], "study.json")],
)  # fmt: skip
def test_a_folder_with_the_name_of_a_result_is_named_before_any_work(
    command: list[str], name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    assert main([*(part.format(run=run) for part in command), "--output", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err == f"error: {tmp_path / name} is a folder, and this command writes a file of this name\n"


@pytest.mark.parametrize("command", ["train", "evaluate", "data", "demo"])
def test_help_explains_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "default" in capsys.readouterr().out


def test_stages_have_their_lengths_and_probabilities() -> None:
    settings = small(
        length=64, min_length=32, unrolled_length=4, short_length=16, unrolled_share=0.25, short_share=0.5,
        identity_probability=1.0, short_identity_probability=0.0, steps=40, group="Z60",
    )  # fmt: skip
    batches = [batch for batch, _ in zip(stream(settings), range(40), strict=False)]
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    for part, least, most in ((lengths[:10], 2, 4), (lengths[10:20], 4, 16), (lengths[20:], 32, 64)):
        assert least <= min(part) <= max(part) <= most
    moved = [bool((batch["input_ids"] != settings.algebra.identity).all()) for batch in batches]
    assert all(moved[:20])
    assert all((batch["input_ids"] == settings.algebra.identity).all() for batch in batches[20:])


def test_sequences_grow_when_the_last_two_tokens_are_right() -> None:
    settings = small(
        length=64, min_length=32, unrolled_length=4, short_length=9, unrolled_share=0.5, short_share=0.9,
        steps=1000, grow_at=0.9,
    )  # fmt: skip
    assert [phase.lengths for phase in phases(settings)] == [(2, 4), (4, 6), (6, 9), (32, 64)]
    labels = torch.arange(5).expand(4, 5)
    right = F.one_hot(labels, 6).float()
    wrong = right.clone()
    wrong[:, 4] = 0.0  # the argmax is 0, but the label is 4
    begun = []
    for answers in (right, wrong):
        progress = Progress(settings)
        for step in range(400):
            progress.add(step, answers, labels)
        begun.append([progress.phase(step) for step in range(1000)])
    assert [begun[0].index(phase) for phase in range(4)] == [0, 22, 44, 66]
    assert [begun[1].index(phase) for phase in (0, 1, 3)] == [0, 500, 900]


def test_batches_of_the_phase_before_do_not_count() -> None:
    """A phase ends early if the mean accuracy of 20 of its batches reaches ``grow_at``.

    Here phase 1 ends at step 40, as the settings say: only 18 of its accurate batches count, and 20 are
    needed. All batches of phase 2 are wrong. If phase 2 also counted the batches of phase 1, it would end
    early.
    """
    progress = Progress(
        small(length=16, unrolled_length=4, short_length=16, grow_at=0.8, unrolled_share=0.2, short_share=0.8,
              steps=200)
    )  # fmt: skip
    labels = torch.zeros(4, 6, dtype=torch.int64)
    right, wrong = (F.one_hot(labels + shift, 6).float() for shift in (0, 1))
    for step in range(60):
        progress.add(step, right if 20 <= step < 40 else wrong, labels)
    assert progress.ends[:2] == [40, 160]


def test_phase_2_stays_if_its_sequences_cannot_grow() -> None:
    fixed = {"length": 16, "min_length": 8, "unrolled_length": 8, "short_length": 8, "short_share": 0.7}
    assert phases(small(**fixed, grow_at=0.9)) == phases(small(**fixed))


def test_a_checkpoint_of_an_older_version_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, torch.Tensor]
) -> None:
    """Older versions had no callback ``Progress``, so their checkpoints have no state for it."""
    interrupt(monkeypatch, 8, tmp_path / "cut")
    for checkpoint in (tmp_path / "cut").glob("checkpoint-*"):
        file = checkpoint / "trainer_state.json"
        state = json.loads(file.read_text())
        del state["stateful_callbacks"]["Progress"]
        file.write_text(json.dumps(state))
        seal(checkpoint)
    resumed = weights(train(small(), tmp_path / "cut", save_steps=2))
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_rehearsal_is_spread_over_the_last_stage() -> None:
    settings = small(
        length=64, min_length=32, unrolled_length=4, short_length=16, unrolled_share=0.25, short_share=0.5,
        identity_probability=1.0, short_identity_probability=0.0, steps=40, group="Z60", rehearsal=0.3,
    )  # fmt: skip
    batches = [batch for batch, _ in zip(stream(settings), range(40), strict=False)]
    short = [batch["input_ids"].shape[1] <= 16 for batch in batches]
    assert all(short[:20]) and sum(short[20:]) == 6
    assert not any(a and b for a, b in pairwise(short[20:]))
    for batch, is_short in zip(batches, short, strict=True):
        assert (batch["input_ids"] != settings.algebra.identity).all() == is_short


def test_a_run_file_gives_defaults_that_flags_change(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "learning_rate": 1e-3}))
    assert main(["train", "--run", str(file), "--output", str(tmp_path / "run"), "--steps", "2"]) == 0
    _, found = load(tmp_path / "run")
    assert asdict(found) == asdict(small(steps=2, learning_rate=1e-3))
    assert build(TrainSettings, read_yaml("a5xm", RUNS)).group == "A5xM"


def test_wrong_run_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    for text, message in (("widht: 3", "widht"), ("- 3", "mapping"), ("a: [", "not valid YAML")):
        file.write_text(text)
        assert main(["train", "--run", str(file), "--output", str(tmp_path / "run")]) == 2
        assert message in capsys.readouterr().err
    assert main(["train", "--run", "a5", "--output", str(tmp_path / "run")]) == 2
    assert "a5xm" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


STUDY: dict[str, Any] = {
    "seeds": [1, 2],
    "variants": {
        "implicit": {}, "lstm": {"backbone": "lstm", "explicit": True},
        "llama": {"backbone": "llama", "explicit": True},
    },
    "tests": [{"identity_probability": [0.5, 0.9], "length": [6], "window": ["all", 4], "sequences": 3}],
}  # fmt: skip


@pytest.fixture
def study_file(tmp_path: Path) -> str:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**SMALL, "steps": 2, "eval_max_iter": 6}))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({**STUDY, "run": str(tmp_path / "small.yaml")}))
    return str(tmp_path / "study.yaml")


def test_study_goes_on_and_gives_what_one_go_gives(
    study_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    def accuracies(folder: Path) -> list[Any]:
        found = json.loads((folder / "study.json").read_text())
        return [(row["variant"], row["seed"], row["evaluation"]["accuracy_by_position"]) for row in found]

    assert main(["study", study_file, "--output", str(tmp_path / "whole")]) == 0
    table = capsys.readouterr().out
    # Per seed: 4 tests of the implicit model (2 probabilities x 2 windows), 2 tests of each explicit model.
    assert len(accuracies(tmp_path / "whole")) == 2 * (4 + 2 + 2)
    assert sum(line.split()[:1] == ["lstm"] for line in table.splitlines()) == 2

    parts = ["study", study_file, "--output", str(tmp_path / "parts")]
    assert main([*parts, "--variants", "llama"]) == 0
    assert main([*parts, "--variants", "implicit", "--seeds", "2"]) == 0
    assert {(v, s) for v, s, _ in accuracies(tmp_path / "parts")} == {
        ("llama", 1),
        ("llama", 2),
        ("implicit", 2),
    }
    assert main(["study", study_file, "--output", str(tmp_path / "parts")]) == 0
    assert accuracies(tmp_path / "parts") == accuracies(tmp_path / "whole")

    monkeypatch.setattr(study_module, "evaluate_fresh", lambda *_, **__: pytest.fail("tested again"))
    rendered = request.getfixturevalue("rendered_figures")
    assert main(["study", study_file, "--output", str(tmp_path / "whole")]) == 0
    assert all(rendered(tmp_path / "whole" / f"{name}.png") for name in ("by_length", "by_position"))


def test_processes_that_share_a_study_write_in_turn(
    study_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one process writes the comparison, another waits. A thread stands for the other process."""
    waits, flock = threading.Event(), fcntl.flock

    def watched(handle: int, kind: int) -> None:
        if not kind & fcntl.LOCK_NB:
            waits.set()
        flock(handle, kind)

    out = tmp_path / "out"
    conduct(study_file, out, ["lstm"], [1])
    (out / "study.json").unlink()
    other = threading.Thread(target=conduct, args=(study_file, out, ["lstm"], [1]))
    with locked(out, "compares"):
        monkeypatch.setattr(fcntl, "flock", watched)
        other.start()
        assert waits.wait(60) and not (out / "study.json").exists()
    other.join()
    assert (out / "study.json").exists()


@pytest.mark.parametrize("bf16", [False, True])
def test_a_study_gives_what_evaluate_gives(bf16: bool, study_file: str, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(
        yaml.safe_dump({**SMALL, "steps": 2, "eval_max_iter": 6, "bf16": bf16})
    )
    assert main(["study", study_file, "--output", str(tmp_path / "out"), "--variants", "implicit"]) == 0
    run = tmp_path / "out" / "implicit" / "seed-2"
    options = ["--length", "6", "--window", "all", "4", "--sequences", "3"]
    assert main(["evaluate", str(run), *options, "--identity-probability", "0.5", "0.9"]) == 0
    again = json.loads((run / "evaluation" / "evaluation.json").read_text())
    study = json.loads((tmp_path / "out" / "study.json").read_text())
    there = [row["evaluation"] for row in study if row["seed"] == 2]
    assert len(again) == len(there) == 4
    for found, before in zip(again, there, strict=True):
        for name in set(before) - {"seconds"}:
            assert found[name] == before[name], name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": {"wide": {"widht": 3}}}, "widht"),
        ({"variants": {"wide": {"d_model": 7}}}, "headdim"),
        ({"tests": [{"length": [4]}]}, "identity_probability"),
        ({"tests": [{"identity_probability": [0.5], "length": [4], "window": [0]}]}, "window"),
        ({"tests": [{"identity_probability": [1.5], "length": [4]}]}, "1.5"),
        ({"tests": [{"identity_probability": 0.5, "length": [4]}]}, "must be a list"),
        ({"tests": [{"identity_probability": [0.5], "length": [4], "damping": 0.0}]}, "damping"),
        ({"tests": []}, "tests of a study"),
        ({"variants": {}}, "variants of a study"),
        ({"variants": {"../out": {}}}, "name"),
        ({"variants": {"a": None}}, "variants must be a mapping"),
        ({"variants": {"a": {"seed": 3}}}, "without a seed"),
        ({"variants": {"a": {"learning_rate": "fast"}}}, "variant a"),
        ({"seeds": []}, "seeds of a study"),
        ({"seeds": [1, 2, 1]}, "must differ"),
        ({"seeds": "12"}, "seeds must be a list"),
        ({"seeds": [True]}, "must be a whole number"),
        ({"seeds": [-1]}, "seeds element 1 must be a whole number"),
        ({"variants": {1: {}}}, "in quotes"),
        ({"variants": {"study.json": {}}}, "name"),
        ({"sedes": [1]}, "sedes"),
    ],
)
def test_wrong_studies_are_named(
    study_file: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    study = yaml.safe_load(Path(study_file).read_text())
    Path(study_file).write_text(yaml.safe_dump({**study, **changes}))
    with pytest.raises(ValueError, match=message):
        load_study(study_file)


def test_variants_of_other_settings_are_not_shown(study_file: str, tmp_path: Path) -> None:
    conduct(study_file, output=tmp_path / "out", variants=["lstm"], seeds=[1])
    changed = {**STUDY["variants"], "lstm": {**STUDY["variants"]["lstm"], "learning_rate": 0.5}}
    study = yaml.safe_load(Path(study_file).read_text())
    Path(study_file).write_text(yaml.safe_dump({**study, "variants": changed}))
    with pytest.raises(ValueError, match="lstm/seed-1 holds a run with other settings"):
        conduct(study_file, output=tmp_path / "out", variants=["implicit"])
    assert not (tmp_path / "out" / "implicit").exists()


def test_tests_of_other_sizes_are_no_seeds(study_file: str, tmp_path: Path) -> None:
    """The summary keeps tests with different numbers of sequences apart.

    It ignores results of tests that the study no longer has.
    """
    study = yaml.safe_load(Path(study_file).read_text())
    small = {"identity_probability": [0.5], "length": [4], "sequences": 2}
    for tests in ([small, {**small, "sequences": 3}], [{**small, "sequences": 3}]):
        Path(study_file).write_text(yaml.safe_dump({**study, "tests": tests, "seeds": [1]}))
        names = ["lstm"] if len(tests) == 2 else []
        results = conduct(study_file, output=tmp_path / "out", variants=names)
        assert [r.case["sequences"] for r in results] == [test["sequences"] for test in tests]
        lines = summary(results).splitlines()
        assert [line.split()[4] for line in lines] == ["seeds", *("1" for _ in tests)]


def test_our_studies_are_sound() -> None:
    for file in STUDIES.glob("*.yaml"):
        study = load_study(file.stem)
        for variant in study.variants:
            assert study.settings(variant, 2).seed == 2
