"""Keeping z where tokens are frozen, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def freeze(frozen: Tensor, z: Tensor, proposal: Tensor) -> Tensor:
    """z (B, W, D) where ``frozen`` (B, W), else the proposal."""
    return torch.where(frozen[..., None], z, proposal)
