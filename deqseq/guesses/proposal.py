"""A guess from a module: the module computes where the search starts."""

from torch import Tensor, nn

from deqseq.checks import check_flag, shown
from deqseq.guess import Guess


class Proposal(Guess):
    """Every token starts at the iterate that a module computes from the input.

    The layer registers the module as a submodule. Gradients of the output reach the module only with the
    gradient strategy ``Unrolled`` and ``before=0``. With other strategies, train the module with a loss of
    your own, such as the distance from the module's result to the equilibrium.

    Pass the object to the layer. A ``Proposal`` has no registered name, because a name cannot describe a
    module.

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
