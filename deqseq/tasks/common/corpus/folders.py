"""The text files below folders, as one source of documents.

Every file is one document. All files are read once in advance. Files that are not text, break a rule or
repeat the text of an earlier file are dropped.
"""

import codecs
import hashlib
import os
import site
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from deqseq.tasks.common.corpus.contents import Contents
from deqseq.tasks.common.corpus.documents import Document
from deqseq.tasks.common.corpus.rules import RULES, Rules

_DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])  # the hash of a text: 16 bytes


class _Found(NamedTuple):
    """A file below a folder. ``name``: its path, relative to ``folder``."""

    folder: str
    name: str

    def path(self) -> str:
        return os.path.join(self.folder, self.name)


class FolderFiles:
    """The text files below one or more folders. Every file is one document.

    The files of a folder are in the order of their paths. Files are dropped if they are hidden, cannot be
    read, are not UTF-8 text, break one of the rules, or have the same text as an earlier file. Hidden folders
    and links to folders are not searched.

    Offsets of documents are bytes in the kept files, as if these were one file.

    In memory, every file takes its path, 8 bytes for its size and 16 bytes for the hash of its text.

    Args:
        folders: local folders. If one of them is inside another, its files are read only once.
        pattern: names of the files to read, such as ``"*.py"``; several patterns are separated by commas.
        rules: a key of :data:`deqseq.tasks.common.corpus.rules.RULES`.
        without: folders below ``folders`` that are not searched.

    Attributes:
        size: bytes of the kept files.
        stored: equal to ``size``.
        checked: true, because all documents have been read without an error.
        contents: the numbers of kept and dropped files and folders.

    Raises:
        ValueError: the pattern contains a ``/``, the rules are unknown, or no file is kept.
    """

    checked = True

    def __init__(
        self, folders: Sequence[str], pattern: str = "*", rules: str = "code", without: Sequence[str] = ()
    ) -> None:
        if "/" in pattern:
            raise ValueError(f"a pattern is compared with names of files, without folders; got {pattern!r}")
        if rules not in RULES:
            raise ValueError(f"rules must be one of {', '.join(RULES)}, got {rules!r}")
        self.folders, self.pattern, self.rules = list(map(str, map(Path, folders))), pattern, rules
        self.contents = Contents(self.folders)
        found = [file for folder in self.folders for file in self._below(folder, without)]
        self._files, sizes, digests = self._kept(found)
        if not self._files:
            why = "; ".join(f"{reason}: {amount.files}" for reason, amount in self.contents.dropped.items())
            raise ValueError(
                f"no file for the pattern {pattern!r} is kept from {', '.join(self.folders)}"
                + (f" (dropped files: {why})" if why else "")
            )
        self._ends, self._digests = np.cumsum(sizes), digests
        self.size = self.stored = int(self._ends[-1])

    def describe(self) -> dict[str, Any]:
        """Describe the source, for the manifest. The description changes when a kept text changes.

        The entry ``contents`` also changes when a dropped file changes.
        """
        return {
            "path": ", ".join(self.folders),
            "files": self.pattern,
            "rules": self.rules,
            "texts": len(self._files),
            "bytes": self.size,
            "sha256": hashlib.sha256(self._digests.tobytes()).hexdigest(),
            "contents": self.contents.plain(),
        }

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yield the documents from offset ``start`` on. ``start`` is 0, or the field ``next`` of a document.

        Raises:
            ValueError: a file has changed since it was read for the first time.
        """
        for number in range(int(np.searchsorted(self._ends, start, "right")), len(self._files)):
            path = self._files[number].path()
            try:
                text, size = _read(path)
                same = _digest(text) == self._digests[number].tobytes()
            except (OSError, UnicodeDecodeError):
                same = False
            if not same:
                raise ValueError(f"{path} has changed while the text was prepared: start again with --force")
            yield Document(text, True, int(self._ends[number]), size)

    def cut(self, near: int) -> int | None:
        """The offset of the first document that begins at ``near`` or later, or ``None`` if there is none."""
        if near == 0:
            return 0
        number = int(np.searchsorted(self._ends, near))
        return int(self._ends[number]) if number < len(self._files) - 1 else None

    def _below(self, folder: str, without: Sequence[str]) -> list[_Found]:
        """The matching files below a folder, sorted by path. Also counts the folders that are skipped."""
        others = {os.path.realpath(other) for other in (*self.folders, *without)}
        skipped = self.contents.skip_folder
        patterns = [pattern.strip() for pattern in self.pattern.split(",")]
        found = []
        for place, inner, names in os.walk(folder, onerror=lambda _: skipped("cannot be listed")):
            searched = []
            for name in inner:
                path = os.path.join(place, name)
                if name.startswith("."):
                    skipped("hidden")
                elif os.path.islink(path):
                    skipped("link")
                elif os.path.realpath(path) not in others:
                    searched.append(name)
            inner[:] = searched
            for name in names:
                if any(fnmatchcase(name, pattern) for pattern in patterns):
                    relative = os.path.relpath(os.path.join(place, name), folder)
                    found.append(_Found(folder, relative))
        return sorted(found)

    def _kept(self, found: Sequence[_Found]) -> tuple[list[_Found], np.ndarray, np.ndarray]:
        """Read all files. Returns the files to keep, their sizes, and the hashes of their texts."""
        texts, sizes, digests = [], [], bytearray()
        for file in tqdm(found, "read", unit="file", disable=None):
            size, digest, reason = _examine(file, RULES[self.rules])
            if reason is not None:
                self.contents.drop(reason, size)
            else:
                texts.append(file)
                sizes.append(size)
                digests += digest
        every = np.frombuffer(bytes(digests), _DIGEST)
        first = np.zeros(len(texts), bool)
        first[np.unique(every, return_index=True)[1]] = True  # the first file of each text
        for file, size, keep in zip(texts, sizes, first, strict=True):
            if keep:
                self.contents.keep(file.folder, file.name, size)
            else:
                self.contents.drop("duplicate", size)
        kept = [file for file, keep in zip(texts, first, strict=True) if keep]
        return kept, np.array(sizes, np.int64)[first], every[first]


def _examine(file: _Found, rules: Rules) -> tuple[int, bytes, str | None]:
    """The size of a file in bytes, the hash of its text, and the reason to drop the file, if there is one."""
    size = 0
    try:
        known = os.stat(file.path())
        if not stat.S_ISREG(known.st_mode):  # do not open a pipe: reading it would wait for its writer
            return 0, b"", "not a regular file"
        size = known.st_size
        if os.path.basename(file.name).startswith("."):
            return size, b"", "hidden"
        if size > rules.largest:
            return size, b"", f"more than {rules.largest // 2**20} MiB"
        text, size = _read(file.path())
    except OSError:
        return size, b"", "cannot be read"
    except UnicodeDecodeError:
        return size, b"", "not UTF-8 text"
    if "\0" in text:
        return size, b"", "a NUL character"
    return size, _digest(text), rules.broken_by(text)


def _read(path: str) -> tuple[str, int]:
    """The text of a file without its byte order mark, and the size of the file in bytes."""
    with open(path, "rb") as file:
        data = file.read()
    return data.removeprefix(codecs.BOM_UTF8).decode(), len(data)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST.itemsize).digest()


def installed_folders() -> tuple[list[str], list[str]]:
    """The folders of the running Python's packages and standard library, and the folders to leave out.

    In a virtual environment, the packages of the underlying Python are left out. They are in a folder below
    the standard library, but programs in the environment cannot import them.
    """
    names = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    found = [*names[:2], *site.getsitepackages(), *users, names[2]]
    folders = list(dict.fromkeys(os.path.realpath(folder) for folder in found if os.path.isdir(folder)))
    return folders, [os.path.join(names[2], name) for name in ("site-packages", "dist-packages")]
