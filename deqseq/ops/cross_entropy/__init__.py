"""The loss of predicting the next token.

Shapes: B sequences, L tokens, V the vocabulary's size, V' >= V columns of the logits. The output layer may
pad the logits with more columns than V.
"""

from typing import Any, cast

from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from deqseq import kernels


def next_token_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """The loss of causal language models in transformers, in float32.

    The loss is the cross-entropy of token t + 1 under the logits at token t. The Triton kernel makes no copy
    of the logits for the backward pass.

    Args:
        logits: (B, L, V'). Columns from ``vocab_size`` on are ignored and get a gradient of zero.
        labels: (B, L) token ids. This function shifts them by one position. Labels of -100 are ignored. For
            any other label outside the vocabulary, PyTorch raises an error (on the CPU ``ValueError``), and
            the Triton kernel returns NaN.
        num_items_in_batch: divisor of the summed loss; by default the number of predicted tokens.

    Raises:
        ValueError: ``logits`` have fewer than ``vocab_size`` columns, or ``labels`` have another shape than
            (B, L).
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels must have shape {tuple(logits.shape[:-1])}, got {tuple(labels.shape)}")
    if logits.shape[-1] < vocab_size:
        raise ValueError(f"logits need at least vocab_size = {vocab_size} columns, got {logits.shape[-1]}")
    if kernels.implementation(logits) == "triton":
        from deqseq.ops.cross_entropy import triton

        return triton.next_token_loss(logits, labels, vocab_size, num_items_in_batch)
    try:
        return ForCausalLMLoss(logits[..., :vocab_size], labels, vocab_size, cast(Any, num_items_in_batch))
    except IndexError as error:  # raised on the CPU for a label outside the vocabulary
        wrong = labels[(labels != -100) & ((labels < 0) | (labels >= vocab_size))]
        raise ValueError(f"labels must be in [0, {vocab_size}) or -100, got {int(wrong[0])}") from error
