"""Loads tokenizers from a file, a folder or the Hugging Face Hub, and trains new ones."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, snapshot_download
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deqseq.tasks.common.runs import model_folder

# The largest vocabulary to train. Training reserves memory for all tokens at once, and Python aborts if there
# is too little.
_MOST_TOKENS = 10_000_000
_TIMEOUT = 10  # seconds in which the hub must answer
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[EOS]")


def load_tokenizer(source: str, advice: str = "") -> Any:
    """Load a tokenizer. Raises ``ValueError`` if it cannot be loaded.

    Args:
        source: file or folder of the tokenizer, folder of a model or of a pretraining run, or a name on the
            hub.
        advice: what to do if there is no tokenizer, for the error message.
    """
    named = place = model_folder(source)
    if place.is_dir() and not (place / "tokenizer_config.json").is_file():
        place = place / "tokenizer.json"
    if is_local(str(named)) and not place.exists():
        raise ValueError(f"no tokenizer in {named}{advice}")
    check_reachable(str(named))
    if (place / "config.json").is_file():  # the folder of a model
        import deqseq.causal_lm  # noqa: F401 - registers our models; else transformers asks to run their code
    try:
        tokenizer: Any = (
            PreTrainedTokenizerFast(tokenizer_file=str(place))
            if place.is_file()
            else AutoTokenizer.from_pretrained(str(place))
        )
    except Exception as error:
        if place.exists():
            advice = "; copy it again, or name another one"
        raise ValueError(f"the tokenizer {place} cannot be loaded: {first_line(error)}{advice}") from error
    # If no end-of-text token is set, as in a bare tokenizer.json, take a common one from the vocabulary.
    # lm-eval needs this token for empty contexts.
    if tokenizer.eos_token is None:
        known = tokenizer.get_vocab()
        tokenizer.eos_token = next((token for token in _END_OF_TEXT if token in known), None)
    return tokenizer


def load_for_model(model: str, source: str | None) -> Any:
    """Load the tokenizer ``source`` of a command's option ``--tokenizer``; by default that of ``model``.

    Raises:
        ValueError: the tokenizer cannot be loaded; it is not the tokenizer of the model.
    """
    if source is None:
        return load_tokenizer(model, "; name one with --tokenizer PATH")
    found = load_tokenizer(source)
    check_same_tokens(model, found, source, "leave out --tokenizer")
    return found


def check_same_tokens(model: str | Path, tokenizer: Any, name: str, advice: str) -> None:
    """Raise ``ValueError`` if a number means another token in ``tokenizer`` than in the folder ``model``.

    One of the two vocabularies may have further tokens. A folder without a tokenizer passes. A model on the
    hub passes too.

    Args:
        name: what has ``tokenizer``, for the error message.
        advice: what to do, for the error message.
    """
    folder = model_folder(model)
    if not (folder / "tokenizer.json").is_file():
        return
    there, here = (
        {number: token for token, number in one.get_vocab().items()}
        for one in (load_tokenizer(str(folder)), tokenizer)
    )
    for number in sorted(there.keys() & here.keys()):
        if there[number] != here[number]:
            raise ValueError(
                f"the model in {folder} has another tokenizer than {name}: token {number} is "
                f"{there[number]!r} in the model and {here[number]!r} in {name}; {advice}"
            )


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


def check_reachable(name: str) -> None:
    """Raise ``ValueError`` if ``name`` can only come from the hub, and the hub does not answer.

    Local paths and names in the hub's cache pass. Without this check, transformers would try to reach the hub
    for a minute.
    """
    if is_local(name):
        return
    with suppress(Exception):  # the hub raises many classes of errors
        snapshot_download(name, local_files_only=True)
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception as error:
        raise ValueError(
            f"there is no folder {name}, and {constants.ENDPOINT} cannot be reached: {first_line(error)}"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its class if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
