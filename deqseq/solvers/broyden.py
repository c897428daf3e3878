"""Broyden's method ("good" update, limited memory), one inverse Jacobian per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.checks import Scope, check_count, check_scope
from deqseq.solver import Progress, Solver, SolverState
from deqseq.solvers.history import REACH, combine, dots, guarded, restarted, valid_slots


class _State(NamedTuple):
    u: list[Tensor]  # M slots (B, W, D)
    v: list[Tensor]  # M slots (B, W, D); the inverse Jacobian of f(z) - z is -I + Σ u_i v_i^T
    age: Tensor  # (B, W) valid slots
    residual: Tensor  # (B, W, D) g = f(z) - z of the step before
    z: Tensor  # (B, W, D) z of the step before
    known: Tensor  # (B, W) bool, whether there was a step before since the last restart


@dataclass(frozen=True)
class Broyden(Solver):
    """Broyden's quasi-Newton method on g(z) = f(z) - z (Broyden, 1965; Kelley, 1995, ch. 7).

    z <- z - B g with B = -I + Σ u_i v_i^T, grown by one rank a step. A token whose memory is full starts
    again from B = -I, as does one whose map has changed because tokens before it moved. The first step,
    and any step that comes out non-finite or huge, is Picard's.

    Args:
        memory: rank of the update kept, at least 1.
        scope: ``"token"``, or ``"sequence"``: one inverse Jacobian for all tokens of a sequence, which
            leaks the future and is refused in causal training.

    Raises:
        ValueError: a value outside these ranges.
    """

    memory: int = 8
    scope: Scope = "token"
    capturable = True

    def __post_init__(self) -> None:
        check_count("memory", self.memory)
        check_scope(self.scope)

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.scope == "token"

    def init(self, z: Tensor) -> SolverState:
        nothing = torch.zeros_like(z)
        count = torch.zeros(z.shape[:2], dtype=torch.int64, device=z.device)
        slots = [nothing] * self.memory
        return _State(slots, slots, count, nothing, nothing, count.bool())

    def step(
        self, z: Tensor, fz: Tensor, state: SolverState, progress: Progress
    ) -> tuple[Tensor, SolverState]:
        residual = fz - z
        if self.scope == "sequence":
            residual = residual.where(progress.active[..., None], residual.new_zeros(()))
        again = restarted(progress, self.scope)
        known = state.known & ~again
        full = state.age >= self.memory
        age = state.age.where(known & ~full, state.age.new_zeros(()))
        mine = valid_slots(age, self.memory)

        moved, changed = z - state.z, residual - state.residual
        with torch.no_grad():
            # B Δg and Δz^T B with the update so far
            on_changed = torch.where(mine, dots(state.v, changed, self.scope), 0.0)
            on_moved = torch.where(mine, dots(state.u, moved, self.scope), 0.0)
        left = combine(state.v, on_moved) - moved
        with torch.no_grad():
            slope = dots([left], changed, self.scope)
            size = dots([left], left, self.scope).sqrt() * dots([changed], changed, self.scope).sqrt()
            usable = known[..., None] & (slope.abs() > 1e-6 * size) & torch.isfinite(slope)
            inverse = torch.where(usable, slope.reciprocal(), 0.0)
        right = moved + changed - combine(state.u, on_changed)
        u = [right * inverse.to(right.dtype), *state.u[:-1]]
        v = [torch.where(usable, left, left.new_zeros(())), *state.v[:-1]]
        with torch.no_grad():
            age = torch.where(known, age + 1, age)
            mine = valid_slots(age, self.memory)
            on_residual = torch.where(mine, dots(v, residual, self.scope), 0.0)
            limit = REACH * torch.linalg.vector_norm(residual, dim=-1, dtype=on_residual.dtype)
        z_next = guarded(z, fz - combine(u, on_residual), fz, limit)
        state = _State(u, v, age, residual, z, torch.ones_like(known))
        return z_next, state
