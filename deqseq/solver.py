"""The interface of solvers. A solver computes the next iterate. Only the loop (``deqseq.loop``) evaluates f.

Shapes: B sequences, W tokens in the window, D width.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deqseq.registry import Registry


@dataclass
class Progress:
    """Tells a solver's ``step`` how far each token's search is after an evaluation. All tensors are (B, W).

    A token is settled when its search has ended. Padding is always settled.

    Attributes:
        residual: float32, relative residual of each token; ``None`` if the number of iterations is fixed.
        active: bool, tokens that were not settled before the evaluation.
        iterations: int64, number of iterations of each token, including the current one.
        settled: bool, tokens that are settled after the evaluation.
        max_iter: maximum number of iterations per token.
    """

    residual: Tensor | None
    active: Tensor
    iterations: Tensor
    settled: Tensor
    max_iter: int

    @cached_property
    def entered(self) -> Tensor:
        """(B, W) bool, tokens that have just had their first iteration."""
        return self.active & (self.iterations <= 1)

    @cached_property
    def shifting(self) -> Tensor:
        """(B, W) bool, tokens with an unsettled token before them.

        f(z) at a token depends on the tokens before it, so f(z) changes while an earlier token is unsettled.
        If the number of iterations is fixed, ``residual`` is ``None``, and no token counts as shifting.
        """
        if self.residual is None:
            return torch.zeros_like(self.settled)
        return (~self.settled).cumsum(1) > (~self.settled).long()

    @cached_property
    def last(self) -> Tensor:
        """(B, W) bool, tokens whose next iteration is the last."""
        return self.iterations + 1 == self.max_iter

    @property
    def fresh(self) -> Tensor:
        """(B, W) bool, tokens that are ``entered`` or ``shifting``.

        Their history is that of another token, or of a map that has changed since.
        """
        return self.entered | self.shifting


SolverState = Any
"""The state of a solver: nested tuples and lists of tensors (B, W, ...) and numbers. When the window slides,
the loop moves the values of each token to the token's new place along W."""


class Solver(ABC):
    """Proposes the next iterate from evaluations of f.

    Attributes:
        causal: true if token t's iterate depends only on tokens 0 to t. Training requires a causal solver,
            except in a layer ``ImplicitSequenceLayer(causal=False)``.
        differentiable: true if autograd through ``step`` computes exact gradients.
        windowed: true if the solver works with a window. Its state must then be a :data:`SolverState`.
        capturable: true if a CUDA graph can record ``step``. ``step`` must then never make the host wait for
            the device, and the state must hold only tensors.
        random: true if ``step`` draws random numbers. ``ImplicitDifferentiation`` refuses such a solver
            for its backward system.
    """

    causal: bool = True
    differentiable: bool = False
    windowed: bool = True
    capturable: bool = False
    random: bool = False

    @abstractmethod
    def init(self, z: Tensor) -> SolverState:
        """The state before the first step, for the initial iterate ``z`` (B, W, D)."""

    @abstractmethod
    def step(
        self, z: Tensor, fz: Tensor, state: SolverState, progress: Progress
    ) -> tuple[Tensor, SolverState]:
        """The next iterate (B, W, D) and state after the evaluation ``fz = f(z)``."""


solvers: Registry[Solver] = Registry(
    "solver",
    "deqseq.solvers",
    {
        "picard": "deqseq.solvers.picard:Picard",
        "anderson": "deqseq.solvers.anderson:Anderson",
        "broyden": "deqseq.solvers.broyden:Broyden",
        "best": "deqseq.solvers.best:BestIterate",
        "noisy": "deqseq.solvers.noisy:Noisy",
        "torchdeq": "deqseq.solvers.torchdeq:TorchDEQ",
    },
    base=Solver,  # type: ignore[type-abstract]
)
