"""Atomic writes of files (write under another name, sync, rename), their errors, and locks on folders."""

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deqseq.tasks.common.processes import lost

PART = ".part"
"""The suffix of files that are still being written."""


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, atomically. NaN and infinity become null: JSON has no such numbers."""
    part = path.with_name(f"{path.name}{PART}")  # replaces the leftover of a killed process
    text = json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"
    with writing(path), part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    rename(part, path)


def rename(part: Path, path: Path) -> None:
    """Give a synced file its final name, and sync its folder."""
    part.replace(path)
    if os.name == "nt":  # Windows cannot sync folders
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def nearest_folder(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists. Raises ``ValueError`` if it is a file."""
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is not a folder")
    return nearest


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context in which to write the file or folder ``path``.

    It names ``path`` in errors that name no file, such as that of a full disk. It turns errors of other
    packages, such as safetensors, into ``OSError``.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except ValueError:
        raise
    except Exception as error:  # safetensors, tokenizers and torch.save have error classes of their own
        if lost(error):
            raise
        raise OSError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error


@contextmanager
def locked(folder: Path, what: str, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Make ``folder`` if it does not exist, and lock it until the context or the process ends.

    A folder that it made is removed if it is empty in the end. On file systems without locks, nothing is
    locked.

    Args:
        what: a verb for the error message, such as ``"prepares"``: what the lock's owner does to the folder.
        shared: whether other processes may have shared locks at the same time, such as readers.
        wait: if another process has the lock, wait for it.

    Raises:
        ValueError: another process has the lock, and ``wait`` is false.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(handle, kind)
            except BlockingIOError:
                raise ValueError(
                    f"another process {what} {folder}: wait until it ends, or name another folder"
                ) from None
        yield
    finally:
        os.close(handle)
        if made:
            with suppress(OSError):  # rmdir fails if the folder is not empty; then keep it
                folder.rmdir()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
