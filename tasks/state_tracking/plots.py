"""Figures of state-tracking evaluations: accuracy and iterations by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deqseq.tasks.figures import pyplot
from deqseq.tasks.state_tracking.evaluate import Evaluation


def plot_by_position(rows: Sequence[tuple[str, Evaluation]], path: Path, chance: float, trained: int) -> None:
    """Draw accuracy and iterations against position for every evaluation, and write a PNG.

    Args:
        rows: names and evaluations.
        path: file to write.
        chance: accuracy of a guess, drawn as a line.
        trained: longest training length, drawn as a line.
    """
    plt = pyplot()
    if plt is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6.5), sharex=True, layout="constrained")
    for name, e in rows:
        position = range(1, e.length + 1)
        window = "" if e.iterations is None else f", window {e.window or 'all'}"
        label = f"{name}, length {e.length}{window}"
        (line,) = top.plot(position, e.accuracy_by_position, label=label)
        if e.iterations_by_position is not None:
            bottom.plot(position, e.iterations_by_position, label=label, color=line.get_color())
    top.axhline(chance, color="grey", linestyle=":", label="chance")
    for axis in (top, bottom):
        axis.axvline(trained, color="grey", linestyle="--", label="longest in training")
        axis.grid(alpha=0.3)
    top.set(ylabel="accuracy", ylim=(-0.02, 1.02))
    bottom.set(ylabel="iterations of the token", xlabel="position")
    bottom.set_ylim(bottom=0)
    top.legend(fontsize="small")
    bottom.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_training(log: Sequence[dict[str, float]], path: Path) -> None:
    """Draw loss and, where there was a search, its iterations against the step, and write a PNG."""
    plt = pyplot()
    if plt is None:
        return
    entries = [entry for entry in log if "loss" in entry]
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    steps = [entry["step"] for entry in entries]
    axis.semilogy(steps, [entry["loss"] for entry in entries], label="loss")
    axis.set(xlabel="step", ylabel="cross-entropy")
    axis.grid(alpha=0.3)
    if entries and "nfe" in entries[0]:
        twin = axis.twinx()
        twin.plot(steps, [e["nfe"] for e in entries], color="tab:orange", label="evaluations of f")
        twin.set_ylabel("evaluations of f a step")
        twin.set_ylim(bottom=0)
    figure.legend(fontsize="small", loc="outside upper right")
    figure.savefig(path, dpi=150)
    plt.close(figure)
