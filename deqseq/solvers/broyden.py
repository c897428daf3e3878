"""Broyden's method ("good" update, limited memory), one inverse Jacobian per token."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.checks import Scope
from deqseq.solver import Progress, SolverState
from deqseq.solvers.history import MAX_STEP, HistorySolver, combine, guarded


class _State(NamedTuple):
    u: list[Tensor]  # M = ``memory`` slots (B, W, D)
    v: list[Tensor]  # M slots (B, W, D); the approximate inverse Jacobian is B = -I + Σ u_i v_i^T
    age: Tensor  # (B, W) number of valid slots
    residual: Tensor  # (B, W, D) g = f(z) - z of the previous step
    z: Tensor  # (B, W, D) z of the previous step
    known: Tensor  # (B, W) bool, whether ``residual`` and ``z`` are set: false before the first step


@dataclass(frozen=True)
class Broyden(HistorySolver):
    """Broyden's quasi-Newton method on g(z) = f(z) - z (Broyden, 1965; Kelley, 1995, ch. 7).

    z <- z - B g, where B = -I + Σ u_i v_i^T approximates the inverse Jacobian of g. Every step adds one term
    to the sum. When its memory is full, a token restarts from B = -I.

    The first step is a Picard step. A Picard step also replaces a non-finite or huge step. f(z) at a token
    depends on earlier tokens. Therefore a token takes Picard steps while the residual of an earlier token
    exceeds 30 % of the token's own residual.

    Args:
        memory: maximum number of terms in the sum, from 1 to 4096.
        scope: with ``"token"``, every token has its own B. With ``"sequence"``, all tokens of a sequence
            share one B. Then iterates depend on later tokens, so causal training refuses ``"sequence"``.

    Raises:
        ValueError: ``memory`` outside this range, or an unknown scope.
    """

    memory: int = 8
    scope: Scope = "token"

    def init(self, z: Tensor) -> SolverState:
        nothing = torch.zeros_like(z)
        count = torch.zeros(z.shape[:2], dtype=torch.int64, device=z.device)
        slots = [nothing] * self.memory
        return _State(slots, slots, count, nothing, nothing, count.bool())

    def step(
        self, z: Tensor, fz: Tensor, state: SolverState, progress: Progress
    ) -> tuple[Tensor, SolverState]:
        residual = self.residual(z, fz, progress)
        known = state.known & ~self.restarted(progress)
        full = state.age >= self.memory
        age = state.age.where(known & ~full, state.age.new_zeros(()))
        valid = self.valid(age)

        moved, changed = z - state.z, residual - state.residual
        with torch.no_grad():
            # Dot products v_i · Δg and u_i · Δz. They give B Δg and Δz^T B, with B of the previous step.
            on_changed = torch.where(valid, self.dots(state.v, changed), 0.0)
            on_moved = torch.where(valid, self.dots(state.u, moved), 0.0)
        left = combine(state.v, on_moved) - moved
        with torch.no_grad():
            slope = self.dots([left], changed)
            size = self.dots([left], left).sqrt() * self.dots([changed], changed).sqrt()
            usable = known[..., None] & (slope.abs() > 1e-6 * size) & torch.isfinite(slope)
            inverse = torch.where(usable, slope.reciprocal(), 0.0)
        right = moved + changed - combine(state.u, on_changed)
        u = [right * inverse.to(right.dtype), *state.u[:-1]]
        v = [torch.where(usable, left, left.new_zeros(())), *state.v[:-1]]
        with torch.no_grad():
            age = torch.where(known, age + 1, age)
            valid = self.valid(age)
            on_residual = torch.where(valid, self.dots(v, residual), 0.0)
            limit = MAX_STEP * torch.linalg.vector_norm(residual, dim=-1, dtype=on_residual.dtype)
        z_next = guarded(z, fz - combine(u, on_residual), fz, limit)
        state = _State(u, v, age, residual, z, torch.ones_like(known))
        return z_next, state
