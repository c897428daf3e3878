"""From sources to shards: batches of documents are tokenised in parallel and written in order.

One thread reads and writes. Workers tokenise; the tokenizers library releases Python's lock. The shards
depend neither on the number of workers nor on interruptions.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, tee, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from deqseq.tasks.common.corpus.documents import Source
from deqseq.tasks.common.corpus.encoder import Encoder
from deqseq.tasks.common.corpus.holdout import SALT, SPLITS, HoldOut, Split
from deqseq.tasks.common.corpus.shards import Place, Preparation, locked

# Bytes of text in a batch; a worker tokenises it in a tenth of a second.
_BATCH = 2**18


@dataclass
class Text:
    """Consecutive text of one split. ``ends``: an end-of-text token follows."""

    split: Split
    text: str
    ends: bool


@dataclass
class Batch:
    """Texts that are tokenised together. ``next``: where reading continues after them; ``size``: bytes."""

    texts: list[Text]
    next: Place
    size: int


def prepare(
    output: Path, sources: Sequence[Source], tokenizer: Any, name: str, hold_out: HoldOut,
    shard_tokens: int, workers: int, force: bool = False,
) -> int:  # fmt: skip
    """Write the shards that folder ``output`` lacks; returns the bytes of text that were read.

    Args:
        name: of the tokenizer, for the manifest.
        shard_tokens: a shard ends after the batch with which it has at least so many tokens.
        workers: threads that tokenise.
        force: start afresh, whatever the folder holds.

    Raises:
        ValueError: a folder with other content, or that another process prepares; no documents, or one that
            cannot be read.
    """
    encoder = Encoder(tokenizer, remember=workers <= 3)
    head = {  # everything that the shards depend on
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
    preparation = Preparation(output, head, force)
    start = preparation.manifest.next
    if start is None:
        return 0
    if preparation.fresh:
        check(sources)
    size = 0
    with locked(output), ThreadPoolExecutor(workers) as pool, _bar("tokenise", sources, start) as bar:
        preparation.start(tokenizer)
        writers = preparation.writers()
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


def check(sources: Sequence[Source]) -> None:
    """Read all files, and one row of a dataset, to find errors early: tokenising takes 100 times as long."""
    found = False
    with _bar("check", sources, Place()) as bar:
        for source in sources:
            for document in islice(source.documents(), 1 if source.size is None else None):
                found = True
                bar.update(document.size)
    if not found:
        raise ValueError(f"no documents in {', '.join(source.describe()['path'] for source in sources[:3])}")


def batches(sources: Sequence[Source], hold_out: HoldOut, start: Place) -> Iterator[Batch]:
    """All documents from ``start`` on, in batches. From the end of any batch on, the same batches follow.

    Neighbouring pieces of a document become one text again, unless one of them is held out and the other is
    not: then an end-of-text token separates them.
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
    """The batches with their tokens; at most ``ahead`` of them are tokenised at a time."""
    under_way: deque[tuple[Batch, Future[Encoded]]] = deque()
    for batch in batches:
        under_way.append((batch, pool.submit(_encode, encoder, batch)))
        if len(under_way) > ahead:
            first, encoded = under_way.popleft()
            yield first, encoded.result()
    for first, encoded in under_way:
        yield first, encoded.result()


def _bar(title: str, sources: Sequence[Source], start: Place) -> tqdm:
    """A progress bar over the bytes of the sources, without a total if the size of one is unknown."""
    known = [source.size for source in sources if source.size is not None]
    whole = len(known) == len(sources)
    total, initial = (sum(known), sum(known[: start.source]) + start.offset) if whole else (None, 0)
    return tqdm(desc=title, total=total, initial=initial, unit="B", unit_scale=True, disable=None)
