"""Data for the tests of pretraining."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deqseq.tasks import prepare


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of bytes: lines that say one letter again and again, and lines of random letters."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(0)
    lines = ["a" * 39 if i % 2 else "".join(chance.choices("bcdefgh jklmn", k=39)) for i in range(80)]
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytes_only = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([], bytes_only)
    tokenizer.save(str(folder / "tokenizer.json"))
    made = ["--output", str(folder / "data"), "--tokenizer", str(folder / "tokenizer.json")]
    options = ["--documents", "line", "--validation-share", "0.1", "--workers", "1"]
    assert prepare.main([str(folder / "text.txt"), *made, *options]) == 0
    return folder / "data"
