"""Runs side by side: ``python -m deqseq.tasks.pretrain compare RUN_FOLDER ...``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deqseq.tasks.common.results import Column, column, table


@dataclass
class Line:
    """A run after some tokens of training, at the end of a stage.

    Attributes:
        run: its folder's name.
        tokens: trained on.
        minutes: of training, without evaluations and checkpoints.
        perplexity: of the held-out rows that evaluations in training read.
        iterations: of a token of it.
        tokens_per_second: in training, since the end of the stage before, in the median.
        mfu: likewise; ``None`` where the device's peak is not known.
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
        found.append(
            Line(
                name,
                end * batch_tokens,
                trained[-1]["train_seconds"] / 60,
                scores[0]["eval_perplexity"],
                scores[0].get("eval_iterations"),
                _median(trained, "tokens_per_second"),
                _median(trained, "mfu"),
                max((entry["memory_gib"] for entry in trained if "memory_gib" in entry), default=None),
            )
        )
    return found


def _median(log: list[dict[str, float]], key: str) -> float | None:
    values = [entry[key] for entry in log if key in entry]
    return statistics.median(values) if values else None
