"""The evaluation reports. Each report measures a model, prints a table and writes a result folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deqseq.problem import SolveOptions
from deqseq.tasks.common.figures import save_figure
from deqseq.tasks.common.models import implicit_layer, load_model, local_model, read_tokens, solve_options
from deqseq.tasks.common.results import Column, ResultFolder, column, table
from deqseq.tasks.common.tokenizer import load_for_model
from deqseq.tasks.evaluate import plots
from deqseq.tasks.evaluate.downstream import evaluate_tasks, other_prompts
from deqseq.tasks.evaluate.duality import compare_windows, describe_worst, unconverged
from deqseq.tasks.evaluate.perplexity import score, score_by_budget

_SEARCH = [
    column("iterations", ".1f"), column("converged", ".4f"), column("passes_per_batch", ".1f"),
    column("seconds", ".1f"),
]  # fmt: skip
_SCORE: list[Column] = [
    column("length"), column("window"), column("tokens"), column("nll", ".4f"), column("perplexity", ".3f"),
    *_SEARCH, column("tokens_per_second", ".0f"),
]  # fmt: skip
_POSITIONS: list[Column] = [
    ("positions", lambda row: f"{row.first}-{row.last}"), column("tokens"), column("nll", ".4f"),
    column("nll_stderr", ".4f", "±"), column("perplexity", ".3f"), column("iterations", ".1f"),
]  # fmt: skip
_BUDGET: list[Column] = [
    column("nll", ".4f"), column("perplexity", ".3f"), column("residual", ".1e"), *_SEARCH,
]  # fmt: skip
_DUALITY: list[Column] = [
    column("window"), column("agreement", ".4f"), column("max_logit_diff", ".1e"),
    column("mean_logit_diff", ".1e"), column("kl", ".1e"), column("perplexity", ".3f"), *_SEARCH,
]  # fmt: skip
_TASKS: list[Column] = [
    column("task"), column("documents"),
    *(column(name, ".4f", title) for metric in ("acc", "acc_norm")
      for name, title in ((metric, metric), (f"{metric}_stderr", "±"))),
    column("perplexity", ".2f"), column("perplexity_stderr", ".2f", "±"), column("chance", ".2f"),
    column("metric", title="in the average"), column("source"),
]  # fmt: skip


@dataclass
class _Found:
    """The results of a report: the rows of a table, notes to print below the table, and the figure.

    ``draw(axes, rows)`` draws the figure on ``panels`` axes. ``more``: further entries of the JSON file.
    """

    rows: Sequence[Any]
    columns: Sequence[Column]
    draw: Callable[[list[Any], Any], None]
    title: str
    panels: int = 2
    notes: Sequence[str] = ()
    more: dict[str, Any] = field(default_factory=dict)


def report(options: Any) -> None:
    """Make a report. ``options`` is an instance of one of the command line's report classes."""
    name = type(options).__name__.lower()
    tokenizer = load_for_model(local_model(options.model), options.tokenizer)
    tokens = read_tokens(options.text, tokenizer, options.limit) if hasattr(options, "text") else None
    model = load_model(options.model, options.device, options.dtype)
    window: Any = "model" if isinstance(options.window, list) else options.window
    budget = (options.rtol, options.max_iter) if hasattr(options, "max_iter") else ()
    solve = solve_options(model, None if window == "all" else window, *budget)
    folder = None
    if options.output is not None:
        used = _settings(options, model, solve)
        folder = ResultFolder(options.output, name, options.model, used, options.force)
    found = _REPORTS[name](options, model, tokenizer if tokens is None else tokens, solve)
    print(table(found.columns, found.rows), *found.notes, sep="\n")
    if folder is None:
        return
    folder.write(found.rows, model, **found.more)

    def draw(axes: list[Any]) -> None:
        axes[0].figure.suptitle(f"{Path(options.model).name}: {found.title}")
        found.draw(axes, found.rows)

    drawn = save_figure(folder.figure, draw, found.panels, size=(8, 3.5 * found.panels))
    print(f"wrote {folder.json}" + (f" and {folder.figure}" if drawn else ""))


def _settings(options: Any, model: Any, solve: SolveOptions | None) -> dict[str, Any]:
    """The options as a dictionary.

    Some options can leave their value to the model, such as ``window="model"``. The dictionary then has the
    value of the model.
    """
    unrecorded = ("model", "output", "force", "files")
    found = {name: value for name, value in vars(options).items() if name not in unrecorded}
    found["tokenizer"] = options.tokenizer or options.model
    found["device"] = str(model.device)
    found["dtype"] = str(model.dtype).removeprefix("torch.")
    layer = implicit_layer(model)
    names = {"model": None if layer is None else layer.eval_solve.window or "all"}
    several = isinstance(options.window, list)
    windows = [names.get(w, w) for w in (options.window if several else [options.window])]
    found["window"] = windows if several else windows[0]
    if solve is not None and "max_iter" in found:
        found["rtol"] = getattr(solve.convergence, "rtol", None)
        found["max_iter"] = solve.convergence.max_iter
    return found


def _perplexity(options: Any, model: Any, tokens: Any, solve: SolveOptions | None) -> _Found:
    found = score(model, tokens, [options.length], options.batch_size, solve)
    panels = 1 if found[0].policy is None else 2
    notes = ["", table(_POSITIONS, found[0].by_position)]
    return _Found(found, _SCORE, plots.positions, f"sequences of {options.length} tokens", panels, notes)


def _length(options: Any, model: Any, tokens: Any, solve: SolveOptions | None) -> _Found:
    found = score(model, tokens, options.length, options.batch_size, solve)
    return _Found(found, _SCORE, plots.lengths, "the same text in sequences of several lengths")


def _iterations(options: Any, model: Any, tokens: Any, solve: SolveOptions | None) -> _Found:
    found = score_by_budget(
        model, tokens, options.length, options.iterations, solve, options.rtol, options.batch_size
    )

    def budget(row: Any) -> str:
        return f"own: {row.budget}" if row is found[-1] else str(row.budget)

    notes = ["own: with the model's own convergence policy"]
    columns = [("budget", budget), *_BUDGET]
    return _Found(found, columns, plots.budgets, "more or fewer iterations", notes=notes)


def _duality(options: Any, model: Any, tokens: Any, solve: SolveOptions | None) -> _Found:
    policy = None if solve is None else solve.convergence
    windows = [None if window == "all" else window for window in options.window]
    found = compare_windows(model, tokens, options.length, windows, policy, options.batch_size)
    warnings = unconverged(found)
    notes = [describe_worst(found), *warnings]
    title = "one text in several windows"
    return _Found(found, _DUALITY, plots.windows, title, notes=notes, more={"warnings": warnings})


def _downstream(options: Any, model: Any, tokenizer: Any, solve: SolveOptions | None) -> _Found:
    layer = implicit_layer(model)
    if layer is not None and solve is not None:
        layer.eval_solve = solve  # set them here: lm-eval passes no solve options
    found = evaluate_tasks(model, tokenizer, options.tasks, options.files, options.limit, options.batch_size)
    mean, warnings = sum(s.main for s in found) / len(found), other_prompts(found)
    notes, more = [f"average {mean:.4f}", *warnings], {"average": mean, "warnings": warnings}
    return _Found(found, _TASKS, plots.tasks, "zero-shot tasks", 1, notes, more)


_REPORTS: dict[str, Callable[..., _Found]] = {
    "perplexity": _perplexity, "length": _length, "iterations": _iterations, "duality": _duality,
    "downstream": _downstream,
}  # fmt: skip
