"""Tokenises documents in parallel and writes the tokens to shards, in the order of the documents.

One thread reads and writes. Worker threads tokenise in parallel, because the tokenizers library releases
Python's global lock. The number of workers does not change the shards. If the preparation is interrupted and
continued, the shards are the same as without the interruption.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, takewhile, tee, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from deqseq.tasks.common.corpus.documents import Document
from deqseq.tasks.common.corpus.encoder import Encoder
from deqseq.tasks.common.corpus.holdout import SALT, SPLITS, HoldOut, Split
from deqseq.tasks.common.corpus.parts import WHOLE, divide
from deqseq.tasks.common.corpus.shards import Manifest, Place, Preparation
from deqseq.tasks.common.corpus.sources import Source
from deqseq.tasks.common.files import locked

# Minimum bytes of text in a batch. A worker tokenises a batch of this size in a tenth of a second.
_BATCH = 2**18


@dataclass
class Text:
    """A document, or a part of a document. ``ends``: whether an end-of-text token follows the text."""

    split: Split
    text: str
    ends: bool


@dataclass
class Batch:
    """Texts that are tokenised together. ``next``: the place where the next batch begins. ``size``: bytes."""

    texts: list[Text]
    next: Place
    size: int


def prepare(
    output: Path, sources: Sequence[Source], tokenizer: Any, name: str, hold_out: HoldOut,
    shard_tokens: int, workers: int, force: bool = False, part: tuple[int, int] = WHOLE,
) -> int:  # fmt: skip
    """Write the missing shards of folder ``output``. Returns how many bytes of text were read.

    Args:
        name: the name of the tokenizer, as the manifest records it.
        shard_tokens: when the shard of one split has this many tokens, new shards begin for both splits.
            A shard ends only where a batch ends, so a shard may have more tokens.
        workers: number of threads that tokenise.
        force: start again and replace all shards in the folder.
        part: ``(K, N)``: prepare only part K of N.

    Raises:
        ValueError: the folder has other content, another process prepares the folder, there are no
            documents, or a document cannot be read.
    """
    encoder = Encoder(tokenizer, remember=workers <= 3)
    head = {  # everything that determines the shards
        "tokenizer": {
            "name": name,
            "vocab_size": encoder.vocab_size,
            "end_of_text": encoder.end_of_text,
            "sha256": encoder.sha256(),
        },
        "dtype": encoder.dtype.str,
        "sources": [source.describe() for source in sources],
        "hold_out": {"hash": "blake2b", "share": hold_out.share, "salt": SALT},
        "shard_tokens": shard_tokens,
    }
    if part != WHOLE:
        head["part"] = list(part)
    sources, begin, end = divide(sources, part)
    with locked(output, "prepares or trains on", shared=not force and Manifest.finished(output)):
        preparation = Preparation(output, head, force, begin)
        start = preparation.manifest.next
        if start is None:
            return 0
        if preparation.fresh and not check(sources, begin, end) and part == WHOLE:
            named = ", ".join(source.describe()["path"] for source in sources[:3])
            raise ValueError(f"no documents in {named}")
        preparation.start(tokenizer.save_pretrained)
        size = 0
        with ThreadPoolExecutor(workers) as pool, _bar("tokenise", sources, start, begin, end) as bar:
            writers = preparation.writers()
            read = batches(sources, hold_out, start, end)
            for batch, encoded in _in_order(pool, encoder, read, 2 * workers):
                for split, (tokens, documents) in encoded.items():
                    writers[split].add(tokens, documents)
                size += batch.size
                bar.update(batch.size)
                if max(writer.tokens for writer in writers.values()) >= shard_tokens:
                    preparation.commit(writers, batch.next)
                    writers = preparation.writers()
            preparation.commit(writers, None)
    return size


def check(sources: Sequence[Source], begin: Place, end: Place) -> bool:
    """Read the documents once before they are tokenised, to find errors early.

    Reading takes about a hundredth of the time of tokenising. Datasets, compressed files and remote files are
    read only up to the first document. The files of folders were already read when they were selected, so
    they are not read again. Returns whether there is at least one document.
    """
    if all(source.checked for source in sources):
        return True
    found = False
    with _bar("check", sources, begin, begin, end) as bar:
        for number, documents in _between(sources, begin, end):
            for document in islice(documents, 1 if sources[number].size is None else None):
                found = True
                bar.update(document.size)
    return found


def _between(sources: Sequence[Source], start: Place, end: Place) -> Iterator[tuple[int, Iterator[Document]]]:
    """For every source between ``start`` and ``end``: its number, and its documents in this range."""
    for number in range(start.source, end.source):
        yield number, sources[number].documents(start.offset if number == start.source else 0)
    if end.offset > (start.offset if start.source == end.source else 0):
        documents = sources[end.source].documents(start.offset if start.source == end.source else 0)
        yield end.source, takewhile(lambda document: document.next <= end.offset, documents)


def batches(sources: Sequence[Source], hold_out: HoldOut, start: Place, end: Place) -> Iterator[Batch]:
    """All documents from ``start`` to ``end``, in batches.

    A file that is one document is read in pieces, and each piece has its own split. Neighbouring pieces of
    the same split are joined. An end-of-text token separates neighbouring pieces of different splits.

    If you start again at the ``next`` of a batch, you get the same later batches. A long document is cut at
    places that do not depend on earlier documents. So a corpus that is prepared in several parts has the same
    tokens as a corpus that is prepared at once.
    """
    texts: list[Text] = []
    size = own = 0  # bytes of the batch; bytes of the current document in the batch
    place = start
    for number, documents in _between(sources, start, end):
        sided, ahead = tee((document, hold_out.split(document.text)) for document in documents)
        next(ahead, None)
        for (document, split), following in zip_longest(sided, ahead):
            ends = document.ends or following[1] != split
            if texts and not texts[-1].ends:
                texts[-1] = Text(split, texts[-1].text + document.text, ends)
            else:
                texts.append(Text(split, document.text, ends))
            size, own = size + document.size, own + document.size
            place = Place(number, document.next)
            if own >= _BATCH or (size >= _BATCH and document.ends):
                yield Batch(texts, place, size)
                texts, size, own = [], 0, 0
            if document.ends:
                own = 0
    if texts:
        yield Batch(texts, place, size)


Encoded = dict[Split, tuple[np.ndarray, int]]
"""For each split: the tokens, and the number of documents that end in them."""


def _encode(encoder: Encoder, batch: Batch) -> Encoded:
    ids = encoder([text.text for text in batch.texts])
    end = np.array([encoder.end_of_text], encoder.dtype)
    found: Encoded = {}
    for split in SPLITS:
        own = [(text, tokens) for text, tokens in zip(batch.texts, ids, strict=True) if text.split == split]
        parts = [part for text, tokens in own for part in ((tokens, end) if text.ends else (tokens,))]
        if parts:
            found[split] = np.concatenate(parts), sum(text.ends for text, _ in own)
    return found


def _in_order(
    pool: ThreadPoolExecutor, encoder: Encoder, batches: Iterator[Batch], ahead: int
) -> Iterator[tuple[Batch, Encoded]]:
    """Yield every batch with its tokens, in order. The pool tokenises up to ``ahead`` batches in advance."""
    under_way: deque[tuple[Batch, Future[Encoded]]] = deque()
    for batch in batches:
        under_way.append((batch, pool.submit(_encode, encoder, batch)))
        if len(under_way) > ahead:
            first, encoded = under_way.popleft()
            yield first, encoded.result()
    for first, encoded in under_way:
        yield first, encoded.result()


def _bar(title: str, sources: Sequence[Source], start: Place, begin: Place, end: Place) -> tqdm:
    """A progress bar over the bytes from ``begin`` to ``end``, already filled up to ``start``.

    If the size of a source is unknown, the bar shows no total.
    """
    known = [source.size for source in sources if source.size is not None]
    total, initial = None, 0
    if len(known) == len(sources):
        first, now, last = (sum(known[: place.source]) + place.offset for place in (begin, start, end))
        total, initial = last - first, now - first
    return tqdm(desc=title, total=total, initial=initial, unit="B", unit_scale=True, disable=None)
