"""The five reports: each loads a model, measures, prints a table and writes a result folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deqseq.problem import SolveOptions
from deqseq.tasks.common.models import implicit_layer, load_model, read_tokens, solve_options
from deqseq.tasks.common.results import Column, ResultFolder, column, table
from deqseq.tasks.common.tokenizer import load_tokenizer
from deqseq.tasks.evaluate import plots
from deqseq.tasks.evaluate.downstream import (
    average,
    check_tasks,
    evaluate_tasks,
    local_files,
    other_prompts,
)
from deqseq.tasks.evaluate.duality import compare_windows, describe_worst, unconverged
from deqseq.tasks.evaluate.perplexity import score, score_by_budget, score_by_length

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
class _Setup:
    """The inputs of a report. Making it finds all errors before the work starts."""

    model: Any
    tokenizer: Any
    tokens: Any
    solve: SolveOptions | None
    folder: ResultFolder | None


def _prepare(options: Any) -> _Setup:
    tokenizer = load_tokenizer(options.model, options.tokenizer)
    tokens = read_tokens(options.text, tokenizer, options.limit) if "text" in options else None
    model = load_model(options.model, options.device, options.dtype)
    window: Any = "model" if isinstance(options.window, list) else options.window
    budget = (options.rtol, options.max_iter) if "max_iter" in options else ()
    solve = solve_options(model, window, *budget)
    folder = None
    if options.output is not None:
        used = _settings(options, model, solve)
        folder = ResultFolder(options.output, options.report, options.model, used, options.force)
    return _Setup(model, tokenizer, tokens, solve, folder)


def _settings(options: Any, model: Any, solve: SolveOptions | None) -> dict[str, Any]:
    """The options, with the values used where they leave the choice to the model or the machine."""
    unrecorded = {"report", "model", "output", "force"}
    found = {name: value for name, value in vars(options).items() if name not in unrecorded}
    found["tokenizer"] = options.tokenizer or options.model
    found["device"] = str(model.device)
    found["dtype"] = str(model.dtype).removeprefix("torch.")
    layer = implicit_layer(model)
    names = {"model": None if layer is None else layer.eval_solve.window or "all", None: "all"}
    several = isinstance(options.window, list)
    windows = [names.get(w, w) for w in (options.window if several else [options.window])]
    found["window"] = windows if several else windows[0]
    if solve is not None and "max_iter" in options:
        found["rtol"] = getattr(solve.convergence, "rtol", None)
        found["max_iter"] = solve.convergence.max_iter
    return found


def _finish(
    setup: _Setup, options: Any, columns: Sequence[Column], rows: Sequence[Any],
    plot: Callable[[Any, Path, str], bool], notes: Sequence[str] = (), **more: Any,
) -> None:  # fmt: skip
    print(table(columns, rows), *notes, sep="\n")
    if setup.folder is None:
        return
    setup.folder.write(rows, setup.model, **more)
    drawn = plot(rows, setup.folder.figure, Path(options.model).name)
    print(f"wrote {setup.folder.json}" + (f" and {setup.folder.figure}" if drawn else ""))


def _perplexity(options: Any) -> None:
    setup = _prepare(options)
    found = score(setup.model, setup.tokens, options.length, options.batch_size, True, setup.solve)
    notes = ["", table(_POSITIONS, found.by_position)]
    _finish(setup, options, _SCORE, [found], plots.plot_positions, notes)


def _length(options: Any) -> None:
    setup = _prepare(options)
    found = score_by_length(setup.model, setup.tokens, options.length, options.batch_size, True, setup.solve)
    _finish(setup, options, _SCORE, found, plots.plot_lengths)


def _iterations(options: Any) -> None:
    setup = _prepare(options)
    found = score_by_budget(
        setup.model, setup.tokens, options.length, options.iterations, options.window, options.rtol,
        options.batch_size, progress=True,
    )  # fmt: skip

    def budget(row: Any) -> str:
        return f"own: {row.budget}" if row is found[-1] else str(row.budget)

    notes = ["own: with the model's own convergence policy"]
    _finish(setup, options, [("budget", budget), *_BUDGET], found, plots.plot_budgets, notes)


def _duality(options: Any) -> None:
    setup = _prepare(options)
    found = compare_windows(
        setup.model, setup.tokens, options.length, options.window,
        None if setup.solve is None else setup.solve.convergence, options.batch_size, progress=True,
    )  # fmt: skip
    warnings = unconverged(found)
    notes = [describe_worst(found), *warnings]
    _finish(setup, options, _DUALITY, found, plots.plot_duality, notes, warnings=warnings)


def _downstream(options: Any) -> None:
    check_tasks(options.tasks)
    files = None if options.data_dir is None else local_files(options.tasks, options.data_dir)
    setup = _prepare(options)
    layer = implicit_layer(setup.model)
    if layer is not None and setup.solve is not None:
        layer.eval_solve = setup.solve  # lm-eval calls the model without options
    found = evaluate_tasks(
        setup.model, setup.tokenizer, options.tasks, files, options.limit, options.batch_size, progress=True
    )
    mean, warnings = average(found), other_prompts(found)
    notes = [f"average {mean:.4f}", *warnings]
    _finish(setup, options, _TASKS, found, plots.plot_tasks, notes, average=mean, warnings=warnings)


REPORTS: dict[str, Callable[[Any], None]] = {
    "perplexity": _perplexity,
    "length": _length,
    "iterations": _iterations,
    "duality": _duality,
    "downstream": _downstream,
}
