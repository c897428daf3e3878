"""``import deqseq`` imports no optional package. These packages are imported only where they are used."""

import subprocess
import sys

import pytest

HEAVY = ("transformers", "triton", "torchdeq", "matplotlib", "datasets", "mamba_ssm", "fla", "vllm")

COMMANDS = (
    "prepare", "pretrain", "generate", "evaluate.__main__", "reasoning.__main__", "state_tracking.__main__",
    "text_tracking.__main__", "catbabi.__main__",
)  # fmt: skip


def modules_after(statement: str) -> set[str]:
    code = f"import sys, torch; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return {name.partition(".")[0] for name in done.stdout.split()} | set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import deqseq",
        "import deqseq.solvers, deqseq.backbones, deqseq.curriculum",
        f"import {', '.join(f'deqseq.tasks.{name}' for name in COMMANDS)}",  # so that --help comes at once
    ],
)
def test_imports(statement: str) -> None:
    found = modules_after(statement)
    assert "deqseq" in found
    assert not found & set(HEAVY)


def test_the_core_imports_no_concrete_part() -> None:
    found = modules_after("import deqseq")
    assert not any(
        name.startswith(
            ("deqseq.solvers", "deqseq.backbones", "deqseq.guesses", "deqseq.tasks", "deqseq.causal_lm")
        )
        for name in found
    )


def test_everything_announced_is_there() -> None:
    import deqseq

    assert all(hasattr(deqseq, name) for name in deqseq.__all__)
