"""Keeping z where tokens are frozen."""

import torch
from torch import Tensor

from deqseq import kernels


def freeze(frozen: Tensor, z: Tensor, proposal: Tensor) -> Tensor:
    """z (B, W, D) where ``frozen`` (B, W), else the proposal.

    The result may be in the proposal's memory, unless gradients are recorded.
    """
    if kernels.fused(z):
        from deqseq.ops.freeze.triton import freeze_

        return freeze_(frozen, z, proposal.contiguous())
    return torch.where(frozen[..., None], z, proposal)
