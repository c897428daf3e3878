"""Tokenizers by name or file."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[EOS]")


def load_tokenizer(model: str, source: str | None = None) -> Any:
    """The tokenizer at ``source``: a tokenizer.json, a folder or a hub name; by default the model's.

    Raises:
        ValueError: no tokenizer there.
    """
    place = Path(source or model)
    hint = "name one with --tokenizer PATH"
    if place.is_dir():
        single = place / "tokenizer.json"
        if not single.is_file() and not (place / "tokenizer_config.json").is_file():
            raise ValueError(f"no tokenizer in {place}: {hint}")
        if not (place / "tokenizer_config.json").is_file():
            place = single
    elif is_local(str(place)) and not place.is_file():
        raise ValueError(f"no tokenizer in {place}: {hint}")
    try:
        tokenizer: Any = (
            PreTrainedTokenizerFast(tokenizer_file=str(place))
            if place.is_file()
            else AutoTokenizer.from_pretrained(str(place))
        )
    except Exception as error:
        raise ValueError(f"the tokenizer {place} cannot be loaded: {first_line(error)}; {hint}") from error
    if tokenizer.eos_token is not None:
        return tokenizer
    # A tokenizer.json does not say which token ends a text. lm-eval needs one for empty contexts.
    known = tokenizer.get_vocab()
    end = next((token for token in _END_OF_TEXT if token in known), None)
    if end is not None:
        tokenizer.eos_token = end
    return tokenizer


def is_local(name: str) -> bool:
    """Whether a name is a path: it exists, or looks like a path instead of a name on the hub."""
    return Path(name).exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
