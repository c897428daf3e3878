"""Runs side by side: ``python -m deqseq.tasks.pretrain compare RUN_FOLDER ...``."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from deqseq.tasks.common.results import Column, column, table
from deqseq.tasks.common.runs import read_record, read_settings
from deqseq.tasks.common.settings import build
from deqseq.tasks.pretraining.card import plot_curves
from deqseq.tasks.pretraining.settings import RunSettings

_COLUMNS: tuple[Column, ...] = (
    column("run"), column("tokens", ","), column("minutes", ".2f"), column("perplexity", ".2f"),
    column("iterations", ".2f"), column("tokens_per_second", ",.0f", "tokens/s"), column("mfu", ".3f", "MFU"),
    column("memory_gib", ".1f", "GiB"),
)  # fmt: skip


def compare(folders: Sequence[Path], figure: Path) -> str:
    """The table of finished runs at the end of their stages; draws their curves.

    Times and tokens count from the beginning of the run, without evaluations and checkpoints. Tokens a second
    and MFU (model FLOPs utilisation) are medians over the stage, GiB the most that was allocated on a GPU.

    Raises:
        ValueError: a folder without a finished run.
    """
    lines, runs = [], []
    for folder in folders:
        given = read_settings(folder)
        given.pop("fingerprint", None)
        settings = build(RunSettings, given)
        log = read_record(folder)["log"]
        runs.append((folder.name, log, settings))
        lines += _lines(folder.name, log, settings)
    drawn = plot_curves(runs, figure)
    return table(_COLUMNS, lines) + (f"\n\ndrew {figure}" if drawn else "")


def _lines(name: str, log: list[dict[str, float]], settings: RunSettings) -> list[SimpleNamespace]:
    """A row for each stage: its scores on the held-out rows, and the tokens, time and iterations used."""
    found = []
    for first, end in pairwise([0, *settings.stage_ends]):
        trained = [entry for entry in log if "loss" in entry and first < entry["step"] <= end]
        score = next((entry for entry in log if "eval_loss" in entry and entry["step"] == end), None)
        if not trained or score is None:
            continue
        columns = ("tokens_per_second", "mfu", "memory_gib")
        speeds, mfus, memory = ([entry[key] for entry in trained if key in entry] for key in columns)
        found.append(SimpleNamespace(
            run=name, tokens=end * settings.batch_tokens, minutes=trained[-1]["train_seconds"] / 60,
            perplexity=score["eval_perplexity"], iterations=score.get("eval_iterations"),
            tokens_per_second=statistics.median(speeds) if speeds else None,
            mfu=statistics.median(mfus) if mfus else None, memory_gib=max(memory, default=None),
        ))  # fmt: skip
    return found
