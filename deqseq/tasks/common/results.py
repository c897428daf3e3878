"""Text tables, and the folders that hold the JSON file and the figure of a report."""

import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import deqseq
from deqseq.tasks.common.command_line import check_folder
from deqseq.tasks.common.files import PART, write_json

Column = tuple[str, Callable[[Any], str]]
"""The title of a column, and the function that maps a row to the text of its cell."""


def table(columns: Sequence[Column], rows: Sequence[Any], form: str = "plain") -> str:
    """The rows as a text table, one line per row. ``form``: one of tabulate's table formats."""
    cells = [[write(row) for _, write in columns] for row in rows]
    titles = [title for title, _ in columns]
    return tabulate(cells, titles, tablefmt=form, stralign="right", disable_numparse=True)


def column(
    name: str, form: str = "", title: str | None = None, of: Callable[[Any], Any] = lambda row: row
) -> Column:
    """A column that shows one attribute of every row, or ``-`` if the attribute is ``None``.

    Args:
        name: name of the attribute.
        form: format specification of the values, such as ``.2f``.
        title: title of the column; by default ``name`` with spaces instead of underscores.
        of: maps a row to the object with the attribute; by default the row itself.
    """

    def write(row: Any) -> str:
        value = getattr(of(row), name)
        return "-" if value is None else format(value, form)

    return title or name.replace("_", " "), write


class ResultFolder:
    """The folder of one report. It holds REPORT.json and REPORT.png, where REPORT is the argument ``report``.

    :meth:`write` makes the folder and overwrites an earlier result with the same settings.

    Args:
        settings: everything that the results depend on, as JSON types.
        force: allow other files in the folder (they are kept) and a result with other settings (it is
            overwritten).

    Raises:
        ValueError: the files cannot be written; without ``force``, the folder holds other files or a result
            with other settings.
    """

    def __init__(
        self, path: str | Path, report: str, model: str, settings: dict[str, Any], force: bool = False
    ) -> None:
        self.path = Path(path)
        self.json = self.path / f"{report}.json"
        self.figure = self.path / f"{report}.png"
        self._head: dict[str, Any] = {"report": report, "model": model, "settings": settings}
        check_folder(self.path, self.json.name, self.figure.name)
        if not force:
            self._check()

    def write(self, rows: Sequence[Any], model: Any, **more: Any) -> None:
        """Write the JSON file: rows (dataclasses), ``more``, model configuration, versions and machine."""
        self.path.mkdir(parents=True, exist_ok=True)
        config = json.loads(model.config.to_json_string())
        made = {**self._head, "config": config, **provenance(model.device)}
        write_json(self.json, {**made, "rows": [asdict(row) for row in rows], **more})

    def _check(self) -> None:
        names = {file.name for file in self.path.iterdir()} if self.path.exists() else set()
        try:
            former = json.loads(self.json.read_text())
            ours = former["report"] == self._head["report"]
        except (OSError, ValueError, TypeError, KeyError):
            ours = False
        own = (self.json.name, self.figure.name)
        names -= {name + PART for name in own}  # leftovers of an interrupted report
        if ours:
            names -= set(own)
        if others := sorted(names):
            raise ValueError(
                f"{self.path} holds other files than a former {self._head['report']} report "
                f"({', '.join(others[:3])}): name another folder, or write beside them with --force"
            )
        if not ours:
            return
        before, now = ({"model": h.get("model"), **h.get("settings", {})} for h in (former, self._head))
        if found := changes(before, now):
            raise ValueError(
                f"{self.json} is a result with other settings ({', '.join(found)}): name another folder "
                "with --output, or overwrite it with --force"
            )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two mappings, each as ``NAME OLD, now NEW``."""
    return [
        f"{name} {before.get(name)}, now {now.get(name)}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions of Python and the loaded libraries, the machine and the date, to be stored with a result."""
    libraries = {name: sys.modules.get(name) for name in ("torch", "transformers", "lm_eval")}
    versions = {name: found.__version__ for name, found in libraries.items() if found}
    return {
        "versions": {"deqseq": deqseq.__version__, "python": platform.python_version(), **versions},
        "machine": describe_machine(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_machine(device: torch.device) -> str:
    """The name of the GPU; without a GPU, the name of the processor and PyTorch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    known = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in known.splitlines() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, threads: {torch.get_num_threads()}"
