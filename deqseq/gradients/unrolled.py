"""Back-propagation through every iteration, or through the last iterations only."""

from dataclasses import dataclass, replace

import torch

from deqseq.checks import check_count, check_flag, shown
from deqseq.gradient import GradientStrategy
from deqseq.iteration import steps
from deqseq.problem import Problem
from deqseq.solution import Solution


@dataclass(frozen=True)
class Unrolled(GradientStrategy):
    """Back-propagation through ``iterations`` steps of the layer's solver.

    The steps begin at the initial guess. If ``before`` is positive, the solver first does ``before`` steps
    without an autograd graph. Gradients then do not reach the initial guess.

    ``before`` can also be a pair of numbers. In training, every call then draws a whole number at random,
    from the first number of the pair to the second. With ``(0, 24)`` and one iteration, training covers the
    depths 1 to 25. This is similar to the progressive training of Bansal et al. (2022, arXiv 2202.05826). In
    evaluation with gradients enabled, the solver does the larger number of steps.

    HRM (arXiv 2506.21734), TRM (arXiv 2510.04871) and EqR (arXiv 2605.21488) train by deep supervision in
    segments. To do the same, pass the detached result of each optimiser step as ``z0`` of the next step.

    While gradients are enabled, the layer does not search for the fixed point, and ignores its policy and its
    window. Autograd treats the coefficients of Anderson and Broyden as constants, so with these two solvers
    the gradient is not exact. Second derivatives raise ``RuntimeError`` with them, or if ``before`` is not 0.

    Args:
        iterations: number of iterations that autograd records. Each iteration evaluates f once on all tokens.
        checkpoint: true: store no activations, and recompute the iterations in the backward pass.
        before: number of iterations without a graph. They come before the recorded iterations, which start
            with an empty solver memory. Or a pair: the smallest and the largest number. torch's random
            generator of the CPU then draws the number. In a process group, all ranks must do the same number
            of evaluations, so a pair is refused.

    Raises:
        ValueError: ``iterations`` below 1; ``before`` is neither a number >= 0 nor a pair of such numbers, or
            the second number of the pair is not larger than the first; a ``checkpoint`` that is not a bool;
            in training, a pair in a layer with a process group.
    """

    iterations: int
    checkpoint: bool = False
    before: int | tuple[int, int] = 0
    searches = False

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)
        check_flag("checkpoint", self.checkpoint)
        if not isinstance(self.before, (tuple, list)):
            check_count("before", self.before, least=0)
            return
        if len(self.before) != 2:
            raise ValueError(f"before must be a number or a pair of numbers, got {shown(self.before)}")
        least, most = self.before
        check_count("the first number of before", least, least=0)
        check_count("the second number of before", most, least=least + 1)
        object.__setattr__(self, "before", (least, most))  # JSON and YAML store a pair as a list

    def solve(self, problem: Problem) -> Solution:
        before = self._number_before(problem)
        if before == 0:
            return steps(problem, self.iterations, checkpoint=self.checkpoint)
        with torch.no_grad():
            start = steps(replace(problem, returns_state=False), before)
        found = steps(replace(problem, z0=start.z), self.iterations, checkpoint=self.checkpoint)
        return replace(found, iterations=start.iterations + found.iterations, nfe=start.nfe + found.nfe)

    def _number_before(self, problem: Problem) -> int:
        """The number of iterations without a graph in this call."""
        if isinstance(self.before, int):
            return self.before
        least, most = self.before
        if not problem.training:
            return most
        if problem.group is not None:
            raise ValueError(
                "the ranks of a process group must do the same number of iterations, "
                f"got before={self.before}: choose one number"
            )
        return int(torch.randint(least, most + 1, (), device="cpu"))

    def exact(self, problem: Problem) -> bool:
        return self.before == 0 and problem.solver.differentiable
