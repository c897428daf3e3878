"""Back-propagation through every iteration."""

from dataclasses import dataclass

from deqseq.checks import check_count
from deqseq.gradient import GradientStrategy
from deqseq.problem import Problem
from deqseq.search import steps
from deqseq.solution import Solution


@dataclass(frozen=True)
class Unrolled(GradientStrategy):
    """Back-propagation through ``iterations`` steps of the layer's solver from the initial guess.

    While gradients are enabled, the layer does not search for the fixed point. It then uses neither its
    policy nor its window. With Anderson and Broyden, second derivatives raise ``RuntimeError``: they would be
    wrong, because autograd treats the coefficients of these solvers as constants.

    Args:
        iterations: number of iterations that autograd records. Each evaluates f once on all tokens.
        checkpoint: store no activations of the iterations, and recompute them in the backward pass.

    Raises:
        ValueError: ``iterations`` below 1.
    """

    iterations: int
    checkpoint: bool = False
    searches = False

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)

    def solve(self, problem: Problem) -> Solution:
        return steps(problem, self.iterations, checkpoint=self.checkpoint)

    def exact(self, problem: Problem) -> bool:
        return problem.solver.differentiable
