"""The rule that chooses the documents held out from training."""

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
SALT = "deqseq"


@dataclass(frozen=True)
class HoldOut:
    """Holds out a pseudo-random share of the documents: a hash of a document's text decides.

    Equal texts are always in the same split, in shards and in streams, on every machine. Documents
    held out at one share are also held out at every larger share.

    Args:
        share: share of the documents to hold out, in [0, 1).
    """

    share: float = 0.001

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"the share held out for validation must be in [0, 1), got {self.share}")

    def split(self, text: str) -> Split:
        """The split of a document."""
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=SALT.encode()).digest()
        return "validation" if int.from_bytes(digest, "big") < self.share * 2**64 else "train"
