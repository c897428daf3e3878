"""Residuals of an evaluation: ||f(z) - z|| and ||f(z)|| of every token."""

from deqseq.ops.residual.naive import judge, relative, residual_norms

__all__ = ["judge", "relative", "residual_norms"]
