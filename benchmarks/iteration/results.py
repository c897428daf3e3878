"""Results of benchmarks/what_iteration_buys.py: the result of a run, tables and the figure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, mode
from types import SimpleNamespace
from typing import Any, Literal

from deqseq.tasks.common.figures import log_scale, save_figure
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.results import Column, column, table
from deqseq.tasks.common.runs import read_json
from deqseq.tasks.common.settings import PositiveFinite, check_types

FILE = "result.json"
"""The file with the result, in the folder of a run."""

_POINT = ("tokens", "seconds", "perplexity")

_COLUMNS: tuple[Column, ...] = (
    column("form"), column("learning_rate", "g"), column("seeds"),
    column("tokens", ".2f", "tokens, M"), column("seconds", ".1f"),
    column("run_seconds", ".1f", "seconds in the run"), column("iterations", ".2f"),
    column("perplexity", ".3f"), column("to_control", "+.1%", "to the control"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one run.

    Attributes:
        model: the run file, such as llama-130m, and settings that differ from it.
        form: a form of the study, such as injected.
        unit, amount: the budget: a number of tokens or of seconds.
        parameters: number of trained parameters.
        seconds: training time, computed from the time of a step that was known before training.
        run_seconds: wall-clock time of training, from the log of the run. ``None`` on a CPU, because other
            programs on the machine would change it.
        perplexity: per token, on all held-out rows, after training.
        iterations: mean number of evaluations of f per token in evaluation; ``None`` if f is evaluated once.
        curve: the evaluations during training, each with its tokens, seconds and perplexity.
        data: fingerprint of the data.
    """

    model: str
    form: str
    unit: Literal["tokens", "seconds"]
    amount: PositiveFinite
    learning_rate: PositiveFinite
    seed: int
    parameters: int
    steps: int
    tokens: int
    seconds: float
    run_seconds: float | None
    perplexity: PositiveFinite
    iterations: float | None
    curve: list[dict[str, float]]
    data: str
    versions: dict[str, str]
    machine: str
    date: str

    def __post_init__(self) -> None:
        check_types(self)
        for point in self.curve:
            if missing := [name for name in _POINT if name not in point]:
                raise ValueError(f"a point of the curve has no {', '.join(missing)}: {point}")

    @property
    def key(self) -> tuple[Any, ...]:
        """The fields that distinguish the run from all others of the study."""
        return (*self.comparable, self.unit, self.amount, self.form, self.learning_rate, self.seed)

    @property
    def comparable(self) -> tuple[str, str]:
        """The model and the data. Only runs for which both are equal may be compared."""
        return (self.model, self.data)


def read(file: Path) -> Result:
    """Read the result of a run. Raises ``ValueError`` if the file holds no result."""
    found = read_json(file)
    try:
        return Result(**found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a result of this study: {error}") from error


def collect(folders: Sequence[Path]) -> list[Result]:
    """The results of all finished runs in the folders of studies, sorted by model, data and budget.

    The data of the earliest run comes first.

    Raises:
        ValueError: a folder has no result; or two results are of the same run.
    """
    if empty := [str(folder) for folder in folders if not any(folder.rglob(FILE))]:
        raise ValueError(f"no finished run in {', '.join(empty)}")
    files = sorted({file for folder in folders for file in folder.rglob(FILE)})
    found: dict[tuple[Any, ...], tuple[Path, Result]] = {}
    for file in files:
        result = read(file)
        if result.key in found:
            raise ValueError(
                f"{found[result.key][0].parent} and {file.parent} hold the same run: name one of them"
            )
        found[result.key] = file, result
    runs = [result for _, result in found.values()]
    since = {
        group: min(r.date for r in runs if r.comparable == group) for group in {r.comparable for r in runs}
    }
    return sorted(runs, key=lambda r: (r.model, since[r.comparable], r.unit, r.amount))


def titles(results: Sequence[Result]) -> dict[tuple[str, str], str]:
    """A title for each model and data. It names the data if the model has runs with other data."""
    groups = list(dict.fromkeys(r.comparable for r in results))
    models = [model for model, _ in groups]
    return {
        (model, data): f"{model}, data {data[:8]}" if models.count(model) > 1 else model
        for model, data in groups
    }


def tables(results: Sequence[Result]) -> dict[str, str]:
    """A Markdown table for each model, data and budget, by its title. A row is a mean over the seeds.

    The column "to the control" compares every run with the control of the same seed and learning rate.
    """
    found: dict[str, str] = {}
    names = titles(results)
    for budget in dict.fromkeys((r.comparable, r.unit, r.amount) for r in results):
        group, unit, amount = budget
        rows = [r for r in results if (r.comparable, r.unit, r.amount) == budget]
        title = f"{names[group]}, {amount:,.10g} {unit}"
        lines = _rows(rows)
        several = any(line.seeds > 1 for line in lines)
        found[title] = table([*_COLUMNS, column("range")] if several else _COLUMNS, lines, "github")
    return found


def _rows(results: Sequence[Result]) -> list[SimpleNamespace]:
    """The rows of a table, one for each form and learning rate, with the lowest perplexity last."""
    control = {(r.learning_rate, r.seed): r.perplexity for r in results if r.form == "injected"}
    rows = []
    for form, rate in dict.fromkeys((r.form, r.learning_rate) for r in results):
        runs = [r for r in results if (r.form, r.learning_rate) == (form, rate)]
        perplexities = [r.perplexity for r in runs]
        iterations = [1.0 if r.iterations is None else r.iterations for r in runs]
        timed = [r.run_seconds for r in runs if r.run_seconds is not None]
        pairs = [(r.perplexity, control.get((r.learning_rate, r.seed))) for r in runs]
        changes = [own / other - 1 for own, other in pairs if other is not None]
        complete = len(changes) == len(runs) and form != "injected"
        several = f"{min(perplexities):.3f} to {max(perplexities):.3f}" if len(runs) > 1 else None
        rows.append(SimpleNamespace(
            form=form, learning_rate=rate, seeds=len(runs),
            tokens=fmean(r.tokens for r in runs) / 1e6, seconds=fmean(r.seconds for r in runs),
            run_seconds=fmean(timed) if timed else None, iterations=fmean(iterations),
            perplexity=fmean(perplexities), range=several, to_control=fmean(changes) if complete else None,
        ))  # fmt: skip
    return sorted(rows, key=lambda row: -row.perplexity)


def save(results: Sequence[Result], output: Path) -> list[Path]:
    """Write ``output.json`` with all results and tables, and the figure ``output.png``. Returns the files."""
    output.parent.mkdir(parents=True, exist_ok=True)
    file, figure = (output.with_name(output.name + suffix) for suffix in (".json", ".png"))
    content = {"tables": tables(results), "runs": [asdict(result) for result in results]}
    write_json(file, content)
    rows = len(titles(results))
    drawn = save_figure(figure, partial(_draw, results), rows, 3, (15, 4.2 * rows))
    return [file, figure] if drawn else [file]


def _draw(results: Sequence[Result], axes: list[Any]) -> None:
    """Draw three panels for each model and data.

    They show perplexity against tokens for budgets of tokens, the difference to the control for the same
    runs, and perplexity against seconds for budgets of seconds.
    """
    colours = {form: f"C{i}" for i, form in enumerate(dict.fromkeys(r.form for r in results))}
    for number, (group, title) in enumerate(titles(results).items()):
        tokens, change, seconds = axes[3 * number : 3 * number + 3]
        of_tokens, of_seconds = (
            [r for r in results if (r.comparable, r.unit) == (group, unit)] for unit in ("tokens", "seconds")
        )
        _draw_perplexities(tokens, of_tokens, colours)
        _draw_changes(change, of_tokens, colours)
        _draw_perplexities(seconds, of_seconds, colours)
        tokens.set(xlabel=f"tokens, millions ({title})", ylabel="held-out perplexity")
        change.set(xlabel=f"tokens, millions ({title})", ylabel="difference to the control, %")
        seconds.set(xlabel=f"planned seconds ({title})", ylabel="held-out perplexity")
        for axis in (tokens, change, seconds):
            axis.set_visible(bool(axis.lines))
            if axis.lines:
                axis.legend()


def _draw_perplexities(axis: Any, results: Sequence[Result], colours: dict[str, str]) -> None:
    """Draw perplexity against the unit of the budget: a curve for each form and budget.

    All curves have the same seed, the smallest one, and the learning rate that most runs have.
    """
    first = min((r.seed for r in results), default=0)
    usual = mode(r.learning_rate for r in results) if results else 0
    labelled = set[str]()
    for r in results:
        if (r.seed, r.learning_rate) == (first, usual):
            x = [p[r.unit] / (1e6 if r.unit == "tokens" else 1) for p in r.curve]
            y = [p["perplexity"] for p in r.curve]
            label = None if r.form in labelled else r.form
            axis.plot(x, y, "o-", color=colours[r.form], label=label, markersize=3, linewidth=1)
            labelled.add(r.form)
    log_scale(axis.yaxis)


def _draw_changes(axis: Any, results: Sequence[Result], colours: dict[str, str]) -> None:
    """Draw how much every form differs from the control, in percent.

    Forms that are more than 15 % away from the control in any test are left out. Dashed lines have another
    learning rate than most runs.
    """
    labelled = set[str]()
    usual = mode(r.learning_rate for r in results) if results else 0
    for (form, _, rate), points in changes(results).items():
        if all(abs(change) <= 0.15 for _, change in points):
            x, y = [tokens / 1e6 for tokens, _ in points], [100 * change for _, change in points]
            style, label = "o-" if rate == usual else "o--", None if form in labelled else form
            axis.plot(x, y, style, color=colours[form], label=label, markersize=3, linewidth=1)
            labelled.add(form)
    if axis.lines:
        axis.axhline(0, color="grey", linewidth=1)


def changes(results: Sequence[Result]) -> dict[tuple[str, float, float], list[tuple[float, float]]]:
    """How much each form differs from the control: a curve for each form, budget and learning rate.

    A point is a number of tokens, and the relative difference of the perplexity there: a mean over the runs
    that have a control with the same data, budget, learning rate and seed.
    """
    controls = {
        r.key: {p["tokens"]: p["perplexity"] for p in r.curve} for r in results if r.form == "injected"
    }
    found: dict[tuple[str, float, float], dict[float, list[float]]] = {}
    for r in results:
        control = controls.get(replace(r, form="injected").key, {})
        for p in r.curve if r.form != "injected" else []:
            if p["tokens"] in control:
                curve = found.setdefault((r.form, r.amount, r.learning_rate), {})
                curve.setdefault(p["tokens"], []).append(p["perplexity"] / control[p["tokens"]] - 1)
    return {
        line: sorted((tokens, fmean(ratios)) for tokens, ratios in curve.items())
        for line, curve in found.items()
    }
