"""Tables, and the folders that hold a report's JSON and figure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers


class ResultFolder:
    """The folder of one report: REPORT.json and REPORT.png.

    Made when the results are written. A former result of the same report is overwritten.

    Raises:
        ValueError: the folder holds other files, and they are not to be kept company (``force``).
    """

    def __init__(self, path: str | Path, report: str, force: bool = False) -> None:
        self.path = Path(path)
        self.report = report
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{path} is a file: name a folder for the results")
        others = self._others()
        if others and not force:
            raise ValueError(
                f"{path} holds other files than a former {report} report ({', '.join(others[:3])}): name "
                "another folder, or write beside them with --force"
            )

    @property
    def json(self) -> Path:
        return self.path / f"{self.report}.json"

    @property
    def figure(self) -> Path:
        return self.path / f"{self.report}.png"

    def write(self, model: str, settings: dict[str, Any], rows: Sequence[Any], **more: Any) -> None:
        """Write the rows, a dataclass each, and what they were made with."""
        self.path.mkdir(parents=True, exist_ok=True)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        result = {
            "report": self.report,
            "model": model,
            "settings": settings,
            "versions": versions,
            "rows": [asdict(row) for row in rows],
            **more,
        }
        self.json.write_text(json.dumps(_finite(result), indent=2, allow_nan=False) + "\n")

    def _others(self) -> list[str]:
        if not self.path.exists():
            return []
        names = {file.name for file in self.path.iterdir()}
        return sorted(names - {self.json.name, self.figure.name} if self._is_former() else names)

    def _is_former(self) -> bool:
        try:
            found = json.loads(self.json.read_text())
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and found.get("report") == self.report


def _finite(value: Any) -> Any:
    """JSON knows no infinity and no NaN; they become null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Column = tuple[str, Callable[[Any], str]]


def table(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """The rows as text, one line each; a column is its title and what to write for a row."""
    lines = [[title for title, _ in columns], *([write(row) for _, write in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def column(title: str, name: str, form: str = "") -> Column:
    """An attribute of the rows in a format; ``-`` where it is ``None``."""

    def write(row: Any) -> str:
        value = getattr(row, name)
        return "-" if value is None else format(value, form)

    return title, write


def window_label(row: Any) -> str:
    """The window of a score; ``-`` for an explicit model."""
    return "-" if row.policy is None else "all" if row.window is None else str(row.window)
