"""Which documents are held out from training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class HoldOut:
    """A random share of the documents, chosen by a hash of their text.

    So the same text is always on the same side: in shards, in streams, as a duplicate, on any machine. A
    larger share holds out what a smaller one does, and more.

    Args:
        share: of the documents, in [0, 1).
        salt: another one draws other documents.
    """

    share: float = 0.001
    salt: str = "deqseq"

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"the share held out for validation must be in [0, 1), got {self.share}")
        if len(self.salt.encode()) > hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(f"salt must have at most 64 bytes, got {self.salt!r}")

    def split(self, text: str) -> Split:
        """The side of a document."""
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self.salt.encode()).digest()
        return "validation" if int.from_bytes(digest, "big") < self.share * 2**64 else "train"
