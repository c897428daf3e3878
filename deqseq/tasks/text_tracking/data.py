"""A folder of data: documents to train on, their token shards, tests at several lengths, and a tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deqseq.checks import check_count
from deqseq.tasks.common.corpus import HoldOut, TokenFolder, pipeline
from deqseq.tasks.common.corpus.documents import JsonLines
from deqseq.tasks.common.files import PART, locked, write_json
from deqseq.tasks.common.results import changes
from deqseq.tasks.text_tracking.documents import (
    Document,
    Kind,
    check_options,
    make_document,
    read_documents,
    write_documents,
)
from deqseq.tasks.text_tracking.worlds import WORLDS

END_OF_TEXT, UNKNOWN = "<|endoftext|>", "<|unknown|>"
_SETTINGS, _TRAIN, _TOKENIZER, _SHARDS = "settings.json", "train.jsonl", "tokenizer", "shards"
_SHARD_TOKENS = 100_000_000


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer for all kinds of documents: one token for every word. It is the same for all data."""
    words = sorted({word for world in WORLDS.values() for word in world.VOCABULARY})
    vocabulary = {word: number for number, word in enumerate([END_OF_TEXT, UNKNOWN, *words])}
    found: Any = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END_OF_TEXT, unk_token=UNKNOWN)


def make_folder(
    folder: Path, kinds: Sequence[Kind], length: int, test_lengths: Sequence[int], places: int,
    longest_run: int | None, documents: int, test_documents: int, validation_share: float, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Make a folder of data. After an interruption, a new call keeps finished files and makes the others.

    The folder contains

    - ``train.jsonl``: documents of ``length`` tokens, the end-of-text token included;
    - ``shards``: the same documents as token shards for pretraining. Rows of ``length`` tokens are whole
      documents;
    - ``test-LENGTH.jsonl``: test documents of each of the ``test_lengths``;
    - ``tokenizer``: a tokenizer that transformers' AutoTokenizer loads;
    - ``settings.json``: the settings.

    Returns:
        The content of ``settings.json``.

    Raises:
        ValueError: an option is out of range; the folder holds other files, or data with other settings.
    """
    for one in (length, *test_lengths):
        check_options(kinds, one, places, longest_run)
    check_count("documents", documents)
    check_count("test_documents", test_documents)
    hold_out = HoldOut(validation_share)
    lengths = sorted(set(test_lengths))
    settings = {
        "kinds": sorted(kinds), "length": length, "test_lengths": lengths, "places": places,
        "longest_run": longest_run, "documents": documents, "test_documents": test_documents,
        "validation_share": validation_share, "seed": seed,
    }  # fmt: skip
    with locked(folder, "makes"):
        _check_folder(folder, settings)
        write_json(folder / _SETTINGS, settings)
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder / _TOKENIZER)
        files = {_test(one): (one, test_documents) for one in lengths} | {_TRAIN: (length, documents)}
        for name, (size, count) in files.items():
            if not (folder / name).exists():
                own = (
                    make_document(kinds, size, places, f"{seed} {name} {i}", longest_run)
                    for i in range(count)
                )
                write_documents(folder / name, own, count)
        source = JsonLines(str(folder / _TRAIN))
        pipeline.prepare(folder / _SHARDS, [source], tokenizer, _TOKENIZER, hold_out, _SHARD_TOKENS, 1)
    return settings


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the data in ``folder``. Raises ``ValueError`` if it holds no finished data."""
    try:
        settings: dict[str, Any] = json.loads((folder / _SETTINGS).read_text())
        if not {"length", "test_lengths"} <= settings.keys():
            raise ValueError(f"{_SETTINGS} has other settings")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder} holds no data that the command data has made: {error}") from error
    TokenFolder(folder / _SHARDS)  # the last file that the command writes
    return settings


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of the data in ``folder``. Raises ``ValueError`` if it was changed."""
    return TokenFolder(folder / _SHARDS).tokenizer()


def read_test(folder: Path, length: int) -> list[Document]:
    """The test documents of ``length`` tokens. Raises ``ValueError`` if there are none."""
    known = read_settings(folder)["test_lengths"]
    if length not in known:
        raise ValueError(f"{folder} has tests of {', '.join(map(str, known))} tokens, not of {length}")
    return read_documents(folder / _test(length))


def _test(length: int) -> str:
    return f"test-{length}.jsonl"


def _check_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless the folder is empty or holds data with these settings."""
    file = folder / _SETTINGS
    others = sorted(path.name for path in folder.iterdir() if path.suffix != PART)
    if not others:
        return
    try:
        former = json.loads(file.read_text())
    except (OSError, ValueError):
        raise ValueError(
            f"{folder} holds other files ({', '.join(others[:3])}) and no data of this command: name another "
            "folder"
        ) from None
    if differ := changes(former, settings):
        raise ValueError(
            f"{folder} holds data with other settings ({'; '.join(differ)}): name another folder"
        )
