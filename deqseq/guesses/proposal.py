"""A module proposes where the search starts."""

from torch import Tensor, nn

from deqseq.guess import Guess


class Proposal(Guess):
    """Every token starts where a module proposes.

    The layer registers the module as a submodule. Gradients reach the module only through ``Unrolled`` with
    ``before=0``. The other gradient strategies do not differentiate the start of a search: train the module
    by a loss of your own, such as the distance from its result to the equilibrium.

    Args:
        module: maps the input (B, L, D) to the initial iterate (B, L, D). A proposal is given as an object,
            because a module has no name.
        causal: whether token t of the module's result depends only on tokens up to t. Nobody checks it.
    """

    def __init__(self, module: nn.Module, causal: bool = True) -> None:
        if not isinstance(module, nn.Module):
            raise ValueError(f"Proposal takes a module, got {module!r}")
        self.module: nn.Module = module
        self.causal = causal

    def __repr__(self) -> str:
        return f"Proposal({type(self.module).__name__}, causal={self.causal})"

    def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor | None:
        proposed: Tensor = self.module(x)
        return proposed
