"""Loads tokenizers from a file, a folder or the Hugging Face Hub, and trains new ones."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deqseq.tasks.common.runs import model_folder

# The largest vocabulary to train. Training reserves memory for all tokens at once, and Python aborts if there
# is too little.
_MOST_TOKENS = 10_000_000
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[EOS]")


def load_tokenizer(model: str, source: str | None = None) -> Any:
    """Load a tokenizer. Raises ``ValueError`` if it cannot be loaded.

    Args:
        model: folder of a model or of a pretraining run, or a name on the hub.
        source: file, folder or hub name of the tokenizer; by default the tokenizer of ``model``.
    """
    named = place = model_folder(source or model)
    hint = "name one with --tokenizer PATH"
    if place.is_dir() and not (place / "tokenizer_config.json").is_file():
        place = place / "tokenizer.json"
    if is_local(str(named)) and not place.exists():
        raise ValueError(f"no tokenizer in {named}: {hint}")
    if (place / "config.json").is_file():  # the folder of a model
        import deqseq.causal_lm  # noqa: F401 - registers our models; else transformers asks to run their code
    try:
        tokenizer: Any = (
            PreTrainedTokenizerFast(tokenizer_file=str(place))
            if place.is_file()
            else AutoTokenizer.from_pretrained(str(place))
        )
    except Exception as error:
        raise ValueError(f"the tokenizer {place} cannot be loaded: {first_line(error)}; {hint}") from error
    # If no end-of-text token is set, as in a bare tokenizer.json, take a common one from the vocabulary.
    # lm-eval needs this token for empty contexts.
    if tokenizer.eos_token is None:
        known = tokenizer.get_vocab()
        tokenizer.eos_token = next((token for token in _END_OF_TEXT if token in known), None)
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer. Its end of text is ``<|endoftext|>``.

    Args:
        vocab_size: maximum number of tokens: the 256 bytes, the end of text, and merged pairs.
    """
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[_END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(texts, trainer)
    return made


def trained_size(name: str) -> int | None:
    """The SIZE in ``train:SIZE``, the name of a tokenizer to be trained; ``None`` for other names.

    Raises:
        ValueError: SIZE is not a whole number from 257 (the 256 bytes and the end of text) to 10,000,000.
    """
    verb, colon, size = name.partition(":")
    if verb != "train" or not colon:
        return None
    if not size.isdecimal() or not 257 <= int(size) <= _MOST_TOKENS:
        raise ValueError(
            f"a tokenizer to train is train:SIZE with a size of at least 257 and at most {_MOST_TOKENS:,}, "
            f"got {name!r}"
        )
    return int(size)


def is_local(name: str) -> bool:
    """Whether ``name`` is a local path and not a hub name.

    It is a path if it looks like one, if it exists, or if the folder that should contain it exists.
    """
    path = Path(name)
    looks = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return looks or path.exists() or (path.parent != Path() and path.parent.is_dir())


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its class if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
