"""The interface of guesses. A guess proposes the initial iterate of the search for the fixed point.

Shapes: B sequences, L tokens, D width.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from deqseq.registry import Registry


class Guess(ABC):
    """Proposes the initial iterate of a search.

    Example of a guess in another package::

        class Input(Guess):
            def propose(self, x, number, previous):
                return x

    Attributes:
        varies: true if starts with different numbers get different guesses. :func:`~deqseq.solve_many`
            requires it.
        causal: true if the guess for token t depends only on tokens up to t. Causal training requires it.
        module: a module that the guess uses, or ``None``. The layer registers the module as a submodule, so
            optimisers, ``layer.to`` and state dicts find its parameters.
    """

    varies: bool = False
    causal: bool = True
    module: nn.Module | None = None

    @abstractmethod
    def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor | None:
        """The initial iterate (B, L, D); ``None`` means zero.

        Values at padding are ignored. Tokens that are not finite become zero.

        Args:
            x: (B, L, D) the layer's input. Each row is one sequence, followed by padding, which is zero.
            number: in training ``None``. A random guess then draws new values for every sequence. In
                evaluation, the number of the start, which is 0 in a call of the layer. The guess for a token
                must then depend only on this number, on the place of the token in its row, and on the
                sequence. It must not depend on other sequences, on L, on torch's global random state or on
                the device.
            previous: (B, D) for each sequence the equilibrium of the last token before ``x``; ``None`` if it
                is unknown.
        """


def propose(guess: Guess, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor | None:
    """The proposal of ``guess``; the arguments are those of :meth:`Guess.propose`.

    Raises:
        ValueError: the proposal is not a floating-point tensor of x's shape on x's device.
    """
    z0 = guess.propose(x, number, previous)
    if z0 is None:
        return None
    if not isinstance(z0, Tensor):
        raise ValueError(f"guess {guess} must return a tensor or None, got {z0!r}")
    if z0.shape != x.shape or z0.device != x.device or not z0.is_floating_point():
        raise ValueError(
            f"guess {guess} must return a floating-point tensor of shape {tuple(x.shape)} on {x.device}, got "
            f"{z0.dtype} of shape {tuple(z0.shape)} on {z0.device}"
        )
    return z0


def modules_of(*guesses: Guess) -> nn.ModuleList | None:
    """The modules of the guesses, each once; ``None`` if there are none."""
    found = dict.fromkeys(guess.module for guess in guesses)
    return nn.ModuleList(module for module in found if module is not None) or None


guesses: Registry[Guess] = Registry(
    "guess",
    "deqseq.guesses",
    {
        "zero": "deqseq.guesses.zero:Zero",
        "noise": "deqseq.guesses.noise:Noise",
        "previous": "deqseq.guesses.previous:Previous",
    },
    base=Guess,  # type: ignore[type-abstract]
    hint="; a module becomes a guess as Proposal(module)",
)
