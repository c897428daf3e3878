"""What the benchmark scripts share: timing, tables, JSON, grids that go on where they stopped."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm


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
    """Print rows in aligned columns, which are those of all rows."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    print(title)
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if value and not 1e-2 <= abs(value) < 1e5 else f"{value:.3f}"
    return "-" if value is None else str(value)


def measure_grid(
    file: Path, keys: Sequence[Mapping[str, Any]], measure: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The rows ``{**key, **measure(key)}``, written to ``file`` (JSON lines) as they come.

    Rows that the file holds already are not measured again. A measurement that raises leaves its error as
    the row's ``problem``; it is not written, so that it is tried again the next time.

    Raises:
        ValueError: the file holds something else.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    known = _read_rows(file)
    rows = []
    for key in (bar := tqdm(keys, unit="row")):
        bar.set_postfix_str(" ".join(str(value) for value in key.values()))
        row = next((row for row in known if key.items() <= row.items()), None)
        if row is None:
            try:
                row = {**key, **measure(key)}
            except (RuntimeError, ValueError, ImportError) as error:
                row = {**key, "problem": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
            else:
                with file.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
        rows.append(row)
    return rows


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of ``file``; a last line that was cut off while it was written is dropped from it."""
    if not file.exists():
        return []
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(dict(json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file} cannot be read, line {number} is no row: {error}") from error
    if whole != text:
        part = file.with_suffix(".part")
        part.write_text(whole)
        part.replace(file)
    return rows


def checksum(model: torch.nn.Module, *inputs: Tensor) -> str:
    """Twelve hexadecimal digits that tell a model's weights, and its inputs, from others."""
    digest = hashlib.sha256()
    for values in (*model.state_dict().values(), *inputs):
        digest.update(str((values.dtype, tuple(values.shape))).encode())
        digest.update(values.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def peak_mib(function: Callable[[], Any], device: str) -> float | None:
    """MiB that ``function`` allocates at its peak, beyond what was allocated before; CUDA only."""
    if device == "cpu":
        function()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def finish(path: str, result: Mapping[str, Any]) -> None:
    """Write ``result`` as JSON and say where."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {file}")
