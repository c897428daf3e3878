"""Files that are whole at every moment: written under another name, synced, then renamed."""

import json
import math
import os
from pathlib import Path
from typing import Any

PART = ".part"
"""The end of the names of files that are still being written."""


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON in one step. NaN and infinity, which JSON does not have, become null."""
    part = path.with_name(f"{path.name}{PART}")  # the next write replaces what a killed one left
    with part.open("w") as file:
        file.write(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    rename(part, path)


def rename(part: Path, path: Path) -> None:
    """Give a synced file its final name, and sync its folder."""
    part.replace(path)
    if os.name == "nt":  # folders cannot be synced there
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
