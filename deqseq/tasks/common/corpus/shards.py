"""The folder of token shards: its manifest, how it is written so that it can be interrupted, what is checked.

A shard is a run of tokens, little-endian uint16 or uint32 without a header, of one split. ``manifest.json``
names the finished shards and what they were made of; whatever it does not name does not count. A shard gets
its name when it is on the disk in full, and the manifest changes in one step after that. So the folder is
good at every moment, and a process that is killed loses the shards it was writing, no more.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deqseq.tasks.common.corpus.holdout import SPLITS, Split
from deqseq.tasks.common.results import changes

VERSION = 1
_MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
_UNFINISHED = ".part"


@dataclass(frozen=True)
class Shard:
    """One file of tokens.

    Attributes:
        file: its name in the folder.
        documents: that end in it.
        sha256: checksum of its bytes.
    """

    file: str
    split: Split
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Place:
    """Where reading goes on: a source, by its number, and an offset that it understands."""

    source: int = 0
    offset: int = 0


class Manifest:
    """What a folder holds and what it was made of.

    Attributes:
        head: tokenizer, sources and settings.
        next: where an unfinished preparation goes on; ``None``: it is finished.
        shards: the finished ones.
    """

    def __init__(self, head: dict[str, Any], next: Place | None = None, shards: Sequence[Shard] = ()) -> None:
        self.head = head
        self.next = next
        self.shards = list(shards)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            ValueError: none there, of another version, or shards that are missing or too short.
        """
        path = folder / _MANIFEST
        if not path.is_file():
            raise ValueError(f"no token shards in {folder}: it has no {_MANIFEST} (see deqseq.tasks.prepare)")
        try:
            found = json.loads(path.read_text())
            version = found.pop("version")
            place, shards = found.pop("next"), [Shard(**shard) for shard in found.pop("shards")]
            item = np.dtype(found["dtype"]).itemsize
            int(found["tokenizer"]["vocab_size"]), int(found["tokenizer"]["end_of_text"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a manifest of token shards") from error
        if version != VERSION:
            raise ValueError(f"{path} has version {version}, this program reads version {VERSION}")
        manifest = cls(found, place and Place(**place), shards)
        for shard in shards:
            file, wanted = folder / shard.file, shard.tokens * item
            size = file.stat().st_size if file.is_file() else None
            if size != wanted:
                has = "is missing" if size is None else f"has {size} bytes instead of {wanted}"
                raise ValueError(f"the shard {file} {has}: copy it again, or prepare anew with --force")
        return manifest

    def write(self, folder: Path) -> None:
        """Write it in one step: there is the old one or the new one."""
        content = {
            "version": VERSION,
            **self.head,
            "next": None if self.next is None else asdict(self.next),
            "shards": [asdict(shard) for shard in self.shards],
        }
        temporary = folder / (_MANIFEST + _UNFINISHED)
        with temporary.open("w") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            os.fsync(file.fileno())
        _rename(temporary, folder / _MANIFEST)

    def tokens(self, split: Split) -> int:
        """How many tokens a split has."""
        return sum(shard.tokens for shard in self.shards if shard.split == split)


class Preparation:
    """A folder while its shards are written; one that was interrupted goes on.

    Nothing is written before :meth:`start`.

    Args:
        head: of the manifest.
        force: begin anew, whatever the folder holds.

    Raises:
        ValueError: without ``force``, the folder holds other files, shards that are damaged, or shards of
            other sources or settings.
    """

    def __init__(self, path: Path, head: dict[str, Any], force: bool = False) -> None:
        self.path = path
        self.manifest = Manifest(head, Place())
        self.fresh = force or not (path / _MANIFEST).exists()
        if force:
            return
        if not self.fresh:
            former = Manifest.read(path)
            if differ := changes(_flat(former.head), _flat(head)):
                more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
                raise ValueError(
                    f"{path} was prepared with other settings ({', '.join(differ[:3])}{more}): name another "
                    "folder, or begin anew with --force"
                )
            self.manifest = former
        elif path.exists() and (others := sorted(f.name for f in path.iterdir() if not _ours(f.name))):
            raise ValueError(
                f"{path} holds other files ({', '.join(others[:3])}): name another folder, or write beside "
                "them with --force"
            )

    def start(self, tokenizer: Any) -> None:
        """Make the folder and keep the tokenizer in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.fresh:
            self.manifest.write(self.path)  # from here on, no shard that lies there counts
            for split in SPLITS:
                for stale in self.path.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9].bin"):
                    stale.unlink()
        tokenizer.save_pretrained(self.path / TOKENIZER)

    def writers(self) -> dict[Split, ShardWriter]:
        """A writer of the next shard of every split."""
        dtype = np.dtype(self.manifest.head["dtype"])
        number = {split: sum(shard.split == split for shard in self.manifest.shards) for split in SPLITS}
        return {split: ShardWriter(self.path, split, number[split], dtype) for split in SPLITS}

    def commit(self, writers: dict[Split, ShardWriter], next: Place | None) -> None:
        """Finish the shards that hold everything up to ``next``."""
        finished = [writer.finish() for writer in writers.values()]
        self.manifest.shards += [shard for shard in finished if shard is not None]
        self.manifest.next = next
        self.manifest.write(self.path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make ``folder``, and keep other processes from preparing it; a process that is killed does so no more.

    Raises:
        ValueError: another process prepares it. File systems that know no locks are not guarded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process prepares {folder}: wait until it ends, or name another folder"
                ) from None
        yield
    finally:
        os.close(handle)


class ShardWriter:
    """One shard while it is written, under another name than its own."""

    def __init__(self, folder: Path, split: Split, number: int, dtype: np.dtype) -> None:
        self.path = folder / f"{split}-{number:05d}.bin"
        self.split = split
        self.tokens = 0
        self.documents = 0
        self._dtype = dtype
        self._sha256 = hashlib.sha256()
        self._file = Path(f"{self.path}{_UNFINISHED}").open("wb")  # noqa: SIM115 - until finish

    def add(self, tokens: np.ndarray, documents: int) -> None:
        """Append tokens, in which so many documents end."""
        data = tokens.astype(self._dtype, copy=False).tobytes()
        self._file.write(data)
        self._sha256.update(data)
        self.tokens += len(tokens)
        self.documents += documents

    def finish(self) -> Shard | None:
        """Put the shard in its place; ``None``, and no file, if it is empty."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        if not self.tokens:
            Path(file.name).unlink()
            return None
        _rename(Path(file.name), self.path)
        return Shard(self.path.name, self.split, self.tokens, self.documents, self._sha256.hexdigest())


def _flat(head: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under their paths; sources under their own."""
    found: dict[str, Any] = {}
    for name, value in head.items():
        if name == "sources":
            found[name] = [source["path"] for source in value]
            value = {source["path"]: source for source in value}
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name} ")
        else:
            found[prefix + name] = value
    return found


def _ours(name: str) -> bool:
    """Whether a preparation that was killed before its first manifest may have left it."""
    return name == _MANIFEST + _UNFINISHED


def _rename(temporary: Path, path: Path) -> None:
    """Give a file its name, for good."""
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
