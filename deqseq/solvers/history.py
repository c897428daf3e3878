"""Base class of solvers with a memory.

The memory is a list of M tensors (B, W, D), called slots; the latest slot comes first. The age of a token is
the number of its valid slots, which were filled after its last restart. Solvers ignore the other slots. A
restart sets the age to zero.

A step makes a new list of slots: the new slot, then the old slots without the oldest slot. A step never
overwrites a slot, so autograd can record the step.

Shapes: B sequences, W tokens in the window, D width, M memory.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deqseq.checks import MOST_STEPS, Scope, check_count, check_scope
from deqseq.solver import Progress, Solver

MAX_STEP = 100.0
"""Maximum length of a step, as a multiple of ``||f(z) - z||``. Longer steps are replaced by Picard steps."""
STEADY_SHARE = 0.3
"""Token t restarts while an unsettled token before t has a residual above this share of the residual of t."""


class HistorySolver(Solver):
    """A solver that combines its last steps.

    Attributes:
        memory: number of slots.
        scope: with ``"token"``, every token has its own coefficients, so its iterates do not depend on later
            tokens. With ``"sequence"``, all tokens of a sequence share coefficients.
    """

    memory: int
    scope: Scope
    capturable = True

    def __post_init__(self) -> None:
        check_count("memory", self.memory, most=MOST_STEPS)
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
        """Dot product of every slot with ``vector`` (B, W, D) in at least float32: (B, W, M).

        In sequence scope, every token gets the sum of the dot products of all tokens.
        """
        dtype = torch.promote_types(vector.dtype, torch.float32)
        vector = vector.to(dtype)
        products = torch.stack([(slot.to(dtype) * vector).sum(-1) for slot in slots], dim=-1)
        return products if self.causal else products.sum(1, keepdim=True).expand_as(products)

    def valid(self, age: Tensor) -> Tensor:
        """(B, W, M) bool, the valid slots: the first ``age`` (B, W) slots of each token."""
        return torch.arange(self.memory, device=age.device) < age[..., None]

    def restarted(self, progress: Progress) -> Tensor:
        """(B, W) bool, true for tokens that restart. Their history is dropped.

        In token scope, a new token restarts. Any other token t restarts while an unsettled token before t has
        a residual above ``STEADY_SHARE`` times the residual of t. The reason: f(z) at t depends on the tokens
        before t. In sequence scope, all tokens of a sequence restart when a new token enters the window.
        """
        entered = progress.entered
        if not self.causal:
            return entered.any(1, keepdim=True).expand_as(entered)
        if progress.residual is None:
            return entered
        moving = progress.residual.masked_fill(progress.settled, 0.0)
        largest = F.pad(moving[:, :-1], (1, 0)).cummax(1).values  # largest residual of the earlier tokens
        return entered | ~(largest <= STEADY_SHARE * progress.residual)  # also true if a residual is NaN


def combine(slots: list[Tensor], weights: Tensor) -> Tensor:
    """Sum (B, W, D) of the slots, weighted by ``weights`` (B, W, M)."""
    weights = weights.to(slots[0].dtype)
    total = slots[0] * weights[..., 0:1]
    for i, slot in enumerate(slots[1:], start=1):
        total = torch.addcmul(total, slot, weights[..., i : i + 1])
    return total


def guarded(z: Tensor, proposal: Tensor, fallback: Tensor, limit: Tensor) -> Tensor:
    """Returns the proposal at tokens where it is good, and the fallback at all other tokens.

    A proposal is good if it is finite and its distance from z is at most ``limit`` (B, W).
    """
    with torch.no_grad():
        length = torch.linalg.vector_norm(proposal - z, dim=-1, dtype=limit.dtype)
        good = length <= limit  # false for NaN
    return torch.where(good[..., None], proposal, fallback)
