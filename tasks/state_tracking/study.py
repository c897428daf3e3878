"""A study: variants of a run, each with several seeds, tested alike and shown side by side."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from deqseq.convergence import check_count
from deqseq.tasks.evaluate.results import Column, table
from deqseq.tasks.runs import read_yaml
from deqseq.tasks.state_tracking.evaluate import Evaluation, evaluate_fresh
from deqseq.tasks.state_tracking.plots import plot_by_length, plot_by_position
from deqseq.tasks.state_tracking.settings import TrainSettings, check_fields, run_fields
from deqseq.tasks.state_tracking.train import train

logger = logging.getLogger(__name__)

STUDIES = Path(__file__).parent / "studies"
_RESULTS = "study.json"


@dataclass(frozen=True)
class Test:
    """What every model is tested on: each probability at each length, solved in each window.

    Attributes:
        identity_probability, length: of the sequences.
        window: tokens solved at a time, or ``"all"``; explicit models are tested once.
        max_iter: evaluations a token may take part in; the model's by default.
        sequences: how many.
    """

    __test__ = False  # none of pytest's

    identity_probability: Sequence[float]
    length: Sequence[int]
    window: Sequence[int | str] = (8,)
    max_iter: int | None = None
    sequences: int = 512

    def __post_init__(self) -> None:
        check_count("sequences", self.sequences)
        if self.max_iter is not None:
            check_count("max_iter", self.max_iter)
        for length in self.length:
            check_count("length", length)
        for window in self.window:
            if window != "all":
                check_count("window", window)  # type: ignore[arg-type]  # which it says

    def cases(self, explicit: bool) -> Iterator[dict[str, Any]]:
        """What :func:`evaluate_fresh` takes, for every evaluation."""
        for p in self.identity_probability:
            for length in self.length:
                case = {"length": length, "sequences": self.sequences, "identity_probability": p}
                if explicit:
                    yield case
                else:
                    for window in self.window:
                        tokens = None if window == "all" else int(window)
                        yield {**case, "window": tokens, "max_iter": self.max_iter}


@dataclass(frozen=True)
class Study:
    """What a study file says.

    Attributes:
        run: run file that the variants start from.
        variants: by their names, the fields in which they differ from it.
        tests: what all are tested on.
        seeds: of weights and data.

    Raises:
        ValueError: unknown fields, or values out of their range.
    """

    run: str
    variants: Mapping[str, Mapping[str, Any]]
    tests: Sequence[Test]
    seeds: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        for name, changes in self.variants.items():
            check_fields(changes, f"variant {name}")
            self.settings(name, self.seeds[0])

    def settings(self, variant: str, seed: int) -> TrainSettings:
        """What to train for a variant and a seed."""
        return TrainSettings(**{**run_fields(self.run), **self.variants[variant], "seed": seed})


def load_study(source: str) -> Study:
    """A study from a YAML file, or one of ours by its name.

    Raises:
        ValueError: no such file or name, unknown fields, values out of range.
    """
    tree = read_yaml(source, STUDIES)
    known = [f.name for f in fields(Study)]
    if unknown := sorted(set(tree) - set(known)):
        raise ValueError(f"{source} sets {', '.join(unknown)}: a study has {', '.join(known)}")
    try:
        return Study(**{**tree, "tests": [Test(**test) for test in tree.get("tests", [])]})
    except TypeError as error:
        raise ValueError(f"the study {source} cannot be read: {error}") from error


@dataclass(frozen=True)
class Result:
    """One test of one trained model."""

    variant: str
    seed: int
    evaluation: Evaluation


def conduct(study: Study, output: Path, variants: Sequence[str] | None = None) -> list[Result]:
    """Train and test what is not there yet, then put the results of all variants and seeds together.

    Writes ``study.json``, ``by_length.png`` and, of the first model that was tested in several windows,
    ``by_position.png``.

    Args:
        output: folder of the study; a run is in ``output/VARIANT/seed-N``.
        variants: those to train and test now; all by default. Of the others what is there is shown, so
            several processes can share a study.

    Raises:
        ValueError: no such variant; the folder holds runs with other settings.
    """
    if unknown := sorted(set(variants or ()) - set(study.variants)):
        raise ValueError(f"no variant {', '.join(unknown)}: the study has {', '.join(study.variants)}")
    results = []
    for name in study.variants:
        for seed in study.seeds:
            folder = output / name / f"seed-{seed}"
            if variants is None or name in variants:
                logger.info("%s, seed %d: %s", name, seed, folder)
                found = _tested(study.settings(name, seed), folder, study.tests)
            else:
                found = list(_read(folder / _RESULTS).values())
            results += [Result(name, seed, evaluation) for evaluation in found]
    (output / _RESULTS).write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    _draw(study, results, output)
    return results


def _tested(settings: TrainSettings, folder: Path, tests: Sequence[Test]) -> list[Evaluation]:
    """The evaluations of one run, each written down once it is made."""
    model = train(settings, folder)
    found = _read(folder / _RESULTS)
    cases = {json.dumps(case): case for test in tests for case in test.cases(settings.explicit)}
    for key, case in tqdm(cases.items(), desc="tests", leave=False):
        if key not in found:
            found[key] = evaluate_fresh(model, settings, **case, progress=True)
            part = folder / f"{_RESULTS}.part"
            part.write_text(json.dumps({key: asdict(e) for key, e in found.items()}) + "\n")
            part.replace(folder / _RESULTS)
    return [found[key] for key in cases]


def _read(file: Path) -> dict[str, Evaluation]:
    if not file.exists():
        return {}
    return {key: Evaluation(**values) for key, values in json.loads(file.read_text()).items()}


def _draw(study: Study, results: Sequence[Result], output: Path) -> None:
    run = study.settings(next(iter(study.variants)), study.seeds[0])
    chance = 1 / len(run.algebra)
    curves: dict[tuple[float, str], dict[int, list[float]]] = {}
    windows: dict[tuple[str, int, float | None, int], list[Evaluation]] = {}
    for r in results:
        e = r.evaluation
        curve = curves.setdefault((e.identity_probability or 0.0, r.variant), {})
        curve.setdefault(e.length, []).append(e.accuracy_last10)
        if e.iterations is not None:
            windows.setdefault((r.variant, r.seed, e.identity_probability, e.length), []).append(e)
    plot_by_length(curves, output / "by_length.png", chance, run.length)
    several = next((case for case in windows.items() if len(case[1]) > 1), None)
    if several is not None:
        (name, *_), found = several
        plot_by_position([(name, e) for e in found], output / "by_position.png", chance, run.length)


def summary(results: Sequence[Result]) -> str:
    """A line for every variant and test: over the seeds, mean and worst accuracy and how the search went."""
    groups: dict[tuple[Any, ...], list[Evaluation]] = {}
    for r in results:
        e = r.evaluation
        window = "-" if e.iterations is None else "all" if e.window is None else str(e.window)
        groups.setdefault((r.variant, e.identity_probability, e.length, window), []).append(e)

    def mean(name: str, form: str) -> Column:
        def write(group: tuple[tuple[Any, ...], list[Evaluation]]) -> str:
            values = [getattr(e, name) for e in group[1]]
            return "-" if None in values else format(sum(values) / len(values), form)

        return name.replace("_", " "), write

    columns: list[Column] = [
        *(
            (title, lambda group, i=i: str(group[0][i]))
            for i, title in enumerate(("model", "p", "length", "window"))
        ),
        ("seeds", lambda group: str(len(group[1]))),
        ("last 10", mean("accuracy_last10", ".4f")[1]),
        ("worst", lambda group: f"{min(e.accuracy_last10 for e in group[1]):.4f}"),
        *(
            mean(name, form)
            for name, form in (("iterations", ".1f"), ("passes", ".0f"), ("converged", ".4f"))
        ),
    ]
    return table(columns, list(groups.items()))
