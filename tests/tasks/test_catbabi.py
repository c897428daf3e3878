"""Tests of CatbAbI: data, streams, the state carried between batches, training, evaluation, command line."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import set_seed

from deqseq.backbone import Backbone, State
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.causal_lm.cache import EquilibriumCache
from deqseq.tasks.catbabi import compare
from deqseq.tasks.catbabi.__main__ import main
from deqseq.tasks.catbabi.data import IGNORE_INDEX, CatBabi, StoryStreams, build, load, once
from deqseq.tasks.catbabi.evaluate import Evaluation, evaluate, load_run
from deqseq.tasks.catbabi.settings import TrainSettings
from deqseq.tasks.catbabi.stories import TASKS, read_dataset, read_folder
from deqseq.tasks.catbabi.train import StreamTrainer, train
from deqseq.tasks.common.settings import build as make_settings

LINES = """\
1 Mary moved to the Garden.
2 Where is Mary? \tgarden\t1
1 The kitchen is north of the hall.
2 How do you go from the kitchen to the hall?\ts,w\t1 1
3 John got the milk.
4 What is John carrying?\tmilk\t3
"""
TEXTS = (
    "mary moved to the garden . where is mary ? garden",
    "the kitchen is north of the hall . how do you go from the kitchen to the hall ? s,w "
    "john got the milk . what is john carrying ? milk",
)
STORIES = [text.split() for text in TEXTS]
PLACES = ("garden", "kitchen", "hall", "office")


def write_babi(folder: Path, stories: int = 6) -> Path:
    """Write bAbI files of all tasks and splits. Returns their folder.

    In each story, Mary moves once or twice. A question follows each move.
    """
    folder.mkdir(parents=True)
    chance = torch.Generator().manual_seed(0)
    for split in ("train", "valid", "test"):
        for task in TASKS:
            lines = []
            for _ in range(stories):
                moves = int(torch.randint(1, 3, (), generator=chance))
                for i in range(moves):
                    place = PLACES[int(torch.randint(4, (), generator=chance))]
                    lines.append(f"{2 * i + 1} Mary went to the {place}.")
                    lines.append(f"{2 * i + 2} Where?\t{place}\t{2 * i + 1}")
            (folder / f"qa{task}_{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catbabi")
    babi = write_babi(folder / "babi")
    assert main(["build", "--data-dir", str(babi), "--output", str(folder / "data")]) == 0
    return folder / "data"


@pytest.fixture(scope="module")
def data(built: Path) -> CatBabi:
    return load(built)


# ---- building ----


@pytest.mark.parametrize("name", ["qa1_train.txt", "qa1_single-supporting-fact_train.txt"])
def test_stories_word_by_word(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LINES)
    (tmp_path / "qa11_train.txt").write_text("1 Nobody asks.\n")
    assert read_folder(tmp_path, "train", 1) == STORIES


@pytest.mark.parametrize("drop_last", [False, True])
def test_built_tokens_are_the_stories_with_eos_in_front(tmp_path: Path, drop_last: bool) -> None:
    manifest = build(lambda split, task: STORIES, tmp_path, drop_last)
    made = load(tmp_path)
    assert made.vocabulary[:2] == ["<pad>", "<eos>"]
    assert made.vocabulary[2:] == sorted({word for story in STORIES[: 2 - drop_last] for word in story})
    words = [made.vocabulary[token] for token in made.splits["test"].tokens.tolist()]
    one = [word for story in STORIES[: 2 - drop_last] for word in ["<eos>", *story]]
    assert words == one * 20
    per_task = (1, 12, 1) if drop_last else (2, 44, 3)
    counts = manifest["splits"]["train"]
    assert (counts["stories"], counts["tokens"], counts["questions"]) == tuple(20 * n for n in per_task)
    assert made.splits["train"].tasks.tolist() == [t for t in TASKS for _ in range(per_task[0])]


def test_built_twice_is_equal_and_damage_is_found(tmp_path: Path) -> None:
    first, again = (build(lambda split, task: STORIES, tmp_path / "data") for _ in range(2))
    assert first == again
    (tmp_path / "data" / "vocabulary.json").write_text("[]")
    with pytest.raises(ValueError, match=r"damaged: vocabulary\.json changed.*: build it again"):
        load(tmp_path / "data")
    with pytest.raises(ValueError, match="CatbAbI made from other stories"):
        build(lambda split, task: STORIES, tmp_path / "data", drop_last=True)
    assert build(lambda split, task: STORIES, tmp_path / "data") == load(tmp_path / "data").manifest
    (tmp_path / "data" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="holds other files"):
        build(lambda split, task: STORIES, tmp_path / "data")


@pytest.mark.parametrize("nested", ["lists", "rows"])
def test_hugging_face_dataset(tmp_path: Path, nested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    lines = [("Mary moved to the Garden.", ""), ("Where is Mary?", "garden")]
    story: Any = [{"text": text, "answer": answer} for text, answer in lines]
    if nested == "lists":
        story = {"text": [text for text, _ in lines], "answer": [answer for _, answer in lines]}
    (tmp_path / "babi").mkdir()
    datasets.Dataset.from_dict({"story": [story]}).to_parquet(tmp_path / "babi" / "validation.parquet")
    (tmp_path / "babi" / "README.md").write_text(
        "---\nconfigs:\n- config_name: en-qa7\n  data_files:\n  - split: validation\n"
        "    path: validation.parquet\n---\n"
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert read_dataset(str(tmp_path / "babi"), "en", "valid", 7) == STORIES[:1]
    with pytest.raises(ValueError, match="cannot load en-qa8, split train"):
        read_dataset(str(tmp_path / "babi"), "en", "train", 8)


@pytest.mark.parametrize("text", ["Mary moved.\n", "2 Mary moved.\n", "1\n"])
def test_files_of_another_form_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "qa1_train.txt").write_text(text)
    with pytest.raises(ValueError, match="line 1"):
        read_folder(tmp_path, "train", 1)


# ---- streams ----


def stories_of(tokens: list[int]) -> list[tuple[int, ...]]:
    """Split tokens into stories, which start with <eos>. Drops the last story, which may be cut off."""
    starts = [i for i, token in enumerate(tokens) if token == 1]
    return [tuple(tokens[start:end]) for start, end in pairwise(starts)]


def test_a_pass_of_training_reads_every_story_once(data: CatBabi) -> None:
    stories = data.splits["train"]
    batches = list(islice(StoryStreams(stories, None, batch_size=3, cut=7, seed=1), 120))
    streams = torch.cat([batch["input_ids"] for batch in batches], 1)
    targets = torch.cat([batch["labels"] for batch in batches], 1)
    assert torch.equal(streams[:, 1:], targets[:, :-1])
    edges = stories.shuffled(torch.Generator().manual_seed(1)).runs(3)
    first_pass = [s for row, a, b in zip(streams, edges[:-1], edges[1:], strict=True)
                  for s in stories_of([*row[: b - a].tolist(), 1])]  # fmt: skip
    assert streams.shape[1] > max(b - a for a, b in pairwise(edges))
    assert sorted(first_pass) == sorted(stories_of([*stories.tokens.tolist(), 1]))
    # The second pass follows the first without a gap, and has the stories in another order.
    second = [stories_of(row[b - a :].tolist())[0] for row, a, b in
              zip(streams, edges[:-1], edges[1:], strict=True)]  # fmt: skip
    assert all(story in first_pass for story in second)
    assert [stories_of(row.tolist())[:3] for row in streams] != [
        stories_of(row[b - a :].tolist())[:3] for row, a, b in
        zip(streams, edges[:-1], edges[1:], strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("start", [1, 33, 60])
def test_streams_start_anywhere(data: CatBabi, start: int) -> None:
    stream = StoryStreams(data.splits["train"], data.question, batch_size=4, cut=5, seed=3)
    whole = list(islice(stream, start + 2))
    stream.start = start
    for expected, found in zip(whole[start:], islice(stream, 2), strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_answers_alone_count(data: CatBabi) -> None:
    stream = StoryStreams(data.splits["train"], data.question, batch_size=2, cut=50, seed=1)
    everything = StoryStreams(data.splits["train"], None, batch_size=2, cut=50, seed=1)
    batch, all_labels = next(iter(stream)), next(iter(everything))["labels"]
    asked = batch["input_ids"] == data.question
    assert asked.any() and (batch["labels"][~asked] == IGNORE_INDEX).all()
    assert torch.equal(batch["labels"][asked], all_labels[asked])
    assert {data.vocabulary[token] for token in batch["labels"][asked].tolist()} <= set(PLACES)


@pytest.mark.parametrize("batch_size", [1, 7, 500])
def test_evaluation_reads_every_token_once(data: CatBabi, batch_size: int) -> None:
    stories = data.splits["test"].of_tasks([2, 5])
    inputs, targets, tasks = (
        torch.cat(parts, 1) for parts in zip(*once(stories, batch_size, 9), strict=True)
    )
    real = targets != IGNORE_INDEX
    assert sorted(inputs[real].tolist()) == sorted(stories.tokens.tolist())
    assert sorted(targets[real].tolist()) == sorted(stories.tokens.tolist())
    assert sorted(tasks[real].tolist()) == sorted(stories.tasks.repeat_interleave(stories.lengths).tolist())
    for row, kept in zip(inputs, real, strict=True):
        assert set(stories_of([*row[kept].tolist(), 1])) <= set(stories_of([*stories.tokens.tolist(), 1]))


# ---- the carried state ----

SMALL: dict[str, Any] = {
    "d_model": 16, "d_state": 8, "headdim": 8, "steps": 8, "batch_size": 4, "cut": 10, "max_iter": 6,
    "eval_max_iter": 20, "unrolled_iterations": 2, "unrolled_share": 0.5, "phantom_steps": 2,
}  # fmt: skip


def small(built: Path, **changes: Any) -> TrainSettings:
    return make_settings(TrainSettings, {"data": str(built), **SMALL, **changes})


def in_cuts(model: ImplicitForCausalLM, tokens: torch.Tensor, cut: int) -> tuple[torch.Tensor, State]:
    backbone: Backbone = model.model.layer.backbone
    state, logits = None, []
    for piece in tokens.split(cut, 1):
        cache = EquilibriumCache(backbone.rewinds, state)
        logits.append(model(piece, past_key_values=cache).logits)
        assert cache.state is not None
        state = backbone.keep_last(cache.state, cut)
    assert state is not None
    return torch.cat(logits, 1), state


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("backbone", ["mamba2", "llama"])
@torch.no_grad()
def test_carried_state_equals_one_long_sequence(
    built: Path, backbone: Any, explicit: bool, contractive: Callable[[Backbone], Backbone]
) -> None:
    settings = small(built, backbone=backbone, explicit=explicit, tolerance=1e-6, eval_max_iter=100)
    model = ImplicitForCausalLM(settings.config(vocab_size=12)).eval()
    contractive(model.model.layer.backbone)
    tokens = torch.randint(12, (3, 16))
    whole = model(tokens).logits
    found, _ = in_cuts(model, tokens, 8)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-3)
    apart = torch.cat([model(piece).logits for piece in tokens.split(8, 1)], 1)
    assert (apart[:, 8:] - whole[:, 8:]).abs().max() > 1e-3


@torch.no_grad()
def test_attention_remembers_one_cut(built: Path) -> None:
    settings = small(built, backbone="llama", explicit=True)
    model = ImplicitForCausalLM(settings.config(vocab_size=12)).eval()
    tokens = torch.randint(12, (3, 32))
    found, state = in_cuts(model, tokens, 8)
    assert state.seen.tolist() == [8] * 3 and state.layers[0][0].shape[2] == 8
    torch.testing.assert_close(found[:, 24:], model(tokens[:, 16:]).logits[:, 8:], atol=1e-4, rtol=1e-3)
    assert (found[:, 24:] - model(tokens).logits[:, 24:]).abs().max() > 1e-3


# ---- training ----


def weights(model: ImplicitForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# The llama run resumes in the first (unrolled) stage, the mamba2 run in the second.
@pytest.mark.parametrize(("backbone", "stopped_at"), [("llama", 4), ("mamba2", 6)])
def test_resumed_run_equals_uninterrupted_run(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: Any, stopped_at: int
) -> None:
    settings = small(built, backbone=backbone, steps=6)
    trained = train(settings, tmp_path / "whole", save_steps=2)
    assert not trained.training and type(trained).forward.__get__(trained) == trained.forward
    whole = weights(trained)
    original = StreamTrainer.compute_loss
    calls = 0

    def interrupted(self: StreamTrainer, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == stopped_at:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(StreamTrainer, "compute_loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "cut", save_steps=2)
    with pytest.raises(ValueError, match="no finished run"):
        load_run(tmp_path / "cut")
    resumed = weights(train(settings, tmp_path / "cut", save_steps=2))
    assert json.loads((tmp_path / "cut" / "training.json").read_text())["resumed"]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_state_is_carried_in_training(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    original = StreamTrainer.compute_loss

    def watched(self: StreamTrainer, *args: Any, **kwargs: Any) -> Any:
        seen.append([] if self.carried is None else self.carried.seen.tolist())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StreamTrainer, "compute_loss", watched)
    train(small(built, steps=3), tmp_path)
    assert seen == [[], [10] * 4, [20] * 4]


def test_a_batch_that_asks_nothing_moves_nothing(built: Path, tmp_path: Path) -> None:
    settings = small(built, batch_size=1, cut=1, steps=1)  # the batch is one <eos>: no answer to learn
    set_seed(settings.seed)
    before = weights(ImplicitForCausalLM(settings.config(len(load(built).vocabulary))))
    after = weights(train(settings, tmp_path))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def run(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "implicit"
    changes = {"learning_rate": 2e-2, "steps": 60, "batch_size": 8, "cut": 20}
    train(small(built, **changes, max_grad_norm=1.0), folder)
    return folder


def test_an_implicit_model_learns_to_answer(run: Path, data: CatBabi) -> None:
    found = evaluate(load_run(run), data)
    assert found.accuracy > 0.5  # a random guess among the four places gives 0.25
    assert found.perplexity is None
    assert found.iterations is not None and found.iterations >= 1
    stories = data.splits["test"]
    assert found.tokens == len(stories.tokens)
    assert found.questions == int((stories.tokens == data.question).sum())
    asked = {t: int((stories.of_tasks([t]).tokens == data.question).sum()) for t in TASKS}
    right = [found.accuracy_by_task[t] * asked[t] for t in TASKS]
    assert sum(right) == pytest.approx(found.accuracy * found.questions)
    assert all(abs(r - round(r)) < 1e-6 for r in right)


def test_streams_of_evaluation_do_not_matter(run: Path, data: CatBabi) -> None:
    trained = load_run(run)
    trained = trained._replace(settings=replace(trained.settings, tasks=[3]))
    some = [evaluate(trained, data, "valid", batch_size) for batch_size in (2, 5)]
    assert {e.tokens for e in some} == {len(data.splits["valid"].of_tasks([3]).tokens)}
    assert list(some[0].accuracy_by_task) == [3]


def test_a_split_without_questions_is_named(run: Path, data: CatBabi) -> None:
    trained = load_run(run)
    trained = trained._replace(settings=replace(trained.settings, tasks=[3]))
    other = replace(data, splits={"valid": data.splits["valid"].of_tasks([2])})
    with pytest.raises(ValueError, match=r"valid must have questions of the run's tasks: \[3\]"):
        evaluate(trained, other, "valid")


def test_from_the_command_line(
    run: Path, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    rendered_figures: Callable[[Path], bool],
) -> None:  # fmt: skip
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    explicit = str(tmp_path / "explicit")
    command = ["train", "--data", str(built), "--output", explicit, "--explicit", "--mode", "lm", *flags]
    assert main([*command, "--bf16", "true"]) == 0
    assert main(["evaluate", explicit, "--split", "valid", "test"]) == 0
    assert main(["evaluate", str(run), "--window", "4"]) == 0
    record = json.loads((tmp_path / "explicit" / "evaluation" / "test.json").read_text())
    assert list(record["accuracy_by_task"]) == [str(task) for task in TASKS] and record["iterations"] is None
    assert 1 < record["perplexity"] < 20  # a uniform guess over the 12 words gives 12
    capsys.readouterr()
    assert main(["compare", str(run), explicit, "--output", str(tmp_path / "compare")]) == 0
    above = json.loads((tmp_path / "compare" / "compare.json").read_text())["above"]["implicit"]["explicit"]
    named = ", ".join(map(str, above)) or "none"
    assert f"implicit beats explicit on {len(above)} tasks: {named}" in capsys.readouterr().out
    assert rendered_figures(tmp_path / "compare" / "compare.png")
    first, second = (compare.read(folder, "test").accuracy_by_task for folder in (run, explicit))
    assert above == [task for task in TASKS if first[task] > second[task]]


# ---- errors ----


def test_a_damaged_manifest_is_named_with_advice(tmp_path: Path) -> None:
    build(lambda split, task: STORIES, tmp_path)
    file = tmp_path / "manifest.json"
    whole = file.read_text().rstrip()
    for size in range(0, len(whole), 97):
        file.write_text(whole[:size])
        with pytest.raises(ValueError, match="holds no CatbAbI"):
            load(tmp_path)
        with pytest.raises(
            ValueError, match=r"manifest\.json cannot be read: .*; remove the folder, or name"
        ):
            build(lambda split, task: STORIES, tmp_path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["build", "--data-dir", "{tmp}/no", "--output", "{tmp}/x"], "no folder"),
        (["build", "--data-dir", "{built}", "--output", "{tmp}/x"], "one file qa1_train.txt, found 0"),
        (["train", "--data", "{tmp}/no", "--output", "{tmp}/x"], "holds no CatbAbI"),
        (["train", "--data", "{built}", "--output", "{tmp}/x", "--tasks", "0", "21"], r"20, got [0, 21]"),
        (["train", "--data", "{built}", "--output", "{tmp}/x", "--batch_size", "999"], "at most the 120"),
        (
            ["train", "--data", "{built}", "--output", "{tmp}/x", "--cut", "500", "--batch_size", "4"],
            "got 500",
        ),
        (["train", "--data", "{built}", "--output", "{built}"], "holds no run"),
        (["train", "--data", "{built}", "--output", "{run}"], "other settings"),
        (["evaluate", "{tmp}/no"], "holds no run"),
        (["evaluate", "{foreign}"], "run of another kind"),
        (["evaluate", "{run}", "--batch-size", "0"], "batch_size must be a whole number >= 1"),
        (["evaluate", "{run}", "--window", "0"], "window must be a whole number >= 1"),
        (["compare", "{built}"], "has no evaluation on test"),
        (["compare", "{run}", "--output", "{built}/manifest.json"], "manifest.json is not a folder"),
    ],
)
def test_errors_end_with_a_sentence_and_status_2(
    command: list[str],
    message: str,
    run: Path,
    built: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "settings.json").write_text('{"group": "A5"}')
    places = {"tmp": tmp_path, "run": run, "built": built, "foreign": foreign}
    assert main([part.format(**places) for part in command]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "mt"), ("backbone", "rnn"), ("steps", 0), ("cut", 0), ("tasks", [21]), ("headdim", 7),
        ("label_smoothing", 1.0), ("unrolled_share", 2.0), ("learning_rate", 0.0),
        ("learning_rate", float("inf")), ("tolerance", 0.0),
        ("phantom_damping", 1.2), ("damping", 0.0), ("eval_max_iter", 0),
        ("weight_decay", -1.0), ("phantom_steps", 0), ("seed", -1), ("max_grad_norm", -1.0),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(built: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=str(value).strip("[]")):
        small(built, **{name: value})


def test_data_may_move_but_not_change(built: Path, tmp_path: Path, run: Path) -> None:
    other = build(lambda split, task: STORIES, tmp_path / "other")
    assert other["drop_last"] is False
    changed = replace(load_run(run).settings, data=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"other settings .*fingerprint"):
        train(changed, run)


def other_data(folder: Path, data: CatBabi, word: Callable[[str], str] = str) -> CatBabi:
    """Build new data in ``folder``.

    Every split has the test stories of ``data``, but ``word(w)`` replaces every word w.
    """
    stories = data.splits["test"]
    words = [
        [word(data.vocabulary[i]) for i in part] for part in stories.tokens.split(stories.lengths.tolist())
    ]
    by_task = [(int(task), story[1:]) for task, story in zip(stories.tasks, words, strict=True)]
    build(lambda split, task: [story for t, story in by_task if t == task], folder)
    return load(folder)


def test_other_data_need_the_vocabulary_of_the_run(run: Path, data: CatBabi, tmp_path: Path) -> None:
    trained = load_run(run)
    moved = other_data(tmp_path / "same", data)
    assert moved.fingerprint != data.fingerprint
    assert evaluate(trained, moved, "valid").accuracy == evaluate(trained, data, "test").accuracy
    renamed = other_data(tmp_path / "other", data, lambda word: "zoo" if word == "garden" else word)
    assert len(renamed.vocabulary) == len(data.vocabulary)
    with pytest.raises(ValueError, match="must have the vocabulary"):
        evaluate(trained, renamed)
    older = trained._replace(trained_on={**trained.trained_on, "vocabulary": None})
    evaluate(older, data)
    with pytest.raises(ValueError, match="checksum not recorded"):
        evaluate(older, moved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "f00"}, "same data: a on .*, b on f00"),
        ({"accuracy_by_task": {3: 1.0}}, r"same tasks: .*, b on \[3\]"),
    ],
)
def test_evaluations_of_other_data_or_tasks_are_not_compared(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Evaluation("test", "abc", 9, 4, 0.5, {1: 0.5, 2: 0.5}, None, 3.0, 0.1, 1.0, 2.0)
    for name, found in (("a", one), ("b", replace(one, **change))):
        compare.save(found, tmp_path / name)
    assert main(["compare", *(str(tmp_path / name) for name in "ab"), "--output", str(tmp_path / "x")]) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "x").exists()
