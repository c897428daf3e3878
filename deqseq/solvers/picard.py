"""Picard iteration, with optional damping."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deqseq.checks import check_damping
from deqseq.solver import Progress, Solver, SolverState


@dataclass(frozen=True)
class Picard(Solver):
    """Picard iteration: z <- z + damping (f(z) - z).

    Args:
        damping: in (0, 1]; with 1, the next iterate is f(z).

    Raises:
        ValueError: ``damping`` is outside (0, 1].
    """

    damping: float = 1.0

    differentiable = True
    capturable = True

    def __post_init__(self) -> None:
        check_damping(self.damping)

    def init(self, z: Tensor) -> SolverState:
        return ()

    def step(
        self, z: Tensor, fz: Tensor, state: SolverState, progress: Progress
    ) -> tuple[Tensor, SolverState]:
        return damped(z, fz, self.damping), state


def damped(z: Tensor, fz: Tensor, damping: float) -> Tensor:
    """The next iterate of damped Picard iteration: z + damping (f(z) - z)."""
    return fz if damping == 1 else torch.lerp(z, fz, damping)
