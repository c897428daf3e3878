"""The folder of token shards: its manifest, its checks, and how writing survives an interruption.

A shard is a run of tokens of one split, little-endian uint16 or uint32 without a header. ``manifest.json``
lists the finished shards and what they were made from; other files do not count. A shard gets its final name
once it is synced to the disk, and the manifest changes in one step after that. So the folder is valid at
every moment, and a process that is killed loses only the shards that it was writing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deqseq.tasks.common.corpus.holdout import SPLITS, Split
from deqseq.tasks.common.files import PART, rename, write_json
from deqseq.tasks.common.results import changes
from deqseq.tasks.common.settings import flat

VERSION = 1
_MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Shard:
    """One file of tokens. ``documents``: how many documents end in it."""

    file: str
    split: Split
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Place:
    """Where reading continues: the number of a source, and an offset in it (see ``Document.next``)."""

    source: int = 0
    offset: int = 0


@dataclass
class Manifest:
    """The contents of a folder, and what they were made from."""

    head: dict[str, Any]  # tokenizer, sources and settings
    next: Place | None = None  # where an unfinished preparation continues
    shards: list[Shard] = field(default_factory=list)  # the finished ones

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder; ``ValueError`` if there is none, or a shard is missing or too short."""
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
        """Write the manifest in one step."""
        content = asdict(self)
        write_json(folder / _MANIFEST, {"version": VERSION, **content.pop("head"), **content})


class Preparation:
    """Writes the shards of a folder. An interrupted preparation continues.

    Nothing is written before :meth:`start`. With ``force`` the preparation starts anew, whatever the folder
    holds.

    Raises:
        ValueError: without ``force``, the folder holds other files, shards that are damaged, or shards of
            other sources or settings.
    """

    def __init__(self, path: Path, head: dict[str, Any], force: bool = False) -> None:
        self.path = path
        self.manifest = Manifest(head, Place())
        self.fresh = force or not (path / _MANIFEST).exists()
        others = sorted(f.name for f in path.iterdir() if f.suffix != PART) if path.exists() else []
        if not self.fresh:
            former = Manifest.read(path)
            if differ := changes(_flat(former.head), _flat(head)):
                more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
                raise ValueError(
                    f"{path} was prepared with other settings ({', '.join(differ[:3])}{more}): name another "
                    "folder, or begin anew with --force"
                )
            self.manifest = former
        elif others and not force:
            raise ValueError(
                f"{path} holds other files ({', '.join(others[:3])}): name another folder, or write beside "
                "them with --force"
            )

    def start(self, tokenizer: Any) -> None:
        """Make the folder and save the tokenizer in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.fresh:
            self.manifest.write(self.path)  # from now on, the old shards do not count
            for split in SPLITS:
                for stale in self.path.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9].bin"):
                    stale.unlink()
        tokenizer.save_pretrained(self.path / TOKENIZER)

    def writers(self) -> dict[Split, ShardWriter]:
        """A writer for the next shard of every split."""
        dtype, shards = np.dtype(self.manifest.head["dtype"]), self.manifest.shards
        numbers = {split: sum(shard.split == split for shard in shards) for split in SPLITS}
        return {split: ShardWriter(self.path, split, number, dtype) for split, number in numbers.items()}

    def commit(self, writers: dict[Split, ShardWriter], next: Place | None) -> None:
        """Finish the shards, which contain everything up to ``next``."""
        finished = [writer.finish() for writer in writers.values()]
        self.manifest.shards += [shard for shard in finished if shard is not None]
        self.manifest.next = next
        self.manifest.write(self.path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make ``folder`` and lock it until the context or process ends; ``ValueError`` if it is locked already.

    File systems without locks are not protected.
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
    """One shard while it is written, under a temporary name."""

    def __init__(self, folder: Path, split: Split, number: int, dtype: np.dtype) -> None:
        self.path = folder / f"{split}-{number:05d}.bin"
        self.split = split
        self.tokens, self.documents = 0, 0
        self._dtype = dtype
        self._sha256 = hashlib.sha256()
        self._file = Path(f"{self.path}{PART}").open("wb")  # noqa: SIM115 - until finish

    def add(self, tokens: np.ndarray, documents: int) -> None:
        """Append tokens, in which ``documents`` documents end."""
        data = tokens.astype(self._dtype, copy=False).tobytes()
        self._file.write(data)
        self._sha256.update(data)
        self.tokens += len(tokens)
        self.documents += documents

    def finish(self) -> Shard | None:
        """Give the shard its final name; an empty one is removed, and ``None`` returned."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        if not self.tokens:
            Path(file.name).unlink()
            return None
        rename(Path(file.name), self.path)
        return Shard(self.path.name, self.split, self.tokens, self.documents, self._sha256.hexdigest())


def _flat(head: dict[str, Any]) -> dict[str, Any]:
    """Nested settings as one level; the settings of a source are named by its path."""
    sources = head["sources"]
    own = {f"{source['path']} {name}": value for source in sources for name, value in flat(source)}
    return {**dict(flat({**head, "sources": [source["path"] for source in sources]})), **own}
