"""What the tasks' figures share."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files; ``None``, and a word about it, where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        logger.warning("no figure without matplotlib: pip install 'deqseq[plots]'")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def log_scale(axis: Any, base: float = 10) -> None:
    """Make an axis (``axes.xaxis``, ``axes.yaxis``) logarithmic, with plain numbers at its ticks."""
    from matplotlib import ticker

    class Plain(ticker.LogFormatter):
        """Labels the ticks that matplotlib would, but 620 rather than 6.2×10²."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=base)
    axis.set_major_formatter(Plain(base))
    axis.set_minor_formatter(Plain(base))
