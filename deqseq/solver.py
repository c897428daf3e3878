"""The contract between a solver and the loop. A solver is algebra: it never calls f and never loops.

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
    """The record of the tokens that a solver receives at each step. Every tensor is (B, W).

    Attributes:
        residual: float32, relative residual of the evaluation; ``None`` for a fixed number of iterations.
        active: bool, tokens that had not settled before the evaluation.
        iterations: int64, evaluations that each token has taken part in.
        settled: bool, tokens that have settled.
        budget: evaluations a token may take part in.
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
        """(B, W) bool, tokens behind an unsettled token, whose changes also change their map."""
        if self.residual is None:
            return torch.zeros_like(self.settled)
        return (~self.settled).cumsum(1) > (~self.settled).long()

    @cached_property
    def last(self) -> Tensor:
        """(B, W) bool, tokens whose next evaluation is the last one in the budget."""
        return self.iterations + 1 == self.budget

    @property
    def fresh(self) -> Tensor:
        """(B, W) bool, tokens whose history must be forgotten, because it belongs to another map."""
        return self.entered | self.shifting


SolverState = Any
"""Nested tuples and lists of tensors (B, W, ...) and of plain numbers. When the window slides, the loop
gathers the tensors along W."""


class Solver(ABC):
    """Proposes the next iterate from evaluations of f.

    Attributes:
        causal: whether token t's iterate depends on tokens up to t only. Training refuses other solvers,
            unless ``ImplicitSequenceLayer(causal=False)`` allows them.
        differentiable: whether autograd through ``step`` is exact.
        windowed: whether the state can slide with a window.
        capturable: whether ``step`` never makes the host wait for the device and the state holds tensors
            only, so that steps can be recorded as a CUDA graph.
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
