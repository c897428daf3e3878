"""Whole blocks at one token a sequence: decoding. :mod:`deqseq.ops.one_token.triton` has the fused blocks.

Their plain forms are the blocks of :mod:`deqseq.backbones`, which call the other operations one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deqseq.kernels import Choice

MOST_SEQUENCES = 64


def applies(stream: Tensor, state: tuple[Tensor, ...] | None, choice: Choice) -> bool:
    """Whether the fused blocks compute ``stream`` (B, W, D) after a layer's ``state``."""
    return (
        state is not None
        and stream.shape[1] == 1
        and stream.shape[0] <= MOST_SEQUENCES
        and choice.others == choice.products == "triton"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )
