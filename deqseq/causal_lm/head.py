"""The output layer: the tokens that get logits, and the logits.

Shapes: B sequences, L tokens, D width, V vocabulary.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqseq.backbone import take_tokens
from deqseq.checks import check_count, check_integers


def logits_of(hidden: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns the logits (B, L, V) of ``hidden`` (B, L, D), and padded logits (B, L, V') with V' >= V.

    Only a plain ``nn.Linear`` on a GPU pads. With any other ``head``, both are the same tensor.
    """
    unchanged = type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.bias is None
    if hidden.is_cuda and unchanged and not (head._forward_hooks or head._forward_pre_hooks):
        padded = aligned_linear(hidden, weight := cast(Tensor, head.weight))
        return padded[..., : len(weight)], padded
    logits = head(hidden)
    return logits, logits


def aligned_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``, padded with zero columns to a multiple of 64. GPUs compute such widths faster."""
    return F.linear(x, F.pad(weight, (0, 0, 0, -weight.shape[0] % 64)))


def last_real(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The hidden state of each row's last real token: (B, 1, D).

    A row without real tokens gets the hidden state of its last column.

    Args:
        hidden: (B, L, D).
        attention_mask: (B, C + L). Its last L columns belong to ``hidden``.
    """
    length = hidden.shape[1]
    if length == 1:
        return hidden
    real = attention_mask[:, -length:].bool()
    number = torch.arange(1, length + 1, device=hidden.device)
    last = torch.where(real.any(1), (real * number).argmax(1), length - 1)
    return take_tokens(hidden, last[:, None])


def check_kept(logits_to_keep: int | Tensor, length: int) -> None:
    """Raise ``ValueError`` if ``logits_to_keep`` is not a valid number of tokens or tensor of token indices.

    The values of indices are checked on the CPU only.
    """
    if not isinstance(logits_to_keep, Tensor):
        check_count("logits_to_keep", logits_to_keep, least=0)
        return
    check_integers("logits_to_keep", logits_to_keep)
    if logits_to_keep.dim() != 1:
        raise ValueError(f"logits_to_keep must have one dimension, got {tuple(logits_to_keep.shape)}")
    if logits_to_keep.device.type == "cpu":
        wrong = logits_to_keep[(logits_to_keep < -length) | (logits_to_keep >= length)]
        if wrong.numel():
            raise ValueError(f"logits_to_keep must be in [{-length}, {length}), got {int(wrong[0])}")
