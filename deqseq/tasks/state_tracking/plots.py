"""Figures of state tracking: accuracy and iterations by position and by length, and training curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deqseq.tasks.common.figures import log_scale, save_figure
from deqseq.tasks.state_tracking.evaluate import Evaluation, window_name


def plot_by_position(rows: Sequence[tuple[str, Evaluation]], path: Path, chance: float, trained: int) -> None:
    """Write a PNG of three quantities by position: accuracy, iterations and share of converged tokens.

    Each evaluation is a curve. Straight lines show ``chance``, the accuracy of random guesses, and
    ``trained``, the longest length in training.
    """

    def draw(axes: list[Any]) -> None:
        top, middle, bottom = axes
        for i, (name, e) in enumerate(rows):
            # Draw earlier curves wider, so that they stay visible behind equal later curves.
            wide = {"linewidth": 1.5 * (len(rows) - i) ** 0.7}
            position = range(1, e.length + 1)
            window = "" if e.iterations is None else f", window {window_name(e)}"
            label = f"{name}, length {e.length}{window}"
            (line,) = top.plot(position, e.accuracy_by_position, label=label, **wide)
            if e.iterations_by_position is not None:
                middle.plot(position, e.iterations_by_position, color=line.get_color())
                bottom.plot(position, e.converged_by_position, color=line.get_color(), **wide)
        top.axhline(chance, color="grey", linestyle=":", label="chance")
        for axis in axes:
            axis.axvline(trained, color="grey", linestyle="--", label="longest in training")
        top.set(ylabel="accuracy", ylim=(-0.02, 1.02))
        middle.set(ylabel="iterations of the token")
        middle.set_ylim(bottom=0)
        bottom.set(ylabel="share converged", xlabel="position", ylim=(-0.02, 1.02))
        top.figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", ncols=2)

    save_figure(path, draw, rows=3, size=(8, 8), sharex=True)


def plot_by_length(
    curves: Mapping[tuple[float, str], Mapping[int, Sequence[Evaluation]]],
    path: Path,
    chance: float,
    trained: int,
) -> None:
    """Write a PNG of the accuracy of the last ten tokens and of the iterations per token, by length.

    There is a column for each value of ``p``, the probability that a token is the identity. A line shows the
    mean over the seeds, and a band reaches from the worst to the best seed. Straight lines show ``chance``,
    the accuracy of random guesses, and ``trained``, the longest length in training.

    Args:
        curves: ``curves[p, name][length]`` lists the evaluations of the model ``name``, one per seed.
    """  # fmt: skip
    if not curves:
        return
    names = list(dict.fromkeys(name for _, name in curves))
    shares = sorted({p for p, _ in curves})

    def band(axis: Any, number: int, name: str, found: dict[int, list[float]]) -> None:
        style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
        lengths, values = list(found), list(found.values())
        wide = 1.5 * (len(names) - number) ** 0.5  # earlier lines are wider, so they stay visible
        mean = [sum(v) / len(v) for v in values]
        axis.plot(lengths, mean, label=name, marker=".", linewidth=wide, **style)
        worst, best = [min(v) for v in values], [max(v) for v in values]
        axis.fill_between(lengths, worst, best, alpha=0.15, **style)

    def draw(axes: list[Any]) -> None:
        top, bottom = axes[: len(shares)], axes[len(shares) :]
        for p, accuracy, iterations in zip(shares, top, bottom, strict=True):
            for number, name in enumerate(names):
                curve = dict(sorted(curves.get((p, name), {}).items()))
                band(
                    accuracy,
                    number,
                    name,
                    {n: [e.accuracy_last10 for e in found] for n, found in curve.items()},
                )
                solved = {n: [e.iterations for e in found if e.iterations] for n, found in curve.items()}
                if solved and all(solved.values()):
                    band(iterations, number, name, solved)
            accuracy.axhline(chance, color="grey", linestyle=":")
            for axis in (accuracy, iterations):
                axis.axvline(trained, color="grey", linestyle="--")
                log_scale(axis.xaxis, base=2)
            accuracy.set(title=f"identity with probability {p:g}", ylim=(-0.02, 1.02))
            iterations.set(xlabel="length")
            iterations.set_ylim(bottom=0)
        top[0].set_ylabel("accuracy of the last ten tokens")
        bottom[0].set_ylabel("iterations per token")
        top[0].legend()

    size = (4.5 * len(shares) + 1.5, 6.4)
    save_figure(
        path, draw, rows=2, columns=len(shares), size=size, sharey="row", sharex=True, height_ratios=(3, 2)
    )


def plot_training(log: Sequence[dict[str, float]], path: Path) -> None:
    """Write a PNG of the loss by training step. For implicit models, it also shows the evaluations of f."""
    entries = [entry for entry in log if "loss" in entry]
    steps = [entry["step"] for entry in entries]

    def draw(axes: list[Any]) -> None:
        (axis,) = axes
        axis.semilogy(steps, [entry["loss"] for entry in entries], label="loss")
        axis.set(xlabel="step", ylabel="cross-entropy")
        if entries and "nfe" in entries[0]:
            twin = axis.twinx()
            twin.grid(False)
            twin.plot(steps, [e["nfe"] for e in entries], color="tab:orange", label="evaluations of f")
            twin.set_ylabel("evaluations of f a step")
            twin.set_ylim(bottom=0)
        axis.figure.legend(loc="outside upper right")

    save_figure(path, draw)
