"""A policy that settles all tokens of a sequence once a given share of them may settle."""

from dataclasses import dataclass

from torch import Tensor

from deqseq.checks import check_share
from deqseq.policy import ConvergencePolicy, Judgement, policies


@dataclass(frozen=True)
class Quantile(ConvergencePolicy):
    """Settles all tokens of a sequence once the inner policy would settle at least a given share of them.

    The slowest tokens then do not keep the sequence running. But the result of a token depends on later
    tokens, because they decide when it settles. So causal layers refuse this policy in training. To use it,
    make the layer with ``ImplicitSequenceLayer(causal=False)``.

    Args:
        policy: the inner policy: an object, a name, or a mapping with a name and options.
        share: share of the sequence's tokens, in (0, 1].

    Raises:
        ValueError: ``share`` outside (0, 1].
    """

    policy: ConvergencePolicy
    share: float = 0.95

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", policies.create(self.policy))
        check_share("share", self.share)

    @property
    def max_iter(self) -> int:  # type: ignore[override]
        return self.policy.max_iter

    @property
    def check_every(self) -> int | None:  # type: ignore[override]
        return self.policy.check_every

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return False

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        inner = self.policy.judge(z, fz, iterations, active)
        solvable = iterations > 0  # false at padding
        ready = solvable & (inner.may_settle | ~active)
        reached = ready.sum(1) >= self.share * solvable.sum(1)
        return Judgement(inner.residual, inner.converged, inner.may_settle | reached[:, None])
