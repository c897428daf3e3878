"""Padding is taken out before a solve: every sequence's real tokens move to the front, in order.

What is left of padding then stands after all real tokens, where causality alone keeps it from mattering;
backbones and solvers need no masks. Shapes: B sequences, L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deqseq.backbone import take_tokens


@dataclass(frozen=True)
class Packing:
    """Where the real tokens of a padded batch are.

    Attributes:
        order: (B, L) int64, the token that goes to each place: real tokens first, in order.
        lengths: (B,) int64, number of real tokens.
    """

    order: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor) -> Packing:
        """From a mask (B, L): non-zero for real tokens, anywhere in the sequence."""
        real = attention_mask.bool()
        return cls(torch.argsort(~real, dim=1, stable=True), real.sum(1))

    def pack(self, values: Tensor) -> Tensor:
        """(B, L, ...) in the caller's order -> real tokens first."""
        return take_tokens(values, self.order)

    def unpack(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        return take_tokens(values, torch.argsort(self.order, dim=1))
