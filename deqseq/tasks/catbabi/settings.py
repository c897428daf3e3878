"""Settings of a CatbAbI run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.checks import check_count
from deqseq.curriculum import Curriculum, Stage
from deqseq.tasks.catbabi.stories import TASKS
from deqseq.tasks.common.runs import check_seed, check_types, read_settings


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class TrainSettings:
    """Everything that determines a trained model; saved beside it as ``settings.json``.

    The defaults are the paper's, as far as they are known. Training has two stages: iterations that are
    unrolled from zero and differentiated through; then a search for the fixed point and a few phantom steps,
    which carry the gradient.

    Raises:
        ValueError: a value out of its range, with the rule.
    """

    data: str = field(metadata={"help": "folder that `build` made"})
    mode: Literal["qa", "lm"] = _help("what is learned: qa, the answers; lm, every token", "qa")
    tasks: list[int] | None = field(
        default=None, metadata={"help": "train on these tasks only, of 1 to 20", "nargs": "+"}
    )
    backbone: Literal["mamba2", "llama"] = _help("body", "mamba2")
    explicit: bool = _help("train the explicit twin: the same stack applied once", False)
    d_model: int = _help("width", 256)
    n_layer: int = _help("blocks", 1)
    d_state: int = _help("state dim of a head; Mamba2", 128)
    expand: int = _help("inner width over width; Mamba2", 2)
    headdim: int = _help("width of a head", 64)
    damping: float = _help("of the solver, Picard's iteration; 1 is none", 1.0)
    steps: int = _help("optimiser steps", 15000)
    batch_size: int = _help("streams", 128)
    cut: int = _help("tokens of a stream a step; the state is carried from cut to cut", 200)
    learning_rate: float = _help("peak; warms up over 5 %% of the steps, decays over the last 30 %%", 1e-3)
    weight_decay: float = _help("of matrices", 0.0)
    max_grad_norm: float = _help("gradient clipping; 0 is none", 0.25)
    label_smoothing: float = _help("share of the target spread over all tokens", 0.0)
    unrolled_share: float = _help("share of the steps in the unrolled stage", 1 / 3)
    unrolled_iterations: int = _help("iterations of the unrolled stage", 32)
    checkpoint: bool = _help(
        "recompute unrolled iterations in the backward pass: less memory, more time", True
    )
    tolerance: float = _help("relative residual of the search", 0.03)
    max_iter: int = _help("evaluations a token may take part in, in a search in training", 50)
    eval_max_iter: int = _help("the same in evaluation", 200)
    phantom_steps: int = _help("steps that carry the gradient in the fixed-point stage", 6)
    phantom_damping: float = _help("damping of these steps", 0.5)
    bf16: bool = _help("autocast to bfloat16; weights stay float32", False)
    seed: int = _help("of weights and data", 1)

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "batch_size", "cut", "unrolled_iterations", "phantom_steps", "max_iter",
                     "eval_max_iter"):  # fmt: skip
            check_count(name, getattr(self, name))
        for name, known in (("mode", ("qa", "lm")), ("backbone", ("mamba2", "llama"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")
        unknown = sorted(set(self.tasks or ()) - set(TASKS))
        if unknown or self.tasks == []:
            raise ValueError(f"tasks must be numbers from 1 to 20, got {unknown or 'none'}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if not 0 <= self.unrolled_share <= 1:
            raise ValueError(f"unrolled_share must be in [0, 1], got {self.unrolled_share}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        for name in ("weight_decay", "max_grad_norm"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        check_seed(self.seed)
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {self.tolerance}")
        if self.backbone == "llama" and self.d_model % self.headdim:
            raise ValueError(f"headdim must divide d_model = {self.d_model}, got {self.headdim}")
        self.curriculum()
        with torch.device("meta"):  # checks the model's sizes
            ImplicitForCausalLM(self.config(vocab_size=2))

    def config(self, vocab_size: int) -> ImplicitConfig:
        """The model's configuration."""
        body: dict[str, Any] = {"name": self.backbone, "d_model": self.d_model, "n_layer": self.n_layer}
        if self.backbone == "mamba2":
            body |= {"d_state": self.d_state, "expand": self.expand, "headdim": self.headdim}
        else:
            body |= {"n_head": self.d_model // self.headdim}
        return ImplicitConfig(
            vocab_size=vocab_size,
            backbone=body,
            implicit=not self.explicit,
            solver={"name": "picard", "damping": self.damping},
            gradient=self._phantom(),
            convergence=self._search(self.max_iter),
            eval_convergence=self._search(self.eval_max_iter),
            pad_token_id=0,
            eos_token_id=1,
        )

    def curriculum(self) -> Curriculum | None:
        """The two stages; ``None`` for an explicit model."""
        if self.explicit:
            return None
        unrolled = {
            "name": "unrolled",
            "iterations": self.unrolled_iterations,
            "checkpoint": self.checkpoint,
        }
        stages = []
        if self.unrolled_share > 0:
            stages.append(Stage(self.unrolled_share, unrolled))
        if self.unrolled_share < 1:
            stages.append(Stage(1.0, self._phantom(), self._search(self.max_iter)))
        return Curriculum(stages)

    def _phantom(self) -> dict[str, Any]:
        return {"name": "phantom", "steps": self.phantom_steps, "damping": self.phantom_damping}

    def _search(self, max_iter: int) -> dict[str, Any]:
        return {"name": "residual", "rtol": self.tolerance, "max_iter": max_iter}


@dataclass(frozen=True)
class TrainedOn:
    """What a run recorded of its data: the vocabulary's checksum is unknown of older runs."""

    fingerprint: str | None
    vocabulary: str | None


def load_settings(path: str | Path) -> tuple[TrainSettings, TrainedOn]:
    """The settings of the run in folder ``path``, and what it says of its data.

    Raises:
        ValueError: no run there, or one of another kind.
    """
    found = read_settings(path)
    trained_on = TrainedOn(found.pop("fingerprint", None), found.pop("vocabulary", None))
    if unknown := set(found) ^ {f.name for f in fields(TrainSettings)}:
        raise ValueError(f"{path} holds a run of another kind: {', '.join(sorted(unknown)[:5])}")
    return TrainSettings(**found), trained_on
