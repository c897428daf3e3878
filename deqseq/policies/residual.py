"""A policy that stops a token when its residual is small."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deqseq.checks import Scope, check_count, check_not_negative, check_scope
from deqseq.ops import residual
from deqseq.policy import ConvergencePolicy, Judgement


@dataclass(frozen=True)
class Residual(ConvergencePolicy):
    """A token has converged when ``||f(z) - z|| <= atol + rtol * ||f(z)||``.

    A relative tolerance is for bounded maps, such as all backbones with a final norm. If z grows without
    bound, the relative residual may fall although f has no fixed point. For f(z) = z + c it is 1/n after n
    iterations. For such a map, require an absolute tolerance too:
    ``Residual(rtol=0.05) & Residual(atol=0.1)``.

    Args:
        rtol: relative tolerance.
        atol: absolute tolerance. At least one of the two tolerances must be positive.
        max_iter: maximum number of iterations per token.
        scope: with ``"token"``, both norms are those of the token. With ``"sequence"``, both norms are over
            all tokens of the sequence, as in the reference implementation. Later tokens then influence when a
            token settles, so training with ``"sequence"`` needs ``ImplicitSequenceLayer(causal=False)``.
        check_every: once every ``check_every`` calls of f, the host checks whether all tokens have settled.
            :class:`ConvergencePolicy` describes the default.

    Raises:
        ValueError: a tolerance is negative or not finite, both tolerances are zero, ``max_iter`` or
            ``check_every`` is below 1, or the scope is unknown.
    """

    rtol: float = 0.0
    atol: float = 0.0
    max_iter: int = 32
    scope: Scope = "token"
    check_every: int | None = None

    capturable = True

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            check_not_negative(name, getattr(self, name))
        if self.rtol == 0 and self.atol == 0:
            raise ValueError("Residual needs a tolerance: rtol > 0 or atol > 0, got 0 for both")
        check_count("max_iter", self.max_iter)
        if self.check_every is not None:
            check_count("check_every", self.check_every)
        check_scope(self.scope)

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.scope == "token"

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        if self.scope == "token":
            return Judgement(*residual.judge(z, fz, self.atol, self.rtol))
        change, size = (_over_sequence(norms, active) for norms in residual.residual_norms(z, fz))
        return Judgement(residual.relative(change, size), change <= self.atol + self.rtol * size)


def _over_sequence(norms: Tensor, active: Tensor) -> Tensor:
    counted = norms.where(active, norms.new_zeros(()))
    total: Tensor = torch.linalg.vector_norm(counted, dim=1, keepdim=True)
    return total.expand_as(norms)
