"""Seals: a seal shows whether the files of a folder are complete and unchanged.

A seal is the file ``complete.json``, written last. It lists the files with their sizes and checksums. A
folder without a seal is incomplete.

To compute a checksum, a file is cut into blocks of 16 MiB. Each block is hashed with XXH3 (128 bits). The
checksum is the XXH3 of these hashes.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xxhash import xxh3_128

from deqseq.tasks.common.files import write_json

logger = logging.getLogger(__name__)

SEAL = "complete.json"
_BLOCK = 2**24
_THREADS = min(8, os.cpu_count() or 1)  # for checksums; xxhash releases Python's lock


def seal(folder: Path, files: Iterable[Path] | None = None) -> None:
    """Sync the files to the disk and write the seal. ``files``: all files in ``folder`` by default."""
    found = sorted(path for path in files or folder.rglob("*") if path.is_file() and path.name != SEAL)
    with ThreadPoolExecutor(1) as disk:  # compute checksums while the disk writes
        synced = disk.map(_sync, found)
        listed = {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3_128": checksum}
            for path, checksum in zip(found, _checksums(found), strict=True)
        }
        list(synced)  # raises the error if a sync failed
    write_json(folder / SEAL, listed)


def unseal(folder: Path) -> None:
    """Remove the seal of a folder: it is damaged, or about to be rewritten or removed."""
    (folder / SEAL).unlink(missing_ok=True)


def fault(folder: Path, content: bool = True) -> str | None:
    """What is wrong with a folder, such as ``"was not written to its end"``; ``None`` if it matches its seal.

    Args:
        content: also compare checksums, which reads every file. Seals of version 0.1 have no checksums.
    """
    try:
        listed = json.loads((folder / SEAL).read_text())
    except FileNotFoundError:
        return "was not written to its end"
    except (OSError, ValueError):
        return f"is damaged: {SEAL} cannot be read"
    if not isinstance(listed, dict) or not listed:
        return f"is damaged: {SEAL} lists no files"
    files = [
        (folder / name, entry if isinstance(entry, dict) else {"bytes": entry})
        for name, entry in listed.items()
    ]
    try:
        for path, entry in files:
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                return f"is damaged: {path.relative_to(folder)} is missing"
            if size != entry.get("bytes"):
                return (
                    f"is damaged: {path.relative_to(folder)} has {size} bytes instead of {entry.get('bytes')}"
                )
        if content:
            checksums = _checksums([path for path, _ in files])
            for (path, entry), checksum in zip(files, checksums, strict=True):
                if entry.get("xxh3_128", checksum) != checksum:
                    return f"is damaged: the checksum of {path.relative_to(folder)} is not the one in {SEAL}"
    except OSError as error:
        return f"cannot be read: {error}"
    return None


def checkpoints(run: Path) -> list[Path]:
    """The folders ``checkpoint-STEP`` of a run, the oldest first."""
    found = [path for path in run.glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step at which a checkpoint was written, from its name."""
    return int(checkpoint.name.partition("-")[2])


def rotate(run: Path, keep: int | None) -> None:
    """Keep the last ``keep`` complete checkpoints (``None``: all complete ones), and remove all others."""
    found = checkpoints(run)
    whole = [path for path in found if fault(path, content=False) is None]
    kept = whole if keep is None else whole[-keep:]
    for path in found:
        if path not in kept:
            unseal(path)  # after an interrupted removal, the checkpoint is incomplete
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", path, error)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _checksums(files: Sequence[Path]) -> list[str]:
    """Checksums of files. Several threads hash the blocks."""
    blocks = [(path, start) for path in files for start in range(0, max(path.stat().st_size, 1), _BLOCK)]
    whole = {path: xxh3_128() for path in files}
    with ThreadPoolExecutor(_THREADS) as pool:
        for (path, _), digest in zip(blocks, pool.map(_block_digest, blocks), strict=True):
            whole[path].update(digest)
    return [whole[path].hexdigest() for path in files]


def _block_digest(block: tuple[Path, int]) -> bytes:
    path, start = block
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        return xxh3_128(file.read(_BLOCK)).digest()
