"""The loss of predicting the next token, by transformers."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss


def next_token_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None
) -> Tensor:
    """Arguments as in :func:`deqseq.ops.cross_entropy.next_token_loss`."""
    return ForCausalLMLoss(logits[..., :vocab_size], labels, vocab_size, cast(Any, num_items_in_batch))
