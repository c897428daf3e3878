"""The interface of convergence policies.

A policy decides when a token has converged, and how many iterations it may take. It judges every
evaluation of f on the device. It never changes z, and should not make the host wait for the device.

Training, evaluation and generation run the same loop and may use different policies.

Shapes: B sequences, W tokens in the window, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deqseq.checks import check_count, shown
from deqseq.ops import residual
from deqseq.registry import Registry


@dataclass(init=False, eq=False)
class Judgement:
    """A policy's judgement on every token.

    Attributes:
        residual: (B, W) float32, relative residual.
        converged: (B, W) bool, true if the token meets the tolerance.
        may_settle: (B, W) bool, true if the search may end for the token; by default ``converged``.
    """

    residual: Tensor
    converged: Tensor
    may_settle: Tensor

    def __init__(self, residual: Tensor, converged: Tensor, may_settle: Tensor | None = None) -> None:
        self.residual = residual
        self.converged = converged
        self.may_settle = converged if may_settle is None else may_settle


class ConvergencePolicy(ABC):
    """Decides when tokens have converged. ``a & b`` needs both policies a and b, ``a | b`` at least one.

    Attributes:
        max_iter: maximum number of iterations per token.
        min_iter: minimum number of iterations per token. :class:`~deqseq.budget.AdaptiveBudget` does not
            lower ``max_iter`` below it.
        causal: true if the judgement on a token does not depend on later tokens.
        check_every: once every ``check_every`` calls of f, the host checks whether all tokens have settled.
            ``None`` means 1 on the CPU, where the check is free, and 4 on other devices. Settled tokens are
            frozen, so ``check_every`` never changes a result.
        capturable: true if a CUDA graph can record ``judge``. Then ``judge`` must never make the host wait
            for the device.
    """

    max_iter: int
    min_iter: int = 0
    causal: bool = True
    check_every: int | None = None
    capturable: bool = False

    @abstractmethod
    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        """Judge the evaluation ``fz = f(z)``.

        Args:
            z, fz: (B, W, D) the iterate, and f at the iterate.
            iterations: (B, W) number of iterations of each token, including this evaluation.
            active: (B, W) bool, true for tokens that still iterate, false for settled tokens and padding.
        """

    def __and__(self, other: ConvergencePolicy) -> ConvergencePolicy:
        return self._combined("both", other)

    def __or__(self, other: ConvergencePolicy) -> ConvergencePolicy:
        return self._combined("either", other)

    def _combined(self, name: str, other: ConvergencePolicy) -> ConvergencePolicy:
        if not isinstance(other, ConvergencePolicy):
            raise ValueError(f"a policy combines only with another policy, got {shown(other)}")
        return policies.create({"name": name, "first": self, "second": other})


@dataclass(frozen=True)
class FixedIterations(ConvergencePolicy):
    """Evaluates every token exactly ``iterations`` times. There is no tolerance.

    In a combination with another policy, this policy is a bound: ``Residual(rtol=1e-3) & FixedIterations(4)``
    does at least four iterations. ``Residual(rtol=1e-3) | FixedIterations(4)`` does at most four iterations.

    Raises:
        ValueError: ``iterations`` below 1.
    """

    iterations: int

    capturable = True

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)

    @property
    def max_iter(self) -> int:  # type: ignore[override]
        return self.iterations

    @property
    def min_iter(self) -> int:  # type: ignore[override]
        return self.iterations

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        found = residual.relative(*residual.residual_norms(z, fz))
        return Judgement(found, torch.zeros_like(active), iterations >= self.iterations)


class _Policies(Registry[ConvergencePolicy]):
    def create(self, spec: ConvergencePolicy | str | Mapping[str, Any] | None) -> ConvergencePolicy:
        """Make the policy that ``spec`` describes. ``None`` stands for the paper's policy for training."""
        policy = super().create({"name": "residual", "rtol": 0.05, "max_iter": 32} if spec is None else spec)
        check_count(f"max_iter of {policy}", getattr(policy, "max_iter", None))
        return policy


policies = _Policies(
    "convergence policy",
    "deqseq.policies",
    {
        "residual": "deqseq.policies.residual:Residual",
        "fixed": "deqseq.policy:FixedIterations",
        "both": "deqseq.policies.combined:Both",
        "either": "deqseq.policies.combined:Either",
        "quantile": "deqseq.policies.quantile:Quantile",
    },
    base=ConvergencePolicy,  # type: ignore[type-abstract]
)
