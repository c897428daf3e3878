"""Convergence policies, one file each. A new policy is a subclass of :class:`deqseq.ConvergencePolicy`."""

from deqseq.policies.combined import Both, Either
from deqseq.policies.quantile import Quantile
from deqseq.policies.residual import Residual
from deqseq.policy import FixedIterations

__all__ = ["Both", "Either", "FixedIterations", "Quantile", "Residual"]
