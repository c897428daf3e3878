"""Data for the tests of pretraining."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    chance = random.Random(0)
    pieces = []
    for i in range(60):
        pieces.append("a" * 40 if i % 2 else "".join(chance.choice("bcdefgh jklmn") for _ in range(40)))
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        pieces,
        trainers.BpeTrainer(
            vocab_size=257,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    t.save(str(out / "tokenizer.json"))
    ids = np.array(t.encode("".join(pieces)).ids, dtype=np.uint16)
    np.save(out / "train.npy", ids)
    np.save(out / "validation.npy", ids[:200])
    (out / "manifest.json").write_text(json.dumps({"vocab": t.get_vocab_size()}))
    return out
