"""Causal self-attention with rotary positions. :mod:`deqseq.ops.one_token` has kernels for one token."""

from deqseq.ops.attention.naive import AttentionWeights, attend, no_slots, rotate

__all__ = ["AttentionWeights", "attend", "no_slots", "rotate"]
