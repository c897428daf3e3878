"""The settings of a pretraining run: model, data and training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from deqseq.tasks.common.settings import (
    BelowOne,
    ClosedUnitInterval,
    NonNegativeFinite,
    NonNegativeInt,
    PositiveFinite,
    PositiveInt,
    Seed,
    Tree,
    build,
    check_types,
)

# Importing the model classes takes seconds. So functions import them late, after the fast checks.
if TYPE_CHECKING:
    from deqseq.causal_lm import ImplicitConfig
    from deqseq.curriculum import Curriculum


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All settings of a run. A resumed run may change only the settings in ``RESUMES``.

    Args:
        model: preset such as mamba2-130m; {preset: NAME, ...} to change its options; or a mapping of
            ImplicitConfig's options
        explicit: evaluate the map once, without a search or stages. The model is explicit, or injected if
            model.backbone.injection is true
        data: folder made by deqseq.tasks.prepare; or a Hugging Face dataset to stream, as {dataset: NAME,
            subset, split, validation_split, validation_share, files, column, tokenizer}
        documents: with joined, a token also sees earlier documents in its row; with separate, a token sees
            only its own document
        length: tokens per row
        tokens: tokens to train on; give either tokens or steps
        steps: optimiser steps; give either steps or tokens
        passes: maximum number of passes over the data
        batch_tokens: tokens per optimiser step, over all processes
        per_device_batch_size: rows in one forward pass of a process
        learning_rate: highest learning rate
        min_learning_rate: learning rate at the end
        warmup_share: share of the steps over which the learning rate rises linearly
        decay_share: share of the steps, at the end, over which the learning rate falls as 1 - sqrt(progress)
        weight_decay: weight decay of matrices; norms, biases, A, D, dt and weight-norm gains do not decay
        beta1: beta1 of AdamW
        beta2: beta2 of AdamW
        max_grad_norm: gradients are clipped to this norm
        stages: list of {until, gradient, convergence, eval_convergence, solver, window, adaptive_budget};
            until is the end of a stage, as a share of the training such as 0.8, or as {tokens: N} or
            {steps: N}; solver is model.solver by default; adaptive_budget is the mean residual that searches
            should reach: max_iter changes by one after every step
        start_from: model folder or checkpoint with the initial weights; the optimiser starts anew
        bf16: autocast to bfloat16; weights stay float32
        compile: compile the blocks with torch.compile; not for Mamba2
        activation_budget: share of the activations that compiled blocks keep for the backward pass; the
            activations that are cheapest to compute are recomputed
        recompute: recompute every evaluation in the backward pass (activation checkpointing)
        seed: seed of the initial weights and of the order of the rows
        full_determinism: use deterministic operations only. Then a run has equal losses if it is repeated or
            resumed on as many GPUs of the same kind. This can be slower
        workers: number of processes that load rows
        log_steps: write a line to the log every N steps
        eval_steps: evaluate every N steps, and at the end of every stage
        eval_at: list of steps after which to evaluate too
        eval_rows: held-out rows in an evaluation during training; null means all
        save_steps: save a checkpoint every N steps, and at the end of every stage
        keep: number of checkpoints to keep, at least 2: the last one, and the one being written
        spectral_every: estimate the spectral radius of df/dz for every Nth line of the log; 0 means never
        report_to: where the Trainer reports the log: tensorboard, wandb, ..., or none

    Raises:
        ValueError: a value is out of range or contradicts another value.
    """

    model: str | dict[str, Any]
    explicit: bool = False
    data: str | dict[str, Any] | None = None
    documents: Literal["joined", "separate"] = "joined"
    length: PositiveInt = 2048
    tokens: PositiveInt | None = None
    steps: PositiveInt | None = None
    passes: PositiveFinite = 1.0
    batch_tokens: PositiveInt = 2**20
    per_device_batch_size: PositiveInt = 8
    learning_rate: PositiveFinite
    min_learning_rate: PositiveFinite = 1e-5
    warmup_share: ClosedUnitInterval = 0.01
    decay_share: ClosedUnitInterval = 0.2
    weight_decay: NonNegativeFinite = 0.1
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    max_grad_norm: PositiveFinite = 1.0
    stages: list[dict[str, Any]] | None = None
    start_from: str | None = None
    bf16: bool = True
    compile: bool = False
    activation_budget: ClosedUnitInterval = 1.0
    recompute: bool = False
    seed: Seed = 0
    full_determinism: bool = False
    workers: NonNegativeInt = 2
    log_steps: PositiveInt = 10
    eval_steps: PositiveInt = 1000
    eval_at: list[PositiveInt] = field(default_factory=list)
    eval_rows: PositiveInt | None = 512
    save_steps: PositiveInt = 500
    keep: PositiveInt = 2
    spectral_every: NonNegativeInt = 10
    report_to: str = "tensorboard"

    def __post_init__(self) -> None:
        check_types(self)
        if self.stream and self.eval_rows is None:
            raise ValueError("eval_rows must be a number if the data is streamed, got None")
        if (self.tokens is None) == (self.steps is None):
            raise ValueError(f"give either tokens or steps, got {self.tokens} and {self.steps}")
        whole = max(1, round(self.batch_tokens / self.length)) * self.length
        for wrong, rule in (
            (self.length < 2, f"length must be at least 2, a token and the next one, got {self.length}"),
            (self.batch_tokens % self.length, f"batch_tokens must be a multiple of length = {self.length}, "
             f"got {self.batch_tokens}; the nearest is {whole}"),
            (self.total_steps < 1, f"tokens must be at least batch_tokens = {self.batch_tokens}, "
             f"got {self.tokens}"),
            (self.min_learning_rate > self.learning_rate, "min_learning_rate must be in (0, learning_rate = "
             f"{self.learning_rate:g}], got {self.min_learning_rate:g}"),
            (self.warmup_share + self.decay_share > 1, "warmup_share and decay_share must add up to at "
             f"most 1, got {self.warmup_share} and {self.decay_share}"),
            (self.activation_budget == 0, "activation_budget must be in (0, 1], got 0"),
            (self.activation_budget < 1 and not self.compile, "activation_budget below 1 needs compiled "
             "blocks: set compile: true, or activation_budget: 1.0"),
            (self.keep < 2, "keep must be at least 2: the last checkpoint, and the one being written; "
             f"got {self.keep}"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(rule)
        for number, (begin, end) in enumerate(pairwise([0, *self.stage_ends])):
            if end <= begin:
                raise ValueError(
                    f"stages.{number} would have none of {self.total_steps} steps: it would begin after step "
                    f"{begin} and end with step {end}"
                )
        _check_model(self.config().to_json_string(use_diff=False), self.compile)

    @property
    def stream(self) -> StreamSettings | None:
        """The fields of ``data`` if ``data`` is a mapping that names a dataset to stream, else ``None``."""
        return build(StreamSettings, self.data, "data.") if isinstance(self.data, dict) else None

    @property
    def rows_per_step(self) -> int:
        return self.batch_tokens // self.length

    @property
    def total_steps(self) -> int:
        return self.steps if self.steps is not None else int(self.tokens or 0) // self.batch_tokens

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup_share * self.total_steps)

    @property
    def decay_steps(self) -> int:
        return round(self.decay_share * self.total_steps)

    def accumulation(self, processes: int) -> int:
        """The number of gradient accumulation steps on ``processes`` processes.

        Raises:
            ValueError: the rows of a step cannot be shared evenly among the processes.
        """
        rows, size = self.rows_per_step, self.per_device_batch_size
        together = processes * size
        if rows % together == 0:
            return rows // together
        message = (
            f"batch_tokens = {self.batch_tokens} is {rows} rows of {self.length} tokens, which do not divide "
            f"into {processes} processes x per_device_batch_size = {size}"
        )
        if rows % processes == 0:
            raise ValueError(
                f"{message}: use per_device_batch_size {_near_divisors(rows // processes, size)}"
            )
        other = f"{_near_divisors(rows // size, processes)} processes, or " if rows % size == 0 else ""
        whole = max(1, round(rows / together)) * together * self.length
        raise ValueError(f"{message}: use {other}batch_tokens = {whole}")

    def config(self) -> ImplicitConfig:
        """The model's configuration at the end of training, with the options of the last stage."""
        from huggingface_hub.errors import StrictDataclassError

        from deqseq.causal_lm import ImplicitConfig

        options, curriculum = model_options(self.model), self.curriculum()
        if options.get("backbone") is None:
            raise ValueError(
                f"model needs a preset, such as llama-130m, or a backbone, such as llama; got {self.model!r}"
            )
        if self.explicit:
            options["implicit"] = False
        if curriculum is not None:
            last = curriculum.stages[-1]
            options |= {"gradient": last.gradient, "window": last.window}
            for name in ("convergence", "eval_convergence", "solver"):
                if getattr(last, name) is not None:
                    options[name] = getattr(last, name)
        try:
            return ImplicitConfig(**options)
        except StrictDataclassError as error:  # this error class is not a subclass of ValueError
            raise ValueError(" ".join(str(error).split())) from error

    def curriculum(self) -> Curriculum | None:
        """The stages of training, whose ends are shares of all steps. ``None`` if the run has no stages."""
        from deqseq.curriculum import Curriculum, Stage

        model = model_options(self.model)
        if self.explicit or not self.stages or not model.get("implicit", True):
            return None
        # If a stage has its own solver, the stages after it need the model's solver to undo the change.
        own_solver = any(entry.get("solver") is not None for entry in self.stages)
        solver, stages = model.get("solver", "picard") if own_solver else None, []
        for number, entry in enumerate(self.stages):
            until = {"until": self._share(entry["until"], number)} if "until" in entry else {}
            stage = build(Stage, entry | until, f"stages.{number}.")
            stages.append(replace(
                stage, eval_convergence=stage.eval_convergence or stage.convergence,
                solver=stage.solver or solver,
            ))  # fmt: skip
        return Curriculum(stages)

    @property
    def stage_ends(self) -> list[int]:
        """The last step of every stage. If the run has no stages, only the last step of the run."""
        curriculum = self.curriculum()
        stages = [] if curriculum is None else curriculum.stages
        return [round(stage.until * self.total_steps) for stage in stages] or [self.total_steps]

    def _share(self, until: Any, number: int) -> float:
        if isinstance(until, dict) and len(until) == 1:
            (unit, amount), steps = *until.items(), self.total_steps
            if unit == "steps" and type(amount) is int:
                return amount / steps
            if unit == "tokens" and type(amount) in (int, float) and math.isfinite(amount):
                return round(amount / self.batch_tokens) / steps
        elif type(until) in (int, float):
            return float(until)
        raise ValueError(
            f"stages.{number}.until must be a share of the training, {{tokens: N}} or {{steps: N}}, "
            f"got {until}"
        )

    def to_dict(self) -> Tree:
        """The settings as plain data. The function :func:`build` turns such data into settings again."""
        return {**asdict(self), "model": model_options(self.model)}


RESUMES = {
    "data",  # the folder of the data may move, but its fingerprint must stay the same
    "per_device_batch_size", "compile", "activation_budget", "recompute", "workers", "log_steps",
    "eval_steps", "eval_at", "eval_rows", "save_steps", "keep", "spectral_every", "report_to",
}  # fmt: skip
"""Settings that a resumed run may change."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """The fields of the setting ``data`` if the run streams a Hugging Face dataset."""

    dataset: str
    subset: str | None = None
    split: str = "train"
    validation_split: str | None = None
    validation_share: BelowOne = 0.001
    files: str | list[str] = field(default_factory=list)
    column: str = "text"
    tokenizer: str = "EleutherAI/gpt-neox-20b"


def model_options(model: str | Mapping[str, Any]) -> Tree:
    """Turn the field ``model`` of a run file into options of :class:`ImplicitConfig`.

    If the field names a preset, the result has the options of this preset, updated by the other entries. A
    name without a form, such as ``mamba2-130m``, means ``mamba2-130m-free``.
    """
    from deqseq.causal_lm import presets

    options = {"preset": model} if isinstance(model, str) else dict(model)
    if wrong := [name for name in options if not isinstance(name, str)]:
        raise ValueError(f"the fields of model must have names, got {wrong[0]!r}")
    preset = options.pop("preset", None)
    if preset is None:
        return options
    name = f"{preset}-free" if f"{preset}-free" in presets.names() else preset
    return merged(presets.options(name), options)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """A copy of ``under``, updated recursively with the entries of ``over``."""
    result = deepcopy(dict(under))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        # An entry with another ``name``, such as another solver, replaces the old entry entirely.
        both = both and value.get("name") in (None, result[key].get("name"))
        result[key] = merged(result[key], value) if both else deepcopy(value)
    return result


def _near_divisors(number: int, wanted: int) -> str:
    """The three divisors of ``number`` that are nearest to ``wanted``, as text."""
    fits = sorted((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - wanted))
    *head, last = map(str, sorted(fits[:3]))
    return f"{', '.join(head)} or {last}" if head else last


@cache
def _check_model(config: str, compiled: bool) -> None:
    """Build a model without weights, to check its sizes. Equal models are built once.

    Args:
        config: the configuration of the model as JSON.
        compiled: whether its blocks are to be compiled.
    """
    import torch

    from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM

    try:
        with torch.device("meta"):
            model = ImplicitForCausalLM(ImplicitConfig.from_dict(json.loads(config)))
    except (TypeError, RuntimeError) as error:  # torch's errors about sizes beyond 64 bits
        raise ValueError(f"the model cannot be built: {error}") from error
    name = model.config.backbone["name"]
    if compiled and (name == "mamba2" or not hasattr(model.model.layer.backbone, "layers")):
        raise ValueError(
            f"compile needs a backbone that has layers and has no kernels of its own, such as llama, "
            f"got {name}"
        )
