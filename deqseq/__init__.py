"""Deep-equilibrium sequence models with exchangeable parts.

The parts are the backbone, the solver, the gradient strategy, the convergence policy and the guess. Start
with :class:`ImplicitSequenceLayer`. Importing this package needs only torch and einops.
"""

from deqseq.backbone import Backbone, Context, State
from deqseq.breadth import solve_many, solve_starts, solve_with_restarts
from deqseq.gradient import GradientStrategy
from deqseq.gradients import ImplicitDifferentiation, Phantom, Unrolled
from deqseq.guess import Guess
from deqseq.iteration import search, steps
from deqseq.layer import ExplicitSequenceLayer, ImplicitSequenceLayer
from deqseq.outputs import LayerOutput
from deqseq.policies import Both, Either, Quantile, Residual
from deqseq.policy import ConvergencePolicy, FixedIterations, Judgement
from deqseq.problem import Problem, SolveOptions
from deqseq.registry import register
from deqseq.regularisation import jacobian_penalty, spectral_radius
from deqseq.solution import Solution
from deqseq.solver import Progress, Solver
from deqseq.status import Status

__version__ = "0.2.0"

__all__ = [
    "Backbone", "Both", "Context", "ConvergencePolicy", "Either", "ExplicitSequenceLayer",
    "FixedIterations", "GradientStrategy", "Guess", "ImplicitDifferentiation", "ImplicitSequenceLayer",
    "Judgement", "LayerOutput", "Phantom", "Problem", "Progress", "Quantile", "Residual", "Solution",
    "SolveOptions", "Solver", "State", "Status", "Unrolled", "jacobian_penalty", "register", "search",
    "solve_many", "solve_starts", "solve_with_restarts", "spectral_radius", "steps",
]  # fmt: skip
