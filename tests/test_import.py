"""``import deqseq`` imports no optional package. These packages are imported only where they are used."""

import json
import subprocess
import sys

import pytest

HEAVY = ("transformers", "triton", "torchdeq", "matplotlib", "datasets", "mamba_ssm", "fla", "vllm")

COMMANDS = (
    "prepare", "pretrain", "generate", "evaluate.__main__", "reasoning.__main__", "state_tracking.__main__",
    "text_tracking.__main__", "catbabi.__main__",
)  # fmt: skip

STATEMENTS = [
    "import deqseq",
    "import deqseq.solvers, deqseq.backbones, deqseq.curriculum",
    f"import {', '.join(f'deqseq.tasks.{name}' for name in COMMANDS)}",  # so that --help comes at once
]

# Every statement runs in a fork of a process that has imported torch only. Each prints one line.
SCRIPT = """
import json, os, sys, torch

before = set(sys.modules)
for statement in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, statement
        continue
    exec(statement)
    print(json.dumps(sorted(set(sys.modules) - before)), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """The modules that each statement imports, other than those of torch."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *STATEMENTS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(STATEMENTS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("statement", STATEMENTS)
def test_imports(imported: dict[str, list[str]], statement: str) -> None:
    packages = {name.partition(".")[0] for name in imported[statement]}
    assert "deqseq" in packages
    assert not packages & set(HEAVY)


def test_the_core_imports_no_concrete_part(imported: dict[str, list[str]]) -> None:
    assert not any(
        name.startswith(
            ("deqseq.solvers", "deqseq.backbones", "deqseq.guesses", "deqseq.tasks", "deqseq.causal_lm")
        )
        for name in imported["import deqseq"]
    )


def test_everything_announced_is_there() -> None:
    import deqseq

    assert all(hasattr(deqseq, name) for name in deqseq.__all__)
