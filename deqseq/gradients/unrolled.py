"""Back-propagation through every iteration, or through the last iterations only."""

from dataclasses import dataclass, replace

import torch

from deqseq.checks import check_count, check_flag
from deqseq.gradient import GradientStrategy
from deqseq.problem import Problem
from deqseq.search import steps
from deqseq.solution import Solution


@dataclass(frozen=True)
class Unrolled(GradientStrategy):
    """Back-propagation through ``iterations`` steps of the layer's solver.

    The steps begin at the initial guess. If ``before`` is positive, the solver first does ``before`` steps
    without an autograd graph. Gradients then do not reach the initial guess.

    HRM (arXiv 2506.21734), TRM (arXiv 2510.04871) and EqR (arXiv 2605.21488) train by deep supervision in
    segments. To do the same, pass the detached result of each optimiser step as ``z0`` of the next step.

    While gradients are enabled, the layer does not search for the fixed point, and ignores its policy and its
    window. Second derivatives raise ``RuntimeError`` if ``before`` is positive, or if the solver is Anderson
    or Broyden. Autograd treats the coefficients of these two solvers as constants, so second derivatives
    would be wrong.

    Args:
        iterations: number of iterations that autograd records. Each iteration evaluates f once on all tokens.
        checkpoint: true: store no activations, and recompute the iterations in the backward pass.
        before: number of iterations without a graph, before the recorded iterations. The recorded iterations
            start with an empty solver memory.

    Raises:
        ValueError: ``iterations`` below 1; ``before`` below 0; a ``checkpoint`` that is not a bool.
    """

    iterations: int
    checkpoint: bool = False
    before: int = 0
    searches = False

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)
        check_flag("checkpoint", self.checkpoint)
        check_count("before", self.before, least=0)

    def solve(self, problem: Problem) -> Solution:
        if self.before == 0:
            return steps(problem, self.iterations, checkpoint=self.checkpoint)
        with torch.no_grad():
            start = steps(replace(problem, returns_state=False), self.before)
        found = steps(replace(problem, z0=start.z), self.iterations, checkpoint=self.checkpoint)
        return replace(found, iterations=start.iterations + found.iterations, nfe=start.nfe + found.nfe)

    def exact(self, problem: Problem) -> bool:
        return self.before == 0 and problem.solver.differentiable
