"""Convergence policies: when a token has converged, how much may be spent, how often the host looks.

A policy judges one evaluation on the device; it never moves z and never reads the host. Training,
evaluation and generation differ in the policy object only.

Shapes: B sequences, W tokens in the window, D width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deqseq.ops import residual
from deqseq.registry import Registry

Scope = Literal["token", "sequence"]


def check_scope(scope: str) -> None:
    """Raise ``ValueError`` unless ``scope`` is ``"token"`` or ``"sequence"``."""
    if scope not in ("token", "sequence"):
        raise ValueError(f"scope must be 'token' or 'sequence', got {scope!r}")


class Judgement(NamedTuple):
    """A verdict on every token by itself.

    Attributes:
        residual: (B, W) float32, relative.
        converged: (B, W) bool, the tolerance is met.
        done: (B, W) bool, nothing more is to be spent; ``None``: the same as ``converged``.
    """

    residual: Tensor
    converged: Tensor
    done: Tensor | None = None

    @property
    def stops(self) -> Tensor:
        """(B, W) bool, the token may settle."""
        return self.converged if self.done is None else self.done


class ConvergencePolicy(ABC):
    """Decides when tokens have converged. Combine with ``&`` (both) and ``|`` (either).

    Attributes:
        max_iter: evaluations a token may take part in.
        causal: whether the verdict on a token depends on nothing later in its sequence.
        check_every: passes between two looks of the host at the device; ``None``: every pass on the CPU,
            where looking is free, every fourth elsewhere. Settled tokens are frozen, so the interval
            never changes a result.
        capturable: whether ``judge`` reads nothing on the host, so that a CUDA graph of it is right.
    """

    max_iter: int
    causal: bool = True
    check_every: int | None = None
    capturable: bool = False

    @abstractmethod
    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        """Judge the evaluation ``fz = f(z)``.

        Args:
            z, fz: (B, W, D).
            iterations: (B, W) evaluations each token has taken part in, this one included.
            active: (B, W) bool, tokens that are neither settled nor padding.
        """

    def __and__(self, other: ConvergencePolicy) -> ConvergencePolicy:
        return Both(self, other) if isinstance(other, ConvergencePolicy) else NotImplemented

    def __or__(self, other: ConvergencePolicy) -> ConvergencePolicy:
        return Either(self, other) if isinstance(other, ConvergencePolicy) else NotImplemented


@dataclass(frozen=True)
class Residual(ConvergencePolicy):
    """Converged when ``||f(z) - z|| <= atol + rtol * ||f(z)||``.

    Args:
        rtol: relative tolerance.
        atol: absolute tolerance. At least one of the two is positive.
        max_iter: evaluations a token may take part in.
        scope: ``"token"``: every token has its own norm. ``"sequence"``: one norm over the tokens of a
            sequence (the reference implementation's rule); a token's last iteration then depends on
            later tokens, so training refuses it unless asked (``ImplicitSequenceLayer(causal=False)``).
        check_every: see :class:`ConvergencePolicy`.

    Raises:
        ValueError: tolerances that are negative, not finite or both zero; ``max_iter`` or ``check_every``
            below 1; an unknown scope.
    """

    rtol: float = 0.0
    atol: float = 0.0
    max_iter: int = 32
    scope: Scope = "token"
    check_every: int | None = None

    capturable = True

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
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


@dataclass(frozen=True)
class FixedIterations(ConvergencePolicy):
    """Every token takes part in exactly ``iterations`` evaluations; no residual is tested.

    Combined with another policy it sets a bound: ``Residual(rtol=1e-3) & FixedIterations(4)`` does at
    least four.

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

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        found = residual.relative(*residual.residual_norms(z, fz))
        return Judgement(found, torch.zeros_like(active), iterations >= self.iterations)


@dataclass(frozen=True)
class Quantile(ConvergencePolicy):
    """A sequence is done when ``share`` of its tokens have converged by the inner policy.

    The few slow tokens then do not hold up the rest. When they are cut depends on later tokens, so
    training refuses it unless asked (``ImplicitSequenceLayer(causal=False)``).

    Args:
        policy: the inner policy, an object, a name or a mapping.
        share: in (0, 1].

    Raises:
        ValueError: ``share`` outside (0, 1].
    """

    policy: ConvergencePolicy
    share: float = 0.95

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", policies.create(self.policy))
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")

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
        real = iterations > 0  # all but padding
        finished = real & (inner.stops | ~active)
        reached = finished.sum(1) >= self.share * real.sum(1)
        return Judgement(inner.residual, inner.converged, inner.stops | reached[:, None])


class _Combined(ConvergencePolicy):
    def __init__(self, first: ConvergencePolicy, second: ConvergencePolicy) -> None:
        self.first = first
        self.second = second
        self.causal = first.causal and second.causal
        self.capturable = first.capturable and second.capturable
        self.check_every = min(filter(None, (first.check_every, second.check_every)), default=None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.first!r}, {self.second!r})"

    def _judge_both(self, *evaluation: Tensor) -> tuple[Judgement, Judgement]:
        return self.first.judge(*evaluation), self.second.judge(*evaluation)


class Both(_Combined):
    """Converged when both policies say so; the larger budget counts. Written ``first & second``.

    A number of iterations has no tolerance, so the other policy alone says which tokens have converged.
    """

    def __init__(self, first: ConvergencePolicy, second: ConvergencePolicy) -> None:
        super().__init__(first, second)
        self.max_iter = max(first.max_iter, second.max_iter)

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        first, second = self._judge_both(z, fz, iterations, active)
        if isinstance(self.first, FixedIterations):
            converged = second.converged
        elif isinstance(self.second, FixedIterations):
            converged = first.converged
        else:
            converged = first.converged & second.converged
        return Judgement(first.residual, converged, first.stops & second.stops)


class Either(_Combined):
    """Converged when one of two policies says so; the smaller budget counts. Written ``first | second``."""

    def __init__(self, first: ConvergencePolicy, second: ConvergencePolicy) -> None:
        super().__init__(first, second)
        self.max_iter = min(first.max_iter, second.max_iter)

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        first, second = self._judge_both(z, fz, iterations, active)
        return Judgement(first.residual, first.converged | second.converged, first.stops | second.stops)


def check_count(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")


class _Policies(Registry[ConvergencePolicy]):
    def create(self, spec: ConvergencePolicy | str | Mapping[str, Any]) -> ConvergencePolicy:
        policy = super().create(spec)
        check_count(f"max_iter of {policy}", getattr(policy, "max_iter", None))
        return policy


policies: Registry[ConvergencePolicy] = _Policies(
    "convergence policy",
    "deqseq.policies",
    {
        "residual": "deqseq.convergence:Residual",
        "fixed": "deqseq.convergence:FixedIterations",
        "quantile": "deqseq.convergence:Quantile",
    },
    base=ConvergencePolicy,  # type: ignore[type-abstract]
)
