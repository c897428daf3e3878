"""Evaluation: perplexity, lengths, iterations, windows, downstream tasks and the command line."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from deqseq import FixedIterations, Residual, SolveOptions
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.tasks import generate
from deqseq.tasks.common.figures import log_scale
from deqseq.tasks.common.models import load_model, read_tokens, solve_options
from deqseq.tasks.common.results import ResultFolder
from deqseq.tasks.common.tokenizer import is_local, load_tokenizer
from deqseq.tasks.evaluate.__main__ import main
from deqseq.tasks.evaluate.downstream import TASKS, evaluate_tasks, local_files, other_prompts, read_docs
from deqseq.tasks.evaluate.duality import compare_windows, describe_worst, unconverged
from deqseq.tasks.evaluate.perplexity import score, score_by_budget

TEXT = "".join(
    f"The {a} {b} saw a {c} near the {d}. " * 2
    for a in ("old", "red", "tall") for b in ("cat", "king", "tree")
    for c in ("dog", "ship") for d in ("river", "house", "wall")
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    found.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    found.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|endoftext|>")


def encode(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def make_model(implicit: bool = True, vocab_size: int = 300) -> ImplicitForCausalLM:
    backbone = {"name": "mamba2", "d_model": 32, "n_layer": 1, "d_state": 8, "headdim": 8, "chunk_size": 8}
    return ImplicitForCausalLM(
        ImplicitConfig(
            vocab_size=vocab_size,
            implicit=implicit,
            backbone=backbone,
            convergence={"name": "residual", "rtol": 0.05, "max_iter": 16},
            eval_convergence={"name": "residual", "rtol": 1e-5, "max_iter": 1000},
        )
    )


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> ImplicitForCausalLM:
    """An implicit model, trained on ``TEXT`` for 30 steps."""
    torch.manual_seed(0)
    made = make_model().train()
    tokens = encode(tokenizer, TEXT)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    for _ in range(30):
        starts = torch.randint(len(tokens) - 24, (8,))
        batch = torch.stack([tokens[i : i + 24] for i in starts.tolist()])
        made(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return made.eval()


@pytest.fixture(scope="module")
def tokens(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    return encode(tokenizer, TEXT)[:86]


@pytest.fixture(scope="module")
def saved(model: ImplicitForCausalLM, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, ``bare`` (the same model, no tokenizer), ``explicit`` and ``text.txt``."""
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "bare")
    torch.manual_seed(0)
    make_model(implicit=False).save_pretrained(folder / "explicit")
    (folder / "text.txt").write_text(TEXT[:400])
    return folder


@torch.no_grad()
def by_hand(model: Any, tokens: Tensor, length: int) -> float:
    """Mean cross-entropy of all tokens except the first, summed up token by token."""
    total = 0.0
    for i in range(0, len(tokens) - 1, length):
        inputs = tokens[i : min(i + length, len(tokens) - 1)]
        log_p = model(inputs[None]).logits[0].double().log_softmax(-1)
        total -= sum(log_p[t, tokens[i + t + 1]].item() for t in range(len(inputs)))
    return total / (len(tokens) - 1)


@pytest.mark.parametrize("length", [16, 17, 85])
def test_perplexity_is_the_cross_entropy_of_every_token(
    model: ImplicitForCausalLM, tokens: Tensor, length: int
) -> None:
    expected = by_hand(model, tokens, length)
    for batch_size in (1, 3, 100):
        (found,) = score(model, tokens, [length], batch_size)
        assert found.tokens == 85
        assert found.nll == pytest.approx(expected, abs=1e-4)
        assert found.perplexity == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-4)
        assert found.converged == 1 and found.iterations and found.passes_per_batch
    parts = found.by_position
    assert sum(p.tokens for p in parts) == 85
    assert sum(p.tokens * p.nll for p in parts) / 85 == pytest.approx(found.nll)
    assert parts[0].first == 1 and parts[-1].last == length
    assert all(a.last == b.first - 1 for a, b in pairwise(parts))
    assert all(p.nll_stderr is not None and p.nll_stderr > 0 for p in parts if p.tokens > 1)


def test_iterations_are_those_of_the_tokens(model: ImplicitForCausalLM, tokens: Tensor) -> None:
    (found,) = score(model, tokens, [20], 2)
    with torch.no_grad():
        each = [model(tokens[i : min(i + 20, 85)][None]).solution.iterations for i in range(0, 85, 20)]
    assert found.iterations == pytest.approx(torch.cat(each, 1).double().mean().item())


def test_other_models_of_transformers(tokens: Tensor) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=1, n_head=2)).eval()
    (found,) = score(gpt2, tokens, [32], 2)
    assert found.nll == pytest.approx(by_hand(gpt2, tokens, 32), abs=1e-5)
    assert found.iterations is found.converged is found.passes_per_batch is found.window is None
    with pytest.raises(ValueError, match="no positions for sequences of 40"):
        score(gpt2, tokens, [40])


def test_lengths_share_their_tokens(model: ImplicitForCausalLM, tokens: Tensor) -> None:
    found = score(model, tokens, [8, 16, 64])
    assert [s.tokens for s in found] == [85] * 3
    for s in found:
        assert s.nll == pytest.approx(by_hand(model, tokens, s.length), abs=1e-4)
    first, *longer = found
    assert all(p.change is None for p in first.by_position)
    for s in longer:
        # The mean of the changes at all tokens is the change of the whole text's loss.
        changes = [p.tokens * (p.change or 0) for p in s.by_position]
        assert sum(changes) / 85 == pytest.approx(s.nll - first.nll, abs=1e-9)
    # The first 16 tokens of a sequence of length 64 have the same context as in a sequence of length 16, so
    # their loss is the same. Later tokens have more context, so their loss changes.
    within, beyond, *_ = score(model, tokens, [16, 64])[1].by_position
    assert within.change_stderr == pytest.approx(0, abs=1e-5)
    assert beyond.change_stderr is not None and beyond.change_stderr > 1e-3
    with pytest.raises(ValueError, match="86 tokens; one sequence of length 86 needs 87"):
        score(model, tokens, [8, 86])


def test_more_iterations_approach_the_equilibrium(model: ImplicitForCausalLM, tokens: Tensor) -> None:
    *limited, own = score_by_budget(model, tokens, 32, [1, 4, 16, 64])
    assert [s.iterations for s in limited] == [1, 4, 16, 64]
    assert all(s.converged is None for s in limited) and own.converged == 1
    away = [abs(s.nll - own.nll) for s in limited]
    assert away[0] > 100 * away[-1] and away[-1] < 1e-4
    assert model.model.layer.eval_solve.convergence == Residual(rtol=1e-5, max_iter=1000)


def test_budgets_bound_a_window(model: ImplicitForCausalLM, tokens: Tensor) -> None:
    few, many, own = score_by_budget(model, tokens, 32, [2, 1000], solve_options(model, 4))
    assert few.window == many.window == own.window == 4
    assert few.iterations is not None and few.iterations <= 2 and few.converged != 1
    assert many.nll == pytest.approx(own.nll, abs=1e-5) and many.converged == 1


def test_windows_agree_at_the_equilibrium_and_not_before_it(
    model: ImplicitForCausalLM, tokens: Tensor
) -> None:
    same = compare_windows(model, tokens[:41], 20, [None, 8, 1], Residual(rtol=1e-6, max_iter=2000))
    assert [a.window for a in same] == ["all", 8, 1]
    assert (same[0].agreement, same[0].max_logit_diff, same[0].kl, same[0].worst) == (1, 0, 0, [])
    for a in same[1:]:
        assert a.agreement == 1 and 0 < a.mean_logit_diff <= a.max_logit_diff < 1e-3 and 0 <= a.kl < 1e-6
        assert a.perplexity == pytest.approx(same[0].perplexity, rel=1e-4)
    assert [a.iterations for a in same] == sorted((a.iterations for a in same), reverse=True)
    # With two evaluations, windows differ. The first evaluation, f(0, x), is the same in every window. In the
    # second evaluation, window 1 already uses the final values of earlier tokens.
    noise = torch.randint(300, (86,))  # on its training text, the model is too confident to show a difference
    _, early = compare_windows(model, noise, 32, [None, 1], FixedIterations(2))
    assert early.iterations == 2 and early.agreement < 1 and early.max_logit_diff > 0.01


def test_the_worst_tokens_are_where_the_logits_differ_most(model: ImplicitForCausalLM) -> None:
    noise = torch.randint(300, (86,), generator=torch.Generator(torch.get_default_device()).manual_seed(0))
    rule = FixedIterations(2)
    _, found = compare_windows(model, noise, 20, [None, 1], rule, batch_size=2)
    ways = [SolveOptions(convergence=rule), SolveOptions(convergence=rule, window=1)]
    with torch.no_grad():
        parts = [noise[i : min(i + 20, 85)][None] for i in range(0, 85, 20)]
        pairs = [[model(p, solve=way).logits for way in ways] for p in parts]
        apart = [(one - other).abs().amax(-1)[0] for one, other in pairs]
    values = [w.max_logit_diff for w in found.worst]
    assert values == sorted(values, reverse=True) and values[0] == found.max_logit_diff
    assert values == pytest.approx(torch.cat(apart).topk(5).values.tolist(), abs=1e-5)
    for w in found.worst:
        assert w.max_logit_diff == pytest.approx(apart[w.sequence - 1][w.position - 1].item(), abs=1e-5)
        assert w.iterations == w.first_iterations == 2
    assert f"sequence {found.worst[0].sequence}, position" in describe_worst([found])


def test_a_budget_too_small_for_the_tolerance_is_warned_of(
    model: ImplicitForCausalLM, tokens: Tensor
) -> None:
    windows, tokens = [None, 1], tokens[:41]
    enough = compare_windows(model, tokens, 20, windows, Residual(rtol=1e-4, max_iter=1000))
    short = compare_windows(model, tokens, 20, windows, Residual(rtol=1e-4, max_iter=3))
    assert unconverged(enough) == []
    (said,) = unconverged(short)
    assert "after 3 iterations" in said and f"{1 - (short[1].converged or 0):.2%} in window 1" in said


def test_explicit_models_have_nothing_to_solve(tokens: Tensor) -> None:
    explicit = make_model(implicit=False)
    (found,) = score(explicit, tokens, [16])
    assert found.nll == pytest.approx(by_hand(explicit, tokens, 16), abs=1e-4)
    assert found.policy is found.iterations is None
    for wrong in (
        lambda: score_by_budget(explicit, tokens, 16, [1]),
        lambda: compare_windows(explicit, tokens, 16, [None, 1]),
        lambda: solve_options(explicit, rtol=0.1),
        lambda: solve_options(explicit, window=4),
    ):
        with pytest.raises(ValueError, match="this ImplicitForCausalLM is explicit"):
            wrong()


@contextmanager
def no_work(model: ImplicitForCausalLM) -> Iterator[None]:
    """A context in which the test fails if the model is called."""

    def called(*_: Any) -> None:
        raise AssertionError("the model was called")

    handle = model.register_forward_pre_hook(called)
    try:
        yield
    finally:
        handle.remove()


def test_a_foreign_tokenizer_is_noticed_before_any_work(
    model: ImplicitForCausalLM,
) -> None:
    said = "token 300 is outside the model's vocabulary of 300"
    for at in (1, 3):  # the last token is only a target, never an input
        foreign = torch.tensor([1, 2, 4, 2])
        foreign[at] = 300
        with no_work(model):
            with pytest.raises(ValueError, match=said):
                score(model, foreign, [2], batch_size=1)
            with pytest.raises(ValueError, match=said):
                compare_windows(model, foreign, 2, [None, 1], batch_size=1)


def test_a_foreign_tokenizer_is_noticed_before_the_tasks_of_lm_eval(tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'deqseq[eval]'")
    torch.manual_seed(0)
    narrow = make_model(vocab_size=200)
    files = local_files(["piqa"], write_docs(tmp_path, DOCS))
    with no_work(narrow), pytest.raises(ValueError, match="outside the model's vocabulary of 200"):
        evaluate_tasks(narrow, tokenizer, ["piqa"], files)


def test_windows_are_checked_before_any_work(model: ImplicitForCausalLM, tokens: Tensor) -> None:
    with no_work(model), pytest.raises(ValueError, match="window must be"):
        compare_windows(model, tokens, 32, [None, 0])
    explicit = make_model(implicit=False)
    with pytest.raises(ValueError, match="is explicit"):
        compare_windows(explicit, tokens, 32, ["model", 8])


CHOICES = ["the dog near the wall", "a ship", "the old king saw a tree"]


def questions(stems: list[str], answers: str) -> list[dict[str, Any]]:
    choices = [{"text": text, "label": label} for text, label in zip(CHOICES, "ABC", strict=True)]
    return [
        {"question": {"stem": stem, "choices": choices}, "answerKey": answer}
        for stem, answer in zip(stems, answers, strict=True)
    ]


STEMS = ["What did the red cat see?", "Where is the river?", "Who saw the tall house?", "What is old?"]
DOCS: dict[str, list[dict[str, Any]]] = {
    "lambada_openai": [{"text": "The old cat saw a" + word} for word in (" dog", " ship", " river")],
    "hellaswag": [
        {"ind": i, "activity_label": "Seeing", "ctx_a": "[header] The red king.", "ctx_b": "he saw",
         "ctx": "[header] The red king. he saw", "endings": CHOICES, "label": i}
        for i in range(3)
    ],
    "piqa": [
        {"goal": goal, "sol1": CHOICES[i % 3], "sol2": CHOICES[(i + 1) % 3], "label": i % 2}
        for i, goal in enumerate(STEMS)
    ],
    "arc_easy": questions(STEMS, "ABCA"),
    "arc_challenge": questions(STEMS[::-1], "CCBA"),
    "winogrande": [
        {"sentence": "The cat saw a dog near the wall so _ saw a ship.", "option1": a, "option2": b,
         "answer": answer}
        for a, b, answer in (("the dog", "the old cat", "1"), ("the wall", "the ship", "2"))
    ],
    "openbookqa": questions(STEMS, "BBCA"),
}  # fmt: skip


def prompts(name: str, doc: dict[str, Any]) -> tuple[list[tuple[str, str]], int]:
    """The (context, continuation) pairs of a document, and the index of the right pair."""
    if name == "lambada_openai":
        context, _, last = doc["text"].rpartition(" ")
        return [(context, " " + last)], 0
    if name == "hellaswag":
        if "ctx_a" in doc:
            context = f"{doc['activity_label']}: The red king. He saw"
        else:
            context = "The red king. he saw"
        return [(context, " " + ending) for ending in doc["endings"]], doc["label"]
    if name == "piqa":
        context = f"Question: {doc['goal']}\nAnswer:"
        return [(context, " " + doc["sol1"]), (context, " " + doc["sol2"])], doc["label"]
    if name == "winogrande":
        before, after = doc["sentence"].split("_")
        return [(before + doc[o], after) for o in ("option1", "option2")], int(doc["answer"]) - 1
    question = doc["question"]
    stem = question["stem"] if name == "openbookqa" else f"Question: {question['stem']}\nAnswer:"
    right = [choice["label"] for choice in question["choices"]].index(doc["answerKey"])
    return [(stem, " " + choice["text"]) for choice in question["choices"]], right


@cache
@torch.no_grad()
def log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    ids = encode(tokenizer, context + continuation)
    start = len(encode(tokenizer, context))
    log_p = model(ids[None, :-1]).logits[0, start - 1 :].log_softmax(-1)
    greedy = bool((log_p.argmax(-1) == ids[start:]).all())
    return -F.nll_loss(log_p, ids[start:], reduction="sum").item(), greedy


def expected(model: Any, tokenizer: Any, name: str, docs: list[dict[str, Any]]) -> dict[str, float]:
    """The metrics ``acc`` and ``acc_norm`` (LAMBADA: ``acc`` and ``perplexity``), computed by hand."""
    right: dict[str, list[float]] = {"acc": [], "acc_norm": [], "nll": []}
    for doc in docs:
        pairs, answer = prompts(name, doc)
        found = [log_likelihood(model, tokenizer, *pair) for pair in pairs]
        if name == "lambada_openai":
            right["acc"].append(found[0][1])
            right["nll"].append(-found[0][0])
            continue
        values = torch.tensor([value for value, _ in found])
        sizes = torch.tensor([float(len(continuation) - 1) for _, continuation in pairs])
        right["acc"].append(int(values.argmax()) == answer)
        right["acc_norm"].append(int((values / sizes).argmax()) == answer)
    means = {key: sum(values) / len(values) for key, values in right.items() if values}
    if "nll" in means:
        means["perplexity"] = torch.tensor(means.pop("nll")).exp().item()
    return means


def write_docs(folder: Path, docs: dict[str, list[dict[str, Any]]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, rows in docs.items():
        (folder / f"{name}_x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_downstream_scores_are_those_of_the_log_likelihoods(
    model: ImplicitForCausalLM, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'deqseq[eval]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files = local_files(list(TASKS), write_docs(tmp_path / "data", DOCS))
    found = evaluate_tasks(model, tokenizer, files=files, batch_size=3)
    assert [s.task for s in found] == list(TASKS)
    for s in found:
        assert s.documents == len(DOCS[s.task]) and s.source == str(files[s.task])
        for metric, value in expected(model, tokenizer, s.task, DOCS[s.task]).items():
            if metric != "acc_norm" or s.task != "winogrande":
                assert getattr(s, metric) == pytest.approx(value, rel=1e-3), (s.task, metric)
        assert s.main == getattr(s, TASKS[s.task].metric)
        assert s.main_stderr is not None
    assert other_prompts(found) == []
    assert len({s.main for s in found}) > 1  # the scores differ between tasks


def test_downstream_reads_selections_and_the_schema_of_the_hub(
    model: ImplicitForCausalLM, tokenizer: Any, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'deqseq[eval]'")
    short = [{k: doc[k] for k in ("ctx", "endings", "label")} for doc in DOCS["hellaswag"]]
    hub = [
        {
            "question": doc["question"]["stem"],
            "choices": {k: [c[k] for c in doc["question"]["choices"]] for k in ("text", "label")},
            "answerKey": doc["answerKey"],
            "id": "x",
        }
        for doc in DOCS["arc_easy"]
    ]
    folder = write_docs(tmp_path, {"hellaswag": short, "arc_easy": hub})
    names = ["hellaswag", "arc_easy"]
    found = evaluate_tasks(model, tokenizer, names, local_files(names, folder), limit=2)
    assert [s.documents for s in found] == [2, 2]
    for s, docs in zip(found, (short, DOCS["arc_easy"]), strict=True):
        assert expected(model, tokenizer, s.task, docs[:2]) == {"acc": s.acc, "acc_norm": s.acc_norm}
    # A warning names the task whose prompt differs from lm-eval's prompt.
    (said,) = other_prompts(found)
    assert "hellaswag: the prompt is not lm-eval's" in said and found[1].own_prompt is None


def test_published_documents(
    model: ImplicitForCausalLM, tokenizer: Any, optional_data: Callable[[str], Path]
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'deqseq[eval]'")
    names = ["winogrande", "openbookqa"]
    files = local_files(names, optional_data("data/eval"))
    model = copy.deepcopy(model)
    model.model.layer.eval_solve = SolveOptions(convergence=Residual(rtol=0.05, max_iter=8))
    for s in evaluate_tasks(model, tokenizer, names, files, limit=4):
        docs = [json.loads(line) for line in files[s.task].read_text().split("\n")[:4]]
        assert expected(model, tokenizer, s.task, docs)["acc"] == s.acc


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"goal": "x"', "delimiter"),
        (b"[1, 2]", "must be a JSON object, got [1, 2]"),
        (b'{"goal": "x", "sol1": "y", "label": 0}', "needs the fields ['sol2']"),
        (b'{"goal": "\xff", "sol1": "y", "sol2": "z", "label": 0}', "invalid start byte"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "piqa.jsonl"
    path.write_bytes(json.dumps(DOCS["piqa"][0]).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_docs("piqa", path)
    assert str(raised.value).startswith(f"{path}, line 2: no document of piqa: ")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("piqa", {"label": None}, "label must be one of 0, 1, got None"),
        ("piqa", {"label": 5}, "label must be one of 0, 1, got 5"),
        ("piqa", {"label": -1}, "label must be one of 0, 1, got -1"),
        ("piqa", {"label": True}, "label must be one of 0, 1, got True"),
        ("piqa", {"sol1": None}, "must be text, got None"),
        ("piqa", {"sol1": ""}, "choices must not be empty, got"),
        ("hellaswag", {"label": 3}, "label must be one of 0, 1, 2, got 3"),
        ("hellaswag", {"label": ""}, "label must be one of 0, 1, 2, got ''"),
        ("hellaswag", {"endings": ["a", 1, "c"]}, "must be text, got 1"),
        ("arc_easy", {"answerKey": "Z"}, "answerKey must be one of A, B, C, got 'Z'"),
        ("openbookqa", {"answerKey": None}, "answerKey must be one of A, B, C, got None"),
        ("arc_challenge", {"question": {"stem": "x", "choices": [{"text": "y"}]}}, "KeyError('label')"),
        ("arc_easy", {"question": "x", "choices": {"text": ["y"], "label": ["A", "B"]}}, "zip()"),
        ("winogrande", {"answer": ""}, "answer must be one of 1, 2, got ''"),
        ("winogrande", {"sentence": "no blank"}, "sentence must have a _ to fill in, got 'no blank'"),
        ("lambada_openai", {"text": 1}, "must be text, got 1"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    good = DOCS[name][0]
    path = write_docs(tmp_path, {name: [good, good | change]}) / f"{name}_x.jsonl"
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_docs(name, path)
    assert str(raised.value).startswith(f"{path}, line 2: no document of {name}: ")


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("piqa", "1", 1),
        ("hellaswag", "2", 2),
        ("winogrande", 2, "2"),
        ("arc_easy", " B", "B"),
        ("openbookqa", "C ", "C"),
    ],
)
def test_an_answer_is_read_however_it_is_written(name: str, given: Any, read: Any, tmp_path: Path) -> None:
    field = TASKS[name].answer
    assert field is not None
    path = write_docs(tmp_path, {name: [DOCS[name][0] | {field: given}]}) / f"{name}_x.jsonl"
    assert read_docs(name, path)[0][field] == read


def test_a_task_counts_once(model: ImplicitForCausalLM, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="counts once in the average, but piqa is given again"):
        evaluate_tasks(model, tokenizer, ["piqa", "winogrande", "piqa"])


def test_of_several_files_the_longest_is_taken(tmp_path: Path) -> None:
    write_docs(tmp_path, {"piqa": DOCS["piqa"][:3], "piqa_first": DOCS["piqa"][:1]})
    assert local_files(["piqa"], tmp_path)["piqa"].name == "piqa_x.jsonl"


def test_tokens_of_texts(tokenizer: Any, saved: Path, tmp_path: Path) -> None:
    text = str(saved / "text.txt")
    whole = read_tokens([text, text], tokenizer)
    assert torch.equal(whole, encode(tokenizer, TEXT[:400]).repeat(2))
    assert torch.equal(read_tokens([text, text], tokenizer, limit=10), whole[:11])
    for limit in range(1, 200, 7):
        assert torch.equal(read_tokens([text, text], tokenizer, limit), whole[: limit + 1])
    alone = load_tokenizer(str(saved / "model" / "tokenizer.json"))
    assert torch.equal(read_tokens([text], alone), encode(tokenizer, TEXT[:400]))
    assert alone.eos_token == "<|endoftext|>"
    alone.eos_token = None
    alone.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).eos_token == "<|endoftext|>"


def test_texts_are_scored_byte_for_byte(tokenizer: Any, tmp_path: Path) -> None:
    path, text = tmp_path / "text.txt", "The old cat\r\nsaw a “king” – néar\rthe tall 樹.\r\n\n" * 40
    path.write_bytes(text.encode())
    whole = encode(tokenizer, text)
    assert torch.equal(read_tokens([str(path)], tokenizer), whole)
    for limit in range(1, 300, 7):  # reading may stop inside a character, or between \r and \n
        assert torch.equal(read_tokens([str(path)], tokenizer, limit), whole[: limit + 1])
    for wrong, reason in (
        (b"\xff more", "invalid start byte, 0xff"),
        (b"\xe2\x80", "unexpected end of data"),
    ):
        path.write_bytes(text.encode() + wrong)
        for limit in (None, len(whole)):
            with pytest.raises(ValueError, match=rf"text.txt is not UTF-8: {reason}") as raised:
                read_tokens([str(path)], tokenizer, limit)
            assert str(raised.value).endswith(f"at offset {len(text.encode())}")


def test_leftovers_of_an_interrupted_report_are_replaced(tmp_path: Path) -> None:
    for name in ("length.json.part", "length.png.part"):
        (tmp_path / name).write_text("half")
    ResultFolder(tmp_path, "length", "model", {})
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files .*\(notes.txt\)"):
        ResultFolder(tmp_path, "length", "model", {})


def test_no_more_is_tokenised_than_a_limit_needs(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(TEXT * 100)
    read: list[int] = []

    def watched(text: str, **options: Any) -> Any:
        read.append(len(text))
        return tokenizer(text, **options)

    found = read_tokens([str(tmp_path / "long.txt")], watched, limit=100)
    assert torch.equal(found, encode(tokenizer, TEXT)[:101])
    assert sum(read) < len(TEXT) < len(TEXT * 100)


def run_main(command: list[str], saved: Path, tmp_path: Path) -> int:
    """Run the program and return its exit status. Wrong arguments also give a status, not an exception."""
    try:
        return main([part.format(saved=saved, tmp=tmp_path) for part in command])
    except SystemExit as stopped:
        return int(stopped.code or 0)


TEXT_FLAGS = ["--text", "{saved}/text.txt", "--rtol", "1e-3", "--length", "16"]
COMMANDS: dict[str, list[str]] = {
    "perplexity": [*TEXT_FLAGS, "--window", "4", "--max-iter", "50", "--dtype", "float32"],
    "length": [*TEXT_FLAGS, "32", "--limit", "70"],
    "iterations": [*TEXT_FLAGS, "--iterations", "1", "4", "--window", "all", "--batch-size", "2",
                   "--limit", "70"],
    "duality": [*TEXT_FLAGS, "--window", "all", "4", "1", "--limit", "70"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("report", "rows"), [("perplexity", 1), ("length", 2), ("iterations", 3), ("duality", 3)]
)
def test_command_line(
    report: str, rows: int, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    rendered_figures: Callable[[Path], bool],
) -> None:  # fmt: skip
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'deqseq[plots]'")
    command = [report, "{saved}/model", *COMMANDS[report], "--output", "{tmp}/out"]
    for _ in range(2):  # the second run overwrites the first result
        assert run_main(command, saved, tmp_path) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {f"{report}.json", f"{report}.png"}
    assert rendered_figures(tmp_path / "out" / f"{report}.png")
    result = json.loads((tmp_path / "out" / f"{report}.json").read_text())
    assert result["report"] == report and len(result["rows"]) == rows
    used = result["settings"]
    assert used["rtol"] == 1e-3 and used["text"] == [str(saved / "text.txt")]
    # The result also records settings that were not given, with the values that were used.
    assert used["tokenizer"] == str(saved / "model") and used["dtype"] == "float32" and used["device"]
    assert used["window"] == {"perplexity": 4, "duality": ["all", 4, 1]}.get(report, "all")
    assert used.get("max_iter") == {"perplexity": 50, "iterations": None}.get(report, 1000)
    assert result["config"]["vocab_size"] == 300 and {"deqseq", "torch"} <= set(result["versions"])
    assert result["machine"] and datetime.fromisoformat(result["date"])
    printed = capsys.readouterr().out.splitlines()
    assert "perplexity" in printed[0] and f"{result['rows'][-1]['perplexity']:.3f}" in printed[rows]
    # The printed table and the JSON file use the same names.
    titles = {title.replace(" ", "_") for title in re.split(r" {2,}", printed[0].strip())}
    assert titles <= set(result["rows"][0])


def test_command_line_downstream(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'deqseq[eval]'")
    write_docs(tmp_path / "data", DOCS)
    command = ["downstream", "{saved}/bare", "--tokenizer", "{saved}/model/tokenizer.json", "--data-dir",
               "{tmp}/data", "--tasks", "piqa", "openbookqa", "--limit", "3", "--window", "8",
               "--output", "{tmp}/out"]  # fmt: skip
    assert run_main(command, saved, tmp_path) == 0
    result = json.loads((tmp_path / "out" / "downstream.json").read_text())
    assert [row["task"] for row in result["rows"]] == ["piqa", "openbookqa"]
    assert result["average"] == pytest.approx(sum(row["main"] for row in result["rows"]) / 2)
    assert result["warnings"] == [] and {row["own_prompt"] for row in result["rows"]} == {None}
    assert "lm_eval" in result["versions"]
    said = capsys.readouterr()
    assert f"average {result['average']:.4f}" in said.out.splitlines()[3]
    # lm-eval and datasets may print one progress bar and nothing else.
    bars = {line.partition(":")[0] for line in re.split(r"[\r\n]+", said.err) if line.strip()}
    assert bars == {"Running loglikelihood requests"}


# The program lm_eval without its own tasks. Reading their thousands of files takes longer than the rest.
LM_EVAL = """
import functools, runpy
from lm_eval.tasks import TaskManager

TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
"""


def test_downstream_scores_are_those_of_lm_eval_itself(saved: Path, tmp_path: Path) -> None:
    """``lm_eval --model hf`` loads the folder in a process that has not imported deqseq."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'deqseq[eval]'")
    folders = {"lambada_openai": "lambada", "piqa": "piqa"}
    write_docs(tmp_path / "data", {name: DOCS[name] for name in folders})
    command = ["downstream", "{saved}/model", "--data-dir", "{tmp}/data", "--tasks", *folders, "--output",
               "{tmp}/ours"]  # fmt: skip
    assert run_main(command, saved, tmp_path) == 0
    ours = json.loads((tmp_path / "ours" / "downstream.json").read_text())["rows"]
    (tmp_path / "tasks").mkdir()
    for name, folder in folders.items():  # lm-eval's own tasks, over the same documents
        task = {
            "include": str(Path(lm_eval.__file__).parent / "tasks" / folder / f"{name}.yaml"),
            "task": f"local_{name}", "dataset_path": "json", "dataset_name": None, "training_split": None,
            "validation_split": None, "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data" / f"{name}_x.jsonl")}},
        }  # fmt: skip
        (tmp_path / "tasks" / f"{name}.yaml").write_text(json.dumps(task))
    done = subprocess.run(
        [
            sys.executable, "-P", "-c", LM_EVAL, "--model", "hf", "--model_args",
            f"pretrained={saved / 'model'},trust_remote_code=True", "--tasks",
            ",".join(f"local_{name}" for name in folders), "--include_path", str(tmp_path / "tasks"),
            "--device", "cpu", "--batch_size", "8", "--output_path", str(tmp_path / "theirs"),
        ],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "DISABLE_MULTIPROC": "1"},
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    (path,) = (tmp_path / "theirs").rglob("*.json")
    theirs = json.loads(path.read_text())["results"]
    for row in ours:
        other = theirs[f"local_{row['task']}"]
        assert other["sample_len"] == row["documents"] == len(DOCS[row["task"]])
        metrics = {"lambada_openai": ["acc", "perplexity"], "piqa": ["acc", "acc_norm", "acc_norm_stderr"]}
        for metric in metrics[row["task"]]:
            assert other[f"{metric},none"] == pytest.approx(row[metric], rel=1e-6)


def test_names_in_a_folder_that_exists_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped folder of a run is not looked for on the hub."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    assert is_local("runs/mistyped") and is_local("./model") and is_local("a/b/c")
    assert not is_local("gpt2") and not is_local("state-spaces/mamba2-130m")
    with pytest.raises(ValueError, match="no model in runs/mistyped"):
        load_model("runs/mistyped")
    Path("runs/begun").mkdir()
    Path("runs/begun/settings.json").write_text("{}")
    with pytest.raises(ValueError, match="the run in runs/begun has no model yet: repeat its command"):
        load_model("runs/begun")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_name_is_not_looked_for_on_a_hub_that_does_not_answer(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", Mock(side_effect=OSError("not in the cache")))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"there is no folder nosuch, and http://127\.0\.0\.1:1 cannot be re"
    ):
        load("nosuch")
    folder = tmp_path / "models--nosuch"
    (folder / "snapshots" / "1").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    with pytest.raises(ValueError, match="nosuch cannot be loaded: not in the cache"):
        load("nosuch")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["perplexity", "{tmp}/none", *TEXT_FLAGS], "no model in"),
        (["perplexity", "{tmp}", *TEXT_FLAGS], "no model in"),
        (["perplexity", "{tmp}/none", "--tokenizer", "{saved}/model", *TEXT_FLAGS], "no model in"),
        (["perplexity", "{saved}/bare", *TEXT_FLAGS], "name one with --tokenizer"),
        (["perplexity", "{saved}/model", "--text", "{tmp}/none.txt"], "cannot be read"),
        (["perplexity", "{saved}/model", "--text", "{saved}/text.txt"], "one sequence of length 2048"),
        (["perplexity", "{saved}/model", *TEXT_FLAGS, "--window", "0"],
         "window must be a whole number >= 1, or one of 'all', 'model', got 0"),
        (["perplexity", "{saved}/model", *TEXT_FLAGS, "--rtol", "-1"], "rtol must be a positive"),
        (["perplexity", "{saved}/model", *TEXT_FLAGS, "--limit", "x"], "limit must be a whole number >= 1"),
        (["perplexity", "{saved}/model", *TEXT_FLAGS, "--device", "nowhere"], "device nowhere cannot"),
        (["perplexity", "{saved}/model", *TEXT_FLAGS, "--device", "meta"], "device meta cannot"),
        (["length", "{saved}/model", *TEXT_FLAGS, "100000"], "one sequence of length 100000"),
        (["iterations", "{saved}/model", *TEXT_FLAGS, "--iterations", "0"], "must be a whole number >= 1"),
        (["duality", "{saved}/model", *TEXT_FLAGS, "--window", "all"], "at least two"),
        (["duality", "{saved}/explicit", "--tokenizer", "{saved}/model", "--text", "{saved}/text.txt",
          "--length", "16"], "is explicit"),
        (["duality", "{saved}/explicit", "--tokenizer", "{saved}/model", *TEXT_FLAGS[:2], "--length", "16",
          "--window", "model", "8"], "is explicit"),
        (["duality", "{tmp}/none", *TEXT_FLAGS, "--window", "all", "0"], "window"),
        (["downstream", "{tmp}/none", "--tasks", "piqa", "piqa"], "piqa is given again"),
        (["downstream", "{saved}/model", "--tasks", "chess"], "chess"),
        (["downstream", "{saved}/model", "--data-dir", "{tmp}"], "no file for lambada_openai"),
        (["perplexity", "{saved}/model", *TEXT_FLAGS, "--output", "{saved}"], "holds other files"),
        (["perplexity", "{tmp}/none", *TEXT_FLAGS, "--output", "{saved}/text.txt"], "is not a folder"),
        (["perplexity", "{tmp}/none", *TEXT_FLAGS, "--output", "{saved}/text.txt/a/b"], "is not a folder"),
        pytest.param(
            ["perplexity", "{tmp}/none", *TEXT_FLAGS, "--output", "/proc/a/b"],
            "nothing can be written to the folder /proc",
            marks=pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs the folder /proc"),
        ),
    ],
)  # fmt: skip
def test_errors_end_with_a_sentence_and_status_2(
    command: list[str], message: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(command, saved, tmp_path) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error: " in last and message in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", ["evaluate", "generate"])
def test_the_tokenizer_must_be_the_models(
    program: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(folder: str, tokenizer: str) -> int:
        if program == "generate":
            options = ["--tokenizer", str(tmp_path / tokenizer), "--max-new-tokens", "1", "--rtol", "0.1"]
            return generate.main([str(saved / folder), "The cat", *options])
        return run_main(
            ["perplexity", f"{{saved}}/{folder}", "--tokenizer", f"{{tmp}}/{tokenizer}", *TEXT_FLAGS],
            saved,
            tmp_path,
        )

    form = json.loads((saved / "model" / "tokenizer.json").read_text())
    (tmp_path / "same.json").write_text(json.dumps(form))
    known = form["model"]["vocab"]
    form["model"]["vocab"] = {**known, "further": len(known)}
    (tmp_path / "more.json").write_text(json.dumps(form))
    form["model"]["vocab"] = {**known, "a": known["b"], "b": known["a"]}
    (tmp_path / "other.json").write_text(json.dumps(form))
    assert run("model", "same.json") == run("model", "more.json") == run("bare", "other.json") == 0
    capsys.readouterr()
    assert run("model", "other.json") == 2
    (line,) = capsys.readouterr().err.splitlines()
    other = tmp_path / "other.json"
    assert f"the model in {saved / 'model'} has another tokenizer than {other}: token" in line
    assert f"is 'a' in the model and 'b' in {other}; leave out --tokenizer" in line


def test_force_writes_beside_other_files(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    command = ["perplexity", "{saved}/model", *TEXT_FLAGS, "--output", "{tmp}"]
    assert run_main(command, saved, tmp_path) == 2
    assert run_main([*command, "--force"], saved, tmp_path) == 0
    assert (tmp_path / "notes.txt").read_text() == "precious"
    assert (tmp_path / "perplexity.json").is_file()
    assert run_main(["length", *command[1:]], saved, tmp_path) == 2  # the folder holds other files
    (tmp_path / "perplexity.json").unlink()
    (tmp_path / "perplexity.json").mkdir()
    capsys.readouterr()
    assert run_main([*command, "--force"], saved, tmp_path) == 2
    said = capsys.readouterr()
    assert "perplexity.json is a folder, and this command" in said.err and not said.out


def test_a_result_of_other_settings_is_not_overwritten(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["perplexity", "{saved}/model", *TEXT_FLAGS, "--output", "{tmp}"]
    written = tmp_path / "perplexity.json"
    assert run_main(command, saved, tmp_path) == 0
    assert run_main(command, saved, tmp_path) == 0
    before = written.read_text()
    for other in (["--length", "32"], ["--window", "2"], ["--tokenizer", "{saved}/model/tokenizer.json"]):
        assert run_main([*command, *other], saved, tmp_path) == 2
        assert f"other settings ({other[0][2:]} " in capsys.readouterr().err
    assert run_main(["perplexity", "{saved}/bare", "--tokenizer", "{saved}/model", *command[2:]],
                    saved, tmp_path) == 2  # fmt: skip
    assert written.read_text() == before
    assert run_main([*command, "--length", "32", "--force"], saved, tmp_path) == 0
    assert json.loads(written.read_text())["rows"][0]["length"] == 32


def test_logarithmic_axes_have_plain_labels() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'deqseq[plots]'").use(
        "Agg"
    )
    from matplotlib import pyplot as plt

    for low, high in ((560, 690), (1, 1e6), (1e-7, 1)):
        figure, axes = plt.subplots()
        axes.plot([1, 2], [low, high])
        log_scale(axes.yaxis)
        figure.canvas.draw()
        labels = [label.get_text() for label in axes.get_yticklabels(which="both") if label.get_text()]
        assert len(labels) > 1 and all(float(label) > 0 for label in labels)
        plt.close(figure)


def test_help_and_wrong_arguments_wait_for_no_model_library() -> None:
    code = """
import sys
from deqseq.tasks import generate, prepare, pretrain
from deqseq.tasks.evaluate import __main__ as evaluate
for program, arguments in (
    (evaluate, ["--help"]), (evaluate, ["duality", "--help"]),
    (evaluate, ["downstream", "m", "--limit", "x"]),
    (generate, ["--help"]), (generate, ["m", "the", "--top-p", "0.5"]),
    (prepare, ["--help"]), (pretrain, ["--help"]), (pretrain, ["llama-tiny", "--steps", "0"]),
):
    try:
        assert program.main(arguments) == 2
    except SystemExit as stopped:
        assert not stopped.code
assert not {"transformers", "lm_eval", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [*COMMANDS, "downstream"])
def test_help_explains_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "default" in capsys.readouterr().out
