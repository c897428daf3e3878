"""A wrapper that makes any solver end at its best iterate."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deqseq.checks import Scope, check_scope
from deqseq.ops.residual import relative, residual_norms
from deqseq.solver import Progress, Solver, SolverState, solvers


class _State(NamedTuple):
    inner: SolverState
    z: Tensor  # (B, W, D) the best iterate
    residual: Tensor  # (B, W) the residual of the best iterate


class BestIterate(Solver):
    """Wraps a solver and remembers the best iterate: the iterate with the smallest residual.

    If a token does not converge, its last evaluation is f at its best iterate. Without this wrapper, the
    iteration may end far from the best iterate.

    Args:
        solver: the solver to wrap; an object, a name or a mapping.
        scope: with ``"token"``, every token has its own best iterate. While an earlier token has not settled,
            f(z) at this token still changes, so the token forgets its best iterate. With ``"sequence"``, all
            tokens of a sequence share one best iterate: the iterate with the smallest residual of the whole
            sequence. The code of Schöne et al. (ICML 2025) does the same. Iterates then depend on later
            tokens, so causal training refuses ``"sequence"``.

    Raises:
        ValueError: an unknown solver or scope.
    """

    def __init__(self, solver: Solver | str | Mapping[str, Any], scope: Scope = "token") -> None:
        check_scope(scope)
        self.solver = solvers.create(solver)
        self.scope: Scope = scope
        self.causal = self.solver.causal and scope == "token"
        self.windowed = self.solver.windowed
        self.random = self.solver.random

    def __repr__(self) -> str:
        return f"BestIterate({self.solver}, scope={self.scope!r})"

    def init(self, z: Tensor) -> SolverState:
        worst = torch.full(z.shape[:2], torch.inf, device=z.device)
        return _State(self.solver.init(z), z, worst)

    def step(
        self, z: Tensor, fz: Tensor, state: SolverState, progress: Progress
    ) -> tuple[Tensor, SolverState]:
        proposal, inner = self.solver.step(z, fz, state.inner, progress)
        change, size = residual_norms(z, fz)
        forget, last = progress.fresh, progress.last & ~progress.shifting
        if self.scope == "sequence":
            change = change.square().where(progress.active, 0.0).sum(1, keepdim=True).sqrt()
            size = size.square().where(progress.active, 0.0).sum(1, keepdim=True).sqrt()
            forget, last = progress.entered.any(1, keepdim=True), progress.last
        residual = relative(change, size).expand(z.shape[:2])
        better = (residual < state.residual) | forget
        best = torch.where(better[..., None], z, state.z)
        least = torch.where(better, residual, state.residual)
        z_next = torch.where(last[..., None], best, proposal)
        return z_next, _State(inner, best, least)
