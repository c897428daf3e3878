"""Programs accept every command in the README, CONTRIBUTING and docs/.

Each command runs only until its arguments are parsed. A test fails if the program refuses the arguments, for
example because a flag is unknown or a value is missing. Some commands, such as those with ``--help``, end
before the arguments are parsed; their exit status must be 0.

These tests do not check that a program works. So they also fail if no other test runs the program.
"""

import argparse
import re
import runpy
import shlex
import shutil
import string
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from deqseq.tasks.common import command_line
from deqseq.tasks.pretraining import plan, train

ROOT = Path(__file__).parents[1]
SERVING = ROOT / "docs" / "serving.md"  # tests/vllm/test_page.py runs its commands
DOCS = sorted({*(ROOT / "docs").rglob("*.md")} - {SERVING})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
TESTS = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))


def commands(page: str) -> Iterator[list[str]]:
    """The commands in a page's shell code blocks. A backslash at the end of a line continues the command.

    The line ``NAME="..."`` defines ``$NAME`` for the rest of its code block.
    """
    for block in re.findall(r"^```(?:sh|bash)?\n(.*?)^```", _closed(page), re.DOTALL | re.MULTILINE):
        names: dict[str, str] = {}
        line = ""
        for part in block.replace("\\\n", " ").splitlines():
            line += f"{part} "
            try:
                words = shlex.split(string.Template(line).safe_substitute(names), comments=True)
            except ValueError:  # an open quote continues on the next line
                continue
            line = ""
            if len(words) == 1 and "=" in words[0]:
                name, _, names[name] = words[0].partition("=")
            elif words:
                yield words
        assert not line, f"this quotation has no end: {line}"


def _closed(page: str) -> str:
    """The page without code blocks of other languages, such as Python.

    The last line of such a block is removed too, because it looks like the first line of a shell block.
    """
    return re.sub(r"^```(?!sh\n|bash\n)\w+\n.*?^```\n", "", page, flags=re.DOTALL | re.MULTILINE)


CASES = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}")
    for page in PAGES
    for words in commands(page.read_text())
]


class Parsed(BaseException):
    """Raised once the arguments are parsed, to skip the program's work."""


@pytest.fixture(autouse=True)
def stop_before_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make programs stop once they have parsed their arguments. They run in an empty folder."""

    def parsed(*args: Any, **options: Any) -> NoReturn:
        raise Parsed

    def then_stop(parse: Any) -> Any:
        def stopping(self: Any, *args: Any, **options: Any) -> Any:
            found = parse(self, *args, **options)
            if any(action.nargs == argparse.REMAINDER for action in self._actions):
                return found  # another parser reads the remaining arguments
            raise Parsed

        return stopping

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", then_stop(argparse.ArgumentParser.parse_args))
    execute = command_line.execute

    def unless_a_run_file_has_the_rest(command: Any, values: Any) -> None:
        if command.__module__.endswith("pretrain"):
            execute(command, values)
        raise Parsed

    monkeypatch.setattr(command_line, "execute", unless_a_run_file_has_the_rest)
    # Pretraining parses its flags, then checks the fields of the run file, then calls one of these functions.
    monkeypatch.setattr(plan, "describe", parsed)
    monkeypatch.setattr(train, "pretrain", parsed)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:  # modules of benchmarks may hold a replaced function
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the program refuses the command, or if no other test runs the program."""
    while re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    match words:
        case ["make", *rest]:
            for line in _recipe(rest):
                check(line, monkeypatch)
        case ["python", "-m", module, *arguments]:
            parent, _, name = module.rpartition(".")
            imported = rf"from {re.escape(module)}\b|from {re.escape(parent)} import .*\b{name}\b"
            assert re.search(imported, TESTS), f"no test runs {module}"
            _run(lambda: runpy.run_module(module, run_name="__main__"), [module, *arguments], monkeypatch)
        case ["python", script, *arguments]:
            path = ROOT / script
            assert path.name in TESTS, f"no test runs {script}"
            monkeypatch.syspath_prepend(path.parent)
            monkeypatch.delitem(sys.modules, "common", raising=False)
            _run(lambda: runpy.run_path(str(path), run_name="__main__"), [str(path), *arguments], monkeypatch)
        case ["export", *_]:
            pass
        case ["srun", *command]:
            check(command, monkeypatch)
        case ["torchrun", *arguments]:
            launched, _ = get_args_parser().parse_known_args(arguments)
            module = ".".join(("deqseq", *Path(launched.training_script).with_suffix("").parts))
            check(["python", "-m", module, *launched.training_script_args], monkeypatch)
        case ["accelerate", "launch", *arguments]:
            found, _ = launch_command_parser().parse_known_args(arguments)
            assert found.config_file is None or (ROOT / found.config_file).is_file(), found.config_file
            script = Path(found.training_script)
            assert (ROOT / script).is_file(), script
            module = ".".join(("deqseq", *script.with_suffix("").parts))
            check(["python", "-m", module, *found.training_script_args], monkeypatch)
        case ["lm_eval", *arguments]:
            installed = "lm-eval is not installed: pip install 'deqseq[eval]'"
            program = pytest.importorskip("lm_eval.__main__", reason=installed)
            assert 'run_module("lm_eval"' in TESTS, "no test runs lm_eval"
            _run(lambda: program.HarnessCLI().parse_args(), ["lm_eval", *arguments], monkeypatch)
        case ["pip", "install", *targets]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            for target in targets:
                extras = re.fullmatch(r"\.(?:\[(.*)\])?", target)
                assert extras, f"{target} is not this repository"
                assert {*filter(None, (extras[1] or "").split(","))} <= {*project["optional-dependencies"]}
        case _:
            pytest.fail(f"no test covers this command: {shlex.join(words)}")


def _run(program: Callable[[], object], argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    try:
        program()
    except Parsed:
        return
    except SystemExit as end:
        assert not end.code, f"{shlex.join(argv)} ends with status {end.code}"


def _recipe(arguments: list[str]) -> list[list[str]]:
    """The commands of this library (``-m deqseq...``) that ``make`` would run with these arguments."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    venv = ".venv"
    made = [f"--old-file={venv}/{stamp}" for stamp in (".installed", ".installed-docs")]
    dry = ["make", "--dry-run", f"VENV={venv}", *made, *arguments]
    done = subprocess.run(dry, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line, comments=True) for line in done.stdout.splitlines() if "-m deqseq" in line]
    return [["python" if word == f"{venv}/bin/python" else word for word in line] for line in lines]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("words", CASES)
def test_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check(words, monkeypatch)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    "wrong",
    [
        "python -m deqseq.tasks.prepare book.txt --output data --nothing",
        "python -m deqseq.tasks.pretrain llama-130m --data data --nothing 3",
        "python -m deqseq.tasks.state_tracking train --output run --nothing 3",
        "python -m deqseq.tasks.state_tracking evaluate",
        "python -m deqseq.tasks.nothing",
        "python benchmarks/nothing.py",
        "python benchmarks/leak.py --nothing",
        "accelerate launch --num_processes 2 tasks/pretrain.py llama-130m --data data --nothing 3",
        "accelerate launch --config_file nothing.yaml tasks/pretrain.py llama-130m --data data",
        "pip install '.[nothing]'",
        "pip install nothing",
        "make nothing",
        "make demo ARGS='--nothing 3'",
        "nothing",
    ],
)
def test_wrong_commands_are_seen(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(shlex.split(wrong), monkeypatch)


def test_commands_are_found_where_they_stand() -> None:
    fences = [
        "```python\nno\n```",
        '```\nR="--x\n1"\na $R \\\n  b  # c\n\nd e\n```',
        "```text\nno\n```",
        "```sh\nf\n```",
    ]
    page = "\n\nno\n\n".join(fences)
    assert list(commands(page)) == [["a", "--x", "1", "b"], ["d", "e"], ["f"]]
    assert len(CASES) > 25
