"""The data of a pretraining run: a folder of token shards, or a streamed dataset."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import ChainDataset, Dataset

from deqseq.causal_lm import ImplicitConfig
from deqseq.tasks.common.corpus import HoldOut, Split, StreamedRows, TokenFolder
from deqseq.tasks.common.corpus.documents import stamps, stream
from deqseq.tasks.common.corpus.encoder import Encoder
from deqseq.tasks.common.corpus.holdout import SPLITS
from deqseq.tasks.common.corpus.rows import Row
from deqseq.tasks.common.tokenizer import load_tokenizer
from deqseq.tasks.pretraining.settings import RunSettings, StreamSettings

# Rounds of the Feistel network. Four rounds give a strong pseudo-random permutation (Luby and Rackoff, 1988).
_ROUNDS = 8


class TrainingOrder(Dataset[Row]):
    """The rows of a training run, in order of training. Each pass over the data has its own random order.

    Row i depends only on i, the seed and the data. So a run can resume at any step, on any number of
    processes.

    Attributes:
        version: version of the shuffling method. Version 1 was numpy's shuffle.
    """

    version = 2

    def __init__(self, rows: Any, count: int, seed: int) -> None:
        self.rows, self.count, self.seed = rows, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        number, position = divmod(index, len(self.rows))
        return self.rows[shuffled(position, len(self.rows), f"{self.seed} {number}".encode())]


def shuffled(position: int, size: int, key: bytes) -> int:
    """The number at ``position`` in a pseudo-random permutation of ``range(size)``, in O(1) time and memory.

    A Feistel network permutes ``range(side**2)``, where ``side`` is the square root of ``size``, rounded up.
    While the result is ``size`` or more, the network permutes the result again (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002).

    Args:
        key: selects the permutation; at most 64 bytes.
    """
    side = math.isqrt(size - 1) + 1
    while True:
        a, b = divmod(position, side)
        for round in range(_ROUNDS):
            data = b.to_bytes(8, "little") + round.to_bytes(1, "little")
            digest = hashlib.blake2b(data, digest_size=8, key=key).digest()
            a, b = b, (a + int.from_bytes(digest, "little")) % side
        position = a * side + b
        if position < size:
            return position


@dataclass(frozen=True)
class Data:
    """Rows to train on and to evaluate on.

    Attributes:
        train: the training rows: a map-style dataset in the order of training, or a stream.
        validation: the held-out rows, as a map-style dataset.
        fingerprint: a hash that changes if the data changes.
        order: version of the shuffling method (:attr:`TrainingOrder.version`). ``None`` for a stream, because
            streams are not shuffled.
        verify: function that reads all data. It raises ``ValueError`` if the data has changed since it was
            prepared.
    """

    train: Any
    validation: Any
    tokenizer: Any
    vocab_size: int
    end_of_text: int
    fingerprint: str
    order: int | None = None
    verify: Callable[[], None] = lambda: None

    def fitted(self, config: ImplicitConfig) -> ImplicitConfig:
        """Set the begin and end tokens of ``config`` to the data's end-of-text token. Returns ``config``.

        Raises:
            ValueError: the vocabulary of the data is larger than the vocabulary of ``config``.
        """
        if self.vocab_size > config.vocab_size:
            raise ValueError(
                f"the data's tokenizer has {self.vocab_size} tokens, the model {config.vocab_size}: prepare "
                f"the data with the model's tokenizer, or set --model.vocab_size {self.vocab_size}"
            )
        config.bos_token_id = config.eos_token_id = self.end_of_text
        return config


def open_data(settings: RunSettings) -> Data:
    """Open the data of a run.

    Raises:
        ValueError: the data is missing, unfinished or too small, or has no held-out rows.
    """
    if settings.data is None:
        raise ValueError("no data: name a folder made by deqseq.tasks.prepare with --data FOLDER")
    if settings.stream is not None:
        return _streamed(settings, settings.stream)
    folder = TokenFolder(str(settings.data))
    train, validation = (folder.rows(split, settings.length, settings.documents) for split in SPLITS)
    wanted = settings.total_steps * settings.rows_per_step
    if wanted > settings.passes * len(train):
        raise ValueError(
            f"{wanted * settings.length:,} tokens are asked for, but {settings.data} has "
            f"{len(train) * settings.length:,} in rows of {settings.length}, to be gone through "
            f"{settings.passes:g} times: prepare more text, ask for fewer --tokens, or allow "
            f"--passes {wanted / len(train):.3g}"
        )
    return Data(
        TrainingOrder(train, wanted, settings.seed), validation, folder.tokenizer(), folder.vocab_size,
        folder.end_of_text, folder.fingerprint, TrainingOrder.version, folder.verify,
    )  # fmt: skip


def _streamed(settings: RunSettings, given: StreamSettings) -> Data:
    """The rows of a Hugging Face dataset, tokenised on the fly.

    The same rule as in ``deqseq.tasks.prepare`` chooses the held-out documents. Training skips them.
    Evaluation uses the first ``eval_rows`` rows of ``validation_split``. If there is no ``validation_split``,
    evaluation uses rows of held-out documents.
    """
    tokenizer = load_tokenizer(given.tokenizer)
    hold_out = HoldOut(given.validation_share)
    files = [given.files] if isinstance(given.files, str) else given.files
    other = given.validation_split or given.split

    def rows(split: str, side: Split | None) -> StreamedRows:
        return StreamedRows(
            stream(given.dataset, given.subset, split, files), tokenizer, settings.length,
            settings.documents, column=given.column, split=side, hold_out=hold_out,
        )  # fmt: skip

    # If training and validation share a split, evaluate only on its held-out documents.
    side: Split | None = "validation" if other == given.split else None
    validation = list(islice(rows(other, side), settings.eval_rows))
    if not validation:
        raise ValueError(
            f"{given.dataset} has too few held-out documents for a row of {settings.length} tokens: name a "
            "data.validation_split, or a larger data.validation_share"
        )
    encoder = Encoder(tokenizer)
    reading = [given.dataset, given.subset, given.split, other, given.column, given.validation_share]
    content = [encoder.sha256(), *reading, *stamps(given.dataset, files)]
    train = ChainDataset([rows(given.split, "train")] * math.ceil(settings.passes))
    fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return Data(train, validation, tokenizer, encoder.vocab_size, encoder.end_of_text, fingerprint)
