"""What the benchmark scripts share: timing, tables, JSON."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def stopwatch(function: Callable[[], Any], device: str = "cpu") -> float:
    """Seconds that ``function`` takes, the device's queue included."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def describe_machine(device: str) -> dict[str, Any]:
    """What a number depends on: device, threads, versions."""
    name = torch.cuda.get_device_name(device) if device != "cpu" else _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if _has_cpuinfo() else ():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} threads"
    return platform.processor() or platform.machine()


def _has_cpuinfo() -> bool:
    return Path("/proc/cpuinfo").exists()


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal keys in aligned columns."""
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    print(title)
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if value and abs(value) < 1e-2 else f"{value:.3f}"
    return "-" if value is None else str(value)


def finish(path: str, result: Mapping[str, Any]) -> None:
    """Write ``result`` as JSON and say where."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {file}")
