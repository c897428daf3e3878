"""Broyden's "good" method with limited memory. Every token has its own approximate inverse Jacobian.

Shapes: B sequences, W tokens in the window, D width, M memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.checks import Scope
from deqseq.solver import Progress, SolverState
from deqseq.solvers.history import MAX_STEP, HistorySolver, combine, guarded


class _State(NamedTuple):
    u: list[Tensor]  # M slots (B, W, D)
    v: list[Tensor]  # M slots (B, W, D); the approximate inverse Jacobian is H = -I + Σ u_i v_i^T
    age: Tensor  # (B, W) number of slots that may be used
    residual: Tensor  # (B, W, D) g = f(z) - z of the previous step
    z: Tensor  # (B, W, D) z of the previous step
    known: Tensor  # (B, W) bool, true once ``residual`` and ``z`` are those of a previous step


@dataclass(frozen=True)
class Broyden(HistorySolver):
    """Broyden's quasi-Newton method on g(z) = f(z) - z (Broyden, 1965; Kelley, 1995, ch. 7).

    A step is z <- z - H g, where H = -I + Σ u_i v_i^T approximates the inverse Jacobian of g. Every step adds
    one term to the sum. When the memory of a token is full, the token restarts from H = -I.

    The first step is a Picard step. A Picard step also replaces a step that is not finite, or is longer than
    100 ||g||. f(z) at a token depends on earlier tokens. Therefore a token takes Picard steps while the
    residual of an earlier token exceeds 30 % of the token's own residual.

    Args:
        memory: maximum number of terms in the sum, from 1 to 4096.
        scope: with ``"token"``, every token has its own H. With ``"sequence"``, all tokens of a sequence
            share one H, so iterates depend on later tokens. Therefore a causal layer refuses ``"sequence"``
            in training.

    Raises:
        ValueError: ``memory`` is outside its range, or the scope is unknown.
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
            # Dot products v_i · Δg and u_i · Δz. They give H Δg and Δz^T H, with H of the previous step.
            on_changed = torch.where(valid, self.dots(state.v, changed), 0.0)
            on_moved = torch.where(valid, self.dots(state.u, moved), 0.0)
        left = combine(state.v, on_moved) - moved
        with torch.no_grad():
            slope = self.dots([left], changed)
            size = self.dots([left], left).sqrt() * self.dots([changed], changed).sqrt()
            inverse = slope.reciprocal().to(left.dtype)  # infinite if the slope is small
            usable = known[..., None] & (slope.abs() > 1e-6 * size)
            usable = usable & torch.isfinite(slope) & torch.isfinite(inverse)
            inverse = torch.where(usable, inverse, 0.0)
        right = moved + changed - combine(state.u, on_changed)
        u = [right * inverse, *state.u[:-1]]
        v = [torch.where(usable, left, left.new_zeros(())), *state.v[:-1]]
        with torch.no_grad():
            age = torch.where(known, age + 1, age)
            valid = self.valid(age)
            on_residual = torch.where(valid, self.dots(v, residual), 0.0)
            limit = MAX_STEP * torch.linalg.vector_norm(residual, dim=-1, dtype=on_residual.dtype)
        z_next = guarded(z, fz - combine(u, on_residual), fz, limit)
        state = _State(u, v, age, residual, z, torch.ones_like(known))
        return z_next, state
