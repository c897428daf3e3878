"""Converts text to token ids with the tokenizers library."""

import copy
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

# Matches the position before a single space between two words.
_CUT = re.compile(r"(?= \S)(?<=\S)")
# A text is cut between words into parts of this many characters or a few more. Much longer parts would take
# more time and memory.
_LONG = 4096
# A sample text, to test whether a tokenizer gives the same tokens for a whole text and for its single words.
_PROBE = (
    "It's 12,345.67 words -- and  two   spaces,\n\tnew lines \n\n  indented; na\u00efve caf\u00e9, "
    "\u65e5\u672c\u8a9e \u30c6\u30b9\u30c8 'so' (it) [is] {x: 1} http://a.b/c?d=e&f #5 @x 100 % \u00a0 we'll "
    "e\u0301nd.</s> 3 4 \u2014 ok"
)
# The normalisers that never look across a space. With them, a text can be cut at spaces before normalisation.
_NEAR = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "ByteLevel"}
# Maximum number of characters in the cache. A fuller cache is emptied. The limit is about a million English
# words, which take 300 MB.
_REMEMBERED = 2**23


class Encoder:
    """Converts texts to token ids, without special tokens before or after a text.

    Most tokenizers handle each word on its own. For such a tokenizer, a cache keeps the ids of every word.
    This halves the time. Other tokenizers get whole texts.

    Args:
        tokenizer: a tokenizer of transformers, backed by the tokenizers library.
        remember: cache the ids of words. Look-ups in the cache hold Python's global lock, so the cache saves
            time only if at most 3 threads call the encoder.

    Attributes:
        vocab_size: the largest id plus one, added tokens included.
        end_of_text: the id of the token that ends a document.
        dtype: the type of the ids: little-endian uint16 if every id fits, else little-endian uint32.

    Raises:
        ValueError: the tokenizer has no tokenizer.json, or no end-of-text token.
    """

    def __init__(self, tokenizer: Any, remember: bool = True) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError(
                f"the tokenizer {name} has no tokenizer.json: use a fast tokenizer, which has one"
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
        self._backend.encode_special_tokens = True  # read special tokens in documents as plain text
        self._known: dict[str, list[int]] = {}
        self._known_characters = 0
        self._remembers = remember
        self._cuts = self._cuts_between_words()

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token ids of every text. Several threads may call the encoder at the same time."""
        if not self._cuts:
            return [np.array(ids, self.dtype) for ids in self._encode(texts)]
        if self._remembers:
            words = [_CUT.split(text) for text in texts]
            known = self._knowing(set().union(*words))
            ids = (chain.from_iterable(map(known.__getitem__, own)) for own in words)
            return [np.fromiter(own, self.dtype) for own in ids]
        parts = [list(_parts(text)) for text in texts]
        encoded = iter(self._encode([part for own in parts for part in own]))
        return [np.concatenate([np.array(next(encoded), self.dtype) for _ in own]) for own in parts]

    def _cuts_between_words(self) -> bool:
        """Whether tokenising a text word by word gives the same tokens as tokenising the whole text."""
        form = json.loads(self._backend.to_str())
        over = [t for t in form["added_tokens"] if re.search(r"\S ", t["content"]) or t["rstrip"]]
        if any(not token["special"] for token in over):
            return False
        normalizer = form["normalizer"] or {"type": "NFC"}
        if not {part["type"] for part in normalizer.get("normalizers", [normalizer])} <= _NEAR:
            return False
        parts = self._encode(_CUT.split(_PROBE))
        return list(chain.from_iterable(parts)) == self._encode([_PROBE])[0]

    def _knowing(self, words: Collection[str]) -> dict[str, list[int]]:
        """Add ``words`` to the cache. Returns the cache, which maps every word to its ids."""
        if self._known_characters > _REMEMBERED:
            self._known, self._known_characters = {}, 0
        known = self._known  # use one cache until the end: another thread may replace self._known
        new = [word for word in words if word not in known]
        self._known_characters += sum(map(len, new))
        known.update(zip(new, self._encode(new), strict=True))
        return known

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def sha256(self) -> str:
        """Checksum of the tokenizer.json that ``save_pretrained`` writes."""
        return hashlib.sha256(self._backend.to_str(pretty=True).encode()).hexdigest()


def _parts(text: str) -> Iterator[str]:
    """Cut a text between words. Every part except the last has at least ``_LONG`` characters."""
    start = 0
    while found := _CUT.search(text, start + _LONG):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]
