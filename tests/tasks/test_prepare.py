"""Tests of the program that writes token shards: interruptions, settings and wrong arguments."""

import errno
import gzip
import io
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deqseq.tasks.common.corpus import TokenFolder, pipeline, shards, storage, vocabulary
from deqseq.tasks.common.corpus.holdout import SPLITS
from deqseq.tasks.common.files import locked
from deqseq.tasks.prepare import main

WORDS = [f"word{i}" for i in range(500)]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, a text file, the same lines as JSONL, and a longer text file."""
    place = tmp_path_factory.mktemp("prepare")
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate([END, *WORDS])}, unk_token=END))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    plain.save(str(place / "tokenizer.json"))
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=20)) for _ in range(400)]
    (place / "text.txt").write_text("\n".join(lines))
    (place / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (place / "long.txt").write_text("\n".join(lines * 60))
    return place


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_BATCH", 4096)


Run = Callable[..., int]


@pytest.fixture
def run(place: Path) -> Run:
    """A function ``run(output, *names, **options)``: runs the program on the files ``names`` in ``place``."""

    def run(output: Path, *names: str, **options: Any) -> int:
        options = {"validation_share": 0.2, "shard_tokens": 1000, **options}
        return main(command(place, output, *names, **options)[3:])

    return run


def command(place: Path, output: Path, *names: str, **options: Any) -> list[str]:
    found = [sys.executable, "-m", "deqseq.tasks.prepare", *(str(place / name) for name in names)]
    for name, value in {"output": output, "tokenizer": place / "tokenizer.json", **options}.items():
        found += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Killed(BaseException):
    """Simulates a killed process."""


class Calls:
    """Lets the next ``left`` calls of chosen functions pass. Later calls raise :class:`Killed`."""

    left = 0

    def stop(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Killed
            return function(*args, **kwargs)

        return counted


def test_interrupted_anywhere_the_result_is_the_same(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, small_batches: None
) -> None:
    names = ("text.txt", "text.jsonl")
    assert run(tmp_path / "whole", *names, workers=1) == 0
    whole = contents(tmp_path / "whole")
    assert sum(name.endswith(".bin") for name in whole) > 10 and not any("part" in name for name in whole)
    calls = Calls()
    output = tmp_path / "cut"
    with monkeypatch.context() as patch:
        # count all calls that write to the disk: the run may be killed at each
        patch.setattr(os, "fsync", calls.stop(os.fsync))
        patch.setattr(os, "replace", calls.stop(os.replace))
        patch.setattr(shards.ShardWriter, "add", calls.stop(shards.ShardWriter.add))
        stopped = 0
        for steps in range(1000):  # each run continues the previous run, and is killed one call later
            calls.left = steps
            try:
                assert run(output, *names, workers=1 + steps % 3) == 0
                break
            except Killed:
                stopped += 1
                # A run that is stopped at its last fsync has already written everything.
                if contents(output) != whole:
                    with pytest.raises(ValueError, match=r"not prepared to its end|no token shards"):
                        TokenFolder(output)
    assert stopped > 10
    assert contents(output) == whole


def tokens(folder: Path) -> dict[str, bytes]:
    """The tokens of each split, as bytes."""
    return {
        split: b"".join(file.read_bytes() for file in sorted(folder.glob(f"{split}-*.bin")))
        for split in SPLITS
    }


@pytest.fixture(scope="module")
def corpus(place: Path) -> list[Path]:
    """Text and JSONL files of different sizes, some of them compressed."""
    folder = place / "corpus"
    folder.mkdir()
    draw = random.Random(1)
    files = []
    for i in range(9):
        lines = [
            " ".join(draw.choices(WORDS, k=draw.randint(1, 40))) for _ in range(draw.choice((3, 60, 300)))
        ]
        text = "".join(line + draw.choice(("\n", "\n\n", "\n \n\n")) for line in lines)
        files.append(folder / f"{i}{('.txt', '.jsonl', '.txt.gz')[i % 3]}")
        if i % 3 == 1:
            text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        files[-1].write_bytes(gzip.compress(text.encode()) if i % 3 == 2 else text.encode())
    return files


@pytest.mark.parametrize("documents", ["line", "blank", "file"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_parts_with_kills_in_between_have_the_tokens_of_one_run(
    tmp_path: Path, run: Run, corpus: list[Path], monkeypatch: pytest.MonkeyPatch, small_batches: None,
    documents: str, count: int,
) -> None:  # fmt: skip
    names = [str(file) for file in corpus]
    options: dict[str, Any] = {"documents": documents, "workers": 1}
    assert run(tmp_path / "one", *names, **options) == 0
    draw = random.Random(count)
    calls = Calls()

    def until_done(work: Callable[[], int]) -> None:
        for kills in range(100):
            calls.left = draw.randrange(8) if kills < 2 else 10**9
            try:
                assert work() == 0
                return
            except Killed:
                pass

    folders = [tmp_path / f"part-{k}" for k in range(1, count + 1)]
    merged = [str(folder) for folder in draw.sample(folders, count)]  # in random order
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "add", calls.stop(shards.ShardWriter.add))
        patch.setattr(os, "replace", calls.stop(os.replace))
        patch.setattr(os, "link", calls.stop(os.link))
        for k, folder in enumerate(folders, 1):
            until_done(partial(run, folder, *names, **options, part=f"{k}/{count}"))
        until_done(lambda: main(["--merge", *merged, "--output", str(tmp_path / "all")]))
    assert tokens(tmp_path / "all") == tokens(tmp_path / "one")
    whole, one = TokenFolder(tmp_path / "all"), TokenFolder(tmp_path / "one")
    whole.verify()
    for split in SPLITS:
        assert whole.documents(split) == one.documents(split)
    assert all(file.stat().st_nlink == 2 for file in (tmp_path / "all").glob("*.bin"))  # hard links
    before = contents(tmp_path / "all")
    # Both runs change nothing: the folder is merged already, and looks as if one run had prepared it.
    assert main(["--merge", *merged, "--output", str(tmp_path / "all")]) == 0
    assert run(tmp_path / "all", *names, **options) == 0
    assert contents(tmp_path / "all") == before


def test_parts_that_do_not_belong_together(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], small_batches: None
) -> None:
    options: dict[str, Any] = {"documents": "line"}
    for k in (1, 2, 3):
        assert run(tmp_path / f"{k}", "text.txt", **options, part=f"{k}/3") == 0
    sizes = [len(tokens(tmp_path / f"{k}")["train"]) for k in (1, 2, 3)]
    assert max(sizes) < 1.3 * min(sizes)  # the parts are balanced
    assert run(tmp_path / "of-2", "text.txt", **options, part="1/2") == 0
    assert run(tmp_path / "other", "text.txt", **options, part="2/3", validation_share=0.3) == 0
    assert run(tmp_path / "half", "text.txt", **options, part="2/3") == 0
    manifest = shards.Manifest.read(tmp_path / "half")
    manifest.next = shards.Place()
    manifest.write(tmp_path / "half")
    capsys.readouterr()
    for parts, message in (
        ((1, 3), "parts are missing: 2/3"),
        ((1, 2, 2, 3), "part 2/3 is given 2 times"),
        ((1, "other", 3), "other settings (hold_out.share 0.2, now 0.3)"),
        ((1, "of-2"), "other settings (part"),
        ((1, "half", 3), "half is not prepared to its end"),
        ((1, "none", 3), "no token shards in"),
    ):
        named = [str(tmp_path / str(part)) for part in parts]
        assert main(["--merge", *named, "--output", str(tmp_path / "all")]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
        assert not (tmp_path / "all").exists()
    for part in ("0/3", "4/3", "3", "a/b", "1/-2"):
        assert run(tmp_path / "out", "text.txt", part=part) == 2
        assert "a part must be K/N" in capsys.readouterr().err
    assert run(tmp_path / "1", "text.txt", **options, part="2/3") == 2  # a folder holds one part only
    assert "part" in capsys.readouterr().err


@pytest.fixture
def two_parts(tmp_path: Path, run: Run, small_batches: None) -> list[str]:
    """Two folders: the first has part 1/2 of tmp_path/own.txt, the second has part 2/2."""
    (tmp_path / "own.txt").write_text("".join(f"word{i % 500} word{i % 7}\n" for i in range(3000)))
    folders = [str(tmp_path / f"part-{k}") for k in (1, 2)]
    for k, folder in enumerate(folders, 1):
        assert run(Path(folder), str(tmp_path / "own.txt"), documents="line", part=f"{k}/2") == 0
    return folders


def test_a_merge_replaces_an_unfinished_preparation(
    tmp_path: Path, run: Run, two_parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = shards.Preparation.commit

    def killed(*args: Any) -> None:
        commit(*args)
        raise Killed

    name, output = str(tmp_path / "own.txt"), tmp_path / "all"
    assert run(tmp_path / "one", name, documents="line") == 0
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shards.Preparation, "commit", killed)
        run(output, name, documents="line")
    assert shards.Manifest.read(output).shards
    assert main(["--merge", *two_parts, "--output", str(output)]) == 0
    TokenFolder(output).verify()
    assert TokenFolder(output).tokens("train") == TokenFolder(tmp_path / "one").tokens("train")
    assert tokens(output) == tokens(tmp_path / "one")


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("force", [False, True])
def test_a_part_is_not_merged_into_itself(
    tmp_path: Path, two_parts: list[str], capsys: pytest.CaptureFixture[str], link: bool, force: bool
) -> None:
    output = tmp_path / "link" if link else Path(two_parts[0])
    if link:
        output.symlink_to(two_parts[0])
    before = contents(tmp_path)
    assert main(["--merge", *two_parts, "--output", str(output), *["--force"] * force]) == 2
    assert f"{output} is one of the parts" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("file", ["train-00000.bin", "tokenizer/tokenizer_config.json"])
def test_a_damaged_part_is_not_merged(
    tmp_path: Path, two_parts: list[str], capsys: pytest.CaptureFixture[str], file: str
) -> None:
    damaged = Path(two_parts[1]) / file
    data = bytearray(damaged.read_bytes())
    data[4] ^= 1
    damaged.write_bytes(data)
    assert main(["--merge", *two_parts, "--output", str(tmp_path / "all")]) == 2
    assert f"{damaged} is corrupted" in capsys.readouterr().err and not (tmp_path / "all").exists()


def test_other_modification_times_of_parts_are_said(
    tmp_path: Path, run: Run, two_parts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["--merge", *two_parts, "--output", str(tmp_path / "all")]) == 0
    assert not caplog.records
    text = tmp_path / "own.txt"
    text.write_bytes(bytes(reversed(text.read_bytes())))  # other bytes, but the same size
    os.utime(text, (1, 1))
    assert run(Path(two_parts[1]), str(text), documents="line", part="2/2", force=True) == 0
    assert main(["--merge", *two_parts, "--output", str(tmp_path / "other")]) == 0
    (record,) = caplog.records
    assert "part-1 and" in record.message and "different modification times" in record.message


def test_parts_of_parquet_and_datasets(tmp_path: Path, run: Run, small_batches: None) -> None:
    draw = random.Random(0)
    rows = {"text": [" ".join(draw.choices(WORDS, k=20)) for _ in range(400)]}
    for i in range(3):
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / f"{i}.parquet", batch_size=40)
    files = [str(tmp_path / f"{i}.parquet") for i in range(3)]
    for name, names, more in (
        ("files", files, {}), ("one", files[:1], {}), ("dataset", files, {"dataset": "parquet"}),
    ):  # fmt: skip
        assert run(tmp_path / name, *names, **more) == 0
        folders = [tmp_path / f"{name}-{k}" for k in (1, 2, 3)]
        for k, folder in enumerate(folders, 1):
            assert run(folder, *names, **more, part=f"{k}/3") == 0
            assert TokenFolder(folder).documents("train") > 80
        assert main(["--merge", *map(str, folders), "--output", str(tmp_path / f"{name}-all")]) == 0
        assert tokens(tmp_path / f"{name}-all") == tokens(tmp_path / name)
    assert run(tmp_path / "out", *files, dataset="parquet", part="1/1000") == 2


def test_killed_for_real_the_result_is_the_same(tmp_path: Path, place: Path, run: Run) -> None:
    options: dict[str, Any] = {"validation_share": 0.2, "shard_tokens": 5000, "documents": "line"}
    assert run(tmp_path / "whole", "long.txt", **options) == 0
    output = tmp_path / "cut"
    for shard in ("train-00001.bin", "train-00006.bin"):
        process = subprocess.Popen(
            command(place, output, "long.txt", **options), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + 60
        while not (output / shard).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        process.kill()
        _, said = process.communicate(timeout=10)
        assert process.returncode == -signal.SIGKILL, said
    assert run(output, "long.txt", **options, workers=3) == 0
    assert contents(output) == contents(tmp_path / "whole")


def test_a_folder_is_prepared_once_at_a_time(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    with locked(output, "prepares"):  # hold the lock, as another process would
        assert run(output, "text.txt") == 2
        assert "another process prepares" in capsys.readouterr().err and not any(output.iterdir())
    assert run(output, "text.txt") == 0
    with locked(output, "prepares", shared=True):  # a run reads the data
        assert run(output, "text.txt") == 0  # nothing is left to do
        assert run(output, "text.txt", force=True) == 2
        assert "another process prepares or trains on" in capsys.readouterr().err


def test_a_second_process_waits_from_the_start(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check, second = pipeline.check, []

    def meanwhile(*args: Any) -> bool:  # called while the first run has the lock but no file
        monkeypatch.setattr(pipeline, "check", check)
        second.append(run(tmp_path / "out", "text.txt"))
        return check(*args)

    monkeypatch.setattr(pipeline, "check", meanwhile)
    assert run(tmp_path / "out", "text.txt") == 0
    assert second == [2] and "another process prepares" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [2, 7])
def test_workers_do_not_matter(tmp_path: Path, run: Run, small_batches: None, workers: int) -> None:
    for count in (1, workers):
        assert run(tmp_path / str(count), "text.txt", workers=count) == 0
    assert contents(tmp_path / str(workers)) == contents(tmp_path / "1")


def test_summary_and_verification(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], small_batches: None
) -> None:
    output = tmp_path / "out"
    assert run(output, "text.jsonl") == 0
    said = capsys.readouterr().out
    held = TokenFolder(output).documents("validation")
    assert f"train {20 * (400 - held) + 400 - held:,} tokens in {400 - held} documents" in said
    assert f"validation {21 * held:,} tokens in {held} documents" in said and "MB/s" in said
    before = contents(output)
    assert run(output, "text.jsonl") == 0  # writes nothing: the folder is complete
    assert "finished before" in capsys.readouterr().out and contents(output) == before
    assert main(["--verify", "--output", str(output)]) == 0
    shard = output / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\x07\x07")
    assert main(["--verify", "--output", str(output)]) == 2
    assert "train-00001.bin is corrupted" in capsys.readouterr().err
    assert run(output, "text.jsonl", force=True) == 0
    assert contents(output) == before


def test_nothing_held_out_is_said(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out", "text.txt", validation_share=1e-9) == 0
    said = capsys.readouterr().err
    assert "nothing was held out" in said and "--force" in said
    assert run(tmp_path / "all", "text.txt", validation_share=0) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_and_sources_are_named(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    small_batches: None, finished: bool,
) -> None:  # fmt: skip
    text = tmp_path / "own.txt"
    text.write_text("word1 word2\n" * 2000)
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        if not finished:
            patch.setattr(pipeline, "_encode", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(output, str(text))
        else:
            assert run(output, str(text)) == 0
    before = contents(output)
    capsys.readouterr()
    for options, difference in (
        ({"validation_share": 0.3}, "hold_out.share 0.2, now 0.3"),
        ({"shard_tokens": 50}, "shard_tokens 1000, now 50"),
        ({"documents": "line"}, f"{text} documents file, now line"),
    ):
        assert run(output, str(text), **options) == 2
        said = capsys.readouterr().err
        assert difference in said and "--force" in said
    assert run(output, str(text), "text.txt") == 2
    assert "sources" in capsys.readouterr().err
    text.write_text("word1 word2\n" * 2001)
    assert run(output, str(text)) == 2
    assert f"{text} bytes 24000, now 24012" in capsys.readouterr().err
    assert contents(output) == before
    assert run(output, str(text), force=True) == 0
    assert run(tmp_path / "anew", str(text)) == 0
    assert contents(output) == contents(tmp_path / "anew")


def test_other_files_stay(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    note = tmp_path / "out" / "note.txt"
    note.parent.mkdir()
    note.write_text("mine")
    assert run(note.parent, "text.txt") == 2
    assert "holds other files (note.txt)" in capsys.readouterr().err and list(note.parent.iterdir()) == [note]
    assert run(note.parent, "text.txt", force=True) == 0
    assert note.read_text() == "mine" and TokenFolder(note.parent).tokens("train")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_tokenizer_of_the_user_stays(
    tmp_path: Path, place: Path, run: Run, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    mine = tmp_path / "out" / "tokenizer"
    file = mine / "tokenizer.json" if kind == "folder" else mine
    file.parent.mkdir(parents=True)
    file.write_bytes((place / "tokenizer.json").read_bytes())
    before = contents(tmp_path)
    assert run(mine.parent, "text.txt", tokenizer=mine) == 2
    assert "holds other files (tokenizer)" in capsys.readouterr().err
    assert run(mine.parent, "text.txt", tokenizer=mine, force=True) == 2
    said = capsys.readouterr().err
    assert f"{mine} was not written by prepare" in said and said.count("\n") == 1
    assert contents(tmp_path) == before


def test_a_prepared_folder_whose_tokenizer_is_a_file(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(output, "text.txt") == 0
    shutil.rmtree(output / "tokenizer")
    (output / "tokenizer").write_text("mine")
    before = contents(output)
    capsys.readouterr()
    assert run(output, "text.txt", force=True) == 2
    said = capsys.readouterr().err
    assert f"{output / 'tokenizer'} was not written by prepare" in said and said.count("\n") == 1
    assert contents(output) == before


def test_force_keeps_the_tokenizer_until_the_new_one_is_complete(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    assert run(output, "text.txt") == 0
    tokenizer = output / "tokenizer"
    options: dict[str, Any] = {"tokenizer": tokenizer, "shard_tokens": 5000, "force": True, "workers": 1}
    assert run(output, "text.txt", **options) == 0  # saving this tokenizer again gives the same bytes
    whole = contents(tokenizer)
    (tokenizer / "note.txt").write_text("mine")
    manifest = shards.Manifest.read(output)
    (tokenizer / "former.txt").write_text("written with a former tokenizer")
    manifest.tokenizer_files["former.txt"] = shards.checksum(tokenizer / "former.txt")
    manifest.write(output)
    calls = Calls()
    with monkeypatch.context() as patch:
        for owner, name in ((os, "replace"), (os, "unlink"), (os, "fsync"), (shutil, "rmtree")):
            patch.setattr(owner, name, calls.stop(getattr(owner, name)))
        patch.setattr(
            PreTrainedTokenizerFast, "save_pretrained", calls.stop(PreTrainedTokenizerFast.save_pretrained)
        )
        for steps in range(1000):
            calls.left = steps
            try:
                assert run(output, "text.txt", **options) == 0
                break
            except Killed:
                found = contents(tokenizer)
                assert {name: found[name] for name in whole} == whole and "note.txt" in found
    assert steps > 5
    assert contents(tokenizer) == {**whole, "note.txt": b"mine"}
    assert shards.Manifest.read(output).tokenizer_files.keys() == whole.keys()


def test_a_full_disk_while_the_tokenizer_is_saved(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path / "out", "text.txt") == 0
    before = contents(tmp_path)
    capsys.readouterr()

    def full(self: Any, place: Path) -> None:
        place.mkdir()
        (place / "tokenizer.json").write_text("{")
        # The tokenizers library raises this class of error too.
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    for output, more in ((tmp_path / "new", {}), (tmp_path / "out", {"force": True})):
        assert run(output, "text.txt", **more) == 2
        said = capsys.readouterr().err
        assert "the tokenizer cannot be saved" in said and "No space left" in said and said.count("\n") == 1
    assert contents(tmp_path) == before


class FullDisk(io.BytesIO):
    """A file that cannot grow."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_the_error_of_a_full_disk_names_the_shard(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *how: FullDisk() if ".bin" in path.suffixes else real(path, *how)
    )
    assert run(tmp_path / "out", "text.txt") == 2
    said = capsys.readouterr().err
    assert "No space left" in said and f"{tmp_path}/out/train-00000.bin" in said and said.count("\n") == 1


def test_the_error_of_a_full_disk_names_the_file_at_every_sync(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, left = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal left
        left -= stat.S_ISREG(os.fstat(handle).st_mode)
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    named = set()
    for syncs in range(100):
        left = syncs
        if run(tmp_path / "out", "text.txt") == 0:
            break
        (name,) = re.findall(rf"No space left on device: '{tmp_path}/out/(.+)'", capsys.readouterr().err)
        named.add(name)
    assert {"manifest.json", "train-00000.bin"} <= named and shards.Manifest.finished(tmp_path / "out")


def test_a_full_disk_while_a_trained_tokenizer_is_saved(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Mock(**{"save.side_effect": Exception("No space left on device (os error 28)")})
    monkeypatch.setattr(vocabulary, "train_bpe", lambda texts, size: trained)
    assert run(tmp_path / "out", "text.txt", tokenizer="train:300") == 2
    assert "tokenizer.json cannot be written: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("finished", [True, False])
def test_another_modification_time_is_said(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], finished: bool
) -> None:
    text, output = tmp_path / "own.txt", tmp_path / "out"
    text.write_text("word1 word2\n" * 2000)
    assert run(output, str(text)) == 0
    if not finished:
        manifest = shards.Manifest.read(output)
        manifest.next = shards.Place()
        manifest.write(output)
    os.utime(text, (1, 1))
    assert run(output, str(text)) == 2
    said = capsys.readouterr().err
    assert "before the modification time of an input changed" in said and "other settings" not in said
    assert ("the folder is finished, --verify checks it" in said) == finished


def test_all_compressions_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    guide = (Path(__file__).parents[2] / "docs/guide/data.md").read_text()
    assert all(suffix in said and suffix in guide for suffix in storage._COMPRESSED)


@pytest.mark.parametrize(
    "names, options, message",
    [
        (("none.txt",), {}, "no file"),
        ((), {}, "nothing to read"),
        (("text.txt",), {"tokenizer": "/none/tokenizer.json"}, "no tokenizer in /none/tokenizer.json"),
        (
            ("text.jsonl",),
            {"column": "body"},
            "text.jsonl:1: no text in the column 'body': its columns are text",
        ),
        (("text.jsonl",), {"dataset": "json", "split": "test"}, "the dataset json cannot be loaded"),
    ],
)
def test_mistakes_come_before_the_work(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], names: tuple[str, ...],
    options: dict[str, Any], message: str,
) -> None:  # fmt: skip
    assert run(tmp_path / "out", *names, **options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options", [{"validation_share": 1}, {"workers": 0}, {"shard_tokens": "many"}, {"verify": True}]
)
def test_arguments_out_of_range(tmp_path: Path, run: Run, options: dict[str, Any]) -> None:
    assert run(tmp_path / "out", "text.txt", **options) == 2
