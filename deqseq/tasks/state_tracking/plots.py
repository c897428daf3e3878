"""Figures of state-tracking evaluations: accuracy and iterations by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deqseq.tasks.common.figures import log_scale, pyplot
from deqseq.tasks.state_tracking.evaluate import Evaluation


def plot_by_position(rows: Sequence[tuple[str, Evaluation]], path: Path, chance: float, trained: int) -> None:
    """Draw accuracy, iterations and share converged against position for every evaluation; write a PNG.

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
    figure, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    top, middle, bottom = axes
    for i, (name, e) in enumerate(rows):
        wide = {"linewidth": 1.5 * (len(rows) - i) ** 0.7}  # lines that lie on each other show all the same
        position = range(1, e.length + 1)
        window = "" if e.iterations is None else f", window {e.window or 'all'}"
        label = f"{name}, length {e.length}{window}"
        (line,) = top.plot(position, e.accuracy_by_position, label=label, **wide)
        if e.iterations_by_position is not None:
            middle.plot(position, e.iterations_by_position, color=line.get_color())
            bottom.plot(position, e.converged_by_position, color=line.get_color(), **wide)
    top.axhline(chance, color="grey", linestyle=":", label="chance")
    for axis in axes:
        axis.axvline(trained, color="grey", linestyle="--", label="longest in training")
        axis.grid(alpha=0.3)
    top.set(ylabel="accuracy", ylim=(-0.02, 1.02))
    middle.set(ylabel="iterations of the token")
    middle.set_ylim(bottom=0)
    bottom.set(ylabel="share converged", xlabel="position", ylim=(-0.02, 1.02))
    figure.legend(*top.get_legend_handles_labels(), fontsize="small", loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_by_length(
    curves: Mapping[tuple[float, str], Mapping[int, Sequence[float]]], path: Path, chance: float, trained: int
) -> None:
    """Draw the accuracy of the last ten tokens against length, a panel for every probability; write a PNG.

    Args:
        curves: by probability of the identity and name, by length, accuracies of all seeds: a line through
            their means, and a band from the worst to the best.
        path: file to write.
        chance, trained: as in :func:`plot_by_position`.
    """
    plt = pyplot()
    if plt is None or not curves:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for _, name in curves))
    shares = sorted({p for p, _ in curves})
    figure, axes = plt.subplots(
        1,
        len(shares),
        figsize=(4.5 * len(shares) + 1.5, 4.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, p in zip(axes[0], shares, strict=True):
        for i, name in enumerate(names):
            curve = sorted(curves.get((p, name), {}).items())
            lengths, found = [length for length, _ in curve], [values for _, values in curve]
            style = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--"}
            axis.plot(lengths, [sum(v) / len(v) for v in found], label=name, marker=".", **style)
            axis.fill_between(lengths, [min(v) for v in found], [max(v) for v in found], alpha=0.15, **style)
        axis.axhline(chance, color="grey", linestyle=":")
        axis.axvline(trained, color="grey", linestyle="--")
        log_scale(axis.xaxis, base=2)
        axis.set(xlabel="length", title=f"identity with probability {p:g}", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accuracy of the last ten tokens")
    axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
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
