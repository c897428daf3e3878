"""What the solvers with a memory share: per-token slots, masked dot products, a guarded step.

The memory is a list of ``memory`` slots, each a tensor (B, W, D), the latest first. Every token has an age,
the number of slots that hold valid entries of its own: a token that starts afresh drops to zero, and its
old slots are masked out of the small systems. Lists instead of one buffer keep a step free of copies and of
in-place writes, so that it can be unrolled with a graph. No counter says which slot is next: a step works on
tensors alone, and can be recorded.

Shapes: B sequences, W tokens in the window, D width, M memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deqseq.checks import Scope
from deqseq.solver import Progress

REACH = 100.0
"""Longest step in lengths of the residual; where f contracts at rate ρ, Newton's needs 1 / (1 - ρ)."""


def dots(slots: list[Tensor], vector: Tensor, scope: Scope) -> Tensor:
    """Dot products of every slot with ``vector`` (B, W, D): (B, W, M), at least float32.

    In sequence scope they run over all tokens of a sequence, and every token gets the same.
    """
    dtype = torch.promote_types(vector.dtype, torch.float32)
    vector = vector.to(dtype)
    products = torch.stack([(slot.to(dtype) * vector).sum(-1) for slot in slots], dim=-1)
    return products.sum(1, keepdim=True).expand_as(products) if scope == "sequence" else products


def combine(slots: list[Tensor], weights: Tensor) -> Tensor:
    """Sum of the slots weighted by (B, W, M): (B, W, D)."""
    weights = weights.to(slots[0].dtype)
    total = slots[0] * weights[..., 0:1]
    for i, slot in enumerate(slots[1:], start=1):
        total = torch.addcmul(total, slot, weights[..., i : i + 1])
    return total


def valid_slots(age: Tensor, memory: int) -> Tensor:
    """(B, W, M) bool: which slots are a token's own."""
    return torch.arange(memory, device=age.device) < age[..., None]


CALM = 0.3
"""A token's map stands still if those before it have residuals of at most so much of its own."""


def restarted(progress: Progress, scope: Scope) -> Tensor:
    """(B, W) bool: tokens that must forget their history.

    A single token forgets while its map still shifts under it: while a token before it moves nearly as much
    as it does itself. A whole sequence forgets only when its tokens are others: what shifts inside it is
    part of the system it solves.
    """
    if scope == "token":
        return progress.entered | _stirred(progress)
    moved = progress.entered.any(1, keepdim=True)
    return moved.expand_as(progress.entered)


def _stirred(progress: Progress) -> Tensor:
    """(B, W) bool: tokens with one before them that is not settled, and not :data:`CALM`."""
    if progress.residual is None:
        return torch.zeros_like(progress.settled)
    moving = progress.residual.masked_fill(progress.settled, 0.0)
    largest = torch.nn.functional.pad(moving[:, :-1], (1, 0)).cummax(1).values
    return ~(largest <= CALM * progress.residual)  # true for NaN


def guarded(z: Tensor, proposal: Tensor, fallback: Tensor, limit: Tensor) -> Tensor:
    """``proposal`` where it is finite and at most ``limit`` (B, W) away from z, else ``fallback``."""
    with torch.no_grad():
        length = torch.linalg.vector_norm(proposal - z, dim=-1, dtype=limit.dtype)
        good = length <= limit  # false for NaN
    return torch.where(good[..., None], proposal, fallback)
