"""Fixed-point solvers, one file each. A new solver is a subclass of :class:`deqseq.solver.Solver`."""

from deqseq.solvers.anderson import Anderson
from deqseq.solvers.best import BestIterate
from deqseq.solvers.broyden import Broyden
from deqseq.solvers.noisy import Noisy
from deqseq.solvers.picard import Picard
from deqseq.solvers.torchdeq import TorchDEQ

__all__ = ["Anderson", "BestIterate", "Broyden", "Noisy", "Picard", "TorchDEQ"]
