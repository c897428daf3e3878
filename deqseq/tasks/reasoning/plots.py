"""Figures of puzzles: a board being solved (PNG and GIF), accuracy, residuals, and the log of a run.

A depth is a number of evaluations of f. A start is an initial guess, from which a puzzle is solved.
"""

from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from deqseq.tasks.common.figures import log_scale, save_figure
from deqseq.tasks.reasoning.evaluate import Evaluation
from deqseq.tasks.reasoning.puzzles import FREE, GOAL, PATH, START, WALL, Task

_COLOURS = {WALL: "#2b2b2b", FREE: "#ffffff", START: "#2a9d4a", GOAL: "#d1495b", PATH: "#4c8bf5"}
_WRONG = "#e8a33d"


def plot_training(log: Sequence[Mapping[str, float]], path: Path) -> None:
    """Plot a run's log as a PNG: the loss, and the shares of solved training and test puzzles.

    A test that ended early has a hollow marker: it tried fewer puzzles than the largest test of the run.
    """

    def draw(axes: list[Any]) -> None:
        top, bottom = axes
        curves = (
            (top, "loss", "loss"), (bottom, "solved", "training puzzles that leave the batch"),
            (bottom, "raw_accuracy", "test, raw weights"), (bottom, "accuracy", "test, averaged weights"),
        )  # fmt: skip
        for axis, name, label in curves:
            found = [(entry["step"], entry[name]) for entry in log if name in entry]
            tests = "accuracy" in name  # rare, so each gets a marker
            if found:
                axis.plot(*zip(*found, strict=True), label=label, marker="o" if tests else None)
        largest = max((entry.get("tested", 0) for entry in log), default=0)
        early = [
            (entry["step"], entry["accuracy"]) for entry in log if entry.get("tested", largest) < largest
        ]
        if early:
            colour = bottom.lines[-1].get_color()
            bottom.plot(*zip(*early, strict=True), "o", color=colour, markerfacecolor="white")
            bottom.set_title("hollow markers: tests that ended early", fontsize=9)
        top.set(ylabel="loss", yscale="log")
        bottom.set(xlabel="step", ylabel="solved", ylim=(-0.02, 1.02))
        if bottom.lines:  # a short run without tests may have no curves here
            bottom.legend()

    save_figure(path, draw, 2, 1, (8, 6), sharex=True)


def plot_accuracy(
    curves: Mapping[str, Sequence[Evaluation]],
    path: Path,
    residuals: tuple[int, Tensor, Tensor] | None = None,
) -> None:
    """Plot the share of solved puzzles by depth (number of evaluations of f) as a PNG.

    There is one curve for each model and each number of starts (initial guesses).

    Args:
        residuals: for P puzzles: a depth, the residuals (P,) at this depth, and a bool tensor (P,), true for
            right answers. If given, a second panel has two histograms of the residuals: one for right
            answers and one for wrong answers.
    """

    def draw(axes: list[Any]) -> None:
        axis = axes[0]
        deepest = max((e.depth or 1 for rows in curves.values() for e in rows), default=1)
        for name, rows in curves.items():
            if rows[0].depth is None:
                axis.axhline(rows[0].exact, linestyle="--", color="grey", label=name)
                continue
            for starts in sorted({e.starts for e in rows}):
                found = [e for e in rows if e.starts == starts]
                label = name if starts == 1 else f"{name}, best of {starts} starts"
                axis.plot([e.depth for e in found], [e.exact for e in found], marker="o", label=label)
        if deepest > 1:
            log_scale(axis.xaxis, 2)
        axis.set(xlabel="depth (evaluations of f)", ylabel="solved puzzles", ylim=(-0.02, 1.02))
        axis.legend()
        if residuals is not None:
            _draw_residuals(axes[1], *residuals)

    save_figure(path, draw, 1, 1 if residuals is None else 2, (8 if residuals is None else 12, 4))


def _draw_residuals(axis: Any, depth: int, residual: Tensor, right: Tensor) -> None:
    values, mask = residual.nan_to_num(1e8).clamp(1e-8, 1e8).cpu().numpy(), right.cpu().numpy()
    edges = np.geomspace(values.min() / 1.1, values.max() * 1.1, 40)
    for name, chosen in (("right", mask), ("wrong", ~mask)):
        axis.hist(values[chosen], edges, alpha=0.7, label=f"{name} ({int(chosen.sum())})")
    log_scale(axis.xaxis)
    axis.set(xlabel=f"residual of the board at depth {depth}, start 0", ylabel="puzzles", yscale="log")
    axis.legend()


def plot_solving(
    task: Task,
    question: Tensor,
    boards: Sequence[tuple[int, Tensor, float]],
    answer: Tensor | None,
    path: Path,
) -> bool:
    """Draw a board being solved, as a PNG and as a GIF. Without matplotlib, returns false and draws nothing.

    Args:
        question: (C,) one token for each of the C cells of the puzzle.
        boards: one tuple for each depth (number of evaluations of f), in increasing order: the depth, the
            predicted tokens (C,) and the residual.
        answer: (C,) the right tokens, to mark wrong cells; ``None`` if they are unknown.
        path: the PNG file; the GIF has the same name with the suffix .gif.
    """
    # The PNG shows up to four boards. They are evenly spaced, from the first board to the first board whose
    # cells equal those of the last board.
    last = next(i for i, (_, cells, _) in enumerate(boards) if cells.equal(boards[-1][1]))
    few = [boards[i] for i in sorted({round(i * last / 3) for i in range(4)})]

    def still(axes: list[Any]) -> None:
        for axis, (depth, cells, residual) in zip(axes, few, strict=True):
            _draw(axis, task, question, cells, answer)
            axis.set_title(f"depth {depth}\nresidual {residual:.1e}", fontsize=9)

    if not save_figure(path, still, 1, len(few), (2.6 * len(few), 3.2)):
        return False
    _animate(task, question, boards, answer, path.with_suffix(".gif"))
    return True


def _animate(
    task: Task,
    question: Tensor,
    boards: Sequence[tuple[int, Tensor, float]],
    answer: Tensor | None,
    path: Path,
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    frames = []
    for depth, cells, residual in boards:
        figure = Figure(figsize=(3.4, 3.64), dpi=90, layout="constrained")
        axis: Any = figure.subplots()
        _draw(axis, task, question, cells, answer)
        axis.set_title(f"depth {depth}, residual {residual:.1e}", fontsize=10)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("P"))
    times = [300] * (len(frames) - 1) + [2500]  # milliseconds; the last board is shown longer
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0)


def _draw(axis: Any, task: Task, question: Tensor, cells: Tensor, answer: Tensor | None) -> None:
    """Draw a board: clues and walls are dark, predictions have colours, and wrong cells are orange."""
    n = isqrt(len(question))
    given, predicted = question.view(n, n).tolist(), cells.view(n, n).tolist()
    right = predicted if answer is None else answer.view(n, n).tolist()
    axis.set(xlim=(0, n), ylim=(n, 0), aspect="equal", xticks=[], yticks=[])
    axis.grid(False)
    places = [(row, column) for row in range(n) for column in range(n)]
    if task == "maze":
        from matplotlib.patches import Rectangle

        for r, c in places:
            token = given[r][c] if given[r][c] != FREE else predicted[r][c]
            wrong = given[r][c] == FREE and predicted[r][c] != right[r][c]
            colour = _WRONG if wrong else _COLOURS.get(token, _WRONG)
            axis.add_patch(Rectangle((c, r), 1, 1, facecolor=colour, linewidth=0))
        return
    box = isqrt(n)
    for line in range(n + 1):
        width = 1.6 if line % box == 0 else 0.4
        axis.axhline(line, color="black", linewidth=width)
        axis.axvline(line, color="black", linewidth=width)
    for r, c in places:
        clue = given[r][c]
        colour = "black" if clue else (_COLOURS[PATH] if predicted[r][c] == right[r][c] else _WRONG)
        axis.text(
            c + 0.5, r + 0.53, str(clue or predicted[r][c]), ha="center", va="center", color=colour,
            fontsize=90 / n, fontweight="bold" if clue else "normal",
        )  # fmt: skip
