"""State tracking in text: generated documents, folders of data, scores of models, and the command line."""

import importlib.util
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.tasks.common.corpus import TokenFolder
from deqseq.tasks.text_tracking.__main__ import main
from deqseq.tasks.text_tracking.data import make_folder, make_tokenizer, read_test, read_tokenizer
from deqseq.tasks.text_tracking.documents import KINDS, Document, Kind, make_document, read_documents
from deqseq.tasks.text_tracking.evaluate import encode, score_model, score_rules
from deqseq.tasks.text_tracking.report import model_folders
from deqseq.tasks.text_tracking.worlds import WORLDS, Answer

LENGTH = 64
OPTIONS: dict[str, Any] = {
    "kinds": ["programs", "boxes", "cards"], "length": LENGTH, "test_lengths": [LENGTH, 2 * LENGTH],
    "places": 4, "longest_run": 2, "documents": 60, "test_documents": 9, "validation_share": 0.2, "seed": 3,
}  # fmt: skip


class Interpreter:
    """Reads a document and finds its answers. Shares no code with the generator.

    A value is a pair: the word, and the number of operations before the text stated it.
    """

    def __init__(self) -> None:
        self.world: dict[str, tuple[str, int]] = {}
        self.stated: dict[str, str] = {}
        self.mentioned = ""
        self.operations = 0
        self.answers: list[tuple[str, Answer]] = []

    def answer(self, name: str, at: int) -> None:
        value, since = self.world[name]
        self.answers.append((value, Answer(at, self.operations - since, self.stated[name], self.mentioned)))
        self.state(name, value)

    def state(self, name: str, value: str) -> None:
        self.world[name] = (value, self.operations)
        self.stated[name] = self.mentioned = value

    def sentences(self, text: str, end: str) -> list[tuple[int, str]]:
        """For every sentence: the index of its first word, and the sentence without its end mark."""
        return [
            (len(text[: match.start()].split()), match[1].strip())
            for match in re.finditer(rf"([^{end}]*){re.escape(end)}", text)
        ]

    def programs(self, text: str) -> None:
        body: list[str] | None = None
        times = 0
        for at, sentence in self.sentences(text, ";"):
            if loop := re.fullmatch(r"repeat (\d) : (.*)", sentence):
                times, body, sentence = int(loop[1]), [], loop[2]
                self.mentioned = loop[1]
            if sentence == "end":
                assert body is not None
                for line in body * times:
                    self.line(line, at)
                body = None
            elif body is not None:
                body.append(sentence)
            elif sentence:
                self.line(sentence, at)

    def line(self, line: str, at: int) -> None:
        if asked := re.fullmatch(r"print (\w) -> \d", line):
            self.answer(asked[1], at + 3)
            return
        if begins := re.fullmatch(r"(\w) = (\d)", line):
            self.operations += begins[1] in self.world
            self.state(begins[1], begins[2])
            return
        self.operations += 1
        if swap := re.fullmatch(r"swap (\w) (\w)", line):
            a, b = swap.groups()
            self.world[a], self.world[b] = self.world[b], self.world[a]
        else:
            copy = re.fullmatch(r"([a-h]) = ([a-h])", line)
            assert copy, line
            self.world[copy[1]] = self.world[copy[2]]

    def boxes(self, text: str) -> None:
        for at, sentence in self.sentences(text, "."):
            if put := re.fullmatch(r"put the (\w+) in box (\d)", sentence):
                self.state(put[1], put[2])
            elif swap := re.fullmatch(r"swap box (\d) and box (\d)", sentence):
                other = {swap[1]: swap[2], swap[2]: swap[1]}
                self.world = {name: (other.get(v, v), since) for name, (v, since) in self.world.items()}
                self.mentioned = swap[2]
                self.operations += 1
            elif move := re.fullmatch(r"move the (\w+) from box \d to box (\d)", sentence):
                self.answer(move[1], at + 5)
                self.operations += 1
                self.state(move[1], move[2])
            elif sentence:
                asked = re.fullmatch(r"the (\w+) is in box \d", sentence)
                assert asked, sentence
                self.answer(asked[1], at + 5)

    def cards(self, text: str) -> None:
        names = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]
        for at, sentence in self.sentences(text, ";"):
            row = [self.world[name] for name in names if name in self.world]
            if sentence.startswith("lay "):
                for name, card in zip(names, sentence.split()[1:], strict=False):
                    self.state(name, card)
            elif asked := re.fullmatch(r"(\w+) -> \w+", sentence):
                self.answer(asked[1], at + 2)
            elif sentence:
                self.operations += 1
                if sentence == "swap":
                    row[:2] = row[1::-1]
                elif sentence == "rotate":
                    row.append(row.pop(0))
                else:
                    assert sentence == "reverse"
                    row.reverse()
                self.world = dict(zip(names, row, strict=False))


@pytest.mark.parametrize("longest_run", [None, 1, 4])
@pytest.mark.parametrize("places", [3, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interpreter_finds_the_same_answers(kind: Kind, places: int, longest_run: int | None) -> None:
    for number in range(20):
        document = make_document([kind], 100 + number, places, f"{number}", longest_run)
        reader = Interpreter()
        getattr(reader, kind)(document.text)
        words = document.words
        assert len(words) == 99 + number
        assert set(words) <= set(WORLDS[kind].VOCABULARY)
        assert document.answers == [answer for _, answer in reader.answers]
        assert [words[answer.at] for answer in document.answers] == [value for value, _ in reader.answers]
        assert document.answers
        assert [i for i, tracked in enumerate(document.tracked) if tracked] == [
            answer.at for answer in document.answers
        ]


def documents(kinds: list[Kind], length: int, count: int, places: int = 5) -> list[Document]:
    return [make_document(kinds, length, places, f"{length} {i}") for i in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_depth_of_answers_grows_with_the_length(kind: Kind) -> None:
    def depth(length: int) -> float:
        depths = [a.operations for document in documents([kind], length, 100) for a in document.answers]
        assert min(depths) >= 1
        return sum(depths) / len(depths)

    assert depth(256) > 1.3 * depth(128) > 1.6 * depth(64)


def test_a_longest_run_of_one_asks_after_every_operation() -> None:
    for number in range(30):
        document = make_document(["cards"], 100, 5, f"{number}", 1)
        asked = "(?:swap|rotate|reverse) ; [a-z]+ -> [a-z]+ ; "
        assert re.fullmatch(rf"lay [^;]*; (?:{asked})+(?:[a-z]+ -> [a-z]+ ; )*[; ]*", document.text + " ")


@pytest.mark.parametrize("kind", KINDS)
def test_shorter_runs_have_more_answers(kind: Kind) -> None:
    def answers(longest_run: int | None) -> int:
        return sum(len(make_document([kind], 256, 5, f"{i}", longest_run).answers) for i in range(50))

    counts = [answers(longest_run) for longest_run in (None, 16, 4, 1)]
    assert counts == sorted(counts)
    assert counts[-1] > 1.5 * counts[0]


@pytest.mark.parametrize("kind", KINDS)
def test_rules_that_ignore_operations_are_mostly_wrong(kind: Kind) -> None:
    for score in score_rules(documents([kind], 256, 100), 256):
        assert 0.05 < score.accuracy < 0.35
        assert score.by_kind == {kind: score.accuracy}


def test_equal_seeds_give_equal_documents() -> None:
    assert make_document(KINDS, 128, 5, "1") == make_document(KINDS[::-1], 128, 5, "1")
    assert len({make_document(KINDS, 128, 5, f"{i}").text for i in range(50)}) == 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tracking") / "data"
    make_folder(path, **OPTIONS)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_equal_settings_give_equal_files(folder: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "again", **OPTIONS)
    assert contents(tmp_path / "again") == contents(folder)
    make_folder(tmp_path / "other", **{**OPTIONS, "seed": 4})
    assert contents(tmp_path / "other")["train.jsonl"] != contents(folder)["train.jsonl"]


def test_a_repeated_command_makes_only_missing_files(tmp_path: Path) -> None:
    make_folder(tmp_path / "data", **OPTIONS)
    before = contents(tmp_path / "data")
    (tmp_path / "data" / f"test-{LENGTH}.jsonl").unlink()
    old = (tmp_path / "data" / "train.jsonl").stat()
    make_folder(tmp_path / "data", **OPTIONS)
    assert contents(tmp_path / "data") == before
    assert (tmp_path / "data" / "train.jsonl").stat().st_mtime_ns == old.st_mtime_ns


def test_rows_of_the_shards_are_whole_documents(folder: Path) -> None:
    shards = TokenFolder(folder / "shards")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab() == shards.tokenizer().get_vocab()
    texts = []
    for split in ("train", "validation"):
        rows = shards.rows(split, LENGTH)
        ids = [rows[i]["input_ids"] for i in range(len(rows))]
        assert all(row[-1] == tokenizer.eos_token_id for row in ids)
        texts += [tokenizer.decode(row[:-1]) for row in ids]
    made = [document.text for document in read_documents(folder / "train.jsonl")]
    assert sorted(texts) == sorted(made)
    assert len(made) == OPTIONS["documents"]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=65, max_position_embeddings=256, **sizes))


def implicit(**options: Any) -> ImplicitForCausalLM:
    torch.manual_seed(0)
    backbone = {"name": "mamba2", "d_model": 16, "n_layer": 1, "d_state": 4, "headdim": 8, "chunk_size": 16}
    return ImplicitForCausalLM(ImplicitConfig(vocab_size=65, backbone=backbone, **options))


def learn(model: Any, ids: torch.Tensor, tests: list[Document]) -> None:
    """Train on the answers for a few steps, so that some answers are right."""
    tracked = torch.tensor([[*document.tracked, False] for document in tests])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(10):
        model(input_ids=ids, labels=ids.where(tracked, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [llama, implicit])
def test_the_score_is_that_of_a_count_by_hand(folder: Path, make: Callable[[], Any]) -> None:
    model, tokenizer, tests = make(), read_tokenizer(folder), read_test(folder, LENGTH)
    vocabulary = tokenizer.get_vocab()
    learn(model, encode(tokenizer, tests, LENGTH), tests)
    score = score_model("model", model, tokenizer, tests, LENGTH, batch_size=4)
    model.eval()
    right, deep, losses, others = [], [], [], []
    for document in tests:
        ids = [*(vocabulary[word] for word in document.words), vocabulary["<|endoftext|>"]]
        with torch.no_grad():
            chances = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1).tolist()
        answers = {answer.at: answer for answer in document.answers}
        for at in range(1, len(ids)):
            row = chances[at - 1]
            if at not in answers:
                others.append(-row[ids[at]])
                continue
            losses.append(-row[ids[at]])
            right.append(row.index(max(row)) == ids[at])
            if 3 <= answers[at].operations <= 4:
                deep.append(right[-1])
    assert (score.documents, score.answers) == (len(tests), len(right))
    assert score.accuracy == pytest.approx(sum(right) / len(right))
    assert score.answer_nll == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert score.other_nll == pytest.approx(sum(others) / len(others), rel=1e-4)
    bucket = score.by_operations[2]
    assert (bucket.first, bucket.last, bucket.answers) == (3, 4, len(deep))
    assert bucket.accuracy == pytest.approx(sum(deep) / len(deep))
    assert sum(bucket.answers for bucket in score.by_operations) == score.answers
    assert (score.iterations is None) == (make is llama)
    p = score.accuracy
    assert 0 < p < 1
    assert score.stderr == pytest.approx(math.sqrt(p * (1 - p) / (len(right) - 1)))


def test_a_perfect_reader_scores_one(folder: Path) -> None:
    """A model that always predicts the right next token has accuracy 1 and loss 0."""
    tests, tokenizer = read_test(folder, LENGTH), read_tokenizer(folder)

    class Oracle(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **options: Any) -> Any:
            found = super().forward(input_ids=input_ids, **options)
            logits = torch.nn.functional.one_hot(input_ids.roll(-1, 1), 65).float() * 100
            return type(found)(logits=logits)

    score = score_model("oracle", Oracle(llama().config), tokenizer, tests, LENGTH)
    assert score.accuracy == 1
    assert score.answer_nll == pytest.approx(0, abs=1e-6)
    assert score.stderr == 0


@pytest.mark.usefixtures("rendered_figures")
def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    made = ["--length", "64", "--documents", "40", "--test-documents", "6", "--validation-share", "0.2"]
    assert main(["data", "--output", str(data), *made]) == 0
    assert "tests of 64, 128, 256 tokens" in capsys.readouterr().out
    llama().save_pretrained(tmp_path / "control")
    implicit(convergence={"name": "fixed", "iterations": 2}).save_pretrained(tmp_path / "run" / "model")
    implicit(implicit=False).save_pretrained(tmp_path / "explicit")
    models = [str(tmp_path / name) for name in ("control", "run", "explicit")]
    report = tmp_path / "report"
    rest = ["--data", str(data), "--length", "128", "64", "--output", str(report), "--max-iter", "3"]
    assert main(["evaluate", *models, *rest]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("control", "run", "explicit", "rule: last stated for it", "boxes"))
    found = json.loads((report / "tracking.json").read_text())
    assert found["data"]["length"] == 64
    assert {score["model"]: score["iterations"] for score in found["scores"] if score["length"] == 64} == {
        "rule: last stated for it": None, "rule: last mentioned": None, "control": None, "explicit": None,
        "run": pytest.approx(3, abs=0.5),
    }  # fmt: skip
    control = LlamaForCausalLM.from_pretrained(tmp_path / "control")
    again = score_model("control", control, read_tokenizer(data), read_test(data, 128), 128)
    kept = next(s for s in found["scores"] if s["model"] == "control" and s["length"] == 128)
    assert again.by_kind == kept["by_kind"]
    assert [asdict(depth)["accuracy"] for depth in again.by_operations] == [
        depth["accuracy"] for depth in kept["by_operations"]
    ]
    assert again.answer_nll == pytest.approx(kept["answer_nll"])
    if importlib.util.find_spec("matplotlib"):
        assert (report / "tracking.png").stat().st_size > 10_000


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kinds": []}, "one or more"),
    ({"kinds": ["boxes", "boxes"]}, "different kinds"),
    ({"kinds": ["chess"]}, "'chess'"),
    ({"places": 2}, "from 3 to 8, got 2"),
    ({"places": 9}, "from 3 to 8, got 9"),
    ({"longest_run": 0}, "longest_run must be a whole number >= 1, got 0"),
    ({"length": 47}, "boxes with 4 places need a length of at least 48 tokens, got 47"),
    ({"test_lengths": [64, 0]}, "length must be a whole number >= 1, got 0"),
    ({"documents": 0}, "documents"),
    ({"test_documents": 0}, "test_documents"),
    ({"validation_share": 1.0}, r"\[0, 1\)"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_options_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_folder(tmp_path / "data", **{**OPTIONS, **change})
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("places", [3, 8])
def test_the_shortest_document_has_room_for_an_answer(kind: Kind, places: int) -> None:
    length = WORLDS[kind].shortest_document(places) + 1
    assert sum(len(make_document([kind], length, places, f"{i}").answers) > 0 for i in range(100)) > 50


def test_folders_with_other_content_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seed 3, now 5"):
        make_folder(folder, **{**OPTIONS, "seed": 5})
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"other files.*notes.txt"):
        make_folder(tmp_path, **OPTIONS)
    with pytest.raises(ValueError, match="holds no data"):
        read_test(tmp_path, LENGTH)
    with pytest.raises(ValueError, match="tests of 64, 128 tokens, not of 100"):
        read_test(folder, 100)


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"text": "a", "answers": []}', '{"kind": "cards", "text": "a b", "answers": [{"at": 1}]}',
     '{"kind": "cards", "text": "a b", "answers": '
     '[{"at": 2, "operations": 1, "last_stated": "", "last_mentioned": ""}]}'],
)  # fmt: skip
def test_damaged_documents_are_named(line: str, tmp_path: Path) -> None:
    good = make_document(["cards"], 64, 5, "1")
    (tmp_path / "test.jsonl").write_text(f"{json.dumps(asdict(good))}\n{line}\n")
    with pytest.raises(ValueError, match=r"test.jsonl:2 is not a document"):
        read_documents(tmp_path / "test.jsonl")


def test_models_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    tests, tokenizer = read_test(folder, LENGTH), read_tokenizer(folder)
    with pytest.raises(ValueError, match="a document must have 31 words, got 63"):
        score_model("model", llama(), tokenizer, tests, 32)
    small = LlamaForCausalLM(LlamaConfig(**{**llama().config.to_dict(), "vocab_size": 20}))
    with pytest.raises(ValueError, match="vocabulary of 20"):
        score_model("model", small, tokenizer, tests, LENGTH)
    unknown = Document("cards", " ".join(["hello"] * 63), tests[0].answers)
    with pytest.raises(ValueError, match="one known token of every word"):
        score_model("model", llama(), tokenizer, [unknown], LENGTH)
    with pytest.raises(ValueError, match="no answers"):
        score_rules([Document("cards", tests[0].text, [])], LENGTH)
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").touch()
    assert model_folders([tmp_path / "a", tmp_path / "b" / "model"]) == {
        "a": tmp_path / "a" / "model", "b": tmp_path / "b" / "model",
    }  # fmt: skip
    with pytest.raises(ValueError, match="is given twice"):
        model_folders([tmp_path / "a", tmp_path / "a" / "model"])


def test_a_model_with_another_tokenizer_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama().save_pretrained(tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path / "model")
    assert main(["evaluate", str(tmp_path / "model"), "--data", str(folder)]) == 2
    assert "another tokenizer" in capsys.readouterr().err
