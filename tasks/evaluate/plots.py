"""Figures of the reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deqseq.tasks.evaluate.downstream import TaskScore
from deqseq.tasks.evaluate.duality import Agreement
from deqseq.tasks.evaluate.perplexity import Score, exponential
from deqseq.tasks.figures import pyplot


def plot_positions(scores: Sequence[Score], path: Path) -> bool:
    """Perplexity and, where there was a search, iterations against position. Writes a PNG.

    This and the other figures return whether one was written: without matplotlib there is none.
    """
    searched = scores[0].policy is not None

    def draw(axes: Any) -> None:
        _by_position(scores, axes[0], axes[1] if searched else None)

    return _figure(path, 2 if searched else 1, draw)


def plot_lengths(scores: Sequence[Score], path: Path) -> bool:
    """Perplexity against the length of the sequences, and by position in each. Writes a PNG."""

    def draw(axes: Any) -> None:
        axes[0].plot([s.length for s in scores], [s.perplexity for s in scores], "o-")
        axes[0].set_xscale("log", base=2)
        axes[0].set(xlabel="length of the sequences", ylabel="perplexity")
        _by_position(scores, axes[1], None)

    return _figure(path, 2, draw)


def plot_budgets(scores: Sequence[Score], path: Path) -> bool:
    """Perplexity and residual against the iterations allowed; the last score is the model's own."""

    def draw(axes: Any) -> None:
        *limited, own = scores
        budgets = [s.budget for s in limited]
        axes[0].plot(budgets, [s.perplexity for s in limited], "o-")
        axes[0].axhline(own.perplexity, color="grey", linestyle="--", label="the model's own policy")
        axes[0].set(ylabel="perplexity", yscale="log")
        axes[0].legend(fontsize="small")
        axes[1].plot(budgets, [s.residual for s in limited], "o-")
        axes[1].set(ylabel="relative residual, mean", yscale="log", xlabel="iterations allowed")
        for axis in axes:
            axis.set_xscale("log", base=2)

    return _figure(path, 2, draw)


def plot_duality(found: Sequence[Agreement], path: Path) -> bool:
    """Agreement with the first window and evaluations per token, by window."""

    def draw(axes: Any) -> None:
        names = ["all" if a.window is None else str(a.window) for a in found]
        place = range(len(found))
        axes[0].plot(place, [a.same for a in found], "o-")
        axes[0].set(ylabel=f"same prediction as window {names[0]}", ylim=(-0.02, 1.02))
        axes[1].plot(place, [a.iterations for a in found], "o-")
        axes[1].set(ylabel="evaluations per token", xlabel="window")
        axes[1].set_ylim(bottom=0)
        for axis in axes:
            axis.set_xticks(place, names)

    return _figure(path, 2, draw)


def plot_tasks(scores: Sequence[TaskScore], path: Path) -> bool:
    """The metric of every task that enters the average, with its standard error."""

    def draw(axes: Any) -> None:
        place = range(len(scores))
        error = [s.main_stderr or 0.0 for s in scores]
        axes[0].bar(place, [s.main for s in scores], yerr=error, capsize=3)
        axes[0].set_xticks(place, [f"{s.task}\n{s.metric}" for s in scores], fontsize="x-small")
        axes[0].set(ylabel="accuracy", ylim=(0, 1))

    return _figure(path, 1, draw)


def _by_position(scores: Sequence[Score], top: Any, bottom: Any) -> None:
    for s in scores:
        last = [bucket["last"] for bucket in s.by_position]
        label = f"length {s.length}"
        nll = [exponential(bucket["nll"]) for bucket in s.by_position]  # type: ignore[arg-type]
        top.plot(last, nll, "o-", label=label)
        if bottom is not None:
            bottom.plot(last, [bucket["iterations"] for bucket in s.by_position], "o-", label=label)
    for axis, label in ((top, "perplexity"), (bottom, "iterations of a token")):
        if axis is not None:
            axis.set_xscale("log", base=2)
            axis.set(xlabel="position in the sequence, up to", ylabel=label)
            axis.legend(fontsize="small")


def _figure(path: Path, panels: int, draw: Callable[[Any], None]) -> bool:
    plt = pyplot()
    if plt is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(panels, 1, figsize=(8, 3.5 * panels), layout="constrained", squeeze=False)
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
    draw(axes[:, 0])
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
