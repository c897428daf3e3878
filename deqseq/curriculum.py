"""A curriculum: which gradient strategy and convergence policy a layer trains with, and when.

Layers hold no counters. The schedule belongs to the trainer, which applies it before every step and saves
it in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deqseq.gradient import gradients
from deqseq.layer import ImplicitSequenceLayer
from deqseq.problem import SolveOptions


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        until: the stage ends after this share of all steps, in (0, 1].
        gradient: gradient strategy, as a name or mapping.
        convergence: policy of the search, as a name or mapping; ``None``: that of the previous stage, and in
            the first stage the layer's.
        window: tokens solved at a time; all by default.
        eval_convergence: policy of evaluation; ``None`` as for ``convergence``.
    """

    until: float
    gradient: str | Mapping[str, Any]
    convergence: str | Mapping[str, Any] | None = None
    window: int | None = None
    eval_convergence: str | Mapping[str, Any] | None = None


class Curriculum:
    """Stages in order; the last one ends at 1.

    Raises:
        ValueError: no stages; values of ``until`` that do not increase to 1; unknown parts or options.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        ends = [stage.until for stage in stages]
        if not ends or ends != sorted(set(ends)) or ends[0] <= 0 or ends[-1] != 1:
            raise ValueError(f"stages must end at growing shares of training, the last one at 1, got {ends}")
        for stage in stages:
            gradients.create(stage.gradient)
            for policy in (stage.convergence, stage.eval_convergence):
                SolveOptions(convergence=policy, window=stage.window)
        self.stages: list[Stage] = []
        policies_now: dict[str, Any] = {"convergence": None, "eval_convergence": None}
        for stage in stages:  # fill in inherited policies: a stage must not depend on those applied before
            own = {name: getattr(stage, name) for name in policies_now}
            policies_now |= {name: policy for name, policy in own.items() if policy is not None}
            self.stages.append(replace(stage, **policies_now))

    def at(self, step: int, steps: int) -> Stage:
        """The stage of step number ``step``, from 0, out of ``steps``."""
        return next((s for s in self.stages if step < self.end(s, steps)), self.stages[-1])

    @staticmethod
    def end(stage: Stage, steps: int) -> int:
        """The number of steps, out of ``steps``, after which ``stage`` has ended."""
        return round(stage.until * steps)

    @staticmethod
    def apply(stage: Stage, layer: ImplicitSequenceLayer) -> None:
        """Give the layer the gradient strategy and the options of ``stage``."""
        layer.gradient = gradients.create(stage.gradient)
        layer.train_solve = _options(layer.train_solve, stage.convergence, stage.window)
        layer.eval_solve = _options(layer.eval_solve, stage.eval_convergence, stage.window)

    def to_list(self) -> list[dict[str, Any]]:
        """The stages as plain data, for checkpoints and configurations."""
        return [asdict(stage) for stage in self.stages]


def _options(
    before: SolveOptions, convergence: str | Mapping[str, Any] | None, window: int | None
) -> SolveOptions:
    return SolveOptions(before.solver, before.convergence if convergence is None else convergence, window)
