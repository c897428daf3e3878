"""A curriculum divides training into stages. Each stage sets the layer's gradient strategy and policies.

Layers do not count steps. So the trainer applies the curriculum before every step, and saves the curriculum
in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deqseq.budget import check_target
from deqseq.checks import check_count, check_instance, check_not_negative, shown
from deqseq.gradient import gradients
from deqseq.layer import ImplicitSequenceLayer
from deqseq.problem import SolveOptions


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        until: share of all training steps after which the stage ends, in (0, 1].
        gradient: gradient strategy, as a name or mapping.
        convergence: convergence policy in training, as a name or mapping.
        window: number of tokens solved together. ``None`` solves all tokens of a sequence together,
            in training and in evaluation, whatever the layer's window was.
        eval_convergence: convergence policy in evaluation, as a name or mapping.
        solver: solver in training and evaluation, as a name or mapping.
        adaptive_budget: mean residual that searches in training should reach. After every step, ``max_iter``
            of the training policy grows or falls by one (:class:`~deqseq.budget.AdaptiveBudget`). ``None``:
            ``max_iter`` is constant.

    If ``convergence``, ``eval_convergence`` or ``solver`` is ``None``, the stage uses the previous stage's
    value. The first stage uses the layer's value.
    """

    until: float
    gradient: str | Mapping[str, Any]
    convergence: str | Mapping[str, Any] | None = None
    window: int | None = None
    eval_convergence: str | Mapping[str, Any] | None = None
    solver: str | Mapping[str, Any] | None = None
    adaptive_budget: float | None = None


class Curriculum:
    """The stages of training, in order.

    Raises:
        ValueError: ``stages`` is empty or not a list of :class:`Stage`; ``until`` does not increase from
            stage to stage, or is not 1 in the last stage; a name or option is unknown; a policy has no
            ``max_iter`` that an adaptive budget could change.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        if not isinstance(stages, Sequence) or not all(isinstance(stage, Stage) for stage in stages):
            raise ValueError(f"a curriculum is a list of Stage, got {shown(stages)}")
        ends = [stage.until for stage in stages]
        for end in ends:
            check_not_negative("until", end)
        if not ends or ends != sorted(set(ends)) or ends[0] <= 0 or ends[-1] != 1:
            raise ValueError(f"until must increase from stage to stage and end at 1, got {ends}")
        for number, stage in enumerate(stages):
            try:
                gradients.create(stage.gradient)
                for policy in (stage.convergence, stage.eval_convergence):
                    SolveOptions(stage.solver or "picard", policy, stage.window)
            except ValueError as error:
                raise ValueError(f"stages.{number}: {error}") from error
        self.stages: list[Stage] = []
        parts: dict[str, Any] = dict.fromkeys(("convergence", "eval_convergence", "solver"))
        # If a part is None, use that of the previous stage. Training may resume in any stage, so each stage
        # must contain all parts.
        for stage in stages:
            own = {name: getattr(stage, name) for name in parts}
            parts |= {name: part for name, part in own.items() if part is not None}
            self.stages.append(replace(stage, **parts))
        for stage in self.stages:
            if stage.adaptive_budget is not None:
                check_target(stage.adaptive_budget, SolveOptions(convergence=stage.convergence).convergence)

    def at(self, step: int, steps: int) -> Stage:
        """The stage of step number ``step``, counted from 0, in a training of ``steps`` steps.

        Raises:
            ValueError: ``step`` is no whole number of at least 0, or ``steps`` is none of at least 1.
        """
        check_count("step", step, least=0)
        check_count("steps", steps)
        return next((s for s in self.stages if step < self.end(s, steps)), self.stages[-1])

    @staticmethod
    def end(stage: Stage, steps: int) -> int:
        """The number of steps after which ``stage`` ends, in a training of ``steps`` steps."""
        return round(stage.until * steps)

    @staticmethod
    def apply(stage: Stage, layer: ImplicitSequenceLayer) -> None:
        """Give ``layer`` the gradient strategy, the solver, the policies and the window of ``stage``.

        Raises:
            ValueError: ``stage`` is no :class:`Stage`, or ``layer`` is not implicit.
        """
        check_instance("stage", stage, Stage, "a Stage")
        check_instance("layer", layer, ImplicitSequenceLayer, "an ImplicitSequenceLayer")
        layer.gradient = gradients.create(stage.gradient)
        layer.train_solve = _options(layer.train_solve, stage, stage.convergence)
        layer.eval_solve = _options(layer.eval_solve, stage, stage.eval_convergence)

    def to_list(self) -> list[dict[str, Any]]:
        """The stages as plain data, for checkpoints and configurations."""
        return [asdict(stage) for stage in self.stages]


def _options(before: SolveOptions, stage: Stage, policy: str | Mapping[str, Any] | None) -> SolveOptions:
    solver = before.solver if stage.solver is None else stage.solver
    return SolveOptions(solver, before.convergence if policy is None else policy, stage.window, before.guess)
