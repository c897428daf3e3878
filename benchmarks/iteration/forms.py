"""The forms of benchmarks/what_iteration_buys.py: their stages, their settings and their budgets."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from deqseq.tasks.common.settings import PositiveInt, check_types
from deqseq.tasks.pretraining.run_files import load_run
from deqseq.tasks.pretraining.settings import RunSettings

Form = Literal["transformers", "explicit", "injected", "1+1", "2+1", "4+1", "free", "adaptive", "growth"]
FORMS: list[Form] = list(get_args(Form))
# Settings that a study may change. The others are set by the study, or say which form a model has.
_CHANGES = re.compile(
    r"length|batch_tokens|weight_decay|model\.vocab_size|model\.solver(\..+)?"
    r"|model\.backbone\.(?!name$|injection$|weight_norm$).+"
)
# The forms that evaluate f once, and the suffixes of their run files. These forms have no stages.
_SINGLE = {"transformers": "-explicit", "explicit": "-explicit", "injected": "-injected"}


@dataclass(frozen=True, kw_only=True)
class Study:
    """The settings that all runs of a study share.

    Args:
        data: folder made by deqseq.tasks.prepare
        output: folder of the study
        model: llama or mamba2
        size: 130m, 370m, 760m or 1.3b, with 16 rows of 1,024 tokens in a step; or tiny, for CPUs
        changes: settings that differ from those of the run file, such as {length: 256, model.vocab_size: 65}.
            They may set length, batch_tokens, weight_decay, model.vocab_size, model.solver, and options of
            model.backbone other than name, injection and weight_norm
        growth: ends of the stages 1, 1+1 and 2+1 of the form growth, as shares of all steps
        rows: rows in one forward pass, which limits the memory; by default all rows of a step
        eval_rows: held-out rows in the evaluations during training; the last evaluation takes all rows
        timed_steps: number of steps to time; the time of a step is their median
        timed_search: evaluations of every search while steps of the stages free and adaptive are timed; by
            default their maximum

    Raises:
        ValueError: a value is out of range, there is no such model, or ``changes`` has another setting.
    """

    data: str
    output: str
    model: Literal["llama", "mamba2"] = "llama"
    size: str = "130m"
    changes: dict[str, Any] = field(default_factory=dict)
    growth: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.8])
    rows: PositiveInt | None = None
    eval_rows: PositiveInt = 128
    timed_steps: PositiveInt = 20
    timed_search: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in map(str, self.changes):
            if not _CHANGES.fullmatch(name):
                raise ValueError(
                    "changes may set length, batch_tokens, weight_decay, model.vocab_size, model.solver, and "
                    f"options of model.backbone other than name, injection and weight_norm; got {name}"
                )
        if len(self.growth) != 3 or [0, *self.growth, 1] != sorted({0, *self.growth, 1}):
            raise ValueError(f"growth must be three increasing numbers in (0, 1), got {self.growth}")
        assert self.base  # raises ValueError if there is no such run file

    @property
    def name(self) -> str:
        """The name of the model's run file."""
        return f"{self.model}-{self.size}"

    @property
    def title(self) -> str:
        """The name of the run file and the changed settings."""
        return ", ".join([self.name, *(f"{name} {value}" for name, value in sorted(self.changes.items()))])

    @cached_property
    def base(self) -> RunSettings:
        """The run file of the model: its size, solver, batch and free stage."""
        batch = {"length": 1024, "batch_tokens": 16 * 1024, "activation_budget": 1.0}
        return load_run(self.name, ({} if self.size == "tiny" else batch) | self.changes)

    def stages(self, form: Form) -> list[tuple[str, float]]:
        """The stages of a form: for each stage, its name and its end as a share of all steps."""
        if form in ("free", "adaptive"):
            return [("4+1", 0.8), (form, 1.0)]
        if form == "growth":
            return list(zip(("1", "1+1", "2+1", "free"), (*self.growth, 1.0), strict=True))
        return [(form, 1.0)]

    def settings(self, stages: Sequence[tuple[str, float]], **fields: Any) -> RunSettings:
        """The settings of a run with these stages. ``fields``: further fields of the run."""
        first = stages[0][0]
        shared: dict[str, Any] = self.changes | {
            "data": self.data, "passes": 1000, "length": self.base.length,
            "batch_tokens": self.base.batch_tokens, "activation_budget": self.base.activation_budget,
            "per_device_batch_size": self.rows or self.base.rows_per_step, "warmup_share": 0.05,
            "spectral_every": 0, "report_to": "none", "eval_rows": self.eval_rows,
        }  # fmt: skip
        if first == "transformers":
            shared["model.backbone.weight_norm"] = False
        if first not in _SINGLE:
            shared["stages"] = [{"until": until, **self._stage(name)} for name, until in stages]
        return load_run(self.name + _SINGLE.get(first, ""), shared | fields)

    def _stage(self, name: str) -> dict[str, Any]:
        """A stage as in a run file, without ``until``."""
        if name in ("free", "adaptive"):
            last = (self.base.stages or [])[-1]
            # Without an adaptive budget, every search waits for its slowest token.
            without = ("until", "adaptive_budget") if name == "free" else ("until",)
            return {key: value for key, value in last.items() if key not in without}
        if name == "1":
            first = (load_run(f"{self.name}-growth").stages or [])[0]
            return {key: value for key, value in first.items() if key != "until"}
        search, steps = map(int, name.split("+"))
        return {
            "gradient": {"name": "phantom", "steps": steps, "damping": 0.8},
            "convergence": {"name": "fixed", "iterations": search},
            "eval_convergence": {"name": "fixed", "iterations": search + steps},
        }


@dataclass(frozen=True)
class Budget:
    """An amount of training: a number of ``tokens`` or of ``seconds``."""

    unit: Literal["tokens", "seconds"]
    amount: float

    @property
    def name(self) -> str:
        """The name of the budget's folder."""
        return f"{self.unit}-{self.amount:.10g}"

    def plan(
        self, ends: Sequence[float], times: Sequence[float], batch_tokens: int, points: int
    ) -> dict[str, Any]:
        """The fields ``steps``, ``decay_share`` and ``eval_at`` of a run that uses up this budget.

        Args:
            ends: ends of the stages, as shares of all steps.
            times: seconds of a step in every stage.
            batch_tokens: tokens of a step.
            points: number of evaluations, at equal shares of the budget.

        Raises:
            ValueError: the budget is too small for one step in every stage.
        """
        if self.unit == "tokens":  # every step costs the same number of tokens
            times = [float(batch_tokens)] * len(ends)
        # The part of the budget used up at the end of every stage, divided by the number of steps of the run.
        spent = np.cumsum(np.diff([0, *ends]) * times)
        steps = int(self.amount / spent[-1] + 1e-9)
        if any(round(end * steps) <= round(begin * steps) for begin, end in pairwise([0, *ends])):
            raise ValueError(f"{self.amount:g} {self.unit} are {steps} steps, too few for {len(ends)} stages")

        def share_of_steps(part: float) -> float:
            """The share of the steps that are done when this part of the budget is used up."""
            return float(np.interp(part * spent[-1], [0, *spent], [0, *ends]))

        at = [max(1, round(steps * share_of_steps(k / points))) for k in range(1, points + 1)]
        return {"steps": steps, "decay_share": 1 - share_of_steps(0.5), "eval_at": sorted(set(at))}
