"""From sources to shards: batches of documents are tokenised in parallel and written in order.

One thread reads and writes; workers tokenise, which the tokenizers library does outside of Python's lock.
What is written depends neither on the number of workers nor on interruptions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import tee, zip_longest
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from deqseq.tasks.common.corpus.documents import Source
from deqseq.tasks.common.corpus.encoder import Encoder
from deqseq.tasks.common.corpus.holdout import SPLITS, HoldOut, Split
from deqseq.tasks.common.corpus.shards import Place, Preparation

# Bytes of text in a batch: a tenth of a second's work for a worker.
_BATCH = 2**18


@dataclass
class Text:
    """Consecutive text of one split; ``ends``: an end of text belongs after it."""

    split: Split
    text: str
    ends: bool


@dataclass
class Batch:
    """Texts that are tokenised together; ``next``: where reading goes on after them; ``size`` in bytes."""

    texts: list[Text]
    next: Place
    size: int


def describe(
    encoder: Encoder, name: str, sources: Sequence[Source], hold_out: HoldOut, shard_tokens: int
) -> dict[str, Any]:
    """The head of a manifest: all that the shards depend on."""
    return {
        "tokenizer": {
            "name": name,
            "vocab_size": encoder.vocab_size,
            "end_of_text": encoder.end_of_text,
            "sha256": encoder.sha256(),
        },
        "dtype": encoder.dtype.str,
        "sources": [source.describe() for source in sources],
        "hold_out": {"hash": "blake2b", "share": hold_out.share, "salt": hold_out.salt},
        "shard_tokens": shard_tokens,
    }


def check(sources: Sequence[Source], progress: bool = False) -> None:
    """Read all files, which takes a hundredth of the time of tokenising, and the first row of datasets.

    Raises:
        ValueError: no documents; something that is not one, and where.
    """
    found = False
    with _bar("check", sources, Place(), progress) as bar:
        for source in sources:
            for document in source.documents():
                found = True
                bar.update(document.size)
                if source.size is None:
                    break
    if not found:
        raise ValueError(f"no documents in {', '.join(source.describe()['path'] for source in sources[:3])}")


def write(
    preparation: Preparation, sources: Sequence[Source], encoder: Encoder, hold_out: HoldOut,
    shard_tokens: int, workers: int, progress: bool = False,
) -> int:  # fmt: skip
    """Tokenise what is left to do of a preparation; returns the bytes of text that were read.

    Args:
        shard_tokens: a shard ends with the batch that gives it so many tokens.
    """
    start = preparation.manifest.next
    if start is None:
        return 0
    size = 0
    writers = preparation.writers()
    with (
        ThreadPoolExecutor(workers) as pool,
        _bar("tokenise", sources, start, progress) as bar,
    ):
        for batch, encoded in _in_order(pool, encoder, batches(sources, hold_out, start), 2 * workers):
            for split, (tokens, documents) in encoded.items():
                writers[split].add(tokens, documents)
            size += batch.size
            bar.update(batch.size)
            if max(writer.tokens for writer in writers.values()) >= shard_tokens:
                preparation.commit(writers, batch.next)
                writers = preparation.writers()
    preparation.commit(writers, None)
    return size


def batches(sources: Sequence[Source], hold_out: HoldOut, start: Place) -> Iterator[Batch]:
    """All documents from ``start`` on, in batches that are the same wherever between two of them it is.

    Neighbouring pieces of a document become one text again, unless one is held out and the other is not:
    then the text breaks off there, so an end of text goes between.
    """
    texts: list[Text] = []
    size = 0
    place = start
    for number, source in enumerate(sources[start.source :], start.source):
        documents = source.documents(start.offset if number == start.source else 0)
        sided, ahead = tee((document, hold_out.split(document.text)) for document in documents)
        next(ahead, None)
        for (document, split), following in zip_longest(sided, ahead):
            ends = document.ends or following[1] != split
            if texts and not texts[-1].ends:
                texts[-1] = Text(split, texts[-1].text + document.text, ends)
            else:
                texts.append(Text(split, document.text, ends))
            size += document.size
            place = Place(number, document.next)
            if size >= _BATCH:
                yield Batch(texts, place, size)
                texts, size = [], 0
    if texts:
        yield Batch(texts, place, size)


Encoded = dict[Split, tuple[np.ndarray, int]]
"""The tokens of each split, and the documents that end in them."""


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
    """The batches with their tokens, while at most ``ahead`` of them are under way."""
    under_way: deque[tuple[Batch, Future[Encoded]]] = deque()
    for batch in batches:
        under_way.append((batch, pool.submit(_encode, encoder, batch)))
        if len(under_way) > ahead:
            first, encoded = under_way.popleft()
            yield first, encoded.result()
    for first, encoded in under_way:
        yield first, encoded.result()


def _bar(title: str, sources: Sequence[Source], start: Place, progress: bool) -> tqdm:
    """A bar over the bytes of the sources; without an end if the size of one is not known."""
    sizes = [source.size for source in sources]
    known = [size for size in sizes if size is not None]
    whole = len(known) == len(sizes)
    return tqdm(
        desc=title,
        total=sum(known) if whole else None,
        initial=sum(known[: start.source]) + start.offset if whole else 0,
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
