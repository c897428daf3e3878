"""Compares finished runs: ``python -m deqseq.tasks.pretrain compare RUN_FOLDER ...``."""

import statistics
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from deqseq.tasks.common.command_line import check_png
from deqseq.tasks.common.results import column, table
from deqseq.tasks.common.runs import names_of, read_record, read_settings
from deqseq.tasks.common.settings import build
from deqseq.tasks.pretraining.card import plot_curves, scores
from deqseq.tasks.pretraining.settings import RunSettings

_COLUMNS = (
    column("run"), column("stage"), column("budget"), column("tokens", ","), column("minutes", ".2f"),
    column("perplexity", ".2f"), column("iterations", ".2f"),
    column("tokens_per_second", ",.0f", "tokens/s"), column("mfu", ".3f", "MFU"),
    column("memory_gib", ".1f", "GiB"),
)  # fmt: skip


def compare(runs: list[Path], *, output: Path = Path("runs/compare.png")) -> None:
    """Print every run's held-out perplexity, tokens, time and iterations at the end of each stage.

    The column budget shows the evaluations in training. 4+1: at most 4 in the search, then 1 with a gradient.
    0+1: no search. Plots the runs' losses and iterations against tokens and against time.

    Args:
        runs: folders of finished runs
        output: PNG file of the plot
    """
    check_png("--output", output)
    lines, curves, held_out = [], [], set()
    for name_of_run, folder in zip(names_of(runs), runs, strict=True):
        given = read_settings(folder)
        # These two describe the data; they are not fields of RunSettings.
        fingerprint, _ = given.pop("fingerprint", None), given.pop("order", None)
        settings = build(RunSettings, given)
        held_out.add((fingerprint, settings.length, settings.eval_rows))
        log = read_record(folder)["log"]
        curves.append((name_of_run, log, settings))
        lines += _lines(name_of_run, log, settings)
    print(table(_COLUMNS, lines))
    if len(held_out) > 1:
        print("\nThe perplexities may not be comparable: data, length or eval_rows differ.")
    if plot_curves(curves, output):
        print(f"\ndrew {output}")


def _lines(name: str, log: list[dict[str, float]], settings: RunSettings) -> list[SimpleNamespace]:
    """A table row for each stage: budget, tokens, time, speed, memory, and the scores on held-out data.

    Tokens and minutes count from the beginning of the run. Minutes exclude evaluations and checkpoints.
    Tokens/s and MFU (model FLOPs utilisation) are medians over the stage. GiB is the peak memory allocated on
    a GPU up to the end of the stage.
    """
    # Import this module late, so that wrong arguments are reported at once. The import takes seconds.
    from deqseq.tasks.pretraining.plan import evaluation_budget

    found, evaluated, config, curriculum = [], scores(log, settings), settings.config(), settings.curriculum()
    stages = [None] if curriculum is None else curriculum.stages
    spans = zip(stages, pairwise([0, *settings.stage_ends]), strict=True)
    for number, (stage, (first, end)) in enumerate(spans, 1):
        trained = [entry for entry in log if "loss" in entry and first < entry["step"] <= end]
        if not trained or end not in evaluated:
            continue
        columns = ("tokens_per_second", "mfu", "memory_gib")
        speeds, mfus, memory = ([entry[key] for entry in trained if key in entry] for key in columns)
        searched, with_graph = evaluation_budget(config, stage)
        found.append(SimpleNamespace(
            **vars(evaluated[end]), run=name, stage=number, budget=f"{searched}+{with_graph}",
            minutes=trained[-1]["train_seconds"] / 60,
            tokens_per_second=statistics.median(speeds) if speeds else None,
            mfu=statistics.median(mfus) if mfus else None, memory_gib=max(memory, default=None),
        ))  # fmt: skip
    return found
