"""Studies. A study trains variants of a run with several seeds, and compares all models on the same tests."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Literal

from tqdm.auto import tqdm

from deqseq.checks import check_damping
from deqseq.tasks.common.command_line import check_folder
from deqseq.tasks.common.files import locked, write_json
from deqseq.tasks.common.results import Column, column, table
from deqseq.tasks.common.runs import RunFolder
from deqseq.tasks.common.settings import (
    ClosedUnitInterval,
    PositiveInt,
    Seed,
    build,
    check_types,
    defaults,
    read_yaml,
)
from deqseq.tasks.state_tracking.evaluate import Evaluation, evaluate_fresh, window_name
from deqseq.tasks.state_tracking.plots import plot_by_length, plot_by_position
from deqseq.tasks.state_tracking.settings import RUNS, TrainSettings
from deqseq.tasks.state_tracking.train import train

logger = logging.getLogger(__name__)

STUDIES = Path(__file__).parent / "studies"
_RESULTS = "study.json"
_COLUMNS: tuple[Column, ...] = (
    column("model"), column("p", "g"), column("length"), column("window"), column("seeds"),
    column("accuracy_last10", ".4f", "last 10"), column("worst", ".4f"), column("iterations", ".1f"),
    column("passes", ".0f"), column("converged", ".4f"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Test:
    """A group of tests for every model: one test for each combination of probability, length and window.

    Args:
        identity_probability: probabilities that a token of the test sequences is the identity
        length: tokens per sequence, for each test
        window: number of tokens that are solved together, or all. Explicit models have no window. They take
            one test for each probability and length
        max_iter: maximum number of evaluations per token; by default the model's own maximum
        damping: solve with Picard iteration and this damping; by default with the model's own solver
        sequences: number of test sequences
    """

    __test__ = False  # tells pytest that this is not a test

    identity_probability: list[ClosedUnitInterval]
    length: list[PositiveInt]
    window: list[PositiveInt | Literal["all"]] = field(default_factory=lambda: [8])
    max_iter: PositiveInt | None = None
    damping: float | None = None
    sequences: PositiveInt = 512

    def __post_init__(self) -> None:
        check_types(self)
        if self.damping is not None:
            check_damping(self.damping)

    def cases(self, explicit: bool) -> list[dict[str, Any]]:
        """The keyword arguments of :func:`evaluate_fresh`, for each test."""
        search = {"max_iter": self.max_iter, "damping": self.damping}
        solves = [{"window": None if w == "all" else w, **search} for w in self.window]
        return [
            {"length": length, "sequences": self.sequences, "identity_probability": p, **solve}
            for p in self.identity_probability
            for length in self.length
            for solve in ([{}] if explicit else solves)
        ]


@dataclass(frozen=True, kw_only=True)
class Study:
    """The contents of a study file.

    Args:
        run: run file with the settings that all variants share
        variants: maps the name of each variant to the settings that differ from the run file
        tests: groups of tests, each with the fields of :class:`Test`; every model takes all tests
        seeds: seeds of weights and data; every variant is trained with every seed

    Raises:
        ValueError: a field is unknown, or a value is out of range.
    """

    run: str
    variants: dict[str, dict[str, Any]]
    tests: list[dict[str, Any]]
    seeds: list[Seed] = field(default_factory=lambda: [1])

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("variants", "seeds", "tests"):
            if not getattr(self, name):
                raise ValueError(f"{name} of a study must not be empty, got {getattr(self, name)!r}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds of a study must differ, got {self.seeds!r}")
        for name, changes in self.variants.items():
            if not isinstance(name, str):
                raise ValueError(f"a variant's name must be text, in quotes, got {name!r}")
            if not re.fullmatch(r"[\w.=+-]*\w", name) or name.endswith((".json", ".png")):
                raise ValueError(
                    f"a variant's name must be a folder name of letters, digits and -_.=+, got {name!r}"
                )
            if "seed" in changes:
                raise ValueError(f"variant {name} must be without a seed, got {changes!r}")
            try:
                self.settings(name, self.seeds[0])
            except ValueError as error:
                raise ValueError(f"variant {name}: {error}") from error
        self.cases(explicit=False)  # raises ValueError if a test is wrong

    def settings(self, variant: str, seed: int) -> TrainSettings:
        """The training settings of a variant with a seed."""
        fields = read_yaml(self.run, RUNS) | self.variants[variant]
        return build(TrainSettings, {**fields, "seed": seed})

    def cases(self, explicit: bool) -> dict[str, dict[str, Any]]:
        """The keyword arguments of :func:`evaluate_fresh`, for every test of a model.

        The key of a test is its arguments as JSON.
        """
        tests = [build(Test, test, f"tests.{number}.") for number, test in enumerate(self.tests)]
        return {json.dumps(case): case for test in tests for case in test.cases(explicit)}


def load_study(source: str) -> Study:
    """Load a study from a YAML file, or a shipped study by its name.

    Raises:
        ValueError: there is no such file or name, a field is unknown, or a value is out of range.
    """
    return build(Study, read_yaml(source, STUDIES))


@dataclass(frozen=True)
class Result:
    """The result of one test of one trained model. ``case``: the arguments of :func:`evaluate_fresh`."""

    variant: str
    seed: int
    case: Mapping[str, Any]
    evaluation: Evaluation


def conduct(
    study: str, output: Path, variants: list[str] | None = None, seeds: list[int] | None = None
) -> list[Result]:
    """Train variants of a run with several seeds, test them and compare the results.

    Finished parts in the folder ``output`` are not repeated. By default, all variants and seeds are trained.
    Several processes may share the folder, with other variants or seeds each. The comparison of a process
    has the results that are finished by then.

    Raises:
        ValueError: the study cannot be loaded, a variant or seed is unknown, or ``output`` holds runs with
            other settings.
    """
    plan = load_study(study)
    for name, asked, known in (("variant", variants, plan.variants), ("seed", seeds, plan.seeds)):
        if unknown := sorted(set(asked or ()) - set(known)):  # type: ignore[type-var]
            there = ", ".join(map(str, known))
            raise ValueError(f"no {name} {', '.join(map(str, unknown))}: the study has {there}")
    runs = [
        (name, seed, plan.settings(name, seed), output / name / f"seed-{seed}")
        for name in plan.variants
        for seed in plan.seeds
    ]
    check_folder(output, _RESULTS)
    for _, _, settings, folder in runs:  # check all folders before any training
        RunFolder(folder, asdict(settings), defaults=defaults(type(settings)))
    for name, seed, settings, folder in runs:
        if (variants is None or name in variants) and (seeds is None or seed in seeds):
            logger.info("%s, seed %d: %s", name, seed, folder)
            _test(settings, folder, plan.cases(settings.explicit))
    with locked(output, "compares", wait=True):  # processes that share the study write in turn
        results = []
        for name, seed, settings, folder in runs:
            found, cases = _read(folder / _RESULTS), plan.cases(settings.explicit)
            results += [Result(name, seed, case, found[key]) for key, case in cases.items() if key in found]
        write_json(output / _RESULTS, [asdict(result) for result in results])
        _draw(plan, results, output)
    print(summary(results))
    written = [name for name in (_RESULTS, "by_length.png", "by_position.png") if (output / name).exists()]
    print(f"wrote {', '.join(written)} in {output}")
    return results


def _test(settings: TrainSettings, folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Train the model, then run all tests that have no saved result. Save every result immediately."""
    model = train(settings, folder)
    for key, case in tqdm(cases.items(), desc="tests", leave=False):
        found = _read(folder / _RESULTS)
        if key not in found:
            found[key] = evaluate_fresh(model, settings, **case, progress=True)
            write_json(folder / _RESULTS, {key: asdict(e) for key, e in found.items()})


def _read(file: Path) -> dict[str, Evaluation]:
    if not file.exists():
        return {}
    return {key: Evaluation(**values) for key, values in json.loads(file.read_text()).items()}


def _draw(study: Study, results: Sequence[Result], output: Path) -> None:
    run = study.settings(next(iter(study.variants)), study.seeds[0])
    chance = run.algebra.chance
    by_window: dict[tuple[float, str], dict[str, dict[int, list[Evaluation]]]] = {}
    models: dict[tuple[str, int, float, int], list[tuple[str, Evaluation]]] = {}
    for r in results:
        p, length, window = r.case["identity_probability"], r.case["length"], window_name(r.evaluation)
        curve = by_window.setdefault((p, r.variant), {}).setdefault(window, {})
        curve.setdefault(length, []).append(r.evaluation)
        if window != "-":
            models.setdefault((r.variant, r.seed, p, length), []).append((r.variant, r.evaluation))
    # One curve per model: that of the window tested at the most lengths. If searches converge, windows agree.
    curves = {case: max(found.values(), key=len) for case, found in by_window.items()}
    plot_by_length(curves, output / "by_length.png", chance, run.length)
    several = next((rows for rows in models.values() if len(rows) > 1), None)
    if several is not None:
        plot_by_position(several, output / "by_position.png", chance, run.length)


def summary(results: Sequence[Result]) -> str:
    """A text table with one line for each variant and test.

    A line has means over the seeds, and the accuracy of the worst seed.
    """
    groups: dict[str, list[Result]] = {}
    for r in results:
        groups.setdefault(json.dumps([r.variant, r.case]), []).append(r)
    rows = []
    for group in groups.values():
        first, found = group[0], [r.evaluation for r in group]
        means = {}
        for name in ("accuracy_last10", "iterations", "passes", "converged"):
            values = [getattr(e, name) for e in found]
            means[name] = None if None in values else fmean(values)
        rows.append(SimpleNamespace(
            model=first.variant, p=first.case["identity_probability"], length=first.case["length"],
            window=window_name(found[0]), seeds=len(found), worst=min(e.accuracy_last10 for e in found),
            **means,
        ))  # fmt: skip
    return table(_COLUMNS, rows)
