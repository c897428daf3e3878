"""Python in the README and on the pages of docs/ runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
PAGES = [README, *sorted((README.parent / "docs").glob("*.md"))]
BLOCKS = [
    block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]


@pytest.mark.parametrize("code", BLOCKS)
def test_code_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
