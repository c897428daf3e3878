"""Tables, and the folders that hold a report's JSON and figure."""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import deqseq

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ResultFolder:
    """The folder of one report: REPORT.json and REPORT.png.

    Made when the results are written. A former result with the same settings is overwritten.

    Args:
        settings: what the results depend on, as JSON knows it.
        force: write beside other files, and over a result with other settings.

    Raises:
        ValueError: the folder holds other files or a result with other settings, without ``force``.
    """

    def __init__(
        self, path: str | Path, report: str, model: str, settings: dict[str, Any], force: bool = False
    ) -> None:
        self.path = Path(path)
        self.json = self.path / f"{report}.json"
        self.figure = self.path / f"{report}.png"
        self._head: dict[str, Any] = {"report": report, "model": model, "settings": settings}
        if not force:
            self._check()

    def write(self, rows: Sequence[Any], model: PreTrainedModel, **more: Any) -> None:
        """Write the rows, a dataclass each, and what they were made with and on."""
        self.path.mkdir(parents=True, exist_ok=True)
        libraries = {name: sys.modules.get(name) for name in ("torch", "transformers", "lm_eval")}
        versions = {name: found.__version__ for name, found in libraries.items() if found}
        result = {
            **self._head,
            "config": json.loads(model.config.to_json_string()),
            "versions": {"deqseq": deqseq.__version__, **versions},
            "machine": describe_machine(model.device),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rows": [asdict(row) for row in rows],
            **more,
        }
        self.json.write_text(json.dumps(_finite(result), indent=2, allow_nan=False) + "\n")

    def _check(self) -> None:
        names = {file.name for file in self.path.iterdir()} if self.path.exists() else set()
        former = self._former()
        if former is not None:
            names -= {self.json.name, self.figure.name}
        if others := sorted(names):
            raise ValueError(
                f"{self.path} holds other files than a former {self._head['report']} report "
                f"({', '.join(others[:3])}): name another folder, or write beside them with --force"
            )
        if former is None:
            return
        before, now = ({"model": h.get("model"), **h.get("settings", {})} for h in (former, self._head))
        if found := changes(before, now):
            raise ValueError(
                f"{self.json} is a result with other settings ({', '.join(found)}): name another folder, "
                "or overwrite it with --force"
            )

    def _former(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.json.read_text())
        except (OSError, ValueError):
            return None
        ours = isinstance(found, dict) and found.get("report") == self._head["report"]
        return found if ours else None


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two settings differ in, in words."""
    return [
        f"{name} {before.get(name)}, now {now.get(name)}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def describe_machine(device: torch.device) -> str:
    """The name of a GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    known = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in known.splitlines() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, threads: {torch.get_num_threads()}"


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


def column(name: str, form: str = "", title: str | None = None) -> Column:
    """An attribute of the rows in a format, under its own name; ``-`` where it is ``None``."""

    def write(row: Any) -> str:
        value = getattr(row, name)
        return "-" if value is None else format(value, form)

    return title or name.replace("_", " "), write
