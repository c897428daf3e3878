"""Folders as a source of documents: what is kept, what is dropped, and tokenizers trained on the text."""

import gzip
import json
import os
import random
import re
import site
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deqseq.tasks.common.corpus import HoldOut, TokenFolder, pipeline, shards, vocabulary
from deqseq.tasks.common.corpus.folders import FolderFiles, installed_folders
from deqseq.tasks.common.corpus.holdout import SPLITS
from deqseq.tasks.common.corpus.rules import RULES
from deqseq.tasks.common.corpus.sources import sources
from deqseq.tasks.common.tokenizer import train_bpe, trained_size
from deqseq.tasks.prepare import main

END = "<|endoftext|>"
WORDS = ("def", "return", "x", "y_1", "for", "in", "über", "猫", "print(x)", "==", "    if", "else:")
OPTIONS = ["--tokenizer", "train:280", "--validation-share", "0.3", "--shard-tokens", "500"]


def make_code(seed: int, lines: int = 12) -> str:
    """A text that breaks no rule."""
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) + "\n" for _ in range(lines))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with 60 Python files in three packages; 20 of them repeat the text of another package."""
    root = tmp_path / "tree"
    for number in range(60):
        package = ("a", "b", "b/inner")[number % 3]
        (root / package).mkdir(parents=True, exist_ok=True)
        seed = number - 1 if number % 3 == 1 else number  # package b repeats package a
        (root / package / f"m{number}.py").write_text(make_code(seed))
    return root


def run(output: Path, *arguments: object) -> int:
    return main([*map(str, arguments), "--output", str(output), *OPTIONS])


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def documents(folder: Path) -> dict[str, list[str]]:
    """The decoded documents of each split of a prepared folder."""
    made = TokenFolder(folder)
    tokenizer = made.tokenizer()
    found = {}
    for split in SPLITS:
        tokens = [np.fromfile(file, "<u2") for file in sorted(folder.glob(f"{split}-*.bin"))]
        found[split] = tokenizer.decode(np.concatenate(tokens).tolist()).split(END)[:-1]
    return found


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_BATCH", 1024)


# Preparation


def test_every_text_is_once_in_one_split(tmp_path: Path, tree: Path, small_batches: None) -> None:
    assert run(tmp_path / "out", tree) == 0
    found = documents(tmp_path / "out")
    train, validation = found["train"], found["validation"]
    assert len(train) > 15 and len(validation) > 5
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted({file.read_text() for file in tree.rglob("*.py")})


def test_copies_under_other_names_change_nothing_but_the_counts(tmp_path: Path, tree: Path) -> None:
    before = FolderFiles([str(tree)])
    for number, file in enumerate(sorted(tree.rglob("*.py"))):
        (tree / f"z{number}.py").write_bytes(file.read_bytes())
    after = FolderFiles([str(tree)])
    assert [d.text for d in after.documents()] == [d.text for d in before.documents()]
    assert after.describe()["sha256"] == before.describe()["sha256"]
    assert after.contents.dropped["duplicate"].files == before.contents.dropped["duplicate"].files + 60


class Killed(BaseException):
    """Simulates a killed process."""


def test_workers_and_interruptions_do_not_matter(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, small_batches: None
) -> None:
    for workers in (1, 3):
        assert run(tmp_path / f"{workers}", tree, "--workers", workers) == 0
    whole = contents(tmp_path / "1")
    assert contents(tmp_path / "3") == whole and sum(name.endswith(".bin") for name in whole) > 4
    left = 0

    def stop(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return function(*args, **kwargs)

        return counted

    kills = 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop(os.replace))
        patch.setattr(os, "fsync", stop(os.fsync))
        patch.setattr(shards.ShardWriter, "add", stop(shards.ShardWriter.add))
        for steps in range(0, 1000, 5):  # each run continues the previous run and is killed later
            left = steps
            try:
                assert run(tmp_path / "cut", tree, "--workers", 1 + steps % 3) == 0
                break
            except Killed:
                kills += 1
    assert kills > 3
    assert contents(tmp_path / "cut") == whole


@pytest.mark.parametrize("count", [2, 5])
def test_parts_have_the_documents_of_the_whole(
    tmp_path: Path, tree: Path, small_batches: None, count: int
) -> None:
    assert run(tmp_path / "one", tree) == 0
    folders = [tmp_path / f"part-{k}" for k in range(1, count + 1)]
    for k, folder in enumerate(folders, 1):
        assert run(folder, tree, "--part", f"{k}/{count}") == 0
        assert TokenFolder(folder).documents("train") > 0
    assert main(["--merge", *map(str, folders), "--output", str(tmp_path / "all")]) == 0
    assert documents(tmp_path / "all") == documents(tmp_path / "one")


@pytest.mark.parametrize("count", range(1, 8))
def test_cuts_divide_the_documents(tree: Path, count: int) -> None:
    source = FolderFiles([str(tree)])
    whole = list(source.documents())
    cuts = [source.cut(source.size * k // count) for k in range(count)]
    assert cuts[0] == 0 and None not in cuts
    ends = [*cuts[1:], source.size]
    assert [
        d
        for start, end in zip(cuts, ends, strict=True)
        for d in source.documents(start or 0)
        if d.next <= end
    ] == whole
    assert source.cut(source.size - 1) is None


def test_another_text_is_refused(tmp_path: Path, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out", tree) == 0
    assert run(tmp_path / "out", tree) == 0
    assert "finished before" in capsys.readouterr().out
    (tree / ".hidden.py").write_text("a file that is dropped changes nothing")
    (tree / "z.py").write_text((tree / "a" / "m0.py").read_text())
    assert run(tmp_path / "out", tree) == 0
    assert "finished before" in capsys.readouterr().out
    file = tree / "a" / "m0.py"
    file.write_text(file.read_text().upper())
    assert run(tmp_path / "out", tree) == 2
    said = capsys.readouterr().err
    assert "was prepared with other settings" in said and f"{tree} sha256" in said
    assert run(tmp_path / "out", tree, "--force") == 0


def test_a_file_that_changes_while_it_is_prepared(tree: Path) -> None:
    source = FolderFiles([str(tree)])
    (tree / "a" / "m0.py").write_text(make_code(1000))
    with pytest.raises(ValueError, match=r"m0\.py has changed while"):
        list(source.documents())


# Choice of files


def test_what_is_dropped_is_counted(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "package").mkdir(parents=True)
    good = make_code(0)
    files = {
        "good.py": good.encode(),
        "package/bom.py": b"\xef\xbb\xbf" + make_code(1).encode(),
        "package/copy.py": good.encode(),
        "package/bom_copy.py": b"\xef\xbb\xbf" + good.encode(),
        "package/.hidden.py": good.encode(),
        "package/latin.py": "é".encode("latin-1") * 200,
        "package/nul.py": good.encode() + b"\0",
        "package/short.py": b"x = 1\n",
        "package/empty.py": b"",
        "package/line.py": f"{good}x = '{'a ' * 600}'\n".encode(),
        "package/wide.py": ("word " * 30 + "\n").encode() * 10,
        "package/symbols.py": b"[[], [], ()],\n" * 20,
        "package/large.py": b"word and word\n" * 80_000,
        "package/other.txt": good.encode(),
        ".git/config.py": good.encode(),
    }
    for name, data in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(data)
    (root / "lost.py").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root)
    (root / "package" / "up").symlink_to("..")
    os.mkfifo(root / "pipe.py")
    found = FolderFiles([str(root)], "*.py").contents
    assert {reason: amount.files for reason, amount in found.dropped.items()} == {
        "duplicate": 2,
        "hidden": 1,
        "not UTF-8 text": 1,
        "a NUL character": 1,
        "fewer than 100 characters": 2,
        "a line of more than 1,000 characters": 1,
        "more than 100 characters a line on average": 1,
        "less than 25% letters and digits": 1,
        "more than 1 MiB": 1,
        "cannot be read": 1,
        "not a regular file": 1,
    }
    assert found.skipped_folders == {"hidden": 1, "link": 2}
    assert {name: amount.files for name, amount in found.kept.items()} == {".": 1, "package": 1}
    said = found.tables()
    assert all(reason in said for reason in found.dropped) and "hidden: 1" in said and "100.0%" in said
    every = FolderFiles([str(root)], "*.py, *.txt", "none").contents
    assert {reason: amount.files for reason, amount in every.dropped.items()} == {
        "duplicate": 3,
        "hidden": 1,
        "not UTF-8 text": 1,
        "a NUL character": 1,
        "empty": 1,
        "cannot be read": 1,
        "not a regular file": 1,
    }


def test_prose_is_kept_without_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "book"
    book.mkdir()
    for number in range(5):
        text = make_code(number)
        (book / f"{number}.txt").write_text(text if number == 0 else text.replace("\n", " "))
    assert run(tmp_path / "code", book) == 0
    said = capsys.readouterr()
    assert "--rules none keeps prose" in said.err and re.search(r"a line on average +4 ", said.out)
    assert run(tmp_path / "none", book, "--rules", "none", "--files", "*.txt") == 0
    said = capsys.readouterr()
    assert "prose" not in said.err and "dropped" not in said.out


def test_the_numbers_in_the_manifest_add_up(tmp_path: Path, tree: Path) -> None:
    (tree / "a" / "short.py").write_text("x")
    assert run(tmp_path / "out", tree) == 0
    (source,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["sources"]
    found = source["contents"]
    files = [file for file in tree.rglob("*") if file.is_file()]
    assert found["found"] == {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}
    for unit in ("files", "bytes"):
        assert found["kept"][unit] == sum(amount[unit] for amount in found["folders"].values())
        dropped = sum(amount[unit] for amount in found["dropped"].values())
        assert found["found"][unit] == found["kept"][unit] + dropped
    assert found["folders"].keys() == {"a", "b"}
    assert found["kept"]["files"] == sum(TokenFolder(tmp_path / "out").documents(split) for split in SPLITS)


def test_the_order_is_that_of_the_paths(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [file.text for file in FolderFiles([str(tree)]).documents()]
    walk = os.walk

    def shuffled(*args: Any, **kwargs: Any) -> Any:
        for place, folders, files in walk(*args, **kwargs):
            random.Random(0).shuffle(folders)
            random.Random(1).shuffle(files)
            yield place, folders, files

    monkeypatch.setattr(os, "walk", shuffled)
    assert [file.text for file in FolderFiles([str(tree)]).documents()] == names


def test_the_result_may_be_inside_the_folder(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run(tree / "data" / "out", tree) == 0
    assert "finished before" in capsys.readouterr().out


def test_a_folder_inside_another_is_read_once(tree: Path) -> None:
    both = FolderFiles([str(tree), str(tree / "b")])
    alone = FolderFiles([str(tree)])
    assert both.contents.plain()["found"] == alone.contents.plain()["found"]
    without = FolderFiles([str(tree)], without=[str(tree / "b")])
    assert without.contents.plain()["found"]["files"] == 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux allows names of files that are not UTF-8")
def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    place = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(place)
    with open(place + b"/a\xfe.py", "w") as file:
        file.write(make_code(0))
    found = FolderFiles([str(tmp_path)])
    assert len(list(found.documents())) == 1
    found.contents.tables().encode()
    json.dumps(found.describe()).encode()


@pytest.mark.parametrize(
    "text, kept",
    [("x" * 1000 + "\n" + "y\n" * 30, True), ("x" * 1001 + "\n" + "y\n" * 30, False), ("x" * 99, False),
     ("x" * 100, True), ("ab" + "-" * 98, False), ("猫" * 50 + "-" * 50, True)],
)  # fmt: skip
def test_limits_of_the_rules(text: str, kept: bool) -> None:
    assert (RULES["code"].broken_by(text) is None) == kept
    assert RULES["none"].broken_by(text) is None


def test_installed_packages() -> None:
    folders, without = installed_folders()
    assert os.path.realpath(sysconfig.get_path("stdlib")) in folders
    assert {os.path.realpath(place) for place in site.getsitepackages() if os.path.isdir(place)} <= {*folders}
    assert len(folders) == len(set(folders)) and all(map(os.path.isabs, without))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{tree}", "{tree}/a/m0.py"], "name files or folders, not both"),
        (["{tree}", "{tree}/../tree"], "named twice"),
        (["{tree}", "--documents", "line"], "each file of a folder is one document"),
        (["{tree}", "--column", "body"], "plain text, which has no columns, but --column is 'body'"),
        (["{tree}/a/m0.py", "--column", "body"], "plain text has no columns, but --column is 'body'"),
        (["{rows}", "--documents", "line"], "--documents is for plain text, but none is named; got 'line'"),
        (["{rows}", "--dataset", "json", "--documents", "line"], "each row of a dataset is one document"),
        (["{tree}", "--files", "*.md"], "no file for the pattern '*.md' is kept"),
        (["{tree}", "--files", "a/*.py"], "a pattern is compared with names of files"),
        (["{tree}/a/m0.py", "--files", "*.py"], "--files and --rules need a folder"),
        (["{tree}/a/m0.py", "--dataset", "text", "--installed"], "leave out --dataset"),
        (["{tree}", "--tokenizer", "train:many"], "train:SIZE"),
        (["{tree}", "--tokenizer", "train:256"], "at least 257"),
        (["{tree}", "--tokenizer", "train:99999999999999"], "at most 10,000,000, got 'train:99999999999999'"),
        (["{tree}", "--files", ""], "no file for the pattern '' is kept"),
        (["--installed", "--verify"], "leave out TEXT"),
        (["{tree}/none"], "no file"),
    ],
)
def test_mistakes(
    tmp_path: Path, tree: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    given = [argument.format(tree=tree, rows=rows) for argument in arguments]
    assert (
        main([*given, "--output", str(tmp_path / "out"), *([] if "--tokenizer" in given else OPTIONS)]) == 2
    )
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


# Tokenizers


def test_a_tokenizer_is_trained_on_training_documents_alone(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = sources([str(tree)])
    hold_out = HoldOut(0.3)
    texts = [document.text for document in read[0].documents()]
    train = [text for text in texts if hold_out.split(text) == "train"]
    assert list(vocabulary.sample(read, hold_out)) == train
    size = sum(len(text.encode()) for text in texts)
    some = list(vocabulary.sample(read, hold_out, size // 3))
    assert 5 < len(some) < len(train) and set(some) < set(train) and some != train[: len(some)]


def test_the_sample_of_a_source_of_unknown_size_is_its_beginning(tmp_path: Path) -> None:
    lines = [make_code(seed, 1) for seed in range(200)]
    file = tmp_path / "a.txt.gz"
    file.write_bytes(gzip.compress("".join(lines).encode()))
    found = list(vocabulary.sample(sources([str(file)], "line"), HoldOut(0.2), 1000))
    train = [line[:-1] for line in lines if HoldOut(0.2).split(line[:-1]) == "train"]
    assert found == train[: len(found)] and len(found) < len(train)
    assert 1000 <= sum(len(text.encode()) + 1 for text in found) < 1100


def test_training_is_deterministic() -> None:
    texts = [make_code(seed, 100) for seed in range(20)]
    made = [train_bpe(iter(texts), 600).to_str() for _ in range(3)]
    assert made[0] == made[1] == made[2]
    assert trained_size("train:600") == 600
    assert trained_size("name/of-tokenizer") is trained_size("train") is None


def test_a_trained_tokenizer_is_kept_and_reused(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, small_batches: None
) -> None:
    output = tmp_path / "out"
    assert run(output, tree) == 0
    text = (tree / "a" / "m0.py").read_text()
    tokenizer = TokenFolder(output).tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text and len(tokenizer) == 280
    whole = contents(output)
    manifest = shards.Manifest.read(output)
    manifest.next = shards.Place()
    manifest.shards = []
    manifest.write(output)
    monkeypatch.setattr(vocabulary, "train_bpe", lambda *_: 1 / 0)
    assert run(output, tree) == 0  # continues with the saved tokenizer
    assert contents(output) == whole
    with pytest.raises(ZeroDivisionError):
        run(output, tree, "--force")


def test_a_small_text_gives_a_small_vocabulary(
    tmp_path: Path, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tree), "--output", str(tmp_path / "out"), "--tokenizer", "train:9000"]) == 0
    size = TokenFolder(tmp_path / "out").vocab_size
    assert size < 9000 and f"too short for 9,000 tokens: made {size}" in capsys.readouterr().err


def test_errors_in_the_text_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    assert run(tmp_path / "out", tmp_path / "a.jsonl") == 2
    said = capsys.readouterr().err
    assert "a.jsonl:2: no text in the column" in said and said.count("\n") == 1
