"""A wrapper that adds noise to the iterates of any solver."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deqseq.checks import check_positive
from deqseq.solver import Progress, Solver, SolverState, solvers


class Noisy(Solver):
    """Wraps a solver and adds noise N(0, std²) to every iterate that it proposes for an unsettled token.

    The layer option ``solver=(Noisy(std=0.01), "picard")`` trains with noise and evaluates without noise.
    torch's random generator draws the noise, and autograd treats the noise as a constant. If the tolerance is
    smaller than the noise, tokens never converge and use up their iterations. With a fixed number of
    iterations, all tokens have settled after the last evaluation, so the last iterate has no noise.

    Args:
        solver: the solver to wrap; an object, a name or a mapping.
        std: standard deviation, above 0.

    Raises:
        ValueError: an unknown solver; ``std`` is not finite or not above 0.
    """

    random = True

    def __init__(self, solver: Solver | str | Mapping[str, Any] = "picard", std: float = 0.01) -> None:
        check_positive("std", std)
        self.solver = solvers.create(solver)
        self.std = std
        self.causal = self.solver.causal
        self.differentiable = self.solver.differentiable
        self.windowed = self.solver.windowed

    def __repr__(self) -> str:
        return f"Noisy({self.solver}, std={self.std})"

    def init(self, z: Tensor) -> SolverState:
        return self.solver.init(z)

    def step(
        self, z: Tensor, fz: Tensor, state: SolverState, progress: Progress
    ) -> tuple[Tensor, SolverState]:
        proposal, state = self.solver.step(z, fz, state, progress)
        noisy = proposal + self.std * torch.randn_like(proposal)
        return torch.where(progress.settled[..., None], proposal, noisy), state
