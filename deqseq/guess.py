"""The interface of guesses. A guess proposes the initial iterate of the search for the fixed point.

Shapes: B sequences, L tokens, D width.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from deqseq.registry import Registry


class Guess(ABC):
    """Proposes the initial iterate of the search for the fixed point.

    Example of a guess in another package::

        class Input(Guess):
            def propose(self, x, number, previous):
                return x

    Attributes:
        varies: true if :meth:`propose` returns different guesses for different values of ``number``.
            Several starts (:func:`~deqseq.solve_many`, :func:`~deqseq.solve_with_restarts`) need this.
        causal: true if the guess for token t depends only on tokens up to t. A causal layer in training
            accepts only guesses with ``causal = True``.
        capturable: true if a CUDA graph can record :meth:`propose`, which must then never make the host wait
            for the device.
        module: a module that the guess uses, or ``None``. The layer registers the module as a submodule, so
            that optimisers, ``layer.to`` and state dicts find its parameters. If a tool such as PEFT replaces
            the submodule, this attribute becomes the new module.
    """

    varies: bool = False
    causal: bool = True
    capturable: bool = False
    module: nn.Module | None = None

    @abstractmethod
    def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor | None:
        """Returns the initial iterate (B, L, D), or ``None`` to start at zero.

        The layer ignores values at padding. A token whose values are not all finite starts at zero.

        Args:
            x: (B, L, D) the layer's input. Each row is one sequence, followed by zeros as padding.
            number: ``None`` in training. A random guess then draws new values for every sequence. In
                evaluation, the search may run from several starts, and ``number`` is the number of the start.
                A call of the layer uses start 0. In evaluation, the guess for a token must depend only on
                ``number``, on the place of the token in its row, and on the sequence. It must not depend on
                other sequences, on L, on torch's global random state or on the device.
            previous: (B, D) the equilibrium of the last token before ``x``, for each sequence. ``None`` if
                this equilibrium is unknown.
        """


def propose(guess: Guess, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor | None:
    """Call ``guess.propose`` with the same arguments and check the result.

    Raises:
        ValueError: the result is not a floating-point tensor with x's shape and device. ``None`` is allowed.
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


class GuessModules(nn.ModuleList):
    """The modules of ``guesses``. If one of them is replaced, as PEFT does, the guesses use the new one."""

    guesses: tuple[Guess, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        before = vars(self).get("_modules", {}).get(name)
        super().__setattr__(name, value)
        for guess in self.guesses:
            if before is not None and guess.module is before:
                guess.module = value


def modules_of(*guesses: Guess) -> GuessModules | None:
    """The modules that the guesses use, without duplicates. ``None`` if no guess uses a module."""
    found = dict.fromkeys(guess.module for guess in guesses)
    modules = GuessModules(module for module in found if module is not None)
    modules.guesses = guesses
    return modules or None


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
