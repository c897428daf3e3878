"""Gated MLPs in plain PyTorch.

Shapes: B sequences, W tokens, D width, M hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class ValueGateWeights(NamedTuple):
    into: Tensor  # (2 M, D): rows [value, gate]
    out: Tensor  # (D, M)


class SwiGLUWeights(NamedTuple):
    gate: Tensor  # (M, D)
    value: Tensor  # (M, D)
    out: Tensor  # (D, M)


def value_gate(x: Tensor, weights: ValueGateWeights) -> Tensor:
    """out(value * silu(gate)) of x (B, W, D)."""
    value, gate = F.linear(x, weights.into).chunk(2, dim=-1)
    return F.linear(value * F.silu(gate), weights.out)


def swiglu(x: Tensor, weights: SwiGLUWeights) -> Tensor:
    """out(silu(gate) * value) of x (B, W, D) (Shazeer, 2020)."""
    hidden = F.silu(F.linear(x, weights.gate)) * F.linear(x, weights.value)
    return F.linear(hidden, weights.out)
