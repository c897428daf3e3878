"""The common part of solvers with a memory: slots, dot products, restarts, a guarded step.

The memory is a list of M slots, each a tensor (B, W, D), the latest first. Every token has an age: the number
of slots that are valid for it. A token that restarts has age zero; the small systems mask the other slots
out. Because the slots are a list instead of one buffer, a step copies nothing and writes nothing in place, so
it can be unrolled with a graph. Because no counter on the host says which slot is next, it can be recorded as
a CUDA graph.

Shapes: B sequences, W tokens in the window, D width, M memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deqseq.checks import Scope, check_count, check_scope
from deqseq.solver import Progress, Solver

MAX_STEP = 100.0
"""Longest step, in lengths of the residual; at a contraction rate ρ Newton's has length 1 / (1 - ρ)."""
STEADY_SHARE = 0.3
"""A token's history counts only while earlier tokens' residuals are below this share of its own."""


class HistorySolver(Solver):
    """A solver that combines its last steps, with the coefficients of a token or of a whole sequence.

    In token scope every token has coefficients of its own, so its iterates depend on earlier tokens only. In
    sequence scope all tokens of a sequence share them. That leaks the future and is refused in causal
    training; it is there to compare with.

    Attributes:
        memory: slots.
        scope: ``"token"`` or ``"sequence"``.
    """

    memory: int
    scope: Scope
    capturable = True

    def __post_init__(self) -> None:
        check_count("memory", self.memory)
        check_scope(self.scope)

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.scope == "token"

    def residual(self, z: Tensor, fz: Tensor, progress: Progress) -> Tensor:
        """f(z) - z (B, W, D); in sequence scope, zero at tokens that have settled."""
        residual = fz - z
        if self.scope == "sequence":
            residual = residual.where(progress.active[..., None], residual.new_zeros(()))
        return residual

    def dots(self, slots: list[Tensor], vector: Tensor) -> Tensor:
        """Dot products of every slot with ``vector`` (B, W, D): (B, W, M), at least float32."""
        dtype = torch.promote_types(vector.dtype, torch.float32)
        vector = vector.to(dtype)
        products = torch.stack([(slot.to(dtype) * vector).sum(-1) for slot in slots], dim=-1)
        return products if self.causal else products.sum(1, keepdim=True).expand_as(products)

    def valid(self, age: Tensor) -> Tensor:
        """(B, W, M) bool, the slots that are valid at this ``age`` (B, W)."""
        return torch.arange(self.memory, device=age.device) < age[..., None]

    def restarted(self, progress: Progress) -> Tensor:
        """(B, W) bool, tokens whose history does not count.

        A token restarts while an earlier token still moves nearly as much as it does itself, because then its
        map is still changing. A sequence restarts only when other tokens enter the window: it solves for all
        its tokens at once.
        """
        entered = progress.entered
        if self.causal:
            return entered | _earlier_tokens_move(progress)
        return entered.any(1, keepdim=True).expand_as(entered)


def combine(slots: list[Tensor], weights: Tensor) -> Tensor:
    """Sum of the slots weighted by (B, W, M): (B, W, D)."""
    weights = weights.to(slots[0].dtype)
    total = slots[0] * weights[..., 0:1]
    for i, slot in enumerate(slots[1:], start=1):
        total = torch.addcmul(total, slot, weights[..., i : i + 1])
    return total


def guarded(z: Tensor, proposal: Tensor, fallback: Tensor, limit: Tensor) -> Tensor:
    """``proposal`` where it is finite and at most ``limit`` (B, W) away from z, else ``fallback``."""
    with torch.no_grad():
        length = torch.linalg.vector_norm(proposal - z, dim=-1, dtype=limit.dtype)
        good = length <= limit  # false for NaN
    return torch.where(good[..., None], proposal, fallback)


def _earlier_tokens_move(progress: Progress) -> Tensor:
    """(B, W) bool, tokens behind an unsettled one whose residual is not below the steady share."""
    if progress.residual is None:
        return torch.zeros_like(progress.settled)
    moving = progress.residual.masked_fill(progress.settled, 0.0)
    largest = F.pad(moving[:, :-1], (1, 0)).cummax(1).values
    return ~(largest <= STEADY_SHARE * progress.residual)  # true for NaN
