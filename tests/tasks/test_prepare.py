"""The program that makes token shards: interruptions, settings, mistakes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from deqseq.tasks.common.corpus import TokenFolder, pipeline, shards
from deqseq.tasks.common.files import locked
from deqseq.tasks.prepare import main

WORDS = [f"word{i}" for i in range(500)]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, a text, its lines as JSONL, and a longer text."""
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
    """The program on files of the place; ``force=True`` is ``--force``."""

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
    """All files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Killed(BaseException):
    """Stands for the end of the process."""


def test_interrupted_anywhere_the_result_is_the_same(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, small_batches: None
) -> None:
    names = ("text.txt", "text.jsonl")
    assert run(tmp_path / "whole", *names, workers=1) == 0
    whole = contents(tmp_path / "whole")
    assert sum(name.endswith(".bin") for name in whole) > 10 and not any("part" in name for name in whole)
    left = 0

    def stops(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return function(*args, **kwargs)

        return counted

    output = tmp_path / "cut"
    with monkeypatch.context() as patch:
        # every step that leaves a trace on the disk
        patch.setattr(os, "fsync", stops(os.fsync))
        patch.setattr(os, "replace", stops(os.replace))
        patch.setattr(shards.ShardWriter, "add", stops(shards.ShardWriter.add))
        stopped = 0
        for steps in range(1000):  # goes on with what the run before has left, and gets one step further
            left = steps
            try:
                assert run(output, *names, workers=1 + steps % 3) == 0
                break
            except Killed:
                stopped += 1
                if contents(output) != whole:  # the last step is to wait for the disk
                    with pytest.raises(ValueError, match=r"not prepared to its end|no token shards"):
                        TokenFolder(output)
    assert stopped > 10
    assert contents(output) == whole


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
    with locked(output, "prepares"):  # as another process would
        assert run(output, "text.txt") == 2
        assert "another process prepares" in capsys.readouterr().err and not any(output.iterdir())
    assert run(output, "text.txt") == 0


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
    assert run(output, "text.jsonl") == 0  # nothing left to do
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
    assert "nothing was held out" in capsys.readouterr().err
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
