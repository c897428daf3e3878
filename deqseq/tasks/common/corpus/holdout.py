"""Chooses the documents that are kept out of training and used for validation."""

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
SALT = "deqseq"


@dataclass(frozen=True)
class HoldOut:
    """Holds out a pseudo-random share of the documents for validation.

    A hash of the document's text decides. So equal texts are always in the same split: in shards, in streams
    and on every machine. With a larger share, the documents that were held out before are still held out.

    Args:
        share: share of the documents to hold out, in [0, 1).
    """

    share: float = 0.001

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"the share held out for validation must be in [0, 1), got {self.share}")

    def split(self, text: str) -> Split:
        """The split of the document with this text."""
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=SALT.encode()).digest()
        return "validation" if int.from_bytes(digest, "big") < self.share * 2**64 else "train"
