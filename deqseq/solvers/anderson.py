"""Anderson acceleration in the difference form of Walker & Ni (2011).

In every step, each token solves a small linear system.

Shapes: B sequences, W tokens in the window, D width, M memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.checks import Scope, check_damping, check_not_negative
from deqseq.solver import Progress, SolverState
from deqseq.solvers.history import MAX_STEP, HistorySolver, combine, guarded
from deqseq.solvers.picard import damped


class _State(NamedTuple):
    residuals: list[Tensor]  # M differences (B, W, D): r_{i+1} - r_i with r = f(z) - z
    iterates: list[Tensor]  # M differences (B, W, D): u_{i+1} - u_i with u = z + damping * r
    gram: Tensor  # (B, W, M, M) dot products of all pairs of ``residuals``
    age: Tensor  # (B, W) number of differences that may be used
    residual: Tensor  # (B, W, D) r of the previous step
    iterate: Tensor  # (B, W, D) u of the previous step
    pairs: Tensor  # (B, W) number of evaluations since the last restart


@dataclass(frozen=True)
class Anderson(HistorySolver):
    """Anderson acceleration: extrapolates from the last ``memory`` steps.

    z <- z + β r - Σ γ_i (Δz_i + β Δr_i),  γ = argmin ||r - Σ γ_i Δr_i||² + λ Σ ||Δr_i||² γ_i².

    Here r = f(z) - z. Δz_i and Δr_i are differences of z and r between successive iterations.

    f(z) at a token depends on earlier tokens. While earlier tokens still change, old differences are
    misleading. Therefore a token uses its old differences only while the residuals of all earlier tokens are
    at most 30 % of the token's own residual. A damped Picard step replaces a step that is not finite, or is
    longer than 100 ||r||.

    Args:
        memory: number of differences to keep, from 1 to 4096.
        damping: β in (0, 1].
        regularisation: λ, at least 0.
        scope: with ``"token"``, every token has its own coefficients γ. With ``"sequence"``, all tokens of a
            sequence share coefficients, so iterates depend on later tokens. Therefore a causal layer refuses
            ``"sequence"`` in training.

    Raises:
        ValueError: a value is outside its range, or the scope is unknown.
    """

    memory: int = 5
    damping: float = 1.0
    regularisation: float = 1e-5
    scope: Scope = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_damping(self.damping)
        check_not_negative("regularisation", self.regularisation)

    def init(self, z: Tensor) -> SolverState:
        dtype = torch.promote_types(z.dtype, torch.float32)
        nothing = torch.zeros_like(z)
        count = torch.zeros(z.shape[:2], dtype=torch.int64, device=z.device)
        gram = torch.zeros(*z.shape[:2], self.memory, self.memory, dtype=dtype, device=z.device)
        slots = [nothing] * self.memory
        return _State(slots, slots, gram, count, nothing, nothing, count)

    def step(
        self, z: Tensor, fz: Tensor, state: SolverState, progress: Progress
    ) -> tuple[Tensor, SolverState]:
        residual = self.residual(z, fz, progress)
        picard = damped(z, fz, self.damping)
        with torch.no_grad():
            pairs = state.pairs.where(~self.restarted(progress), state.pairs.new_zeros(()))
        residuals = [residual - state.residual, *state.residuals[:-1]]
        iterates = [picard - state.iterate, *state.iterates[:-1]]
        with torch.no_grad():
            row = self.dots(residuals, residuals[0])
            older = state.gram[..., :-1, :-1]
            gram = torch.cat([row[..., None, :], torch.cat([row[..., 1:, None], older], -1)], -2)
            age = pairs.clamp_max(self.memory)
            valid = self.valid(age)
            weights = self._weights(gram, self.dots(residuals, residual), valid)
            size = torch.linalg.vector_norm(residual, dim=-1, dtype=gram.dtype)
        proposal = picard - combine(iterates, weights)
        z_next = guarded(z, proposal, picard, MAX_STEP * size)
        state = _State(residuals, iterates, gram, age, residual, picard, pairs + 1)
        return z_next, state

    def _weights(self, gram: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Solve the normal equations for γ (B, W, M). First scales the residual differences to unit length.

        Args:
            gram: (B, W, M, M) dot products of the residual differences with each other.
            target: (B, W, M) dot products of the residual differences with the current residual.
            valid: (B, W, M) bool, true for the differences to use.
        """
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        usable = valid & (diagonal > 0) & torch.isfinite(diagonal)
        scale = torch.where(usable, diagonal.clamp_min(torch.finfo(gram.dtype).tiny).rsqrt(), 0.0)
        system = gram * scale[..., :, None] * scale[..., None, :]
        system = torch.where(usable[..., :, None] & usable[..., None, :], system, 0.0)
        ridge = torch.where(usable, self.regularisation, 1.0)
        system = system + torch.diag_embed(ridge.to(gram.dtype))
        right = torch.where(usable, target * scale, 0.0)
        weights: Tensor = torch.linalg.solve_ex(system, right)[0]
        return weights * scale
