"""Runs side by side: ``python -m deqseq.tasks.pretrain compare RUN_FOLDER ...``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deqseq.tasks.common.results import Column, column, table


@dataclass
class Line:
    """A run at the end of a stage.

    Attributes:
        run: name of its folder.
        tokens: trained on so far.
        minutes: of training so far, without evaluations and checkpoints.
        perplexity: of the held-out rows that evaluations in training read.
        iterations: of a held-out token, mean.
        tokens_per_second: in training, median over the stage.
        mfu: model FLOPs utilisation, likewise; ``None`` if the device's peak is unknown.
        memory_gib: most that was allocated on a GPU so far.
    """

    run: str
    tokens: int
    minutes: float
    perplexity: float
    iterations: float | None
    tokens_per_second: float | None
    mfu: float | None
    memory_gib: float | None


_COLUMNS: tuple[Column, ...] = (
    column("run"), column("tokens", ","), column("minutes", ".2f"), column("perplexity", ".2f"),
    column("iterations", ".2f"), column("tokens_per_second", ",.0f", "tokens/s"), column("mfu", ".3f", "MFU"),
    column("memory_gib", ".1f", "GiB"),
)  # fmt: skip


def compare(folders: Sequence[Path], figure: Path) -> str:
    """The table of finished runs; draws their curves.

    Raises:
        ValueError: a folder without a finished run.
    """
    from deqseq.tasks.common.runs import read_record, read_settings
    from deqseq.tasks.common.settings import build
    from deqseq.tasks.pretraining.card import plot_curves
    from deqseq.tasks.pretraining.settings import RunSettings

    lines, runs = [], []
    for folder in folders:
        given = read_settings(folder)
        given.pop("fingerprint", None)
        settings = build(RunSettings, given)
        log = read_record(folder)["log"]
        runs.append((folder.name, log, settings))
        curriculum = settings.curriculum()
        ends = [settings.total_steps]
        if curriculum is not None:
            ends = [curriculum.end(stage, settings.total_steps) for stage in curriculum.stages]
        lines += _lines(folder.name, log, ends, settings.batch_tokens)
    drawn = plot_curves(runs, figure)
    return table(_COLUMNS, lines) + (f"\n\ndrew {figure}" if drawn else "")


def _lines(name: str, log: list[dict[str, float]], ends: Sequence[int], batch_tokens: int) -> list[Line]:
    found, first = [], 0
    for end in ends:
        trained = [entry for entry in log if "loss" in entry and first < entry["step"] <= end]
        scores = [entry for entry in log if "eval_loss" in entry and entry["step"] == end]
        first = end
        if not trained or not scores:
            continue
        columns = ("tokens_per_second", "mfu", "memory_gib")
        logged = {key: [entry[key] for entry in trained if key in entry] for key in columns}
        speed, mfu = (statistics.median(logged[key]) if logged[key] else None for key in columns[:2])
        minutes = trained[-1]["train_seconds"] / 60
        solved = scores[0]["eval_perplexity"], scores[0].get("eval_iterations")
        memory = max(logged["memory_gib"], default=None)
        found.append(Line(name, end * batch_tokens, minutes, *solved, speed, mfu, memory))
    return found
