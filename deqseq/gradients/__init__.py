"""Gradient strategies, one file each. A new strategy is a subclass of :class:`deqseq.GradientStrategy`."""

from deqseq.gradients.implicit import ImplicitDifferentiation
from deqseq.gradients.phantom import Phantom
from deqseq.gradients.unrolled import Unrolled

__all__ = ["ImplicitDifferentiation", "Phantom", "Unrolled"]
