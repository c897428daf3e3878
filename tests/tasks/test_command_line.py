"""Tests that a program that fails prints one line about the error and returns an exit status."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deqseq.tasks import generate, prepare, pretrain
from deqseq.tasks.catbabi import __main__ as catbabi
from deqseq.tasks.common import command_line
from deqseq.tasks.evaluate import __main__ as evaluate
from deqseq.tasks.pretraining.faults import Diverged
from deqseq.tasks.reasoning import __main__ as reasoning
from deqseq.tasks.state_tracking import __main__ as state_tracking

PROGRAMS = [
    (prepare, ["text.txt", "--output", "out"]),
    (prepare, ["--verify", "--output", "out"]),
    (generate, ["model", "prompt"]),
    (evaluate, ["perplexity", "model", "--text", "text.txt"]),
    (pretrain, ["llama-tiny"]),
    (pretrain, ["compare", "run"]),
    (pretrain, ["demo"]),
    (state_tracking, ["train", "--output", "run"]),
    (state_tracking, ["evaluate", "run"]),
    (state_tracking, ["data", "S3=4.csv"]),
    (state_tracking, ["demo"]),
    (catbabi, ["train", "--data", "data", "--output", "run"]),
]


@pytest.mark.parametrize(("program", "arguments"), PROGRAMS)
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("damping must be in (0, 1], got 2"), 2, "error: damping must be in (0, 1], got 2"),
        (PermissionError("not yours"), 2, "error: not yours"),
        (Diverged("step 3: the loss is nan"), 1, "error: step 3: the loss is nan"),
        (KeyboardInterrupt(), 130, "interrupted; "),
    ],
)
def test_every_program_ends_with_one_line(
    program: Any, arguments: list[str], error: BaseException, status: int, said: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "execute", fail)
    assert program.main(arguments) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("program", "arguments", "value"),
    [
        (pretrain, ["--help"], "null"),
        (pretrain, ["llama-tiny", "--help"], "0.002"),
        (pretrain, ["--data", "x", "{file}", "-h"], "0.123"),
        (reasoning, ["train", "{file}", "--help"], "0.123"),
        (state_tracking, ["train", "--run", "{file}", "--help"], "0.123"),
        (state_tracking, ["train", "--help"], "0.006"),
    ],
)
def test_help_shows_the_values_of_the_run(
    program: Any, arguments: list[str], value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(("base: llama-tiny\n" if program is pretrain else "") + "learning_rate: 0.123")
    with pytest.raises(SystemExit) as end:
        program.main([argument.format(file=file) for argument in arguments])
    shown = " ".join(capsys.readouterr().out.split())
    found = re.search(r"highest learning rate[^()]*\(type: positive, finite number, default: (\S+)\)", shown)
    assert not end.value.code and found is not None and found[1] == value


def test_help_shows_types_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reasoning.main(["solve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "folder of a trained run (required, type: Path)" in shown and "<class" not in shown


def test_help_of_a_run_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main(["nothing", "--help"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no 'nothing': name a YAML file, or one of ")


def _read(*, number: str) -> None:
    """Read a number."""
    {"two": 2}[number] if number.isalpha() else int(number)


def _main(number: str) -> int:
    return command_line.main("read", "", {"read": _read}, ["read", "--number", number], interrupted="nothing")


def test_faults_of_ours_show_where() -> None:
    with pytest.raises(KeyError):
        _main("missing")


def test_one_process_speaks_for_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert _main("1.5") == 2
    assert capsys.readouterr().err == ""


def test_packages_that_log_at_import_add_no_lines(tmp_path: Path) -> None:
    """torchao does, if it is installed. transformers shows errors only, and no progress bars.

    In this process, both have been imported already.
    """
    code = """
import atexit, runpy, sys

@atexit.register
def verbosity() -> None:
    from transformers.utils import logging
    print(logging.get_verbosity() == logging.ERROR, logging.is_progress_bar_enabled())

runpy.run_module("deqseq.tasks.reasoning", run_name="__main__", alter_sys=True)
"""
    names = ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", code, "solve", str(tmp_path), "1234"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path} ") and done.stderr.count("\n") == 1
    assert done.stdout == "True False\n"
