"""Tests of the puzzle tasks with tiny models.

They cover training with persistent iterates, evaluation at several depths and from several starts, and
solving.
"""

import csv
import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
import yaml

from deqseq import FixedIterations, Residual, SolveOptions
from deqseq.backbones import RecursionBackbone
from deqseq.guesses import Noise, Zero
from deqseq.tasks.common.persistent import Iterates, PersistentTrainer
from deqseq.tasks.common.settings import build, read_yaml
from deqseq.tasks.reasoning import solve as solving
from deqseq.tasks.reasoning import sudoku
from deqseq.tasks.reasoning.__main__ import main
from deqseq.tasks.reasoning.data import PuzzleStream
from deqseq.tasks.reasoning.evaluate import Accuracy, _judged, adaptive, auroc, evaluate, load
from deqseq.tasks.reasoning.files import read_csv, write_csv
from deqseq.tasks.reasoning.mazes import generate as generate_mazes
from deqseq.tasks.reasoning.model import BoardConfig, BoardModel
from deqseq.tasks.reasoning.plots import plot_training
from deqseq.tasks.reasoning.puzzles import CHARACTERS, Puzzles, Task, broken_rules
from deqseq.tasks.reasoning.search import Found, by_depth, from_start, search
from deqseq.tasks.reasoning.settings import RUNS, TrainSettings
from deqseq.tasks.reasoning.solve import _faults, answer, board, questions
from deqseq.tasks.reasoning.symmetries import numbered_symmetry
from deqseq.tasks.reasoning.train import _Trainer, stablemax_cross_entropy, train

pytest.importorskip("numba", reason="numba is not installed: pip install 'deqseq[reason]'")

MIXER = {"name": "mixer", "d_model": 8, "n_layer": 1, "tokens": 16, "weight_norm": False}
RECURSION = {"name": "recursion", "updates": 1, "noise": 0.01, "map": MIXER}
SEQUENCE_ANDERSON = {"name": "anderson", "memory": 2, "scope": "sequence"}
LLAMA = {"name": "llama", "d_model": 8, "n_layer": 1, "n_head": 2, "causal": False}
SMALL: dict[str, Any] = {
    "size": 4, "backbone": RECURSION, "gradient": {"name": "unrolled", "iterations": 1}, "budget": 3,
    "solved_steps": 2, "batches": 2,
    "steps": 12, "batch_size": 8, "learning_rate": 3e-3, "eval_steps": 6, "eval_depth": 2, "average": 0.9,
    "tolerance": 0.05, "max_iter": 24,
}  # fmt: skip


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with 60 Sudokus of size 4."""
    path = tmp_path_factory.mktemp("puzzles") / "sudoku.csv"
    write_csv(path, "sudoku", sudoku.generate(60, size=4, seed=3))
    return path


@pytest.fixture(scope="module")
def trained(puzzles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run that was trained on ``puzzles``."""
    folder = tmp_path_factory.mktemp("run") / "small"
    train(small(puzzles), folder, save_steps=100)
    return folder


def small(data: Path, **changes: Any) -> TrainSettings:
    return build(TrainSettings, {**SMALL, "data": str(data), **changes})


def model(**changes: Any) -> BoardModel:
    torch.manual_seed(0)
    options = {"size": 4, "backbone": RECURSION, "guess": "noise", "gradient": SMALL["gradient"], **changes}
    return BoardModel(BoardConfig(**options)).eval()


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, step: int) -> Iterator[None]:
    """A context manager in which training raises ``KeyboardInterrupt`` after ``step`` steps."""
    original = PersistentTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PersistentTrainer, "training_step", training_step)
        yield


def test_a_resumed_run_equals_an_uninterrupted_run(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run ends with the weights of an uninterrupted run.

    To do so, the run must restore the iterates, the noise and the averaged weights from its checkpoint.
    """
    whole = train(small(puzzles), tmp_path / "whole", save_steps=100)
    with interrupted(monkeypatch, 7), pytest.raises(KeyboardInterrupt):
        train(small(puzzles), tmp_path / "cut", save_steps=5)
    resumed = train(small(puzzles), tmp_path / "cut", save_steps=5)
    assert json.loads((tmp_path / "cut" / "training.json").read_text())["resumed"]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_resumed_run_may_save_at_other_steps(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start saves after steps 4 and 8, the second after every step."""
    with interrupted(monkeypatch, 9), pytest.raises(KeyboardInterrupt):
        train(small(puzzles), tmp_path / "run", save_steps=4)
    with interrupted(monkeypatch, 11), pytest.raises(KeyboardInterrupt):
        train(small(puzzles), tmp_path / "run", save_steps=1)
    assert {folder.name for folder in (tmp_path / "run").glob("checkpoint-*")} == {
        "checkpoint-10",
        "checkpoint-11",
    }


def test_damage_lets_some_tokens_start_again() -> None:
    """About half of the sequences are damaged, each with a different share of its tokens."""
    torch.manual_seed(0)
    iterates = Iterates(budget=9, damage=0.5)
    batch = {"labels": torch.zeros(400, 50)}
    iterates.take(batch)
    iterates.put(torch.zeros(400, 50, 2), torch.zeros(400, dtype=torch.bool))
    iterates.left = torch.full((400,), 5)
    shares = iterates.take(batch)["fresh"].double().mean(1)
    assert 0.4 < (shares > 0).double().mean() < 0.6
    assert 0.4 < shares[shares > 0].mean() < 0.6 and shares[shares > 0].std() > 0.2


def test_the_model_starts_damaged_cells_at_its_guess() -> None:
    made, x = model(guess="zero").train(), torch.ones(1, 16).long()
    made.layer.backbone.noise = 0.0
    z0, fresh = torch.randn(1, 16, 16), torch.zeros(1, 16, dtype=torch.bool)
    fresh[0, 3] = True
    expected = made(x, z0=z0.masked_fill(fresh[..., None], 0)).z
    torch.testing.assert_close(made(x, z0=z0, fresh=fresh).z, expected)
    with pytest.raises(ValueError, match=r"fresh must have shape \(B, C\) or \(B, 1\), got \(1,\)"):
        made(x, z0=z0, fresh=torch.tensor([True]))


def test_embed_std_is_the_size_of_the_initial_embeddings(puzzles: Path) -> None:
    models = []
    for std in (1.0, 3.0):
        torch.manual_seed(0)
        models.append(small(puzzles, embed_std=std).model().state_dict())
    plain, large = models
    torch.testing.assert_close(large.pop("embed.weight"), 3 * plain.pop("embed.weight"))
    assert all(torch.equal(large[name], value) for name, value in plain.items())


def test_the_best_weights_are_kept(puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trained model has the weights of the best test, even if the run was resumed after this test."""
    scores = {3: 0.5, 6: 0.75, 9: 0.75, 12: 0.25}
    settings = small(puzzles, keep="best", eval_steps=3, damage=0.5)
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def test(self: Any) -> None:
        step, average = self.state.global_step, self.average.model
        kept[step] = {name: value.clone() for name, value in average.state_dict().items()}
        self.best.offer(scores[step], step, average)

    monkeypatch.setattr("deqseq.tasks.reasoning.train._Trainer.test", test)
    with interrupted(monkeypatch, 11), pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "cut", save_steps=10)
    resumed = train(settings, tmp_path / "cut", save_steps=10).state_dict()
    assert sorted(kept) == [3, 6, 9, 12]
    assert json.loads((tmp_path / "cut" / "training.json").read_text())["kept_step"] == 9
    assert all(torch.equal(value, kept[9][name]) for name, value in resumed.items())
    assert any(not torch.equal(value, kept[12][name]) for name, value in resumed.items())


@pytest.mark.parametrize(
    ("keep", "expected", "kept"),
    [
        ("best", [(0.0, 2), (0.5, 6), (0.3333, 6), (0.6667, 6), (0.25, 4), (0.6667, 6)], 12),
        ("last", [(0.3333, 6), (0.5, 6), (0.3333, 6), (0.6667, 6), (0.3333, 6), (0.6667, 6)], None),
    ],
)
def test_a_test_ends_once_its_weights_cannot_be_the_best(
    keep: str, expected: list[tuple[float, int]], kept: int | None, puzzles: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Or if they solve nothing in the first batch. Each test has six puzzles, in batches of two."""
    answers = [
        [0, 0, 0, 0, 1, 1], [1, 0, 1, 0, 1, 0], [1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 1], [1, 0, 0, 0, 1, 0], [0, 1, 0, 1, 1, 1],
    ]  # fmt: skip
    tests = iter(answers)
    raw = True

    def residuals(
        model: Any, tested: Puzzles, depth: int, batch_size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        nonlocal raw
        right = torch.tensor([1, 0] if raw else next(tests)).bool()
        assert len(right) == len(tested.questions)
        raw = not raw  # every test tries the raw weights first
        for batch in right.split(batch_size):
            yield batch.float(), batch

    monkeypatch.setattr("deqseq.tasks.reasoning.evaluate._residuals", residuals)
    monkeypatch.setattr("deqseq.tasks.reasoning.train._TEST_BATCH", 2)
    settings = small(puzzles, keep=keep, batch_size=2, eval_steps=2, eval_puzzles=6)
    train(settings, tmp_path / "run", save_steps=100)
    record = json.loads((tmp_path / "run" / "training.json").read_text())
    log = [entry for entry in record["log"] if "accuracy" in entry]
    assert [(entry["accuracy"], entry["tested"]) for entry in log] == expected
    assert [entry["raw_accuracy"] for entry in log] == [0.5] * 6
    assert record.get("kept_step") == kept


def test_the_trained_model_is_the_average(puzzles: Path, tmp_path: Path) -> None:
    raw = train(small(puzzles, average=0.0), tmp_path / "raw", save_steps=100).state_dict()
    averaged = train(small(puzzles, average=0.9), tmp_path / "averaged", save_steps=100).state_dict()
    assert any(not torch.equal(raw[name], averaged[name]) for name in raw)
    log = json.loads((tmp_path / "raw" / "training.json").read_text())["log"]
    tests = [entry for entry in log if "accuracy" in entry]
    assert [entry["step"] for entry in tests] == [6, 12]
    assert all(entry["accuracy"] == entry["raw_accuracy"] for entry in tests)


def test_the_model_in_training_is_tested_with_both_weights(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the model in training is compiled, so tests use it, not the copy with the averaged weights."""
    seen: list[tuple[Any, dict[str, torch.Tensor]]] = []
    test = _Trainer.test

    def state(model: Any) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    def accuracy(model: Any, *_: Any) -> Accuracy:
        seen.append((model.eval(), state(model)))
        return Accuracy(0.25 * len(seen), 8)

    def checked(trainer: Any) -> None:
        model, raw, averaged = trainer.model, state(trainer.model), state(trainer.average.model)
        seen.clear()
        test(trainer)
        assert [tested for tested, _ in seen] == [model, model]
        for (_, found), expected in zip(seen, (raw, averaged), strict=True):
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert any(not torch.equal(raw[name], averaged[name]) for name in raw)
        with pytest.raises(RuntimeError, match="a failed test"), trainer.average.lend(model):
            assert torch.is_grad_enabled()
            raise RuntimeError("a failed test")
        assert all(torch.equal(value, raw[name]) for name, value in model.state_dict().items())
        assert model.training

    monkeypatch.setattr("deqseq.tasks.reasoning.train.accuracy", accuracy)
    monkeypatch.setattr("deqseq.tasks.reasoning.train._Trainer.test", checked)
    train(small(puzzles), tmp_path / "run", save_steps=100)
    log = json.loads((tmp_path / "run" / "training.json").read_text())["log"]
    tests = [(entry["raw_accuracy"], entry["accuracy"]) for entry in log if "accuracy" in entry]
    assert tests == [(0.25, 0.5), (0.25, 0.5)]


def test_iterates_persist_until_a_sequence_leaves() -> None:
    """A sequence stays in its row until it is solved or its budget is spent. Then a fresh one replaces it.

    The labels show which sequence is in a row: row i of the fresh batch n has the label 10 n + i.
    """
    iterates = Iterates(budget=3)

    def fresh(n: int) -> dict[str, torch.Tensor]:
        return {"labels": 10 * n + torch.arange(3)[:, None]}

    first = iterates.take(fresh(0))
    assert "z0" not in first
    iterates.put(torch.zeros(3, 1, 2), torch.tensor([False, False, True]))  # budgets: 1, 2, 3
    second = iterates.take(fresh(1))
    assert second["labels"].flatten().tolist() == [10, 1, 12]
    assert second["fresh"].tolist() == [[True], [False], [True]]
    assert torch.equal(second["z0"], torch.zeros(3, 1, 2))
    iterates.put(torch.ones(3, 1, 2), torch.tensor([False, False, False]))
    assert iterates.take(fresh(2))["labels"].flatten().tolist() == [10, 21, 12]


def test_a_sequence_leaves_after_some_solved_steps_in_a_row() -> None:
    """Here a sequence leaves after two such steps. A step that does not solve it resets the count."""
    iterates = Iterates(budget=9, solved_steps=2)
    stays = []
    for step, solved in enumerate([True, False, True, True, True]):
        labels = iterates.take({"labels": torch.full((9, 1), step)})["labels"]
        stays.append(labels[-1].item())  # the last row has a budget of nine steps
        iterates.put(torch.zeros(9, 1, 2), torch.tensor([False] * 8 + [solved]))
    assert stays == [0, 0, 0, 0, 4]


def test_batches_take_turns(puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three batches, a step continues with the puzzles and iterates of the third step before it."""
    seen: list[dict[str, Any]] = []
    original = BoardModel.forward

    def forward(self: Any, input_ids: Any, **inputs: Any) -> Any:
        out = original(self, input_ids, **inputs)
        if len(input_ids) > 1 and self.training:  # not the check of one board before training
            seen.append({"boards": input_ids, "z": out.z.detach(), **inputs})
        return out

    monkeypatch.setattr(BoardModel, "forward", forward)
    train(small(puzzles, batches=3, solved_steps=3, steps=6, eval_steps=0), tmp_path / "run", save_steps=100)
    assert all("z0" not in inputs for inputs in seen[:3])
    for before, after in zip(seen[:3], seen[3:], strict=True):
        stayed = ~after["fresh"].squeeze(1)
        assert stayed.any()
        assert torch.equal(after["z0"], before["z"])
        assert torch.equal(after["boards"][stayed], before["boards"][stayed])


def test_the_model_continues_from_its_iterates() -> None:
    """Two calls with one iteration each give the result of one call with two iterations.

    A board marked as fresh starts at the guess instead of its iterate.
    """
    made, x = model(guess="zero", gradient={"name": "unrolled", "iterations": 2}), torch.ones(2, 16).long()
    both = made.train().layer
    made.layer.backbone.noise = 0.0
    twice = made(x).z
    both.gradient = type(both.gradient)(1)
    once = made(x).z
    torch.testing.assert_close(made(x, z0=once).z, twice)
    mixed = made(x, z0=once, fresh=torch.tensor([[True], [False]])).z
    torch.testing.assert_close(mixed[0], once[0])
    torch.testing.assert_close(mixed[1], twice[1])


@pytest.mark.parametrize("solver", ["picard", "picard:0.5", SEQUENCE_ANDERSON, "broyden"])
def test_every_depth_has_the_result_of_a_search_of_this_depth(solver: Any) -> None:
    """The other boards in the batch do not change a board's result, but another start does."""
    made = model()
    made.layer.eval_solve = replace(made.layer.eval_solve, solver=solver)
    boards = torch.randint(0, 5, (3, 16))
    for found in by_depth(made, boards, [2, 5]):
        x = made.inputs(boards)
        fixed = replace(made.layer.eval_solve, convergence=FixedIterations(found.depth))
        with torch.no_grad():  # with gradients, the layer does the iterations of its gradient strategy
            expected = made.layer(x, z0=made.start(x, 0), solve=fixed)
        torch.testing.assert_close(found.z, expected.z)
        assert torch.equal(found.answers, made.answers(expected.z).argmax(-1))
    direct = next(by_depth(made, boards, [5]))
    alone = next(by_depth(made, boards[1:2], [5]))
    torch.testing.assert_close(alone.z, direct.z[1:2])
    assert not torch.allclose(next(by_depth(made, boards, [5], number=1)).z, direct.z)


def test_explicit_models_apply_the_map_once() -> None:
    made, boards = model(implicit=False), torch.randint(0, 5, (3, 16))
    found = list(by_depth(made, boards, [4, 8]))
    assert len(found) == 1
    x = made.inputs(boards)
    backbone = made.layer.backbone
    torch.testing.assert_close(found[0].z, backbone(x, backbone.prepare(x)))
    assert made.d_read == 8 and made(boards).solution is None


def test_the_start_with_the_smallest_residual_and_the_vote() -> None:
    right = torch.tensor([[1, 1], [2, 2]], dtype=torch.uint8)
    wrong = torch.zeros(2, 2, dtype=torch.uint8)
    answers = torch.stack([right, wrong, wrong])
    residuals = torch.tensor([[0.1, 0.3], [0.2, 0.1], [0.3, torch.nan]])
    found = _judged(4, answers, residuals, right)
    assert (found.exact, found.vote, found.starts) == (0.5, 0.0, 3)
    assert found.cells == 0.5


def test_auroc_is_the_share_of_ordered_pairs() -> None:
    residual = torch.tensor([0.1, 0.2, 0.2, 0.4])
    right = torch.tensor([True, True, False, False])
    assert auroc(residual, right) == (1 + 1 + 0.5 + 1) / 4
    assert auroc(residual, ~right) == (0 + 0 + 0.5 + 0) / 4
    assert auroc(residual, torch.ones(4, dtype=torch.bool)) is None
    nan = torch.tensor([0.1, 0.2, torch.nan, torch.nan, torch.nan])
    assert auroc(nan, torch.arange(5) < 1) == 1
    many = torch.arange(16382.0)  # in float32, the number of pairs would be rounded
    assert auroc(many, many < 8191) == 1


def test_the_residual_is_that_of_the_whole_board() -> None:
    made, boards = model(), torch.randint(0, 5, (3, 16))
    (one,), (two,) = (list(by_depth(made, boards, [depth])) for depth in (1, 2))
    change = torch.linalg.vector_norm(two.z - one.z, dim=(1, 2))
    torch.testing.assert_close(two.residual, change / torch.linalg.vector_norm(two.z, dim=(1, 2)))


def test_stablemax_is_a_distribution_with_finite_gradients() -> None:
    logits = torch.tensor([[1.0, -3.0, 0.0], [1e6, -1e6, 1.0]], dtype=torch.float64, requires_grad=True)
    losses = [stablemax_cross_entropy(logits, torch.full((2,), c)) for c in range(3)]
    first = [
        float((-stablemax_cross_entropy(logits[:1].detach(), torch.tensor([c]))).exp()) for c in range(3)
    ]
    assert first == pytest.approx([2 / 3.25, 0.25 / 3.25, 1 / 3.25])
    (grad,) = torch.autograd.grad(torch.stack(losses).sum(), logits)
    assert torch.isfinite(grad).all()


def test_mazes_are_turned_with_their_answers(tmp_path: Path) -> None:
    found = generate_mazes(5, size=7, seed=1)
    stream = PuzzleStream("maze", found, 64, augment=True, seed=1, device=torch.device("cpu"))
    batch = stream.batch(0)
    boards = Puzzles(batch["input_ids"].byte(), batch["labels"].byte(), torch.zeros(64, dtype=torch.int64))
    assert broken_rules("maze", boards) == []
    known = {tuple(row) for row in found.questions.tolist()}
    assert len({tuple(row) for row in batch["input_ids"].tolist()} - known) > 5
    assert torch.equal(stream.batch(3)["labels"], stream.batch(3)["labels"])
    assert not torch.equal(stream.batch(3)["labels"], stream.batch(4)["labels"])


def test_boards_that_converge_early_cost_less(trained: Path, puzzles: Path) -> None:
    """Searches that end at a tolerance need fewer evaluations than ``max_iter``.

    An explicit model has no search, so ``adaptive`` refuses it.
    """
    made, settings = load(trained)
    tests = read_csv(puzzles, "sudoku")
    found = adaptive(made, tests)
    assert found.evaluations < settings.max_iter
    solve = made.layer.eval_solve
    alone = made(tests.questions[:1].long(), solve=solve).solution
    assert 1 <= int(alone.iterations[0, 0]) <= settings.max_iter
    with pytest.raises(ValueError, match="explicit"):
        adaptive(model(implicit=False), tests)


def test_searches_that_do_not_converge_are_repeated_from_other_starts(puzzles: Path) -> None:
    """Half of the boards meet the tolerance in one evaluation. With restarts, more boards meet it."""
    made, tests = model(), read_csv(puzzles, "sudoku")
    solve = replace(made.layer.eval_solve, convergence=Residual(rtol=1, max_iter=1, scope="sequence"))
    with torch.no_grad():
        residuals = made(tests.questions.long(), solve=solve).solution.residual
    rtol = float(residuals.square().mean(1).sqrt().median())
    solve = replace(solve, convergence=Residual(rtol=rtol, max_iter=1, scope="sequence"))
    one, many = adaptive(made, tests, solve), adaptive(made, tests, solve, starts=4)
    assert (one.starts, many.starts) == (1, 4)
    assert one.converged == pytest.approx(0.5, abs=0.1) and many.converged > one.converged
    assert one.evaluations == 1 < many.evaluations < 4
    with pytest.raises(ValueError, match="2 starts would all be equal"):
        adaptive(model(guess="zero"), tests, replace(solve, guess=Zero()), starts=2)


def test_an_adaptive_search_that_never_ends_early_equals_a_search_of_fixed_depth(
    trained: Path, puzzles: Path
) -> None:
    """Here, the model's own answers to a third of the puzzles count as right."""
    made, tests = load(trained)[0], read_csv(puzzles, "sudoku")
    (own,) = by_depth(made, tests.questions.long(), [4])
    tests = tests._replace(answers=torch.cat([own.answers[:20], 1 + tests.answers[20:] % 4]))
    never = Residual(rtol=1e-30, max_iter=4, scope="sequence")
    found = adaptive(made, tests, replace(made.layer.eval_solve, convergence=never))
    (fixed,) = evaluate(made, tests, [4])
    assert 0.3 < fixed.exact < 0.5 and found.evaluations == 4
    assert (found.exact, found.auroc) == (fixed.exact, pytest.approx(fixed.auroc))


def test_solver_replaces_the_solver_of_the_run(trained: Path, puzzles: Path) -> None:
    """An evaluation with damping 0.5 goes half of the way to f(z), from the same start."""
    questions = read_csv(puzzles, "sudoku").questions[:3].long()
    (full,), (half,) = (by_depth(load(trained, s)[0], questions, [1]) for s in ("picard", "picard:0.5"))
    made = load(trained)[0]
    torch.testing.assert_close(half.z, (made.start(made.inputs(questions), 0) + full.z) / 2)


def test_guess_replaces_the_guess_of_the_run(
    trained: Path, puzzles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``evaluate`` and ``solve`` start there, and ``evaluate`` records it. ``previous`` is refused."""
    half = "{name: noise, std: 0.5}"
    x = torch.zeros(2, 16, 2 * 16)
    whole, halved = (load(trained, guess=guess)[0].start(x, 3) for guess in (None, yaml.safe_load(half)))
    assert whole.any() and torch.equal(halved, whole / 2)
    command = ["evaluate", str(trained), str(puzzles), "--depth", "2", "--output", str(tmp_path / "found")]
    rows, answers = [], []
    for words in ([], ["--guess", half], ["--guess", "zero"]):
        assert main([*command, *words, "--force"]) == 0
        written = json.loads((tmp_path / "found" / "evaluation.json").read_text())
        rows.append(written["rows"][0]["residual"])
        assert main(["solve", str(trained), str(puzzles), *words, "--output", str(tmp_path / "a.csv")]) == 0
        answers.append((tmp_path / "a.csv").read_text())
    assert len(set(rows)) == len(set(answers)) == 3
    assert written["settings"]["guess"] == "zero"
    assert main(command) == 2 and "other settings (guess zero, now None)" in capsys.readouterr().err
    for words in (command, ["solve", str(trained), str(puzzles)]):
        assert main([*words, "--guess", "previous"]) == 2
        assert "must not be previous" in capsys.readouterr().err
        assert main([*words, "--guess", "oracle"]) == 2
        assert "unknown guess 'oracle'" in capsys.readouterr().err


def test_training_and_evaluation_can_have_different_guesses(puzzles: Path, tmp_path: Path) -> None:
    settings = small(puzzles, guess=["noise", {"name": "noise", "std": 0.5}], steps=1)
    train(settings, tmp_path / "run")
    layer = load(tmp_path / "run")[0].layer
    assert (layer.train_solve.guess, layer.eval_solve.guess) == (Noise(), Noise(std=0.5))
    with pytest.raises(ValueError, match="must not be previous"):
        small(puzzles, guess=["noise", "previous"])
    with pytest.raises(ValueError, match="needs a guess that varies"):
        small(puzzles, guess=["noise", "zero"], starts=2, augment=False)


def test_a_guess_that_does_not_vary_is_refused_before_the_search(
    puzzles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has two starts, and without symmetries all of them would be equal. No table is printed."""
    train(small(puzzles, starts=2, steps=1), tmp_path / "run")
    capsys.readouterr()
    for command in ("evaluate", "solve"):
        words = [command, str(tmp_path / "run"), str(puzzles), "--guess", "zero", "--symmetries", "false"]
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert not out and "2 starts would all be equal with the guess Zero()" in err


ANDERSON = "{name: anderson, memory: 1, scope: sequence}"


def test_commands_take_a_solver(
    trained: Path, puzzles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``evaluate`` and ``solve`` use it, record it, and refuse solvers that cannot be built."""
    residuals = []
    dotted = ["--solver.name", "anderson", "--solver.memory", "1", "--solver.scope", "sequence"]
    for i, words in enumerate((["--solver", "picard"], ["--solver", "picard:0.5"], dotted)):
        folder, answers = tmp_path / str(i), tmp_path / f"{i}.csv"
        evaluate_command = ["evaluate", str(trained), str(puzzles), "--depth", "4", "--output", str(folder)]
        assert main([*evaluate_command, *words]) == 0
        assert main(["solve", str(trained), str(puzzles), *words, "--output", str(answers)]) == 0
        written = json.loads((folder / "evaluation.json").read_text())
        with answers.open() as file:
            residuals += [
                [row["residual"] for row in written["rows"]],
                [r["residual"] for r in csv.DictReader(file)],
            ]
    assert main([*evaluate_command, "--solver", ANDERSON]) == 0  # the same solver: no other settings
    assert written["settings"]["solver"] == {"name": "anderson", "memory": 1, "scope": "sequence"}
    of_tables, of_answers = residuals[::2], residuals[1::2]
    for found in (of_tables, of_answers):
        assert all(one != other for one, other in itertools.combinations(found, 2))
    capsys.readouterr()
    assert (
        main([*evaluate_command, "--solver", "picard:0.25"]) != 0
    )  # the result in the folder has another solver
    assert "solver" in capsys.readouterr().err
    for wrong, message in (
        ("picard:1.5", "damping must be in (0, 1], got 1.5"),
        ("newton", "unknown solver 'newton'"),
    ):
        assert main([*evaluate_command, "--solver", wrong]) != 0
        assert message in capsys.readouterr().err


def test_explicit_models_take_neither_solver_nor_guess(puzzles: Path, tmp_path: Path) -> None:
    train(small(puzzles, explicit=True, steps=1), tmp_path / "run")
    for name, part in (("solver", "picard"), ("guess", "zero"), ("symmetries", True)):
        with pytest.raises(ValueError, match=f"--{name} is for implicit models"):
            load(tmp_path / "run", **{name: part})


def test_evaluation_refuses_what_makes_no_sense(puzzles: Path) -> None:
    tests = read_csv(puzzles, "sudoku")
    for depths in ([], [0], [3, 2]):
        with pytest.raises(ValueError, match="depths"):
            evaluate(model(), tests, depths)
    with pytest.raises(ValueError, match="starts would all be equal"):
        evaluate(model(guess="zero"), tests, [2], starts=2)
    with pytest.raises(ValueError, match="not causal"):
        model(backbone={"name": "llama", "d_model": 8, "n_layer": 1, "n_head": 2})


def test_the_map_is_compiled_on_gpus_only(
    trained: Path, puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str | None] = []
    monkeypatch.setattr(RecursionBackbone, "compile", lambda self, mode: calls.append(mode))
    made, _ = load(trained)
    made.compile_map(torch.device("cpu"))
    assert not calls
    made.compile_map(torch.device("cuda"))
    made.compile_map(torch.device("cuda"), graphs=True)
    assert calls == [None, "reduce-overhead"]
    monkeypatch.setattr(BoardModel, "compile_map", lambda self, device: calls.append(device.type))
    asked = ["--depth", "1", "--compile", "--output", str(tmp_path)]
    assert main(["evaluate", str(trained), str(puzzles), *asked]) == 0
    assert calls[2:] == [made.device.type]


def test_compiled_maps_allow_several_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implicit differentiation goes backward several times through one evaluation of the compiled map."""
    monkeypatch.setattr(RecursionBackbone, "compile", lambda self, mode: None)
    for gradient, allowed in (("phantom", True), ("implicit", False)):
        monkeypatch.setattr(torch._functorch.config, "donated_buffer", True)
        model(gradient=gradient).compile_map(torch.device("cuda"))
        assert torch._functorch.config.donated_buffer is allowed


def test_commands_search_from_as_many_starts_as_the_run_says(puzzles: Path, tmp_path: Path) -> None:
    """``solve`` and the second table of ``evaluate`` do. An explicit model has one start."""
    train(small(puzzles, starts=3, max_iter=1), tmp_path / "run", save_steps=100)
    evaluate_run = ["evaluate", str(tmp_path / "run"), str(puzzles), "--depth", "2"]
    assert main(evaluate_run) == 0
    written = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    assert [row["starts"] for row in written["rows"]] == [1]
    assert [row["starts"] for row in written["adaptive"]] == [1, 2, 3]
    assert main([*evaluate_run, "--starts", "2"]) == 2  # the folder has a result with other settings
    assert main([*evaluate_run, "--starts", "2", "--output", str(tmp_path / "two")]) == 0
    written = json.loads((tmp_path / "two" / "evaluation.json").read_text())
    assert [[row["starts"] for row in written[name]] for name in ("rows", "adaptive")] == [[1, 2]] * 2
    evaluations = []
    for words in ([], ["--starts", "1"]):
        answers = tmp_path / f"{len(words)}.csv"
        assert main(["solve", str(tmp_path / "run"), str(puzzles), *words, "--output", str(answers)]) == 0
        with answers.open() as file:
            evaluations.append({int(row["evaluations"]) for row in csv.DictReader(file)})
    assert max(evaluations[0]) == 3 and evaluations[1] == {1}
    train(small(puzzles, starts=3, explicit=True, guess="zero"), tmp_path / "twin", save_steps=100)
    assert main(["evaluate", str(tmp_path / "twin"), str(puzzles)]) == 0
    assert main(["solve", str(tmp_path / "twin"), str(puzzles), "--output", str(tmp_path / "twin.csv")]) == 0
    with pytest.raises(
        ValueError, match=r"without augment needs a guess that varies, such as noise, got zero"
    ):
        small(puzzles, starts=3, guess="zero", augment=False)


def test_commands(
    trained: Path, puzzles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    rendered_figures: Callable[[Path], bool],
) -> None:  # fmt: skip
    """The commands ``evaluate`` and ``solve`` write their files, and ``solve`` gives the model's own answers.

    ``evaluate`` reads a CSV file. ``solve`` reads a board as text, and all CSV files of a folder.
    """
    assert main(["evaluate", str(trained), str(puzzles), "--depth", "2", "8", "--starts", "2"]) == 0
    out = capsys.readouterr().out
    assert "starts" in out and "tolerance" in out
    written = json.loads((trained / "evaluation" / "evaluation.json").read_text())
    assert [(row["depth"], row["starts"]) for row in written["rows"]] == [(2, 1), (2, 2), (8, 1), (8, 2)]
    question = read_csv(puzzles, "sudoku").questions[0]
    text = "".join(".1234"[c] for c in question.tolist())
    assert main(["solve", str(trained), text, "--figure", str(tmp_path / "board.png")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert (tmp_path / "board.gif").stat().st_size > 1000 and rendered_figures(tmp_path / "board.png")
    made, _ = load(trained)
    (one,) = answer(made, [question])
    rows = [line for line in shown if len(line) == 4]
    assert "".join(rows) == one.board
    assert main(["solve", str(trained), str(puzzles.parent), "--output", str(tmp_path / "a.csv")]) == 0
    with (tmp_path / "a.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 60 and lines[0]["answer"] == one.board
    for row in lines:  # every trusted answer keeps the rules of Sudoku
        if row["trust"] == "yes":
            answers = torch.tensor([[int(c) for c in row["answer"]]], dtype=torch.uint8)
            asked = board(row["question"], "sudoku", 4)[None]
            assert broken_rules("sudoku", Puzzles(asked, answers, torch.zeros(1))) == []


@pytest.mark.parametrize("wrong", ["data", "test"])
def test_files_with_boards_of_another_size_are_named(wrong: str, puzzles: Path, tmp_path: Path) -> None:
    large = tmp_path / "large.csv"
    write_csv(large, "sudoku", sudoku.generate(20, size=9, seed=1))
    files = {"data": puzzles, "test": puzzles, wrong: large}
    with pytest.raises(ValueError, match=r"needs boards of 4 x 4 cells .*large\.csv has boards of 81 cells"):
        train(small(files["data"], test=str(files["test"])), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", ["sudoku", "maze"])
def test_seeds_give_different_batches(task: Task) -> None:
    """Every seed and every number of a batch gives other puzzles in another orientation."""
    boards = torch.randint(1, 5, (50, 16), dtype=torch.uint8)
    found = Puzzles(boards, boards, torch.zeros(50))
    batches = [
        PuzzleStream(task, found, 20, augment=True, seed=seed, device=torch.device("cpu")).batch(number)
        for seed, number in ((1, 0), (1, 1), (2, 0), (2**32 - 1, 0), (1, 0))
    ]
    texts = [str(batch["input_ids"].tolist()) for batch in batches]
    assert texts[0] == texts[-1] and len(set(texts)) == 4


@pytest.mark.parametrize("task", ["sudoku", "maze"])
def test_hints_show_cells_of_the_answers_at_the_start_of_training(task: Task) -> None:
    """Hints copy cells of the answers. Their number falls from batch to batch, down to none.

    Symmetries are the same with and without hints.
    """
    found = {"sudoku": lambda: sudoku.generate(9, seed=1), "maze": lambda: generate_mazes(9, size=9, seed=1)}
    options = {"augment": True, "seed": 3, "device": torch.device("cpu")}
    plain = PuzzleStream(task, found[task](), 400, **options)
    stream = PuzzleStream(task, found[task](), 400, hints=0.8, hint_batches=10, **options)
    shares = []
    for number in (0, 5, 9, 10, 11):
        without, batch = plain.batch(number), stream.batch(number)
        assert torch.equal(batch["labels"], without["labels"])
        changed = batch["input_ids"] != without["input_ids"]
        assert torch.equal(batch["input_ids"][changed], batch["labels"][changed])
        could_change = without["input_ids"] != batch["labels"]
        shares.append((changed & could_change).sum(1) / could_change.sum(1))
    means = [float(share.mean()) for share in shares]
    assert means == pytest.approx([0.4, 0.2, 0.04, 0.0, 0.0], abs=0.03)
    assert float(shares[0].std()) > 0.2  # every puzzle has a share of its own
    assert torch.equal(stream.batch(5)["input_ids"], stream.batch(5)["input_ids"])


def test_a_resumed_run_has_the_same_hints(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"hints": 0.9, "hint_share": 0.8}
    whole = train(small(puzzles, **changes), tmp_path / "whole", save_steps=100)
    with interrupted(monkeypatch, 7), pytest.raises(KeyboardInterrupt):
        train(small(puzzles, **changes), tmp_path / "cut", save_steps=5)
    resumed = train(small(puzzles, **changes), tmp_path / "cut", save_steps=5)
    without = train(small(puzzles), tmp_path / "without", save_steps=100)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert not torch.equal(whole.head.weight, without.head.weight)


def test_marked_cells_must_be_one_path() -> None:
    """A ring of marked cells beside the path is a fault, although each cell of it has two neighbours."""
    rows = ["######", "#S   #", "####G#", "#  ###", "#  ###", "######"]
    question = board("".join(rows), "maze", 6)
    path = ["######", "#Sooo#", "####G#", "#  ###", "#  ###", "######"]
    ring = ["######", "#Sooo#", "####G#", "#oo###", "#oo###", "######"]
    for marked, right in ((path, True), (ring, False)):
        answers = torch.tensor([[CHARACTERS["maze"].index(c) for c in "".join(marked)]], dtype=torch.uint8)
        assert (not _faults("maze", question[None], answers)) == right
    walls = torch.full((1, 36), CHARACTERS["maze"].index("#"), dtype=torch.uint8)
    assert _faults("maze", walls, walls)  # neither start nor goal


@pytest.mark.parametrize(
    ("changes", "rule"),
    [({"solver": "nonsense"}, "solver"), ({"gradient": "nonsense"}, "gradient strategy")],
)
def test_wrong_parts_are_refused_for_explicit_models_too(
    puzzles: Path, changes: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ValueError, match=f"unknown {rule}"):
        small(puzzles, explicit=True, **changes)
    with pytest.raises(ValueError, match="updates"):
        small(puzzles, explicit=True, backbone={**RECURSION, "updates": -3})


def test_depth_adapts_to_the_residual_of_the_board(trained: Path, puzzles: Path) -> None:
    made, _ = load(trained)
    with pytest.raises(ValueError, match="scope sequence"):
        adaptive(made, read_csv(puzzles, "sudoku"), SolveOptions("picard", Residual(rtol=0.1, max_iter=6)))


@pytest.mark.parametrize("starts", [1, 3])
def test_boards_that_have_converged_leave_the_batch(
    trained: Path, puzzles: Path, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``solve`` evaluates f for fewer boards than if all waited for the slowest, with the same answers."""
    made, _ = load(trained)
    boards, batches = list(read_csv(puzzles, "sudoku").questions), []
    backbone = made.layer.backbone
    evaluate = backbone.evaluate
    monkeypatch.setattr(
        backbone, "evaluate", lambda z, *rest: (batches.append(len(z)), evaluate(z, *rest))[1]
    )
    found = answer(made, boards, starts=starts, max_iter=40)
    evaluated, slowest = sum(batches), max(one.evaluations or 0 for one in found)
    assert evaluated < starts * slowest * len(boards)
    alone = [answer(made, [one], starts=starts, max_iter=40)[0] for one in boards]
    assert [one.board for one in alone] == [one.board for one in found]


def test_the_first_start_that_can_be_trusted_gives_the_answer(
    puzzles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches end after one evaluation. An answer breaks a rule here if the sum of its digits is odd."""
    made = model(convergence={"name": "residual", "rtol": 100, "scope": "sequence"})
    boards = read_csv(puzzles, "sudoku").questions
    monkeypatch.setattr(solving, "_faults", lambda task, part, answers: {
        i: "odd" for i, cells in enumerate(answers) if cells.sum() % 2
    })  # fmt: skip
    solve = made.layer.eval_solve
    starts = [[from_start(made, one, n, solve) for n in range(4)] for one in boards[:, None]]
    found = answer(made, list(boards), starts=4)
    needed = []
    for one, tries in zip(found, starts, strict=True):
        good = [n for n, t in enumerate(tries) if t.answers.sum() % 2 == 0]
        best = tries[good[0]] if good else min(tries, key=lambda t: float(t.residual))
        needed.append(good[0] + 1 if good else None)
        assert one.board == "".join(".1234"[c] if c else "?" for c in best.answers[0].tolist())
        assert one.fault == (None if good else "odd")
        assert one.residual == pytest.approx(float(best.residual), rel=1e-4)
        assert one.evaluations == (needed[-1] or 4)
    assert {1, 2, None} <= set(needed)
    with pytest.raises(ValueError, match="2 starts would all be equal"):
        answer(model(guess="zero"), list(boards), starts=2)


def test_later_starts_solve_symmetric_copies(trained: Path, puzzles: Path) -> None:
    """Start 3 solves all boards after symmetry 3, and its answers are changed back."""
    made, _ = load(trained)
    boards = read_csv(puzzles, "sudoku").questions
    symmetry = numbered_symmetry("sudoku", 4, 3)
    found = from_start(made, boards, 3)
    (deep,) = by_depth(made, boards, [2], 3)
    made.symmetries = False
    changed = symmetry.apply(boards.long())
    copies = from_start(made, changed, 3)
    (deep_copies,) = by_depth(made, changed, [2], 3)
    assert torch.equal(symmetry.apply(found.answers.long()), copies.answers.long())
    assert torch.equal(symmetry.apply(deep.answers.long()), deep_copies.answers.long())
    assert torch.equal(found.residual, copies.residual) and torch.equal(deep.residual, deep_copies.residual)
    first = from_start(made, boards, 0)
    assert not torch.equal(from_start(made, boards, 3).residual, found.residual)
    made.symmetries = True
    assert torch.equal(from_start(made, boards, 0).answers, first.answers)


def test_symmetries_let_starts_differ_without_noise(trained: Path, puzzles: Path, tmp_path: Path) -> None:
    """Runs have symmetries if they were trained with them. ``--symmetries`` decides otherwise."""
    assert load(trained)[0].symmetries and not load(trained, symmetries=False)[0].symmetries
    train(small(puzzles, augment=False, steps=1), tmp_path / "run")
    assert not load(tmp_path / "run")[0].symmetries and load(tmp_path / "run", symmetries=True)[0].symmetries
    made, tests = load(trained, guess="zero")[0], read_csv(puzzles, "sudoku")
    small_set = Puzzles(*(column[:8] for column in tests))
    one, _, eight = evaluate(made, small_set, [2], starts=3)
    assert eight.residual < one.residual
    words = ["--starts", "3", "--guess", "zero", "--max_iter", "1"]
    rows = []
    for more in ([], ["--symmetries", "true"], ["--symmetries", "false", "--guess", "noise"]):
        output = tmp_path / f"{len(rows)}.csv"
        assert main(["solve", str(trained), str(puzzles), *words, *more, "--output", str(output)]) == 0
        rows.append(output.read_text())
    assert rows[0] == rows[1] != rows[2]
    command = ["evaluate", str(trained), str(puzzles), "--depth", "2", "--output", str(tmp_path / "found")]
    for more, code in ([], 0), (["--symmetries", "true"], 0), (["--symmetries", "false"], 2):
        assert main([*command, *more]) == code  # the result has symmetries


def test_every_start_of_a_maze_is_different() -> None:
    """Without noise, a maze has eight starts: its rotations and reflections."""
    options = {
        "task": "maze",
        "size": 5,
        "guess": "zero",
        "backbone": {**RECURSION, "map": {**MIXER, "tokens": 25}},
    }
    made = model(**options)
    made.symmetries = True
    boards = generate_mazes(4, size=5, seed=1).questions
    residuals = torch.stack([from_start(made, boards, number).residual for number in range(9)])
    assert all(len(residual.unique()) == 8 for residual in residuals.T)
    assert torch.equal(residuals[0], residuals[8])
    with pytest.raises(ValueError, match="at most 8 different starts, one for each symmetry, got 9"):
        search(made, boards, 9)


def test_searches_follow_the_guess_of_the_solve_options(puzzles: Path) -> None:
    made, boards = model(guess="zero"), read_csv(puzzles, "sudoku").questions[:5]
    noisy = model()
    solve = noisy.layer.eval_solve
    noisy.load_state_dict(made.state_dict())
    for number in (0, 2):
        one, other = from_start(made, boards, number, solve), from_start(noisy, boards, number)
        assert torch.equal(one.residual, other.residual)
    search(made, boards, 2, solve)
    with pytest.raises(ValueError, match="2 starts would all be equal with the guess Zero"):
        search(noisy, boards, 2, made.layer.eval_solve)


def test_a_residual_that_is_not_a_number_is_the_worst(puzzles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start n answers n everywhere, with residuals NaN, infinity, 2, 1 and NaN. No search converges."""
    residuals = [torch.nan, torch.inf, 2.0, 1.0, torch.nan]

    def found(made: Any, boards: torch.Tensor, number: int, solve: Any) -> Found:
        residual = torch.full((len(boards),), residuals[number])
        return Found(torch.full_like(boards, number), residual, torch.ones(len(boards)), residual < 0)

    monkeypatch.setattr("deqseq.tasks.reasoning.search.from_start", found)
    boards = read_csv(puzzles, "sudoku").questions[:2]
    for starts, best in ((1, 0), (2, 0), (3, 2), (5, 3)):
        assert (search(model(), boards, starts).answers == best).all()


def test_searches_refuse_what_makes_no_sense(puzzles: Path) -> None:
    made, boards = model(), read_csv(puzzles, "sudoku").questions[:2]
    fixed = replace(made.layer.eval_solve, convergence=FixedIterations(3))
    with pytest.raises(ValueError, match="several starts need a policy with a tolerance"):
        search(made, boards, 2, fixed)
    with pytest.raises(ValueError, match="an explicit model has one start, got 2 starts"):
        search(model(implicit=False), boards, 2)
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        search(made.train(), boards)


def test_answers_that_have_not_converged_are_searched_again(puzzles: Path) -> None:
    """They are not trusted, also if they keep the rules."""
    made, tests = model(), read_csv(puzzles, "sudoku")
    never = Residual(rtol=1e-30, max_iter=2, scope="sequence")
    made.layer.eval_solve = replace(made.layer.eval_solve, convergence=never)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "_faults", lambda task, part, answers: {})
        found = answer(made, list(tests.questions[:5]), starts=3)
    assert {(one.fault, one.evaluations) for one in found} == {("the search did not converge", 6)}


def test_the_rules_are_checked_for_the_boards_that_are_searched_again(puzzles: Path) -> None:
    """``search`` gives ``trusted`` the questions of these boards only, in order."""
    made, boards = model(), read_csv(puzzles, "sudoku").questions
    marks = boards.long().sum(1) % 3
    seen = []

    def trusted(questions: torch.Tensor, found: Any) -> torch.Tensor:
        seen.append(questions)
        return questions.long().sum(1) % 3 < len(seen)  # one third more with every start

    search(made, boards, 5, trusted=trusted)
    assert [len(part) for part in seen] == [60, int((marks > 0).sum()), int((marks > 1).sum())]
    assert torch.equal(seen[1], boards[marks > 0]) and torch.equal(seen[2], boards[marks > 1])


def test_a_board_is_solved_alone_as_in_a_batch(trained: Path, puzzles: Path) -> None:
    """From any number of starts: all boards of a batch have the same symmetries."""
    made, _ = load(trained)
    boards = read_csv(puzzles, "sudoku").questions[:20]
    solve = replace(made.layer.eval_solve, convergence=Residual(rtol=1e-9, max_iter=2, scope="sequence"))
    middle = float(search(made, boards, 1, solve).residual.median())
    solve = replace(solve, convergence=Residual(rtol=middle, max_iter=2, scope="sequence"))
    batch = search(made, boards, 4, solve)
    for row, one in enumerate(boards[:, None]):
        alone = search(made, one, 4, solve)
        assert torch.equal(alone.answers[0], batch.answers[row])
        assert alone.evaluations == batch.evaluations[row] and alone.converged == batch.converged[row]
        assert float(alone.residual) == pytest.approx(float(batch.residual[row]), rel=1e-4)
    assert len(batch.evaluations.unique()) > 1


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("1234", "4 x 4 = 16 cells, got 4"),
        ("5" + 15 * ".", "characters '.1234' only, got '5'"),
        ("puzzles.cvs", "there is no file puzzles.cvs"),
    ],
)
def test_wrong_boards_are_refused(
    trained: Path, text: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve", str(trained), text]) == 2
    assert rule in capsys.readouterr().err


def test_a_board_with_two_solutions_or_none_is_not_trusted_blindly(trained: Path) -> None:
    """No answer to a board without a solution is trusted, because every answer breaks a rule."""
    made, _ = load(trained)
    clashes = [
        board(text, "sudoku", 4) for text in ("11..............", "1...1...........", "1....1..........")
    ]
    why = "the puzzle has equal clues in a row, column or box"
    assert {a.fault for a in answer(made, clashes)} == {why}
    none = board(
        "123....4........", "sudoku", 4
    )  # the last cell of the first row cannot be 4, the missing digit
    (found,) = answer(made, [none])
    assert found.fault is not None and found.fault != why


def test_a_run_notices_other_puzzles(puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run does not resume if its file of puzzles was replaced. It resumes once the file is restored."""
    data = tmp_path / "data.csv"
    data.write_bytes(puzzles.read_bytes())
    with interrupted(monkeypatch, 8), pytest.raises(KeyboardInterrupt):
        train(small(data), tmp_path / "run", save_steps=6)
    write_csv(data, "sudoku", sudoku.generate(60, size=4, seed=4))
    with pytest.raises(ValueError, match="puzzles of data or test are not those of"):
        train(small(data), tmp_path / "run", save_steps=6)
    data.write_bytes(puzzles.read_bytes())
    train(small(data), tmp_path / "run", save_steps=6)


def test_the_log_of_a_resumed_run_is_that_of_an_uninterrupted_run(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run logs a loss at every step that tests the model. Epochs and seconds count from step 0."""
    settings = small(puzzles, steps=100, eval_steps=50)
    train(settings, tmp_path / "whole", save_steps=50)
    with interrupted(monkeypatch, 60), pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "cut", save_steps=50)
    train(settings, tmp_path / "cut", save_steps=50)
    logs = []
    for name in ("whole", "cut"):
        log = json.loads((tmp_path / name / "training.json").read_text())["log"]
        seconds = [entry.pop("seconds") for entry in log[:-1]]
        assert seconds == sorted(seconds) and 0 < seconds[0] < seconds[-1] <= log[-1]["train_runtime"] + 0.01
        logs.append([{k: v for k, v in entry.items() if not k.startswith("train_")} for entry in log])
    assert logs[0] == logs[1]
    assert [entry["step"] for entry in logs[0] if "loss" in entry] == [50, 100]


@pytest.mark.parametrize("save_steps", [5, 1000])
def test_a_run_that_diverges_ends_with_an_error(
    puzzles: Path, tmp_path: Path, save_steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that diverges writes no checkpoint and no model, because its weights are not finite."""
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({**SMALL, "steps": 60, "learning_rate": 1e30, "max_grad_norm": 0.0}))
    folder = tmp_path / "run"
    arguments = ["train", str(run), "--data", str(puzzles), "--output", str(folder)]
    assert main([*arguments, "--save-steps", str(save_steps)]) == 1
    assert "lower learning rate" in capsys.readouterr().err.splitlines()[-1]
    assert not (folder / "model.safetensors").exists()
    assert not list(folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"backbone": {**RECURSION, "map": {**MIXER, "tokens": 9}}}, "tokens must be 16, the cells"),
        ({"backbone": {**RECURSION, "map": "mixer"}, "explicit": True}, "cannot be built"),
        ({"backbone": {**LLAMA, "board": 9}}, "board must be size = 4, got 9"),
        ({"guess": "previous"}, "must not be previous"),
        ({"gradient": "implicit", "solver": "noisy"}, "would add noise to the gradient"),
        ({"solver": ["picard"] * 3}, "got a list of 3"),
    ],
)
def test_parts_that_do_not_fit_leave_no_folder(
    puzzles: Path, tmp_path: Path, changes: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ValueError, match=rule):
        train(small(puzzles, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_training_refuses_several_processes(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one device, found 2"):
        train(small(puzzles), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_evaluation_refuses_more_starts_than_fit_and_other_policies(puzzles: Path) -> None:
    tests = read_csv(puzzles, "sudoku")
    with pytest.raises(ValueError, match="choose fewer starts"):
        evaluate(model(), tests, [2], starts=10**12)
    with pytest.raises(ValueError, match="Residual of scope sequence only"):
        adaptive(model(convergence={"name": "fixed", "iterations": 3}), tests)


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_puzzles_may_be_compressed_or_have_a_byte_order_mark(
    trained: Path, puzzles: Path, tmp_path: Path, ending: str
) -> None:
    """Files from spreadsheets can be read. They may have a byte order mark and the line ends of Windows."""
    content = b"\xef\xbb\xbf" + puzzles.read_bytes().replace(b"\n", b"\r\n")
    file = tmp_path / f"puzzles{ending}"
    file.write_bytes(gzip.compress(content) if ending == ".csv.gz" else content)
    assert torch.equal(read_csv(file, "sudoku").questions, read_csv(puzzles, "sudoku").questions)
    for source in (file, tmp_path):
        found = [question for _, question in questions(str(source), "sudoku", 4)]
        assert torch.equal(torch.stack(found), read_csv(puzzles, "sudoku").questions)
    only = tmp_path / "only.csv"
    only.write_bytes(b"\xef\xbb\xbfquestion\n" + b"." * 16 + b"\n")
    assert len(list(questions(str(only), "sudoku", 4))) == 1


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("long.csv", b"question\n" + b"1" * 200_000 + b"\n", "long.csv, line 1: field larger than"),
        ("cut.csv.gz", gzip.compress(b"question\n" + bytes(9999), mtime=0)[:-9], "cut.csv.gz, line"),
        ("plain.csv.gz", b"question\n", "plain.csv.gz, line 1: Not a gzipped file"),
        ("board.txt", b"." * 16, "must end in .csv or .csv.gz, got"),
    ],
    ids=["long", "cut", "plain", "text"],
)
def test_broken_files_are_refused(
    trained: Path, tmp_path: Path, name: str, content: bytes, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["solve", str(trained), str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert rule in line


def test_a_large_board_without_line_breaks_is_a_text() -> None:
    """A board as text is not taken for a file name, although it is longer than file names may be.

    An empty text is a board with 0 cells, and is not taken for the folder '.'.
    """
    text = "#" * 31 + ("#" + " " * 28 + "#") * 28 + "#" * 29
    assert len(list(questions(text.replace(" ", "S", 1), "maze", 30))) == 1
    with pytest.raises(ValueError, match="16 cells, got 0"):
        list(questions("", "sudoku", 4))


def test_the_figure_of_a_short_run_has_no_curves(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, rendered_figures: Callable[[Path], bool]
) -> None:
    plot_training([{"step": 3, "train_loss": 1.0}], tmp_path / "training.png")
    assert rendered_figures(tmp_path / "training.png") and not recwarn.list


@pytest.mark.parametrize(("tested", "hollow"), [((100, 20, 100), [(2, 0.9)]), ((9, 9, 9), []), ((), [])])
def test_the_figure_marks_tests_that_ended_early(
    tested: tuple[int, ...], hollow: list[tuple[int, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their markers are hollow, above the curve of the raw weights. Old logs do not have ``tested``."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = list(figure.subplots(2))
    monkeypatch.setattr("deqseq.tasks.reasoning.plots.save_figure", lambda path, draw, *_, **__: draw(axes))
    log = [{"step": i + 1, "accuracy": (0.5, 0.9, 0.8)[i], "raw_accuracy": 0.5} for i in range(3)]
    log = [{**entry, **({"tested": tested[i]} if tested else {})} for i, entry in enumerate(log)]
    plot_training(log, tmp_path / "training.png")
    raw, averaged, *marks = axes[1].lines
    assert list(raw.get_ydata()) == [0.5] * 3 and list(averaged.get_ydata()) == [0.5, 0.9, 0.8]
    assert [point for mark in marks for point in zip(*mark.get_data(), strict=True)] == hollow
    assert all(mark.get_markerfacecolor() == "white" != mark.get_color() for mark in marks)
    assert all(mark.get_color() == averaged.get_color() for mark in marks)


def test_solving_overwrites_no_puzzles(
    trained: Path, puzzles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``solve`` refuses to write its results over the puzzles or over a folder, before it searches."""
    mine = tmp_path / "mine.csv"
    mine.write_bytes(puzzles.read_bytes())
    for source in (mine, tmp_path):
        assert main(["solve", str(trained), str(source), "--output", str(mine)]) == 2
        assert "would overwrite the puzzles" in capsys.readouterr().err
    assert mine.read_bytes() == puzzles.read_bytes()
    for option, name in (("--output", "folder.csv"), ("--figure", "folder.png")):
        (tmp_path / name).mkdir()
        assert main(["solve", str(trained), str(mine), option, str(tmp_path / name)]) == 2
        assert "is a folder" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.part"))


def test_shipped_runs_are_valid(puzzles: Path) -> None:
    for file in RUNS.glob("*.yaml"):
        settings = build(TrainSettings, {**read_yaml(file.stem, RUNS), "data": str(puzzles)})
        with torch.device("meta"):
            assert sum(p.numel() for p in settings.model().parameters()) > 1000


def test_softmax_loss_is_torchs() -> None:
    settings = build(TrainSettings, {**SMALL, "data": "x", "loss": "softmax"})
    assert settings.loss == "softmax"
    logits, labels = torch.randn(6, 5), torch.randint(0, 5, (6,))
    assert stablemax_cross_entropy(logits, labels) != F.cross_entropy(logits, labels)


def test_a_puzzle_must_be_able_to_leave_when_solved(puzzles: Path) -> None:
    with pytest.raises(ValueError, match="solved_steps must be at most budget = 3, got 4"):
        small(puzzles, solved_steps=4)


def test_hints_need_steps(puzzles: Path) -> None:
    with pytest.raises(ValueError, match=r"hints = 0\.5 needs hint_share above 0, got 0"):
        small(puzzles, hints=0.5, hint_share=0)
    assert small(puzzles, hint_share=0).hints == 0
