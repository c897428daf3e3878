"""The interface of solvers. A solver computes the next iterate; only the loop calls f.

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
    """The information that a solver's step gets on the tokens. Every tensor is (B, W).

    Attributes:
        residual: float32, relative residual of the evaluation; ``None`` for a fixed number of iterations.
        active: bool, tokens that had not settled before the evaluation.
        iterations: int64, number of evaluations of each token, including this one.
        settled: bool, tokens that have settled, now or earlier.
        budget: maximum number of evaluations per token.
    """

    residual: Tensor | None
    active: Tensor
    iterations: Tensor
    settled: Tensor
    budget: int

    @cached_property
    def entered(self) -> Tensor:
        """(B, W) bool, tokens whose first evaluation this was."""
        return self.active & (self.iterations <= 1)

    @cached_property
    def shifting(self) -> Tensor:
        """(B, W) bool, tokens after an unsettled token. Changes of the unsettled token change their map."""
        if self.residual is None:
            return torch.zeros_like(self.settled)
        return (~self.settled).cumsum(1) > (~self.settled).long()

    @cached_property
    def last(self) -> Tensor:
        """(B, W) bool, tokens whose next evaluation is the last one in the budget."""
        return self.iterations + 1 == self.budget

    @property
    def fresh(self) -> Tensor:
        """(B, W) bool, tokens whose history must be dropped, because their map is new or still changing."""
        return self.entered | self.shifting


SolverState = Any
"""Nested tuples and lists of tensors (B, W, ...) and of plain numbers. When the window slides, the loop
gathers the tensors along W."""


class Solver(ABC):
    """Proposes the next iterate from evaluations of f.

    Attributes:
        causal: true if token t's iterate depends only on tokens up to t. Training refuses other solvers,
            unless ``ImplicitSequenceLayer(causal=False)`` allows them.
        differentiable: true if autograd through ``step`` is exact.
        windowed: true if the solver works with a window: the state then slides with the window.
        capturable: true if a CUDA graph can record ``step``: it never makes the host wait for the device, and
            the state holds only tensors.
    """

    causal: bool = True
    differentiable: bool = False
    windowed: bool = True
    capturable: bool = False

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
