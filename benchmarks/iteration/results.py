"""Results of benchmarks/what_iteration_buys.py: the result of a run, tables and the figure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from deqseq.tasks.common.figures import log_scale, save_figure
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.results import Column, column, table
from deqseq.tasks.common.runs import read_json

FILE = "result.json"
"""The file with the result, in the folder of a run."""

_COLUMNS: tuple[Column, ...] = (
    column("form"), column("learning_rate", "g"), column("seeds"), column("steps", ","),
    column("tokens", ".2f", "tokens, M"), column("seconds", ".1f"),
    column("run_seconds", ".1f", "seconds in the run"), column("iterations", ".2f"),
    column("perplexity", ".3f"),
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
        curve: tokens, seconds and perplexity of the evaluations during training.
        data: fingerprint of the data.
    """

    model: str
    form: str
    unit: str
    amount: float
    learning_rate: float
    seed: int
    parameters: int
    steps: int
    tokens: int
    seconds: float
    run_seconds: float | None
    perplexity: float
    iterations: float | None
    curve: list[dict[str, float]]
    data: str
    versions: dict[str, str]
    machine: str
    date: str

    @property
    def key(self) -> tuple[Any, ...]:
        """The fields that distinguish the run from all others of the study."""
        return (self.model, self.unit, self.amount, self.form, self.learning_rate, self.seed)


def read(file: Path) -> Result:
    """Read the result of a run. Raises ``ValueError`` if the file holds no result."""
    try:
        return Result(**read_json(file))
    except TypeError as error:
        raise ValueError(f"{file} is not a result of this study: {error}") from error


def collect(folders: Sequence[Path]) -> list[Result]:
    """The results of all finished runs in the folders of studies, sorted by model and budget.

    Raises:
        ValueError: there is no result; two results are of the same run; or runs of one model have different
            data.
    """
    files = sorted({file for folder in folders for file in folder.rglob(FILE)})
    if not files:
        raise ValueError(f"no finished run in {', '.join(map(str, folders))}")
    found: dict[tuple[Any, ...], tuple[Path, Result]] = {}
    fingerprints: dict[str, tuple[Path, str]] = {}
    for file in files:
        result = read(file)
        other, data = fingerprints.setdefault(result.model, (file, result.data))
        if data != result.data:
            raise ValueError(f"{other.parent} and {file.parent} were trained on different data")
        if result.key in found:
            raise ValueError(
                f"{found[result.key][0].parent} and {file.parent} hold the same run: name one of them"
            )
        found[result.key] = file, result
    return sorted((result for _, result in found.values()), key=lambda r: (r.model, r.unit, r.amount))


def tables(results: Sequence[Result]) -> dict[str, str]:
    """A Markdown table for each model and budget, by its title. A row is a mean over the seeds."""
    found: dict[str, str] = {}
    for budget in dict.fromkeys((r.model, r.unit, r.amount) for r in results):
        model, unit, amount = budget
        rows = [r for r in results if (r.model, r.unit, r.amount) == budget]
        title = f"{model}, {amount:,.10g} {unit}"
        lines = _rows(rows)
        several = any(line.seeds > 1 for line in lines)
        found[title] = table([*_COLUMNS, column("range")] if several else _COLUMNS, lines, "github")
    return found


def _rows(results: Sequence[Result]) -> list[SimpleNamespace]:
    """The rows of a table, one for each form and learning rate, with the lowest perplexity last."""
    rows = []
    for form, rate in dict.fromkeys((r.form, r.learning_rate) for r in results):
        runs = [r for r in results if (r.form, r.learning_rate) == (form, rate)]
        perplexities = [r.perplexity for r in runs]
        iterations = [1.0 if r.iterations is None else r.iterations for r in runs]
        timed = [r.run_seconds for r in runs if r.run_seconds is not None]
        several = f"{min(perplexities):.3f} to {max(perplexities):.3f}" if len(runs) > 1 else None
        rows.append(SimpleNamespace(
            form=form, learning_rate=rate, seeds=len(runs), steps=round(fmean(r.steps for r in runs)),
            tokens=fmean(r.tokens for r in runs) / 1e6, seconds=fmean(r.seconds for r in runs),
            run_seconds=fmean(timed) if timed else None, iterations=fmean(iterations),
            perplexity=fmean(perplexities), range=several,
        ))  # fmt: skip
    return sorted(rows, key=lambda row: -row.perplexity)


def save(results: Sequence[Result], output: Path) -> list[Path]:
    """Write ``output.json`` with all results and tables, and the figure ``output.png``. Returns the files."""
    output.parent.mkdir(parents=True, exist_ok=True)
    file, figure = (output.with_name(output.name + suffix) for suffix in (".json", ".png"))
    content = {"tables": tables(results), "runs": [asdict(result) for result in results]}
    write_json(file, content)
    models = list(dict.fromkeys(r.model for r in results))
    drawn = save_figure(figure, partial(_draw, results, models), len(models), 2, (11, 4.2 * len(models)))
    return [file, figure] if drawn else [file]


def _draw(results: Sequence[Result], models: Sequence[str], axes: list[Any]) -> None:
    """For each model, draw perplexity against tokens or seconds, whichever is the unit of the budget.

    Curves are means over the seeds, with the best learning rate of every form and budget.
    """
    forms = list(dict.fromkeys(r.form for r in results))
    for number, model in enumerate(models):
        for axis, unit in zip(axes[2 * number :], ("tokens", "seconds"), strict=False):
            mine = [r for r in results if (r.model, r.unit) == (model, unit)]
            for form, amount in dict.fromkeys((r.form, r.amount) for r in mine):
                runs = [r for r in mine if (r.form, r.amount) == (form, amount)]
                rates = {r.learning_rate for r in runs}
                best = min(
                    rates, key=lambda rate: fmean(r.perplexity for r in runs if r.learning_rate == rate)
                )
                curves = [r.curve for r in runs if r.learning_rate == best]
                points = list(zip(*curves, strict=False))
                x = [fmean(p[unit] for p in point) / (1e6 if unit == "tokens" else 1) for point in points]
                y = [fmean(p["perplexity"] for p in point) for point in points]
                label = form if amount == max(r.amount for r in mine) else None
                axis.plot(x, y, "o-", color=f"C{forms.index(form)}", label=label, markersize=3, linewidth=1)
            name = "tokens, millions" if unit == "tokens" else unit
            axis.set(xlabel=f"{name} ({model})", ylabel="held-out perplexity")
            log_scale(axis.yaxis)
            if mine:
                axis.legend()
