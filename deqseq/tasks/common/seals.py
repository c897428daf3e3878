"""Writes and checks seals. A seal shows whether the files of a folder are complete and unchanged.

A seal is the file ``complete.json``, written last. It lists the files with their sizes and checksums. A
folder without a seal is incomplete.

To compute a checksum, a file is cut into blocks of 16 MiB. Each block is hashed with XXH3 (128 bits). The
checksum is the XXH3 of these hashes.
"""

import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xxhash import xxh3_128

from deqseq.tasks.common.files import PART, write_json, writing

logger = logging.getLogger(__name__)

SEAL = "complete.json"
_BLOCK = 2**24
_THREADS = min(8, os.cpu_count() or 1)  # for hashing in parallel; xxhash releases Python's GIL


def seal(folder: Path, files: Iterable[Path] | None = None) -> None:
    """Sync ``files`` to the disk, and write the seal.

    By default, ``files`` are all files in ``folder``, except the seal and what an interrupted write has left.
    """
    found = sorted(path for path in files or folder.rglob("*") if path.is_file())
    found = [path for path in found if path.name != SEAL and path.suffix != PART]
    with writing(folder), ThreadPoolExecutor(1) as disk:  # compute checksums while the disk writes
        synced = disk.map(_sync, found)
        listed = {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3_128": checksum}
            for path, checksum in zip(found, _checksums(found), strict=True)
        }
        list(synced)  # raises the error if a sync failed
    write_json(folder / SEAL, listed)


def unseal(folder: Path) -> None:
    """Remove the seal of a folder that is damaged, or about to be rewritten or removed.

    If ``folder`` is a symbolic link, remove the link only. The folder that it points to keeps its seal.
    """
    if folder.is_symlink():
        folder.unlink(missing_ok=True)  # another process may have removed the link
    elif (folder / SEAL).is_dir():  # a folder blocks the name of the seal: remove it
        shutil.rmtree(folder / SEAL)
    else:
        (folder / SEAL).unlink(missing_ok=True)


def fault(folder: Path, content: bool = True) -> str | None:
    """Compare a folder with its seal. Returns ``None`` if the folder matches the seal.

    Otherwise returns a text that says what is wrong, such as ``"was not written to its end"``.

    Args:
        content: also compare checksums, for which every file must be read. Seals of version 0.1 have no
            checksums.

    Raises:
        OSError: a file exists but cannot be read. Then it is unknown whether the folder matches its seal.
    """
    try:
        return _fault(folder, content)
    except OSError as error:
        raise OSError(f"{folder} cannot be read: {error}") from error


def _fault(folder: Path, content: bool) -> str | None:
    try:
        listed = json.loads((folder / SEAL).read_text())
    except FileNotFoundError:
        return "was not written to its end"
    except (IsADirectoryError, ValueError):
        return f"is damaged: {SEAL} cannot be read"
    if not isinstance(listed, dict) or not listed:
        return f"is damaged: {SEAL} lists no files"
    files = {name: entry if isinstance(entry, dict) else {"bytes": entry} for name, entry in listed.items()}
    for name, entry in files.items():
        try:
            found = (folder / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if found is None or not stat.S_ISREG(found.st_mode):
            return f"is damaged: {name} is missing"
        if found.st_size != entry.get("bytes"):
            return f"is damaged: {name} has {found.st_size} bytes instead of {entry.get('bytes')}"
    if content:
        try:
            checksums = _checksums([folder / name for name in files])
        except FileNotFoundError as error:  # another process has removed the file since it was found above
            return f"is damaged: {os.path.relpath(error.filename, folder)} is missing"
        for (name, entry), checksum in zip(files.items(), checksums, strict=True):
            if entry.get("xxh3_128", checksum) != checksum:
                return f"is damaged: the checksum of {name} is not the one in {SEAL}"
    return None


def checkpoints(run: Path) -> list[Path]:
    """The folders ``checkpoint-STEP`` of a run, sorted by step."""
    found = [path for path in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step at which a checkpoint was written, read from the name of its folder."""
    return int(checkpoint.name.partition("-")[2])


def rotate(run: Path, keep: int | None) -> None:
    """Keep the last ``keep`` complete checkpoints, and remove all other checkpoints.

    If ``keep`` is ``None``, keep all complete checkpoints. If a folder shares no file name with the complete
    checkpoints, keep it, because it is probably not a checkpoint. If a checkpoint cannot be read, remove
    nothing.
    """
    found = checkpoints(run)
    try:
        whole = [path for path in found if fault(path, content=False) is None]
    except OSError as error:
        logger.warning("old checkpoints are not removed: %s", error)
        return
    kept = whole if keep is None else whole[-keep:]
    usual = {name for path in whole for name in os.listdir(path)}
    for path in found:
        if path in kept:
            continue
        try:
            names = os.listdir(path)
            if names and usual.isdisjoint(names):
                continue
            unseal(path)  # first, so that an interrupted removal leaves a checkpoint without seal
            if path.exists():  # ``unseal`` has already removed a path that is a link
                shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path, error)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _checksums(files: Sequence[Path]) -> list[str]:
    """The checksum of every file. Several threads hash the blocks of the files."""
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
