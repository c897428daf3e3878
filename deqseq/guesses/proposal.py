"""A module proposes where the search starts."""

from torch import Tensor, nn

from deqseq.checks import check_flag, shown
from deqseq.guess import Guess


class Proposal(Guess):
    """Every token starts where a module proposes.

    The layer registers the module as a submodule. Gradients reach the module only through ``Unrolled`` with
    ``before=0``. With other gradient strategies, train the module by a loss of your own, such as the distance
    from its result to the equilibrium.

    A ``Proposal`` has no registered name, because names cannot describe a module: pass the object.

    Args:
        module: maps the input (B, L, D) to the initial iterate (B, L, D).
        causal: true if token t of the module's result depends only on tokens up to t. This is not checked.
    """

    def __init__(self, module: nn.Module, causal: bool = True) -> None:
        if not isinstance(module, nn.Module):
            raise ValueError(f"Proposal takes a module, got {shown(module)}")
        check_flag("causal", causal)
        self.module: nn.Module = module
        self.causal = causal

    def __repr__(self) -> str:
        return f"Proposal({type(self.module).__name__}, causal={self.causal})"

    def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor | None:
        proposed: Tensor = self.module(x)
        return proposed
