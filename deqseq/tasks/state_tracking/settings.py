"""Settings of a state-tracking run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.checks import check_count
from deqseq.curriculum import Curriculum, Stage
from deqseq.tasks.common.runs import check_seed, check_types, read_settings, read_yaml
from deqseq.tasks.state_tracking.algebra import Algebra, algebra
from deqseq.tasks.state_tracking.lstm import LSTM, LSTMConfig


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class TrainSettings:
    """Everything that determines a trained model; saved beside it as ``settings.json``.

    Training has two stages: first a few iterations are unrolled from zero and differentiated through,
    which is cheap and finds the task; then the fixed point is searched for, and a few phantom steps carry
    the gradient. Where ``short_share`` is above 0, that search begins on short sequences, which may be
    denser in hard tokens than the others, and comes back to them where ``rehearsal`` is.

    Raises:
        ValueError: a value out of its range, with the rule.
    """

    group: str = _help("algebra: Z60, S5, A5, products such as A4xZ5, or A5xM with the monoid M", "A5")
    length: int = _help("tokens of the longest training sequence", 16)
    min_length: int = _help("shortest sequence of the fixed-point stage; a batch draws its length", 8)
    unrolled_length: int = _help("longest sequence of the unrolled stage; the shortest has 2 tokens", 8)
    short_length: int = _help(
        "longest sequence of the steps between unrolled_share and short_share, the shortest being "
        "unrolled_length",
        8,
    )
    short_identity_probability: float | None = _help(
        "identity_probability of the steps up to short_share and of rehearsal; the same by default", None
    )
    rehearsal: float = _help(
        "share of the steps after short_share that take sequences like those before it, so that they are "
        "not forgotten",
        0.0,
    )
    identity_probability: float = _help(
        "probability that a token is the group's identity, which changes nothing; "
        "the share of hard tokens is one minus it",
        0.5,
    )
    backbone: Literal["mamba2", "llama", "lstm"] = _help(
        "body; an LSTM is explicit, and here to compare with", "mamba2"
    )
    explicit: bool = _help("train the explicit twin: the same stack applied once", False)
    d_model: int = _help("width", 128)
    n_layer: int = _help("blocks", 1)
    d_state: int = _help("state dim of a head; Mamba2", 32)
    expand: int = _help("inner width over width; Mamba2", 2)
    headdim: int = _help("width of a head; Mamba2 and Llama", 32)
    dt_min: float = _help("least of the first step sizes, log-uniform up to dt_max; Mamba2", 1e-3)
    dt_max: float = _help("largest of them; heads of large steps soon forget", 1e-1)
    damping: float = _help("of the solver, Picard's iteration; 1 is none", 0.7)
    steps: int = _help("optimiser steps", 1800)
    batch_size: int = _help("sequences a step", 64)
    learning_rate: float = _help("peak; warms up over 5 %% of the steps, decays over the last 30 %%", 6e-3)
    weight_decay: float = _help("of matrices", 0.1)
    max_grad_norm: float = _help("gradient clipping", 0.5)
    label_smoothing: float = _help(
        "share of the target spread over all tokens; keeps the logits from growing without end", 0.1
    )
    unrolled_share: float = _help("share of the steps in the unrolled stage", 0.5)
    short_share: float = _help("share of the steps before the first long sequence; 0: unrolled_share", 0.0)
    unrolled_iterations: int = _help("iterations of the unrolled stage", 4)
    tolerance: float = _help("relative residual of the search in the fixed-point stage", 0.005)
    max_iter: int = _help("evaluations a token may take part in, in that search", 20)
    eval_max_iter: int = _help("the same in evaluation", 256)
    train_window: int | None = _help("tokens searched at a time in training; all by default", None)
    phantom_steps: int = _help("steps that carry the gradient in the fixed-point stage", 4)
    phantom_damping: float = _help(
        "damping of these steps; above the solver's, so that its search is calm where they are stable", 0.8
    )
    bf16: bool = _help("autocast to bfloat16 in training; weights stay float32", False)
    seed: int = _help("of weights and data", 1)

    def __post_init__(self) -> None:
        check_types(self)
        algebra(self.group)
        for name in ("length", "steps", "batch_size", "unrolled_iterations", "max_iter", "eval_max_iter"):
            check_count(name, getattr(self, name))
        if self.backbone not in ("mamba2", "llama", "lstm"):
            raise ValueError(f"backbone must be mamba2, llama or lstm, got {self.backbone!r}")
        if self.backbone == "lstm" and not self.explicit:
            raise ValueError("backbone lstm has no implicit form: set explicit")
        if self.backbone == "llama" and self.d_model % self.headdim:
            raise ValueError(f"headdim must divide d_model = {self.d_model}, got {self.headdim}")
        lengths = [("min_length", 1), ("unrolled_length", 2)]
        if self.short_share:
            lengths.append(("short_length", self.unrolled_length))
        for name, least in lengths:
            value = getattr(self, name)
            if not least <= value <= self.length:
                raise ValueError(f"{name} must be between {least} and length = {self.length}, got {value}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if not 0 <= self.unrolled_share <= 1:
            raise ValueError(f"unrolled_share must be in [0, 1], got {self.unrolled_share}")
        if self.short_share and not self.unrolled_share <= self.short_share <= 1:
            raise ValueError(
                f"short_share must be 0 or between unrolled_share = {self.unrolled_share} and 1, "
                f"got {self.short_share}"
            )
        for name in ("identity_probability", "short_identity_probability", "rehearsal"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        if self.rehearsal and not self.short_share:
            raise ValueError(f"rehearsal needs short sequences, a short_share above 0; got {self.rehearsal}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        for name in ("weight_decay", "max_grad_norm"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        check_seed(self.seed)
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {self.tolerance}")
        self.curriculum()
        with torch.device("meta"):  # checks the model's sizes
            self.model()

    @property
    def algebra(self) -> Algebra:
        return algebra(self.group)

    def model(self) -> ImplicitForCausalLM | LSTM:
        """A fresh model."""
        if self.backbone == "lstm":
            return LSTM(LSTMConfig(len(self.algebra), self.d_model, self.n_layer))
        return ImplicitForCausalLM(self.config())

    def config(self) -> ImplicitConfig:
        """The configuration of an equilibrium model or its explicit twin."""
        body: dict[str, Any] = {"name": self.backbone, "d_model": self.d_model, "n_layer": self.n_layer}
        if self.backbone == "mamba2":
            body |= {"d_state": self.d_state, "expand": self.expand, "headdim": self.headdim}
            body |= {"dt_min": self.dt_min, "dt_max": self.dt_max}
        else:
            body |= {"n_head": self.d_model // self.headdim}
        return ImplicitConfig(
            vocab_size=len(self.algebra),
            backbone=body,
            implicit=not self.explicit,
            solver={"name": "picard", "damping": self.damping},
            gradient=self._phantom(),
            window=self.train_window,
            convergence=self._search(self.max_iter),
            eval_convergence=self._search(self.eval_max_iter),
        )

    def curriculum(self) -> Curriculum | None:
        """The two stages; ``None`` for an explicit model."""
        if self.explicit:
            return None
        unrolled = {"name": "unrolled", "iterations": self.unrolled_iterations}
        stages = []
        if self.unrolled_share > 0:
            stages.append(Stage(self.unrolled_share, unrolled))
        if self.unrolled_share < 1:
            stages.append(Stage(1.0, self._phantom(), self._search(self.max_iter), self.train_window))
        return Curriculum(stages)

    def _phantom(self) -> dict[str, Any]:
        return {"name": "phantom", "steps": self.phantom_steps, "damping": self.phantom_damping}

    def _search(self, max_iter: int) -> dict[str, Any]:
        return {"name": "residual", "rtol": self.tolerance, "max_iter": max_iter}


def load_settings(path: str | Path) -> TrainSettings:
    """The settings of the run in folder ``path``.

    Raises:
        ValueError: no run there, or one of another kind.
    """
    try:
        return TrainSettings(**read_settings(path))
    except TypeError as error:
        raise ValueError(f"{path} holds a run of another kind: {error}") from error


RUNS = Path(__file__).parent / "runs"


def run_fields(source: str) -> dict[str, Any]:
    """The fields that a run file sets: a YAML file, or one of ours by its name.

    Raises:
        ValueError: no such file or name, or fields that there are not.
    """
    found = read_yaml(source, RUNS)
    check_fields(found, source)
    return found


def check_fields(found: Mapping[str, Any], where: str) -> None:
    """Raise ``ValueError`` for names that are no fields of a run."""
    known = {f.name for f in fields(TrainSettings)}
    if unknown := sorted(set(found) - known):
        raise ValueError(
            f"{where} sets {', '.join(unknown)}: not among the fields {', '.join(sorted(known))}"
        )
