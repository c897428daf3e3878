"""The phantom gradient: after the search, a few iterations record an autograd graph."""

from dataclasses import dataclass

from deqseq.checks import check_count, check_flag
from deqseq.gradient import GradientStrategy
from deqseq.iteration import search, steps
from deqseq.problem import Problem
from deqseq.solution import Solution
from deqseq.solver import Solver, solvers


@dataclass(frozen=True)
class Phantom(GradientStrategy):
    """Phantom gradient: after the search, do ``steps`` damped iterations with an autograd graph.

    Each iteration is z <- (1 - damping) z + damping f(z) (Geng et al., 2021, arXiv 2111.05177). One step
    without damping gives the Jacobian-free gradient (JFB). With more steps, the gradient approaches the exact
    gradient.

    Args:
        steps: number of iterations with an autograd graph. Each iteration evaluates f once on all tokens.
        damping: step size, in (0, 1]; 1 means no damping.
        checkpoint: recompute the activations of the steps in the backward pass instead of storing them.

    Raises:
        ValueError: ``steps`` is below 1, ``damping`` is outside (0, 1], or ``checkpoint`` is not a bool.
    """

    steps: int = 4
    damping: float = 0.8
    checkpoint: bool = False

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_flag("checkpoint", self.checkpoint)
        self._solver()

    def _solver(self) -> Solver:
        return solvers.create({"name": "picard", "damping": self.damping})

    def solve(self, problem: Problem) -> Solution:
        return steps(problem, self.steps, search(problem), self._solver(), self.checkpoint)
