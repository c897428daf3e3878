"""The loss of predicting the next token.

Shapes: B sequences, L tokens, V vocabulary, V' >= V columns of an output layer that pads.
"""

from __future__ import annotations

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from deqseq import kernels

IGNORED = -100


def next_token_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Cross-entropy of token t + 1 given the logits of token t, in float32; as transformers' own.

    The fused form keeps no copy of the logits: beside them, two numbers a token.

    Args:
        logits: (B, L, V'); columns from ``vocab_size`` on count for nothing and get no gradient.
        labels: (B, L) ids, not shifted; -100 is ignored. Other ids outside the vocabulary are an error of
            the plain form; the fused one, which cannot raise, makes the loss NaN.
        num_items_in_batch: what the sum over tokens is divided by; by default the number of targets.

    Raises:
        ValueError: fewer columns than ``vocab_size``; labels that are not (B, L).
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels must be {tuple(logits.shape[:-1])} for the logits, got {tuple(labels.shape)}"
        )
    if logits.shape[-1] < vocab_size:
        raise ValueError(
            f"logits must have vocab_size = {vocab_size} columns or more, got {logits.shape[-1]}"
        )
    if kernels.implementation(logits) != "triton":
        return ForCausalLMLoss(logits[..., :vocab_size], labels, vocab_size, cast(Any, num_items_in_batch))
    from deqseq.causal_lm.loss_triton import token_losses

    targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].to(logits.device)
    with kernels.device_of(logits):  # which may be another than the sequence layer's
        total = token_losses(logits, targets, vocab_size, IGNORED).sum()
    if num_items_in_batch is None:
        return total / (targets != IGNORED).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
