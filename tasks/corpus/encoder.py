"""Text to token ids, at the speed of the tokenizers library."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# Characters that are tokenised at once: longer parts take a fifth more time, and much memory.
_LONGEST = 8192
# Up to the last space between two words. Tokenizers cut there by themselves, so the tokens stay the same.
_LAST_CUT = re.compile(r".*\S(?= \S)", re.DOTALL)


class Encoder:
    """Token ids of texts, without special tokens before or after them.

    Args:
        tokenizer: of transformers, backed by the tokenizers library.

    Attributes:
        vocab_size: one more than the largest id, added tokens included.
        end_of_text: the id that ends a document.
        dtype: the smallest of uint16 and uint32, little-endian, that holds every id.

    Raises:
        ValueError: a tokenizer that the tokenizers library does not run, or without an end of text.
    """

    def __init__(self, tokenizer: Any) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError(
                f"the tokenizer {name} has no tokenizer.json: only those that have one are fast enough"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {name} has no end-of-text token (eos_token), which ends documents"
            )
        self.end_of_text: int = tokenizer.eos_token_id
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.dtype = np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # a document that spells one out does not end there

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text."""
        parts = [list(_parts(text)) for text in texts]
        flat = [part for own in parts for part in own]
        encoded = iter(self._backend.encode_batch_fast(flat, add_special_tokens=False))
        return [np.concatenate([np.array(next(encoded).ids, self.dtype) for _ in own]) for own in parts]

    def sha256(self) -> str:
        """Checksum of the tokenizer.json that ``save_pretrained`` writes."""
        return hashlib.sha256(self._backend.to_str(pretty=True).encode()).hexdigest()


def _parts(text: str) -> Iterator[str]:
    """A text in parts that are not too long, cut before a single space where there is one."""
    start = 0
    while len(text) - start > _LONGEST:
        found = _LAST_CUT.match(text, start, start + _LONGEST)
        end = found.end() if found else start + _LONGEST
        yield text[start:end]
        start = end
    yield text[start:]
