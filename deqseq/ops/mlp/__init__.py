"""Gated MLPs. :mod:`deqseq.ops.one_token` has kernels for one token a sequence."""

from deqseq.ops.mlp.naive import SwiGLUWeights, ValueGateWeights, swiglu, value_gate

__all__ = ["SwiGLUWeights", "ValueGateWeights", "swiglu", "value_gate"]
