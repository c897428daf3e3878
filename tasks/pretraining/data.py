"""What a run reads: a folder of token shards, or a dataset as it streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from deqseq.causal_lm import ImplicitConfig
from deqseq.tasks.corpus import TokenFolder
from deqseq.tasks.pretraining.settings import RunSettings
from deqseq.tasks.pretraining.trainer import Row, TrainingOrder


@dataclass
class Data:
    """Rows to train on and to evaluate on.

    Attributes:
        train: in the order of the run.
        validation: held out.
        tokenizer: that made them.
        vocab_size, end_of_text: the tokenizer's.
        fingerprint: changes if the data does.
    """

    train: Dataset[Row]
    validation: Any
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    end_of_text: int
    fingerprint: str

    def fitted(self, config: ImplicitConfig) -> ImplicitConfig:
        """The configuration with the end of texts that the data has.

        Raises:
            ValueError: a model of fewer tokens than the tokenizer's.
        """
        if self.vocab_size > config.vocab_size:
            raise ValueError(
                f"the data's tokenizer has {self.vocab_size} tokens, the model {config.vocab_size}: prepare "
                f"the data with the model's tokenizer, or set --model.vocab_size {self.vocab_size}"
            )
        config.bos_token_id = config.eos_token_id = self.end_of_text
        return config


def open_data(settings: RunSettings) -> Data:
    """The data of a run.

    Raises:
        ValueError: none there, or unfinished; fewer tokens than asked for; too few to hold any out.
    """
    if settings.data is None:
        raise ValueError("no data: name a folder made by deqseq.tasks.prepare with --data FOLDER")
    folder = TokenFolder(settings.data)
    _check_tokens(settings, folder.tokens("train"))
    train, validation = (
        folder.rows(split, settings.length, settings.documents) for split in ("train", "validation")
    )
    if not len(validation):
        raise ValueError(
            f"{settings.data} holds out {folder.tokens('validation')} tokens, less than a row of "
            f"{settings.length}: prepare it with a larger --validation-share, or train on shorter rows"
        )
    rows = settings.total_steps * settings.rows_per_step
    return Data(
        TrainingOrder(train, rows, settings.seed),
        validation,
        folder.tokenizer(),
        folder.vocab_size,
        folder.end_of_text,
        folder.fingerprint,
    )


def _check_tokens(settings: RunSettings, there: int) -> None:
    wanted = settings.total_steps * settings.batch_tokens
    usable = there // settings.length * settings.length
    if not usable or wanted > settings.passes * usable:
        raise ValueError(
            f"{wanted:,} tokens are asked for, {settings.data} has {usable:,} in rows of {settings.length}, "
            f"to be gone through {settings.passes:g} times: prepare more text, ask for fewer --tokens, or "
            f"allow --passes {wanted / max(usable, 1):.3g}"
        )
