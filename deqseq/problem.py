"""A fixed-point problem: the map, its inputs, and the options of the solve.

Shapes: B sequences, L tokens, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deqseq.backbone import Context, State, Trace
from deqseq.checks import check_count
from deqseq.guess import Guess, guesses
from deqseq.policy import ConvergencePolicy, FixedIterations, policies
from deqseq.solver import Solver, solvers

PolicySpec = ConvergencePolicy | str | Mapping[str, Any]


@dataclass(frozen=True, init=False)
class SolveOptions:
    """How to solve: the solver, the convergence policy, the window and the guess.

    ``dataclasses.replace(options, window=8)`` returns options with another window.

    Args:
        solver: proposes iterates; an object, a registered name, or a mapping ``{"name": ..., **options}``.
        convergence: decides when to stop; an object, a name or a mapping, as for ``solver``. The default
            is the paper's setting for training language models: a relative residual of 5 % in at most 32
            iterations.
        window: number of tokens solved together; ``None``: all tokens.
        guess: decides where the search starts; an object, a name or a mapping.

    Raises:
        ValueError: unknown names or options; a window below 1.
    """

    solver: Solver
    convergence: ConvergencePolicy
    window: int | None
    guess: Guess

    def __init__(
        self,
        solver: Solver | str | Mapping[str, Any] = "picard",
        convergence: PolicySpec | None = None,
        window: int | None = None,
        guess: Guess | str | Mapping[str, Any] = "zero",
    ) -> None:
        if window is not None:
            check_count("window", window)
        object.__setattr__(self, "solver", solvers.create(solver))
        object.__setattr__(self, "convergence", policies.create(convergence))
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "guess", guesses.create(guess))


class Map(Protocol):
    """The interface of a fixed-point map f. Every :class:`~deqseq.Backbone` is such a map.

    For a solve with a window or a state, the map must be a :class:`~deqseq.Backbone` that keeps state.

    A map may keep inputs of each sequence itself, instead of in the context. If ``Problem.compact`` is true,
    such a map needs a method ``select(rows)``, which returns the map of the sequences ``rows`` (int64
    indices). Such a map must evaluate real tokens only.
    """

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        """f(z), and the trace from which the backbone computes its next state."""
        ...


@dataclass(frozen=True)
class Problem:
    """A fixed-point problem. Gradient strategies pass it to :func:`~deqseq.search` and :func:`~deqseq.steps`.

    Attributes:
        map: the map f.
        context: everything that ``map.evaluate`` needs besides z and the state.
        z0: (B, L, D) the initial guess.
        options: solver, convergence policy and window.
        lengths: (B,) int64 number of tokens to solve, which come first; ``None``: all tokens.
        state: backbone state before the first token; ``None``: there are no earlier tokens.
        state_has_capacity: true if the state already has capacity for all tokens. The solve then does not
            check the capacity. The check would make the host wait for the GPU.
        overwrites_state: if true, the solve may overwrite the tensors of ``state``. They must then be
            contiguous. If false, the solve works on a copy.
        returns_state: if true and ``state`` is given, the solution has the state after the last token.
        compact: if true, remove settled sequences once they are at least an eighth of the batch.
        checkpoint: if true, evaluations store no activations, and the backward pass recomputes them.
        group: process group whose ranks all stop after the same pass; ``None``: every rank stops on its own.
        training: if false, :func:`~deqseq.steps` after a search returns the value of the search. Values in
            evaluation then do not depend on whether gradients are enabled.
    """

    map: Map
    context: Context
    z0: Tensor
    options: SolveOptions
    lengths: Tensor | None = None
    state: State | None = None
    state_has_capacity: bool = False
    overwrites_state: bool = False
    returns_state: bool = False
    compact: bool = False
    checkpoint: bool = False
    group: dist.ProcessGroup | None = None
    training: bool = True

    @property
    def solver(self) -> Solver:
        return self.options.solver

    @property
    def policy(self) -> ConvergencePolicy:
        return self.options.convergence

    @property
    def causal(self) -> bool:
        """Whether token t of f(z) depends only on tokens up to t. True if the map has no ``causal``."""
        return getattr(self.map, "causal", True)

    @property
    def window(self) -> int | None:
        """Number of tokens in the window; ``None`` if all tokens are solved together."""
        window = self.options.window
        return None if window is None or window >= self.z0.shape[1] else window

    @property
    def fixed(self) -> bool:
        """Whether the policy is :class:`FixedIterations`. If so, the result is the last iterate, not f(z)."""
        return isinstance(self.policy, FixedIterations)

    @property
    def sequence_lengths(self) -> Tensor:
        """(B,) int64, number of tokens to solve."""
        if self.lengths is not None:
            return self.lengths
        batch, length, _ = self.z0.shape
        return torch.full((batch,), length, device=self.z0.device)

    @cached_property
    def offsets(self) -> Tensor:
        """(W,) int64, the numbers 0 ... W-1; W is the window's size, or L without a window."""
        return torch.arange(self.window or self.z0.shape[1], device=self.z0.device)

    @property
    def solvable(self) -> Tensor:
        """(B, L) bool, the tokens to solve: neither padding nor dependent on a non-finite input."""
        return torch.arange(self.z0.shape[1], device=self.z0.device) < self.sequence_lengths[:, None]
