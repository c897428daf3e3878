"""The settings that state tracking and CatbAbI share: a model and its two stages of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from deqseq.backbone import backbones
from deqseq.causal_lm import ImplicitConfig
from deqseq.curriculum import Curriculum, Stage
from deqseq.tasks.common.settings import (
    BelowOne,
    ClosedUnitInterval,
    NonNegativeFinite,
    PositiveFinite,
    PositiveInt,
    Seed,
    check_types,
)


@dataclass(frozen=True, kw_only=True)
class TwoStageSettings:
    """A model, and its training in two stages.

    The first stage unrolls iterations from zero and differentiates through them, which is cheap and finds the
    task. The second one searches for the fixed point; a few phantom steps carry the gradient.

    Args:
        backbone: name of any installed backbone, or a mapping {name: NAME, option: value}
        explicit: train the explicit twin: the same stack applied once
        d_model: width; this size and the following ones go to the backbones that take them
        n_layer: blocks
        d_state: state dimension of a head; Mamba2
        expand: inner width divided by the width; Mamba2
        headdim: width of a head, which sets the number of heads; Mamba2 and Llama
        solver: name of any installed solver, or a mapping {name: NAME, option: value}
        damping: damping of Picard's iteration; 1 is none. Other solvers take theirs in the mapping
        steps: optimiser steps
        batch_size: sequences of a step
        learning_rate: highest rate; it warms up over 5 % of the steps and decays over the last 30 %
        weight_decay: weight decay of matrices
        max_grad_norm: gradient clipping; 0 is none
        label_smoothing: share of the target spread over all tokens, which keeps the logits from growing
        unrolled_share: share of the steps in the unrolled stage
        unrolled_iterations: iterations of the unrolled stage
        tolerance: relative residual of the search in the fixed-point stage
        max_iter: most evaluations of a token in a search in training
        eval_max_iter: the same in evaluation
        phantom_steps: steps that carry the gradient in the fixed-point stage
        phantom_damping: damping of these steps
        bf16: autocast to bfloat16 in training; weights stay float32
        seed: seed of weights and data

    Raises:
        ValueError: a value out of its range, with the rule.
    """

    backbone: str | dict[str, Any] = "mamba2"
    explicit: bool = False
    d_model: PositiveInt
    n_layer: PositiveInt = 1
    d_state: PositiveInt
    expand: PositiveInt = 2
    headdim: PositiveInt
    solver: str | dict[str, Any] = "picard"
    damping: float
    steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFinite
    weight_decay: NonNegativeFinite
    max_grad_norm: NonNegativeFinite
    label_smoothing: BelowOne
    unrolled_share: ClosedUnitInterval
    unrolled_iterations: PositiveInt
    tolerance: PositiveFinite
    max_iter: PositiveInt
    eval_max_iter: PositiveInt
    phantom_steps: PositiveInt
    phantom_damping: float
    bf16: bool = False
    seed: Seed = 1

    def __post_init__(self) -> None:
        check_types(self)

    def _config(self, vocab_size: int, **options: Any) -> ImplicitConfig:
        """The configuration of the equilibrium model or its explicit twin."""
        return ImplicitConfig(
            vocab_size=vocab_size,
            backbone=self._backbone(),
            implicit=not self.explicit,
            solver=self._solver(),
            gradient=self._phantom(),
            convergence=self._search(self.max_iter),
            eval_convergence=self._search(self.eval_max_iter),
            **options,
        )

    def _curriculum(self, window: int | None = None, **unrolled: Any) -> Curriculum | None:
        """The two stages; ``None`` for an explicit model.

        Args:
            window: of the search; all tokens by default.
            unrolled: further options of the unrolled strategy.
        """
        if self.explicit:
            return None
        first = {"name": "unrolled", "iterations": self.unrolled_iterations, **unrolled}
        stages = [Stage(self.unrolled_share, first)] if self.unrolled_share > 0 else []
        if self.unrolled_share < 1:
            stages.append(Stage(1.0, self._phantom(), self._search(self.max_iter), window))
        return Curriculum(stages)

    def _backbone(self) -> dict[str, Any]:
        """The backbone with those of our sizes that it takes; its own mapping goes first."""
        own = _mapping(self.backbone)
        sizes = ("n_layer", "d_state", "expand", "headdim", "dt_min", "dt_max")
        found = {name: getattr(self, name) for name in sizes if hasattr(self, name)}
        found = {name: value for name, value in found.items() if backbones.takes(own, name)}
        if backbones.takes(own, "n_head") and "n_head" not in own:
            if self.d_model % self.headdim:
                raise ValueError(f"headdim must divide d_model = {self.d_model}, got {self.headdim}")
            found["n_head"] = self.d_model // self.headdim
        return {"name": own["name"], "d_model": self.d_model, **found, **own}

    def _solver(self) -> dict[str, Any]:
        own = _mapping(self.solver)
        if own["name"] == "picard":
            return {"name": "picard", "damping": self.damping, **own}
        if self.damping != next(f.default for f in fields(self) if f.name == "damping"):
            raise ValueError(
                f"damping is Picard's, got {self.damping} with solver {own['name']}: solvers with a damping "
                "take it as {name: NAME, damping: D}"
            )
        return own

    def _phantom(self) -> dict[str, Any]:
        return {"name": "phantom", "steps": self.phantom_steps, "damping": self.phantom_damping}

    def _search(self, max_iter: int) -> dict[str, Any]:
        return {"name": "residual", "rtol": self.tolerance, "max_iter": max_iter}


def _mapping(part: str | Mapping[str, Any]) -> dict[str, Any]:
    found = {"name": part} if isinstance(part, str) else dict(part)
    if not isinstance(found.get("name"), str):
        raise ValueError(f"a part given as a mapping needs a 'name', got {found}")
    return found
