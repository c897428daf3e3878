"""Sources of documents: plain text, JSONL, parquet and datasets of the Hugging Face Hub.

A source yields its documents in a fixed order and can start at any document, so work can be resumed.
"""

import codecs
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from deqseq.tasks.common.corpus.storage import is_compressed, is_remote, local_stamp, opened, stamp
from deqseq.tasks.common.tokenizer import first_line

# A file that is one document is read in pieces of _PIECE to 2 * _PIECE bytes (1000 tokens or more). A piece
# is either for training or for validation. Pieces are small, so even a single book has pieces of both kinds.
_PIECE = 4096


class Document(NamedTuple):
    """A document, or a piece of a document. Only a document that is a whole file is cut into pieces."""

    text: str  # never empty
    ends: bool  # false if another piece of the same document follows
    next: int  # where reading continues after this document: a byte offset in a file, or a row number
    size: int  # bytes of this document in the source


class TextFile:
    """A plain text file in UTF-8. If the whole file is one document, it is read in pieces of 4 to 8 KiB.

    Args:
        path: a local path or a remote URL. Files ending in .gz, .zst, .xz, .bz2 or .zip (with one file in it)
            are unpacked.
        documents: how the file is divided into documents. ``"file"``: the whole file is one document;
            ``"blank"``: each block between blank lines is one; ``"line"``: each line is one.

    Attributes:
        size: number of bytes of text; ``None`` if the file is compressed or remote.
        stored: number of bytes of the stored file, before it is unpacked.
        checked: whether all documents have been read already, without an error.

    Raises:
        ValueError: the file does not exist or is empty.
    """

    checked = False

    def __init__(self, path: str, documents: str = "file") -> None:
        self.path, self.kind = path if is_remote(path) else str(Path(path)), documents
        self._stamp = stamp(self.path)
        self.stored: int = self._stamp.get("bytes", -1)
        if self.stored < 0:
            raise ValueError(f"no file {path}")
        if not self.stored:
            raise ValueError(f"{path} is empty")
        self.size = None if is_compressed(path) or is_remote(path) else self.stored

    def describe(self) -> dict[str, Any]:
        """Describe the source, for the manifest. The description changes when a local file changes."""
        return {**self._stamp, "documents": self.kind}

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yield the documents from ``start`` on. ``start`` is 0, or the field ``next`` of a document."""
        with opened(self.path) as file:
            if start == 0 and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                start = len(codecs.BOM_UTF8)
            file.seek(start)
            for data, ends in self._cut(file):
                text = self._text(data, start)
                start += len(data)
                if text:
                    yield Document(text, ends, start, len(data))

    def cut(self, near: int) -> int | None:
        """Find a place to divide the file: the first document that begins at byte ``near`` or later.

        Returns the offset of this document, or ``None`` if no document begins there. Compressed files, and
        files that are one document, are never divided. For such a file, the method returns 0 (the start of
        the file) if ``near`` is in the first half of the file, else ``None``.
        """
        if self.kind == "file" or is_compressed(self.path):
            return 0 if 2 * near < self.stored else None
        if near == 0:
            return 0
        with opened(self.path) as file:
            file.seek(near - 1)
            file.readline()
            place = file.tell()
            if self.kind == "blank":  # skip this paragraph: it may begin before ``near``
                place += len(next(_paragraphs(file), b""))
        return place if place < self.stored else None

    def _cut(self, file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
        """Yield each document or piece as bytes, with a bool: whether a document ends there."""
        if self.kind == "file":
            return _pieces(file)
        return ((part, True) for part in (file if self.kind == "line" else _paragraphs(file)))

    def _text(self, data: bytes, start: int) -> str:
        """Decode ``data``. If documents are lines or blocks, blank lines give an empty text.

        ``start``: offset of ``data`` in the file, for error messages.
        """
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            at = f"0x{data[error.start]:02x} at offset {start + error.start}"
            raise ValueError(f"{self.path} is not UTF-8: {error.reason}, {at}") from error
        if self.kind == "file":
            return text
        return text.strip("\r\n") if text.strip() else ""


class JsonLines(TextFile):
    """A file with a JSON object on every line. The field ``column`` of each object is a document."""

    def __init__(self, path: str, column: str = "text") -> None:
        super().__init__(path, "line")
        self.column = column

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "documents": "json", "column": self.column}

    def _text(self, data: bytes, start: int) -> str:
        line = super()._text(data, start)
        try:
            return text_of(json.loads(line), self.column) if line else ""
        except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
            number = 1
            with opened(self.path) as file:
                while file.tell() < start:
                    number += file.readline().count(b"\n")
            deep = isinstance(error, RecursionError)
            reason = "the object is nested too deeply for Python's reader of JSON" if deep else error
            raise ValueError(f"{self.path}:{number}: {reason}") from error


class DatasetRows:
    """The rows of a dataset, streamed with the datasets library. Each row has a document in ``column``.

    Args:
        name: a dataset on the Hugging Face Hub, a local folder, or a file format such as "parquet" or "json".
        files: data files to read; by default all files of the dataset or folder ``name``.

    Attributes:
        stored: number of bytes of the files; 0 if unknown.
        checked: whether all documents have been read already, without an error.
    """

    size = None
    stored = 0
    checked = False

    def __init__(
        self, name: str, subset: str | None = None, split: str = "train", files: Sequence[str] = (),
        column: str = "text",
    ) -> None:  # fmt: skip
        self.name, self.column = name, column
        self._kind = {"path": name, "subset": subset, "split": split, "column": column}
        self._files = files
        self._rows = stream(name, subset, split, files)

    def part(self, number: int, count: int) -> "DatasetRows":
        """Return part ``number`` (1 to ``count``) of the dataset. Parts can be prepared in parallel.

        Each part reads some of the files. If there are fewer files than parts, each part reads some of the
        row groups (the blocks of rows in a file) instead.

        Raises:
            ValueError: there are fewer row groups than parts.
        """
        rows = self._rows if self._rows.num_shards >= count else self._rows.reshard()
        if rows.num_shards < count:
            raise ValueError(
                f"{self.name} has {rows.num_shards} files or row groups, too few for {count} parts"
            )
        found = copy(self)
        found._rows = rows.shard(count, number - 1)
        return found

    def cut(self, near: int) -> int | None:
        """A dataset is never divided at a byte.

        Returns 0 (its start) if ``near`` is in the first half of its bytes, else ``None``.
        """
        return 0 if 2 * near < self.stored else None

    def describe(self) -> dict[str, Any]:
        return {**self._kind, "files": stamps(self.name, self._files)}

    def documents(self, start: int = 0) -> Iterator[Document]:
        number = start
        try:
            for row in self._rows.skip(start):
                text = text_of(row, self.column)
                number += 1
                if text:
                    yield Document(text, True, number, len(text.encode()))
        except Exception as error:  # datasets raises many classes of errors
            raise ValueError(f"row {number} of {self.name} cannot be read: {first_line(error)}") from error


def stream(name: str, subset: str | None = None, split: str = "train", files: Sequence[str] = ()) -> Any:
    """Open a dataset with the datasets library, in streaming mode. Raises ``ValueError`` if this fails."""
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # log no errors: datasets also raises them
    try:
        return datasets.load_dataset(
            name, subset, split=split, data_files=list(files) or None, streaming=True
        )
    except Exception as error:  # datasets, the hub and file systems raise many classes of errors
        raise ValueError(f"the dataset {name} cannot be loaded: {first_line(error)}") from error


def text_of(row: Any, column: str) -> str:
    """Return the text in ``column`` of a row. Raises ``ValueError`` if there is no string in ``column``."""
    text = row.get(column) if isinstance(row, Mapping) else None
    if not isinstance(text, str):
        has = f"its columns are {', '.join(row)}" if isinstance(row, Mapping) else "the row is no JSON object"
        if isinstance(row, Mapping) and column in row:
            has = f"its value is of type {type(text).__name__}"
        raise ValueError(f"no text in the column {column!r}: {has}")
    return text.encode(errors="replace").decode()  # replace lone surrogates, which JSON allows


def _pieces(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Split the rest of a file into pieces of at most 8 KiB.

    A piece ends after a line end if possible, else before a space, else between two characters.
    """
    longest = 2 * _PIECE
    data = b""
    while len(data := data + file.read(longest + 1 - len(data))) > longest:
        cut = data.rfind(b"\n", _PIECE, longest) + 1 or data.rfind(b" ", _PIECE, longest)
        if cut < 0:
            cut = longest
            while cut > longest - 3 and data[cut] & 0xC0 == 0x80:  # do not cut inside a UTF-8 character
                cut -= 1
        yield data[:cut], False
        data = data[cut:]
    if data:
        yield data, True


def _paragraphs(file: BinaryIO) -> Iterator[bytes]:
    """Yield blocks of lines. Each block includes the blank lines after it."""
    block = b""
    for blank, lines in groupby(file, bytes.isspace):
        block += b"".join(lines)
        if blank:
            yield block
            block = b""
    if block:
        yield block


def stamps(name: str, files: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Paths, sizes and modification times of a dataset's files. They show whether the dataset has changed.

    Args:
        name: folder of the dataset. If ``files`` is empty, all files in this folder are listed.
        files: the dataset's files.
    """
    inside = (path for path in Path(name).rglob("*") if path.is_file())
    return [local_stamp(path) for path in [*map(Path, files)] or sorted(inside)]
