"""The settings of a run: what is trained, on what, and how."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
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

# Models take seconds to import: not before the arguments are right.
if TYPE_CHECKING:
    from deqseq.causal_lm import ImplicitConfig
    from deqseq.curriculum import Curriculum


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that determines a pretrained model, and settings without influence on it: ``RESUMES``.

    Args:
        model: options of ImplicitConfig, or a preset: mamba2-130m, llama-1.3b; {preset: NAME, ...} changes
            one. Any installed backbone and solver goes by its name
        explicit: train the explicit twin: the same stack applied once, no stages
        data: folder made by deqseq.tasks.prepare; or {dataset: NAME, subset, split, validation_split, files,
            column, tokenizer}, a Hugging Face dataset to stream
        documents: joined means that rows run on across documents, separate that tokens see their own document
            only
        length: tokens of a row
        tokens: tokens to train on; or give steps
        steps: optimiser steps; or give tokens
        passes: how often the data may be used; more tokens are refused
        batch_tokens: tokens of an optimiser step, over all processes
        per_device_batch_size: rows in memory at a time
        learning_rate: highest learning rate
        min_learning_rate: learning rate at the end
        warmup_share: share of the steps in which the rate rises linearly
        decay_share: share of the steps, the last ones, in which it falls as 1 - sqrt
        weight_decay: weight decay of matrices; not of norms, biases, A, D, dt and lengths of rows
        beta1: AdamW's
        beta2: AdamW's
        max_grad_norm: gradient clipping
        stages: list of {until, gradient, convergence, eval_convergence, window}; until is a share of the
            training, {tokens: N} or {steps: N}
        start_from: model folder or checkpoint to take the weights from; the optimiser starts afresh
        bf16: autocast to bfloat16; weights stay float32
        compile: compile the blocks (Llama)
        activation_budget: share of the activations that compiled blocks keep; the cheap ones are recomputed
        recompute: recompute every evaluation in the backward pass (activation checkpointing)
        seed: seed of weights and order of the rows
        workers: processes that read rows
        log_steps: steps between lines of the log
        eval_steps: steps between evaluations; also at the end of every stage
        eval_rows: rows of the held-out split in these evaluations; null means all
        save_steps: steps between checkpoints; also at the end of every stage
        keep: checkpoints to keep, at least 2
        spectral_every: lines of the log between estimates of the spectral radius; 0 means none
        report_to: tensorboard, wandb, ...: a name the Trainer knows; or none

    Raises:
        ValueError: a value out of its range, or that does not fit the others, with the rule.
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
    workers: NonNegativeInt = 2
    log_steps: PositiveInt = 10
    eval_steps: PositiveInt = 1000
    eval_rows: PositiveInt | None = 512
    save_steps: PositiveInt = 500
    keep: PositiveInt = 2
    spectral_every: NonNegativeInt = 10
    report_to: str = "tensorboard"

    def __post_init__(self) -> None:
        check_types(self)
        if self.stream and self.eval_rows is None:
            raise ValueError("eval_rows must be a number where the data is a stream, got None")
        if (self.tokens is None) == (self.steps is None):
            raise ValueError(f"give either tokens or steps, got {self.tokens} and {self.steps}")
        whole = max(1, round(self.batch_tokens / self.length)) * self.length
        for wrong, rule in (
            (self.length < 2, f"length must be at least 2, a token and its successor, got {self.length}"),
            (self.batch_tokens % self.length, f"batch_tokens must be whole rows of length = {self.length} "
             f"tokens, got {self.batch_tokens}; {whole} would be"),
            (self.total_steps < 1, f"tokens must fill a batch of {self.batch_tokens} tokens at least once, "
             f"got {self.tokens}"),
            (self.min_learning_rate > self.learning_rate, "min_learning_rate must be in (0, learning_rate = "
             f"{self.learning_rate:g}], got {self.min_learning_rate:g}"),
            (self.warmup_share + self.decay_share > 1, "warmup_share and decay_share must not be more than 1 "
             f"together, got {self.warmup_share} and {self.decay_share}"),
            (self.activation_budget == 0, "activation_budget must be in (0, 1], got 0"),
            (self.activation_budget < 1 and not self.compile, "activation_budget is kept by compiled blocks: "
             "set compile: true, or 1.0"),
            (self.keep < 2, "keep must be at least 2, the last checkpoint and one being written, "
             f"got {self.keep}"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(rule)
        for number, (begin, end) in enumerate(pairwise([0, *self.stage_ends])):
            if end <= begin:
                raise ValueError(
                    f"stages.{number} would have none of {self.total_steps} steps: it ends with step {end}, "
                    f"and {begin} are over before it"
                )
        import torch

        from deqseq.causal_lm import ImplicitForCausalLM

        with torch.device("meta"):  # checks the model's sizes
            model = ImplicitForCausalLM(self.config())
        name = model.config.backbone["name"]
        if self.compile and (name == "mamba2" or not hasattr(model.model.layer.backbone, "layers")):
            raise ValueError(
                f"compile is for backbones with layers and without kernels of their own, such as llama, "
                f"got {name}"
            )

    @property
    def stream(self) -> StreamSettings | None:
        """The fields of ``data`` where it is a dataset that streams."""
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
        """Batches of a process in an optimiser step; ``ValueError`` if its rows do not divide among them."""
        rows, size = self.rows_per_step, self.per_device_batch_size
        together = processes * size
        if rows % together == 0:
            return rows // together
        message = (
            f"batch_tokens = {self.batch_tokens} is {rows} rows of {self.length} tokens, which do not divide "
            f"into {processes} processes x per_device_batch_size = {size}"
        )
        if rows % processes == 0:
            raise ValueError(f"{message}: {_near_divisors(rows // processes, size)} rows at a time would")
        other = f"{_near_divisors(rows // size, processes)} processes would, or " if rows % size == 0 else ""
        whole = max(1, round(rows / together)) * together * self.length
        raise ValueError(f"{message}: {other}batch_tokens = {whole}")

    def config(self) -> ImplicitConfig:
        """The model's configuration, at the end of training."""
        from huggingface_hub.errors import StrictDataclassError

        from deqseq.causal_lm import ImplicitConfig

        options, curriculum = model_options(self.model), self.curriculum()
        if self.explicit:
            options["implicit"] = False
        if curriculum is not None:
            last = curriculum.stages[-1]
            options |= {"gradient": last.gradient, "window": last.window}
            for name in ("convergence", "eval_convergence"):
                if getattr(last, name) is not None:
                    options[name] = getattr(last, name)
        try:
            return ImplicitConfig(**options)
        except StrictDataclassError as error:  # no ValueError
            raise ValueError(" ".join(str(error).split())) from error

    def curriculum(self) -> Curriculum | None:
        """The stages, which end at shares of the steps; ``None``: as the model is throughout."""
        from deqseq.curriculum import Curriculum, Stage

        if self.explicit or not self.stages or not model_options(self.model).get("implicit", True):
            return None
        stages = []
        for number, entry in enumerate(self.stages):
            until = {"until": self._share(entry["until"], number)} if "until" in entry else {}
            stage = build(Stage, entry | until, f"stages.{number}.")
            stages.append(replace(stage, eval_convergence=stage.eval_convergence or stage.convergence))
        return Curriculum(stages)

    @property
    def stage_ends(self) -> list[int]:
        """The last step of every stage; without stages, that of the run."""
        curriculum = self.curriculum()
        stages = [] if curriculum is None else curriculum.stages
        return [round(stage.until * self.total_steps) for stage in stages] or [self.total_steps]

    def _share(self, until: Any, number: int) -> float:
        if isinstance(until, dict) and len(until) == 1:
            (unit, amount), steps = *until.items(), self.total_steps
            if unit == "steps" and isinstance(amount, int):
                return amount / steps
            if unit == "tokens" and isinstance(amount, (int, float)) and math.isfinite(amount):
                return round(amount / self.batch_tokens) / steps
        elif isinstance(until, (int, float)):
            return float(until)
        raise ValueError(
            f"stages.{number}.until must be a share of the training, {{tokens: N}} or {{steps: N}}, "
            f"got {until}"
        )

    def to_dict(self) -> Tree:
        """Plain data, from which :func:`build` makes the same settings."""
        return {**asdict(self), "model": model_options(self.model)}


RESUMES = {
    "data",  # it may have moved; its fingerprint must not change
    "per_device_batch_size", "compile", "activation_budget", "recompute", "workers", "log_steps",
    "eval_steps", "eval_rows", "save_steps", "keep", "spectral_every", "report_to",
}  # fmt: skip
"""Settings that may differ when a run is resumed."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """The fields of ``data`` where it is a dataset that streams."""

    dataset: str
    subset: str | None = None
    split: str = "train"
    validation_split: str | None = None
    validation_share: BelowOne = 0.001
    files: str | list[str] = field(default_factory=list)
    column: str = "text"
    tokenizer: str = "EleutherAI/gpt-neox-20b"


def model_options(model: str | Mapping[str, Any]) -> Tree:
    """The options of :class:`ImplicitConfig` that ``model`` in a run file means."""
    from deqseq.causal_lm import presets

    options = {"preset": model} if isinstance(model, str) else dict(model)
    preset = options.pop("preset", None)
    if preset is None:
        return options
    name = f"{preset}-free" if f"{preset}-free" in presets.names() else preset
    return merged(presets.options(name), options)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """``under`` with what ``over`` says, mapping by mapping."""
    result = deepcopy(dict(under))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        # Options of a part that goes by another name are another part's.
        both = both and value.get("name") in (None, result[key].get("name"))
        result[key] = merged(result[key], value) if both else deepcopy(value)
    return result


def _near_divisors(number: int, wanted: int) -> str:
    """The three divisors of ``number`` that are nearest to ``wanted``, in words."""
    fits = sorted((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - wanted))
    *head, last = map(str, sorted(fits[:3]))
    return f"{', '.join(head)} or {last}" if head else last
