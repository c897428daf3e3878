"""Residual addition and RMSNorm in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def add_norm(
    stream: Tensor, added: Tensor | None, norm: nn.RMSNorm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``stream + added`` (B, W, D), and its norm in ``dtype``."""
    if added is not None:
        stream = stream + added
    return stream, norm(stream).to(dtype)
