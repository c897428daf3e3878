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
