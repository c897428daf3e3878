"""A curriculum divides training into stages. Each stage sets the layer's gradient strategy and policies.

Layers do not count steps. So the trainer applies the curriculum before every step, and saves the curriculum
in its checkpoints.
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
        until: share of all training steps after which the stage ends, in (0, 1].
        gradient: gradient strategy, as a name or mapping.
        convergence: convergence policy in training, as a name or mapping. ``None`` keeps the previous stage's
            policy; in the first stage, ``None`` keeps the layer's policy.
        window: number of tokens solved together. ``None`` solves all tokens of a sequence together.
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
        ValueError: ``stages`` is empty or not a list of :class:`Stage`; ``until`` does not increase from
            stage to stage, or is not 1 in the last stage; a name or option is unknown.
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
        # If a policy is None, use the previous stage's policy. Training may resume in any stage, so each
        # stage must contain its policies.
        for stage in stages:
            own = {name: getattr(stage, name) for name in policies_now}
            policies_now |= {name: policy for name, policy in own.items() if policy is not None}
            self.stages.append(replace(stage, **policies_now))

    def at(self, step: int, steps: int) -> Stage:
        """The stage of step number ``step``, counted from 0, in a training of ``steps`` steps."""
        return next((s for s in self.stages if step < self.end(s, steps)), self.stages[-1])

    @staticmethod
    def end(stage: Stage, steps: int) -> int:
        """The number of steps after which ``stage`` ends, in a training of ``steps`` steps."""
        return round(stage.until * steps)

    @staticmethod
    def apply(stage: Stage, layer: ImplicitSequenceLayer) -> None:
        """Give ``layer`` the gradient strategy, the convergence policies and the window of ``stage``."""
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
