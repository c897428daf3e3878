"""A curriculum: which gradient strategy and convergence policy a layer trains with, and when.

Layers do not count steps. The trainer owns the curriculum, applies it before every step and saves it in its
checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deqseq.checks import check_not_negative, shown
from deqseq.gradient import gradients
from deqseq.layer import ImplicitSequenceLayer
from deqseq.problem import SolveOptions


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        until: the stage ends after this share of all steps, in (0, 1].
        gradient: gradient strategy, as a name or mapping.
        convergence: convergence policy in training, as a name or mapping. ``None`` keeps the previous stage's
            policy; in the first stage, ``None`` keeps the layer's policy.
        window: number of tokens solved together; all by default.
        eval_convergence: convergence policy in evaluation. ``None`` keeps the previous stage's evaluation
            policy; in the first stage, ``None`` keeps the layer's evaluation policy.
    """

    until: float
    gradient: str | Mapping[str, Any]
    convergence: str | Mapping[str, Any] | None = None
    window: int | None = None
    eval_convergence: str | Mapping[str, Any] | None = None


class Curriculum:
    """The stages of training, in order.

    Raises:
        ValueError: ``stages`` is empty; ``until`` does not increase from stage to stage, or is not 1 in the
            last stage; a name or option is unknown.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        if not isinstance(stages, Sequence) or not all(isinstance(stage, Stage) for stage in stages):
            raise ValueError(f"a curriculum is a list of Stage, got {shown(stages)}")
        ends = [stage.until for stage in stages]
        for end in ends:
            check_not_negative("until", end)
        if not ends or ends != sorted(set(ends)) or ends[0] <= 0 or ends[-1] != 1:
            raise ValueError(f"until must increase from stage to stage and end at 1, got {ends}")
        for stage in stages:
            gradients.create(stage.gradient)
            for policy in (stage.convergence, stage.eval_convergence):
                SolveOptions(convergence=policy, window=stage.window)
        self.stages: list[Stage] = []
        policies_now: dict[str, Any] = {"convergence": None, "eval_convergence": None}
        for stage in stages:  # replace None by the previous stage's policy: training may resume at any stage
            own = {name: getattr(stage, name) for name in policies_now}
            policies_now |= {name: policy for name, policy in own.items() if policy is not None}
            self.stages.append(replace(stage, **policies_now))

    def at(self, step: int, steps: int) -> Stage:
        """The stage of step ``step`` (counted from 0) of ``steps`` steps."""
        return next((s for s in self.stages if step < self.end(s, steps)), self.stages[-1])

    @staticmethod
    def end(stage: Stage, steps: int) -> int:
        """The step at which ``stage`` ends, if training has ``steps`` steps."""
        return round(stage.until * steps)

    @staticmethod
    def apply(stage: Stage, layer: ImplicitSequenceLayer) -> None:
        """Set the layer's gradient strategy, policies and window to those of ``stage``."""
        layer.gradient = gradients.create(stage.gradient)
        layer.train_solve = _options(layer.train_solve, stage.convergence, stage.window)
        layer.eval_solve = _options(layer.eval_solve, stage.eval_convergence, stage.window)

    def to_list(self) -> list[dict[str, Any]]:
        """The stages as plain data, for checkpoints and configurations."""
        return [asdict(stage) for stage in self.stages]


def _options(
    before: SolveOptions, convergence: str | Mapping[str, Any] | None, window: int | None
) -> SolveOptions:
    policy = before.convergence if convergence is None else convergence
    return SolveOptions(before.solver, policy, window, before.guess)
