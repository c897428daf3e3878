"""Settings shared by the tasks state tracking and CatbAbI: a model and its two stages of training."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deqseq.backbone import backbones
from deqseq.curriculum import Curriculum, Stage
from deqseq.gradient import gradients
from deqseq.policy import policies
from deqseq.registry import Registry
from deqseq.solver import solvers
from deqseq.tasks.common.runs import read_record, read_settings
from deqseq.tasks.common.settings import (
    BelowOne,
    ClosedUnitInterval,
    NonNegativeFinite,
    PositiveFinite,
    PositiveInt,
    Seed,
    Tree,
    build,
    check_types,
)

if TYPE_CHECKING:  # transformers, which takes seconds to import
    from deqseq.causal_lm import ImplicitConfig

Settings = TypeVar("Settings", bound="TwoStageSettings")


@dataclass(frozen=True, kw_only=True)
class TwoStageSettings:
    """A model, and its training in two stages.

    The first stage is cheap. It runs a few iterations from zero and differentiates through all of them. The
    second stage iterates to the fixed point. It then runs a few more iterations, called phantom steps, and
    differentiates only through them. Backbones, policies and gradient strategies receive only the settings
    that they accept.

    Args:
        backbone: name of any installed backbone, or a mapping {name: NAME, option: value}
        explicit: train an explicit model, which applies the same blocks once
        d_model: width of the model
        n_layer: number of blocks
        d_state: state dimension of a head (Mamba2)
        expand: inner width divided by d_model (Mamba2)
        headdim: width of a head, which determines the number of heads (Mamba2 and Llama)
        solver: name of any installed solver, or a mapping {name: NAME, option: value}
        gradient: gradient strategy of the second (fixed-point) stage, a name or a mapping; phantom by default
        convergence: convergence policy of the fixed-point search, a name or a mapping; residual by default
        damping: damping of the picard solver; 1 means none. For other solvers, give solver as a mapping that
            contains damping
        steps: optimiser steps
        batch_size: sequences per optimiser step
        learning_rate: highest learning rate, after a warm-up over 5 % of the steps; decays over the last 30 %
        weight_decay: weight decay of matrices
        max_grad_norm: gradients are clipped to this norm; 0 means no clipping
        label_smoothing: share of the target probability spread over all tokens; keeps the logits from growing
        unrolled_share: share of all optimiser steps that the first (unrolled) stage gets
        unrolled_iterations: number of iterations in the first (unrolled) stage
        tolerance: relative residual at which the fixed-point search ends
        max_iter: maximum number of evaluations per token of the fixed-point search in training
        eval_max_iter: maximum number of evaluations per token of the fixed-point search in evaluation
        phantom_steps: steps of the phantom gradient in the second (fixed-point) stage
        phantom_damping: damping of the phantom steps
        bf16: autocast to bfloat16 in training; weights stay float32
        seed: seed of weights and data

    Raises:
        ValueError: a value is out of range; the message states the rule.
    """

    backbone: str | dict[str, Any] = "mamba2"
    explicit: bool = False
    d_model: PositiveInt = 128
    n_layer: PositiveInt = 1
    d_state: PositiveInt = 32
    expand: PositiveInt = 2
    headdim: PositiveInt = 32
    solver: str | dict[str, Any] = "picard"
    gradient: str | dict[str, Any] | None = None
    convergence: str | dict[str, Any] | None = None
    damping: float = 0.7
    steps: PositiveInt = 1800
    batch_size: PositiveInt = 64
    learning_rate: PositiveFinite = 6e-3
    weight_decay: NonNegativeFinite = 0.1
    max_grad_norm: NonNegativeFinite = 0.5
    label_smoothing: BelowOne = 0.1
    unrolled_share: ClosedUnitInterval = 0.5
    unrolled_iterations: PositiveInt = 4
    tolerance: PositiveFinite = 0.005
    max_iter: PositiveInt = 20
    eval_max_iter: PositiveInt = 256
    phantom_steps: PositiveInt = 4
    phantom_damping: float = 0.8
    bf16: bool = False
    seed: Seed = 1

    def __post_init__(self) -> None:
        check_types(self)

    def _config(self, vocab_size: int, **options: Any) -> "ImplicitConfig":
        from deqseq.causal_lm import ImplicitConfig

        return ImplicitConfig(
            vocab_size=vocab_size,
            backbone=self._backbone(),
            implicit=not self.explicit,
            solver=self._solver(),
            gradient=self._gradient(),
            convergence=self._search(self.max_iter),
            eval_convergence=self._search(self.eval_max_iter),
            **options,
        )

    def _curriculum(self, window: int | None = None, **unrolled: Any) -> Curriculum | None:
        """The two stages of training; ``None`` for an explicit model.

        ``window`` is for the second stage. ``unrolled`` has options for the gradient strategy of the first
        stage.
        """
        if self.explicit:
            return None
        first = {"name": "unrolled", "iterations": self.unrolled_iterations, **unrolled}
        stages = [Stage(self.unrolled_share, first)] if self.unrolled_share > 0 else []
        if self.unrolled_share < 1:
            stages.append(Stage(1.0, self._gradient(), self._search(self.max_iter), window))
        return Curriculum(stages)

    def _backbone(self) -> Tree:
        sizes = ("n_layer", "d_state", "expand", "headdim", "dt_min", "dt_max")
        options = {name: value for name, value in vars(self).items() if name in sizes}
        found = {"d_model": self.d_model, **_filled(backbones, self.backbone, **options)}
        if backbones.takes(found, "n_head") and "n_head" not in found:
            if self.d_model % self.headdim:
                raise ValueError(f"headdim must divide d_model = {self.d_model}, got {self.headdim}")
            found["n_head"] = self.d_model // self.headdim
        return found

    def _solver(self) -> Tree:
        found = _filled(solvers, self.solver)
        if found["name"] == "picard":
            return {"damping": self.damping, **found}
        if self.damping != type(self).damping:
            raise ValueError(
                f"damping is for picard, got {self.damping} with solver {found['name']}: give the damping of "
                "other solvers as {name: NAME, damping: D}"
            )
        return found

    def _gradient(self) -> Tree:
        return _filled(
            gradients, self.gradient or "phantom", steps=self.phantom_steps, damping=self.phantom_damping
        )

    def _search(self, max_iter: int) -> Tree:
        return _filled(policies, self.convergence or "residual", rtol=self.tolerance, max_iter=max_iter)


def load_settings(kind: type[Settings], path: str | Path, *others: str) -> tuple[Settings, Tree]:
    """Read the settings of the finished run in the folder ``path``.

    Returns the settings as an object of class ``kind``, and a dictionary with the entries named in
    ``others``. The settings file has these entries in addition to the fields of ``kind``.

    Raises:
        ValueError: the folder holds no finished run, or a run of another kind.
    """
    found = read_settings(path)
    also = {name: found.pop(name, None) for name in others}
    try:
        settings = build(kind, found)
    except ValueError as error:
        raise ValueError(f"{path} holds a run of another kind: {error}") from error
    read_record(path)
    return settings, also


def _filled(registry: Registry[Any], part: str | Mapping[str, Any], **options: Any) -> Tree:
    """``part`` as a mapping, with ``options`` as defaults. Leaves out options that ``part`` rejects."""
    own = {"name": part} if isinstance(part, str) else dict(part)
    taken = {name: value for name, value in options.items() if registry.takes(own, name)}
    return {"name": own.get("name"), **taken, **own}
