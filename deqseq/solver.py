"""The contract between a solver and the loop. A solver is algebra: it never calls f and never loops.

Shapes: B sequences, W tokens in the window, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor

from deqseq.registry import Registry


class Progress(NamedTuple):
    """What the loop knows about the tokens at a step; each (B, W).

    Attributes:
        residual: float32, relative residual of the evaluation; ``None`` if the policy tests none.
        active: bool, tokens that took part in the evaluation unsettled.
        entered: bool, tokens whose first evaluation this was.
        shifting: bool, tokens with an unsettled one before them: their map is still going to change.
        last: bool, tokens whose next evaluation is the last that the budget allows.
    """

    residual: Tensor | None
    active: Tensor
    entered: Tensor
    shifting: Tensor
    last: Tensor

    @property
    def fresh(self) -> Tensor:
        """(B, W) bool, tokens whose history says nothing about the map they have now."""
        return self.entered | self.shifting


SolverState = Any
"""Nested tuples and lists of tensors (B, W, ...) and of plain numbers; the loop gathers the tensors along
W when the window slides."""


class Solver(ABC):
    """Proposes the next iterate from evaluations of f.

    Attributes:
        causal: whether token t's iterate depends on tokens up to t only. Solvers that are not causal are
            refused in training unless asked for (``ImplicitSequenceLayer(causal=False)``).
        differentiable: whether autograd through ``step`` is exact.
        windowed: whether its state can slide with a window.
    """

    causal: bool = True
    differentiable: bool = False
    windowed: bool = True

    @abstractmethod
    def init(self, z: Tensor) -> SolverState:
        """The state before the first step, for iterates of the shape of ``z`` (B, W, D)."""

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
        "torchdeq": "deqseq.solvers.torchdeq:TorchDEQ",
    },
    base=Solver,  # type: ignore[type-abstract]
)
