"""Rows of a fixed length for training: from a folder of shards, or packed from a stream of documents.

Shapes: L is the number of tokens in a row.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from tqdm.auto import tqdm

from deqseq.checks import check_count
from deqseq.tasks.common.corpus.documents import text_of
from deqseq.tasks.common.corpus.encoder import Encoder
from deqseq.tasks.common.corpus.holdout import SPLITS, HoldOut, Split
from deqseq.tasks.common.corpus.shards import TOKENIZER, Manifest, Shard, checksum
from deqseq.tasks.common.tokenizer import load_tokenizer

Documents = Literal["joined", "separate"]
"""``"joined"``: the earlier documents in a row are context for the later documents. ``"separate"``: no
document is context for another document."""

Row = dict[str, Tensor]
"""``input_ids`` (L,) int64 and, for separate documents, ``position_ids`` (L,) int64."""


class TokenFolder:
    """A folder of token shards, made by ``python -m deqseq.tasks.prepare``.

    Attributes:
        vocab_size: the tokenizer's largest id plus one, added tokens included.
        end_of_text: the id that ends every document.
        fingerprint: a hash of the shards and the tokenizer; the same on every machine.

    Raises:
        ValueError: the manifest is missing, preparation is unfinished, or a shard is missing or has a wrong
            size.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._manifest = Manifest.read(self.path)
        if self._manifest.next is not None:
            raise ValueError(f"{path} is not prepared to its end: run the same deqseq.tasks.prepare again")
        tokenizer = self._manifest.head["tokenizer"]
        self.vocab_size: int = tokenizer["vocab_size"]
        self.end_of_text: int = tokenizer["end_of_text"]
        content = [tokenizer["sha256"], *((s.split, s.tokens, s.sha256) for s in self._manifest.shards)]
        self.fingerprint: str = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def tokens(self, split: Split) -> int:
        """Number of tokens of a split."""
        return sum(shard.tokens for shard in self._shards(split))

    def documents(self, split: Split) -> int:
        """Number of documents that end in a split."""
        return sum(shard.documents for shard in self._shards(split))

    def tokenizer(self) -> Any:
        """The tokenizer that made the shards; ``ValueError`` if one of its files is missing or corrupted."""
        for name, sha256 in self._manifest.tokenizer_checksums().items():
            self._check(name, sha256)
        return load_tokenizer(str(self.path / TOKENIZER))

    def verify(self) -> None:
        """Raise ``ValueError`` if a file is missing or its checksum is not the checksum in the manifest."""
        checksums = {shard.file: shard.sha256 for shard in self._manifest.shards}
        checksums |= self._manifest.tokenizer_checksums()
        with ThreadPoolExecutor(8) as pool:
            checked = pool.map(self._check, *zip(*checksums.items(), strict=True))
            for _ in tqdm(checked, f"verify {self.path}", len(checksums), unit="file", disable=None):
                pass

    def _check(self, name: str, sha256: str) -> None:
        file = self.path / name
        again = "copy it again, or prepare again with --force"
        if not file.is_file():
            raise ValueError(f"{file} is missing: {again}")
        if checksum(file) != sha256:
            raise ValueError(f"{file} is corrupted (its checksum is not the manifest's): {again}")

    def rows(self, split: Split, length: int, documents: Documents = "joined") -> TokenRows:
        """A split, cut into rows of ``length`` tokens; ``ValueError`` if the split is shorter than a row."""
        shards = self._shards(split)
        files = {self.path / shard.file: shard.tokens for shard in shards}
        rows = TokenRows(files, self._manifest.head["dtype"], length, _separator(documents, self.end_of_text))
        if not len(rows):
            hint = "; prepare with a larger --validation-share" if split == "validation" else ""
            has = f"{self.tokens(split)} tokens, not one row of {length}"
            raise ValueError(f"the {split} split of {self.path} has {has}{hint}")
        return rows

    def _shards(self, split: Split) -> list[Shard]:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        return [shard for shard in self._manifest.shards if shard.split == split]


class TokenRows(Dataset[Row]):
    """Rows of consecutive tokens from files. A row may begin in one file and end in the next.

    A row is read from disk when it is accessed. Files do not stay open, so there may be any number of files.

    Args:
        files: the number of tokens of each file, by path.
        end_of_text: the id of the token that ends every document. If given, positions restart at 0 after each
            such token. ``None``: positions do not restart.
    """

    def __init__(self, files: dict[Path, int], dtype: str, length: int, end_of_text: int | None) -> None:
        check_count("length", length)
        self.length = length
        self._files, self._ends = list(files), list(accumulate(files.values()))
        self._dtype = np.dtype(dtype)
        self._end_of_text = end_of_text

    def __len__(self) -> int:
        return (self._ends or [0])[-1] // self.length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return _row(torch.from_numpy(self._read(index * self.length)), self._end_of_text)

    def _read(self, start: int) -> np.ndarray:
        """Read ``length`` tokens as int64, beginning at token ``start``. They may lie in several files."""
        parts, end = [], start + self.length
        number = bisect_right(self._ends, start)
        while start < end:
            file = self._files[number]
            count = min(end, self._ends[number]) - start
            skipped = start - (self._ends[number - 1] if number else 0)
            tokens = np.fromfile(file, self._dtype, count, offset=skipped * self._dtype.itemsize)
            if len(tokens) < count:
                raise ValueError(f"the shard {file} has become shorter since it was opened")
            parts.append(tokens)
            start, number = start + count, number + 1
        return np.concatenate(parts, dtype=np.int64)


class StreamedRows(IterableDataset[Row]):
    """Rows packed from a stream of documents, in the order of the stream. Iterating tokenises the documents.

    Args:
        texts: texts, or rows of a dataset whose field ``column`` is the text. Each is one document.
        documents: with ``"separate"``, positions restart in every document of a row.
        split: read only the documents of this split; ``None``: all documents.
        hold_out: the rule that assigns each document to a split; by default 0.1 % is held out.
    """

    def __init__(
        self, texts: Iterable[str | Mapping[str, Any]], tokenizer: Any, length: int,
        documents: Documents = "joined", *, column: str = "text", split: Split | None = None,
        hold_out: HoldOut | None = None,
    ) -> None:  # fmt: skip
        check_count("length", length)
        self.length = length
        self._texts = texts
        self._encoder = Encoder(tokenizer)
        self._separator = _separator(documents, self._encoder.end_of_text)
        self._column = column
        self._split = split
        self._hold_out = hold_out or HoldOut()

    def __iter__(self) -> Iterator[Row]:
        left = np.empty(0, np.int64)
        for document in self._texts:
            text = document if isinstance(document, str) else text_of(document, self._column)
            if not text or (self._split and self._hold_out.split(text) != self._split):
                continue
            left = np.concatenate([left, *self._encoder([text]), [self._encoder.end_of_text]])
            whole = len(left) - len(left) % self.length
            for row in torch.from_numpy(left[:whole]).split(self.length) if whole else ():
                yield _row(row, self._separator)
            left = left[whole:]


def _row(input_ids: Tensor, end_of_text: int | None) -> Row:
    """A row (L,). If ``end_of_text`` is given, positions restart at 0 after every ``end_of_text`` token."""
    if end_of_text is None:
        return {"input_ids": input_ids}
    place = torch.arange(len(input_ids))
    starts = torch.zeros_like(place)
    starts[1:] = torch.where(input_ids[:-1] == end_of_text, place[1:], 0)
    return {"input_ids": input_ids, "position_ids": place - starts.cummax(0).values}


def _separator(documents: str, end_of_text: int) -> int | None:
    if documents not in get_args(Documents):
        raise ValueError(f"documents must be 'joined' or 'separate', got {documents!r}")
    return end_of_text if documents == "separate" else None
