"""Two Triton kernels for the loss of next-token prediction. They make no copy of the logits.

Shapes: B sequences, L tokens, V vocabulary, V' >= V columns of a padded output layer.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from deqseq.kernels import device_of, first_derivative_only, launch

IGNORED = -100

# The kernels load all V' columns (V' is ``width``) and then discard the columns from V on. A padded V' is a
# multiple of the size of a vector load, but V can be any number. If the load mask ended at V, Triton would
# load one number at a time.


@triton.jit
def _loss_kernel(logits, targets, loss, lse, width, V, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    if target == IGNORED:
        tl.store(loss + row, 0.0)
        tl.store(lse + row, 0.0)
    else:
        logits += row * width
        highest = -float("inf")
        total = 0.0
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(logits + v, v < width, 0.0).to(tl.float32)
            x = tl.where(v < V, x, -float("inf"))
            new = tl.maximum(highest, tl.max(x, 0))
            shift = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(highest - shift) + tl.sum(tl.exp(x - shift), 0)
            highest = new
        known = (target >= 0) & (target < V)
        of_row = tl.where(known, highest + tl.log(total), float("nan"))
        chosen = tl.load(logits + target, known, 0.0).to(tl.float32)
        tl.store(loss + row, of_row - chosen)
        tl.store(lse + row, of_row)


@triton.jit
def _loss_backward_kernel(d_loss, logits, targets, lse, d_logits, width, V, IGNORED: tl.constexpr,
                          BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * width
    d_logits += row * width
    if target == IGNORED:
        for start in range(0, width, BLOCK):
            v = start + tl.arange(0, BLOCK)
            tl.store(d_logits + v, tl.zeros((BLOCK,), d_logits.dtype.element_ty), v < width)
    else:
        of_row = tl.load(lse + row)
        d_row = tl.load(d_loss + row)
        for start in range(0, width, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = tl.load(logits + v, v < width, 0.0).to(tl.float32)
            d_x = (tl.exp(x - of_row) - tl.where(v == target, 1.0, 0.0)) * d_row
            d_x = tl.where(v < V, d_x, 0.0).to(d_logits.dtype.element_ty)
            tl.store(d_logits + v, d_x, v < width)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, ignored: int) -> Tensor:
        logits, targets = logits.contiguous(), targets.contiguous()
        width = logits.shape[-1]
        loss = torch.empty(targets.shape, device=logits.device, dtype=torch.float32)
        lse = torch.empty_like(loss)
        block = min(4096, triton.next_power_of_2(width))
        ctx.sizes, ctx.constants = (width, vocab_size), {"IGNORED": ignored, "BLOCK": block}
        launch(
            _loss_kernel, (targets.numel(),), logits, targets, loss, lse, *ctx.sizes, **ctx.constants,
            num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(logits, targets, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        logits, targets, lse = ctx.saved_tensors
        d_logits = torch.empty_like(logits)
        launch(
            _loss_backward_kernel, (targets.numel(),), d_loss.contiguous(), logits, targets, lse, d_logits,
            *ctx.sizes, **ctx.constants, num_warps=8,
        )  # fmt: skip
        return d_logits, None, None, None


def next_token_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None
) -> Tensor:
    """The loss of next-token prediction, computed by the Triton kernels.

    The arguments are those of :func:`deqseq.ops.cross_entropy.next_token_loss`.
    """
    targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].to(logits.device)
    with device_of(logits):  # the logits may be on another device than the sequence layer
        total = _TokenLosses.apply(logits, targets, vocab_size, IGNORED).sum()
    items: Any = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    loss: Tensor = total / (items.to(total.device) if isinstance(items, Tensor) else items)
    return loss
