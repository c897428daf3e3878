"""A guess that starts the search at the equilibrium of an earlier token."""

from dataclasses import dataclass

from torch import Tensor

from deqseq.guess import Guess


@dataclass(frozen=True)
class Previous(Guess):
    """Every token starts at ``previous``, the equilibrium of the last token before the call.

    ``previous`` is an argument of the layer's ``forward``. If it is ``None``, every token starts at zero.
    Language models pass ``previous`` when a call continues a cache, for example in generation.
    """

    capturable = True

    def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor | None:
        return None if previous is None else previous[:, None].expand_as(x).contiguous()
