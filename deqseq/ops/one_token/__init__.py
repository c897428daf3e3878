"""Blocks for decoding: one call computes a whole block for one token per sequence.

:mod:`deqseq.ops.one_token.triton` has the Triton kernels. This package has no implementation in plain
PyTorch. The blocks in :mod:`deqseq.backbones` compute the same results with separate operations.

Shapes: B sequences, W tokens, D width; H query heads, J key/value heads, P head dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.kernels import Choice

MOST_SEQUENCES = 64

Norm = tuple[Tensor, float | None]
"""Weight and eps of an RMSNorm."""


class AttentionWeights(NamedTuple):
    qkv: Tensor  # (H P + 2 J P, D)
    out_proj: Tensor  # (D, H P)


class ValueGateWeights(NamedTuple):
    into: Tensor  # (2 M, D): rows [value, gate], M hidden width
    out: Tensor  # (D, M)


class SwiGLUWeights(NamedTuple):
    gate: Tensor  # (M, D)
    value: Tensor  # (M, D)
    out: Tensor  # (D, M)


def supports(stream: Tensor, state: tuple[Tensor, ...] | None, choice: Choice) -> bool:
    """Whether the fused blocks can process ``stream`` (B, W, D) with a layer's ``state``."""
    return (
        state is not None
        and stream.shape[1] == 1
        and stream.shape[0] <= MOST_SEQUENCES
        and choice.others == choice.products == "triton"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )
