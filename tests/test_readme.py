"""The README's Python runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_code_of_the_readme_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_files_of_the_reading_order_exist() -> None:
    listing = re.search(r"reading order\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert listing is not None
    root, folder = README.parent, README.parent
    for line in listing[1].splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = root / name
            assert folder.is_dir(), name
        else:
            assert (folder / name.rstrip(",")).exists(), line
