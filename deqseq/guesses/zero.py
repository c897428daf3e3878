"""A guess that starts the search at zero."""

from dataclasses import dataclass

from torch import Tensor

from deqseq.guess import Guess


@dataclass(frozen=True)
class Zero(Guess):
    """Every token starts at zero."""

    capturable = True

    def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor | None:
        return None
