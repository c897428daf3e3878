"""The settings of a run: what is trained, on what, and how."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM, presets
from deqseq.checks import check_count
from deqseq.curriculum import Curriculum, Stage
from deqseq.tasks.common.corpus import HoldOut
from deqseq.tasks.common.runs import check_types

Tree = dict[str, Any]


def _setting(text: str, default: Any = MISSING, resumes: bool = False) -> Any:
    """A field with its help; ``resumes``: a run may go on with another value."""
    options: Any = {} if default is MISSING else {"default": default}
    return field(metadata={"help": text, "resumes": resumes}, **options)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that determines a pretrained model; what is of no influence on it may change on resuming.

    Raises:
        ValueError: a value out of its range, or that does not go with the others, with the rule.
    """

    model: Any = _setting(
        "options of ImplicitConfig, or a preset: mamba2-130m, llama-1.3b; {preset: NAME, ...} changes one"
    )
    explicit: bool = _setting("train the explicit twin: the same stack applied once, no stages", False)
    data: Any = _setting(
        "folder made by deqseq.tasks.prepare; or {dataset: NAME, subset, split, validation_split, files, "
        "column, tokenizer}, a Hugging Face dataset to stream",
        None,
        resumes=True,  # it may have moved; its fingerprint must not change
    )
    documents: str = _setting(
        "'joined': rows run on across documents; 'separate': documents see themselves only", "joined"
    )
    length: int = _setting("tokens of a row", 2048)
    tokens: int | None = _setting("tokens to train on; or give steps", None)
    steps: int | None = _setting("optimiser steps; or give tokens", None)
    passes: float = _setting("how often the data may be gone through; more tokens are refused", 1.0)
    batch_tokens: int = _setting("tokens of an optimiser step, over all processes", 2**20)
    per_device_batch_size: int = _setting("rows in memory at a time", 8, resumes=True)
    learning_rate: float = _setting("peak")
    min_learning_rate: float = _setting("at the end", 1e-5)
    warmup_share: float = _setting("share of the steps in which the rate rises linearly", 0.01)
    decay_share: float = _setting("share of the steps, the last ones, in which it falls as 1 - sqrt", 0.2)
    weight_decay: float = _setting("of matrices; not of norms, biases, A, D, dt and lengths of rows", 0.1)
    beta1: float = _setting("AdamW's", 0.9)
    beta2: float = _setting("AdamW's", 0.95)
    max_grad_norm: float = _setting("gradient clipping", 1.0)
    stages: Any = _setting(
        "list of {until, gradient, convergence, eval_convergence, window}; until: a share of the training, "
        "{tokens: N} or {steps: N}",
        None,
    )
    start_from: str | None = _setting(
        "model folder or checkpoint to take the weights from; the optimiser starts afresh", None
    )
    bf16: bool = _setting("autocast to bfloat16; weights stay float32", True)
    compile: bool = _setting("compile the blocks (Llama)", False, resumes=True)
    activation_budget: float = _setting(
        "share of the activations that compiled blocks keep; what is cheap is recomputed", 1.0, resumes=True
    )
    recompute: bool = _setting(
        "recompute every evaluation in the backward pass (activation checkpointing)", False, resumes=True
    )
    seed: int = _setting("of weights and order of the rows", 0)
    workers: int = _setting("processes that read rows", 2, resumes=True)
    log_steps: int = _setting("steps between lines of the log", 10, resumes=True)
    eval_steps: int = _setting(
        "steps between evaluations; also at the end of every stage", 1000, resumes=True
    )
    eval_rows: int | None = _setting("rows of the held-out split in these; all by default", 512, resumes=True)
    save_steps: int = _setting("steps between checkpoints; also at the end of every stage", 500, resumes=True)
    keep: int = _setting("checkpoints to keep, at least 2", 2, resumes=True)
    spectral_every: int = _setting(
        "lines of the log between estimates of the spectral radius; 0: none", 10, resumes=True
    )
    report_to: str = _setting(
        "tensorboard, wandb, ...: a name the Trainer knows; or none", "tensorboard", resumes=True
    )

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.data, Mapping):
            self._check_stream(self.data)
        elif not isinstance(self.data, (str, type(None))):
            raise ValueError(f"data must be a folder, or a mapping with a dataset, got {self.data!r}")
        counts = ("length", "batch_tokens", "per_device_batch_size", "log_steps", "eval_steps", "save_steps")
        for name in counts:
            check_count(name, getattr(self, name))
        for name in ("tokens", "steps", "eval_rows"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if (self.tokens is None) == (self.steps is None):
            raise ValueError(f"give either tokens or steps, got {self.tokens} and {self.steps}")
        if self.length < 2:
            raise ValueError(f"length must be at least 2, a token and its successor, got {self.length}")
        if self.batch_tokens % self.length:
            near = max(1, round(self.batch_tokens / self.length)) * self.length
            raise ValueError(
                f"batch_tokens must be whole rows of length = {self.length} tokens, got {self.batch_tokens}; "
                f"{near} would be"
            )
        if self.total_steps < 1:
            raise ValueError(
                f"tokens must fill a batch of {self.batch_tokens} tokens at least once, got {self.tokens}"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate:g}")
        if not 0 < self.min_learning_rate <= self.learning_rate:
            raise ValueError(
                f"min_learning_rate must be in (0, learning_rate = {self.learning_rate:g}], "
                f"got {self.min_learning_rate:g}"
            )
        for name in ("warmup_share", "decay_share", "weight_decay", "spectral_every", "workers"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if self.warmup_share + self.decay_share > 1:
            raise ValueError(
                "warmup_share and decay_share must not be more than 1 together, got "
                f"{self.warmup_share} and {self.decay_share}"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, got {self.max_grad_norm}")
        if not 0 < self.passes < math.inf:
            raise ValueError(f"passes must be positive and finite, got {self.passes}")
        if not 0 < self.activation_budget <= 1:
            raise ValueError(f"activation_budget must be in (0, 1], got {self.activation_budget}")
        if self.activation_budget < 1 and not self.compile:
            raise ValueError("activation_budget is kept by compiled blocks: set compile: true, or 1.0")
        if self.keep < 2:
            raise ValueError(
                f"keep must be at least 2, the last checkpoint and one being written, got {self.keep}"
            )
        if self.documents not in ("joined", "separate"):
            raise ValueError(f"documents must be 'joined' or 'separate', got {self.documents!r}")
        self._check_stages()
        config = self.config()
        if self.compile and config.backbone["name"] != "llama":
            raise ValueError(f"compile is for Llama: {config.backbone['name']} has kernels of its own")
        with torch.device("meta"):  # checks the model's sizes
            ImplicitForCausalLM(config)

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
        """Batches of a process in an optimiser step.

        Raises:
            ValueError: a step's rows do not divide; says what would.
        """
        rows, size = self.rows_per_step, self.per_device_batch_size
        if rows % (processes * size) == 0:
            return rows // (processes * size)
        message = (
            f"batch_tokens = {self.batch_tokens} is {rows} rows of {self.length} tokens, which do not divide "
            f"into {processes} processes x per_device_batch_size = {size}"
        )
        if rows % processes == 0:
            fits = [n for n in range(1, rows // processes + 1) if rows // processes % n == 0]
            near = sorted(fits, key=lambda n: abs(n - size))[:3]
            raise ValueError(f"{message}: {_or(sorted(near))} rows at a time would")
        fits = [n for n in range(1, rows // size + 1) if rows % (n * size) == 0]
        near = sorted(sorted(fits, key=lambda n: abs(n - processes))[:3])
        whole = max(1, round(rows / (processes * size))) * processes * size * self.length
        raise ValueError(
            f"{message}: " + (f"{_or(near)} processes would, or " if near else "") + f"batch_tokens = {whole}"
        )

    def config(self) -> ImplicitConfig:
        """The model's configuration, at the end of training."""
        options = model_options(self.model)
        if self.explicit:
            return _config({**options, "implicit": False})
        curriculum = self.curriculum()
        if curriculum is not None:
            last = curriculum.stages[-1]
            options |= {"gradient": last.gradient, "window": last.window}
            for name in ("convergence", "eval_convergence"):
                if getattr(last, name) is not None:
                    options[name] = getattr(last, name)
        return _config(options)

    def curriculum(self) -> Curriculum | None:
        """The stages, which end at shares of the steps; ``None``: as the model is throughout."""
        if not isinstance(self.stages or [], (list, tuple)):
            raise ValueError(f"stages must be a list of mappings, got {self.stages!r}")
        if self.explicit or not self.stages or not model_options(self.model).get("implicit", True):
            return None
        known = [f.name for f in fields(Stage)]
        stages = []
        for number, entry in enumerate(self.stages):
            if not isinstance(entry, Mapping) or "gradient" not in entry:
                raise ValueError(f"stages.{number} must be a mapping with until and gradient, got {entry!r}")
            for name in entry:
                check_known(name, known, f"stages.{number}.")
            evaluated = {"eval_convergence": entry["convergence"]} if "convergence" in entry else {}
            until = self._share(entry.get("until"), number)
            stages.append(Stage(**{**evaluated, **entry, "until": until}))
        return Curriculum(stages)

    def _check_stream(self, data: Mapping[str, Any]) -> None:
        for name in data:
            check_known(name, STREAM, "data.")
        if "dataset" not in data:
            raise ValueError(f"data needs a folder, or a mapping with a dataset, got {dict(data)}")
        share = data.get("validation_share", HoldOut().share)
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise ValueError(f"data.validation_share must be a number, got {share!r}")
        HoldOut(share)
        if self.eval_rows is None:
            raise ValueError("eval_rows must be a number where the data is a stream, got None")

    def _check_stages(self) -> None:
        curriculum, begin = self.curriculum(), 0
        for number, stage in enumerate([] if curriculum is None else curriculum.stages):
            end = Curriculum.end(stage, self.total_steps)
            if end <= begin:
                raise ValueError(
                    f"stages.{number} would have none of {self.total_steps} steps: it ends with step {end}, "
                    f"and {begin} are over before it"
                )
            begin = end

    def _share(self, until: Any, number: int) -> float:
        if isinstance(until, Mapping) and len(until) == 1:
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
        """Plain data; what ``RunSettings(**...)`` takes."""
        return {**asdict(self), "model": model_options(self.model)}


def _config(options: Tree) -> ImplicitConfig:
    try:
        return ImplicitConfig(**options)
    except StrictDataclassError as error:  # no ValueError
        raise ValueError(" ".join(str(error).split())) from error


STREAM = (
    "dataset", "subset", "split", "validation_split", "validation_share", "files", "column", "tokenizer",
)  # fmt: skip
"""Fields of ``data`` where it is a dataset that streams."""

RESUMES = {f.name for f in fields(RunSettings) if f.metadata["resumes"]}
"""Settings that a run may be resumed with when they differ."""


def model_options(model: Any) -> Tree:
    """The options of :class:`ImplicitConfig` that ``model`` in a run file means.

    Raises:
        ValueError: no preset of that name, or neither a name nor a mapping.
    """
    if isinstance(model, str):
        model = {"preset": model}
    if not isinstance(model, Mapping):
        raise ValueError(f"model must be a preset's name or options of ImplicitConfig, got {model!r}")
    options = dict(model)
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


def check_known(
    name: str, known: Sequence[str], prefix: str, also: Sequence[str] = (), shown: str = ""
) -> None:
    """Raise ``ValueError`` unless ``name`` is one of the ``known``; it says which is nearest."""
    if name not in known:
        raise ValueError(unknown(shown or prefix + name, [*(prefix + one for one in known), *also]))


def unknown(name: str, known: Sequence[str]) -> str:
    """What to say of a field that there is not."""
    near = difflib.get_close_matches(name, known, 1, cutoff=0)
    return f"unknown field {name}" + (f"; did you mean {near[0]}?" if near else "")


def _or(numbers: Sequence[int]) -> str:
    *head, last = map(str, numbers)
    return f"{', '.join(head)} or {last}" if head else last
