"""Guesses of the initial iterate, one file each. A new guess is a subclass of :class:`deqseq.Guess`."""

from deqseq.guesses.noise import Noise
from deqseq.guesses.previous import Previous
from deqseq.guesses.proposal import Proposal
from deqseq.guesses.zero import Zero

__all__ = ["Noise", "Previous", "Proposal", "Zero"]
