"""Draws the figures of all tasks in one style, as PNG files."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deqseq.tasks.common.files import PART

logger = logging.getLogger(__name__)

_STYLE: Any = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.fontsize": "small",
    "figure.constrained_layout.use": True,
}


def save_figure(
    path: Path,
    draw: Callable[[list[Any]], object],
    rows: int = 1,
    columns: int = 1,
    size: tuple[float, float] = (8, 4),
    **options: Any,
) -> bool:
    """Draw a figure and write it atomically as a PNG file.

    Returns true if the figure was written. Without matplotlib, logs a warning and returns false.

    Args:
        draw: function that draws the figure. It gets a list of the axes, row by row.
        size: width and height in inches.
        options: passed to ``pyplot.subplots``.
    """
    try:
        import matplotlib
    except ImportError:
        logger.warning("no figure without matplotlib: pip install 'deqseq[plots]'")
        return False
    matplotlib.use("Agg")  # draw to files, not to a screen
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
        try:
            draw(list(axes.flat))
            part = path.with_name(path.name + PART)
            figure.savefig(part, dpi=120, format="png")
            part.replace(path)
        finally:
            plt.close(figure)
    return True


def log_scale(axis: Any, base: float = 10) -> None:
    """Make an axis (``axes.xaxis``, ``axes.yaxis``) logarithmic, with plain numbers at its ticks."""
    from matplotlib import ticker

    class Plain(ticker.LogFormatter):
        """Labels the same ticks as matplotlib's formatter, but writes 620 instead of 6.2×10²."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=base)
    axis.set_major_formatter(Plain(base))
    axis.set_minor_formatter(Plain(base))
