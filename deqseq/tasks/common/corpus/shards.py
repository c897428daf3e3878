"""Writes, reads and checks folders of token shards. An interrupted preparation can be continued.

A shard is a file of tokens of one split: little-endian uint16 or uint32, without a header. ``manifest.json``
lists the finished shards, their sources and settings. Shard files that it does not list are ignored.

A shard is finished in three steps: its file is synced to the disk, the file is renamed, and the manifest is
replaced atomically. So the folder is always valid. A killed process loses only the shards that it was
writing.

The manifest has the SHA-256 of every shard, of every file of the tokenizer, and of its own content.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deqseq.tasks.common.corpus.holdout import SPLITS, Split
from deqseq.tasks.common.files import PART, rename, write_json, writing
from deqseq.tasks.common.results import changes
from deqseq.tasks.common.settings import flat
from deqseq.tasks.common.tokenizer import first_line

VERSION = 2  # version 1 lacks the checksums of the manifest and of most files of the tokenizer
_MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
_TIMES = ("modified", "modified_ns")  # entries with the modification time of a source
_HEAD = {"tokenizer", "dtype", "sources", "hold_out", "shard_tokens"}


@dataclass(frozen=True)
class Shard:
    """One file of tokens. ``documents``: the number of documents that end in the file."""

    file: str
    split: Split
    tokens: int
    documents: int
    sha256: str

    def __post_init__(self) -> None:
        _check_name(self.file)
        if self.split not in SPLITS:
            raise ValueError(f"the split of {self.file} must be {' or '.join(SPLITS)}, got {self.split!r}")
        _check_count(f"tokens of {self.file}", self.tokens)
        _check_count(f"documents of {self.file}", self.documents)
        if not isinstance(self.sha256, str):
            raise ValueError(f"sha256 of {self.file} must be text, got {self.sha256!r}")


@dataclass(frozen=True)
class Place:
    """A position in the sources at which reading continues: the number of a source, and an offset in it."""

    source: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        _check_count("next.source", self.source)
        _check_count("next.offset", self.offset)


@dataclass
class Manifest:
    """The finished shards of a folder, and the tokenizer, sources and settings of their preparation."""

    head: dict[str, Any]  # tokenizer, sources and settings
    next: Place | None = None  # where an unfinished preparation continues
    shards: list[Shard] = field(default_factory=list)  # finished shards
    tokenizer_files: dict[str, str] = field(default_factory=dict)  # SHA-256 of each file

    @classmethod
    def finished(cls, folder: Path) -> bool:
        """Whether ``folder`` holds whole shards of a preparation that has ended."""
        try:
            return cls.read(folder).next is None
        except ValueError:
            return False

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            ValueError: the manifest is missing or damaged, or a shard is missing or has a wrong size.
        """
        path = folder / _MANIFEST
        if not path.is_file():
            raise ValueError(f"no token shards in {folder}: it has no {_MANIFEST} (see deqseq.tasks.prepare)")
        try:
            manifest = cls._parsed(json.loads(path.read_text()))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} is not a manifest of token shards: {why}") from error
        item = np.dtype(manifest.head["dtype"]).itemsize
        for shard in manifest.shards:
            file, wanted = folder / shard.file, shard.tokens * item
            size = file.stat().st_size if file.is_file() else None
            if size != wanted:
                has = "is missing" if size is None else f"has {size} bytes instead of {wanted}"
                raise ValueError(f"the shard {file} {has}: copy it again, or prepare again with --force")
        return manifest

    @classmethod
    def _parsed(cls, found: dict[str, Any]) -> Manifest:
        """Make a manifest from a JSON object.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: the object is not a valid manifest.
        """
        version = found.pop("version")
        if version not in (1, VERSION):
            raise ValueError(f"it has version {version!r}, this program reads versions 1 and {VERSION}")
        if version == VERSION and found.pop("checksum") != _checksum(found):
            raise ValueError(
                "its content does not match its checksum; copy it again, or prepare again with --force"
            )
        files = found.pop("tokenizer_files") if version == VERSION else {}
        place, shards = found.pop("next"), [Shard(**shard) for shard in found.pop("shards")]
        if found.keys() - {"part"} != _HEAD:
            raise ValueError(f"it must have {', '.join(sorted(_HEAD))}, got {', '.join(sorted(found))}")
        tokenizer = found["tokenizer"]
        if found["dtype"] not in ("<u2", "<u4"):
            raise ValueError(f"dtype must be <u2 or <u4, got {found['dtype']!r}")
        _check_count("tokenizer.vocab_size", tokenizer["vocab_size"])
        _check_count("tokenizer.end_of_text", tokenizer["end_of_text"])
        if tokenizer["end_of_text"] >= tokenizer["vocab_size"]:
            raise ValueError(f"end_of_text must be below vocab_size, got {tokenizer['end_of_text']}")
        if not isinstance(tokenizer["sha256"], str):
            raise ValueError(f"tokenizer.sha256 must be text, got {tokenizer['sha256']!r}")
        part = found.get("part", [1, 1])
        if not isinstance(part, list) or len(part) != 2 or any(type(n) is not int for n in part):
            raise ValueError(f"part must be two whole numbers, got {part!r}")
        if not isinstance(files, dict):
            raise ValueError(f"tokenizer_files must be a mapping, got {files!r}")
        for name in files:
            _check_name(name)
        return cls(found, place and Place(**place), shards, files)

    def write(self, folder: Path) -> None:
        """Write the manifest atomically."""
        content = asdict(self)
        content = {**content.pop("head"), **content}
        write_json(folder / _MANIFEST, {"version": VERSION, "checksum": _checksum(content), **content})

    def tokenizer_checksums(self) -> dict[str, str]:
        """The SHA-256 of the tokenizer's files, by their paths in the folder."""
        # A manifest of version 1 has only the checksum of tokenizer.json.
        files = {"tokenizer.json": self.head["tokenizer"]["sha256"], **self.tokenizer_files}
        return {f"{TOKENIZER}/{name}": sha256 for name, sha256 in files.items()}


def checksum(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of ``content``, written as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a whole number >= 0, got {value!r}")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"a file must be named without a folder, got {name!r}")


class Preparation:
    """Writes the shards of a folder, or continues an interrupted preparation.

    Lock the folder first, because the constructor reads its manifest. Nothing is written before
    :meth:`start`.

    Args:
        path: the folder.
        head: the tokenizer, sources and settings of this preparation.
        force: start again, and replace the folder's shards.
        begin: the position at which a new preparation begins to read; by default the first source's start.

    Raises:
        ValueError: the folder contains a ``tokenizer`` that no preparation wrote. Without ``force``, also if
            the folder has other files, damaged shards, or shards made from other sources or settings.
    """

    def __init__(
        self, path: Path, head: dict[str, Any], force: bool = False, begin: Place | None = None
    ) -> None:
        self.path = path
        self.manifest = Manifest(head, begin or Place())
        prepared = (path / _MANIFEST).exists()
        self.fresh = force or not prepared
        others = sorted(f.name for f in path.iterdir() if f.suffix != PART) if path.exists() else []
        if not self.fresh:
            former = Manifest.read(path)
            if differ := changes(flat_head(former.head), flat_head(head)):
                more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
                touched = flat_head(former.head, times=False) == flat_head(head, times=False)
                why = "before the modification time of an input changed" if touched else "with other settings"
                hint = "; the folder is finished, --verify checks it" if former.next is None else ""
                raise ValueError(
                    f"{path} was prepared {why} ({', '.join(differ[:3])}{more}): name another "
                    f"folder, or start again with --force{hint}"
                )
            self.manifest = former
        elif others and not force:
            raise ValueError(
                f"{path} holds other files ({', '.join(others[:3])}): name another folder, or write beside "
                "them with --force"
            )
        elif prepared:
            with suppress(ValueError):  # ignore a damaged manifest
                self.manifest.tokenizer_files = Manifest.read(path).tokenizer_files
        place = path / TOKENIZER
        if os.path.lexists(place) and not (prepared and place.is_dir()):
            raise ValueError(f"{place} was not written by prepare: move it away, or name another folder")

    def start(self, save_tokenizer: Callable[[Path], Any]) -> None:
        """Save the tokenizer, and remove the tokenizer files of an earlier preparation.

        If this preparation starts again, also remove the shards of the earlier preparation. Nothing is
        removed before the new tokenizer is complete. Files that no preparation wrote stay.
        """
        place = self.path / TOKENIZER
        part = self.path / f"{TOKENIZER}{PART}"
        shutil.rmtree(part, ignore_errors=True)  # a killed process may have left this folder
        try:
            save_tokenizer(part)
        except Exception as error:  # the tokenizers library raises Exception if the disk is full
            shutil.rmtree(part, ignore_errors=True)
            raise ValueError(f"the tokenizer cannot be saved in {part}: {first_line(error)}") from error
        files = {file.name: checksum(file) for file in sorted(part.iterdir()) if file.is_file()}
        if self.fresh:
            self.manifest.tokenizer_files |= files  # the next process needs these if this process is killed
            self.manifest.write(self.path)  # from now on, the old shards are ignored
            for split in SPLITS:
                for stale in self.path.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9].bin"):
                    stale.unlink()
        for file in sorted(part.rglob("*")):
            if file.is_file():
                to = place / file.relative_to(part)
                to.parent.mkdir(parents=True, exist_ok=True)
                file.replace(to)
        shutil.rmtree(part)
        for name in self.manifest.tokenizer_files.keys() - files:
            (place / name).unlink(missing_ok=True)
        self.manifest.tokenizer_files = files

    def writers(self) -> dict[Split, ShardWriter]:
        """A writer for the next shard of every split."""
        dtype, shards = np.dtype(self.manifest.head["dtype"]), self.manifest.shards
        numbers = {split: sum(shard.split == split for shard in shards) for split in SPLITS}
        return {split: ShardWriter(self.path, split, number, dtype) for split, number in numbers.items()}

    def commit(self, writers: dict[Split, ShardWriter], next: Place | None) -> None:
        """Finish the open shards and write the manifest.

        ``next``: where reading continues; ``None`` if the preparation is complete.
        """
        finished = [writer.finish() for writer in writers.values()]
        self.manifest.shards += [shard for shard in finished if shard is not None]
        self.manifest.next = next
        self.manifest.write(self.path)


def shard_name(split: Split, number: int) -> str:
    """The file name of a shard."""
    return f"{split}-{number:05d}.bin"


class ShardWriter:
    """Writes one shard. The file has a temporary name until :meth:`finish`."""

    def __init__(self, folder: Path, split: Split, number: int, dtype: np.dtype) -> None:
        self.path = folder / shard_name(split, number)
        self.split = split
        self.tokens, self.documents = 0, 0
        self._dtype = dtype
        self._sha256 = hashlib.sha256()
        self._file = Path(f"{self.path}{PART}").open("wb")  # noqa: SIM115 - until finish

    def add(self, tokens: np.ndarray, documents: int) -> None:
        """Append tokens. ``documents``: the number of documents that end in these tokens."""
        data = tokens.astype(self._dtype, copy=False).tobytes()
        with writing(self.path):
            self._file.write(data)
        self._sha256.update(data)
        self.tokens += len(tokens)
        self.documents += documents

    def finish(self) -> Shard | None:
        """Sync the file and give it its final name. If it has no tokens, remove it and return ``None``."""
        with writing(self.path), self._file as file:
            file.flush()
            os.fsync(file.fileno())
        if not self.tokens:
            Path(file.name).unlink()
            return None
        rename(Path(file.name), self.path)
        return Shard(self.path.name, self.split, self.tokens, self.documents, self._sha256.hexdigest())


def flat_head(head: dict[str, Any], times: bool = True) -> dict[str, Any]:
    """``Manifest.head`` as a flat dictionary. Keys of a source's settings begin with the source's path.

    The tokenizer's name and the contents of folders are left out, because they do not change the shards.

    ``times``: false leaves out the modification times of the sources.
    """
    sources = head["sources"]
    own = {
        f"{source['path']} {name}": value
        for source in sources
        for name, value in flat({key: value for key, value in source.items() if key != "contents"})
    }
    found = {**dict(flat({**head, "sources": [source["path"] for source in sources]})), **own}
    found.pop("tokenizer.name")  # not needed: the sha256 identifies the tokenizer
    return {name: value for name, value in found.items() if times or not name.endswith(_TIMES)}
