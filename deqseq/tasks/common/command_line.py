"""What the command-line programs share: how they log, and how they end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable


def run(command: Callable[[], object], *, interrupted: str, log_level: int = logging.WARNING) -> int:
    """Run a program's command; returns the exit status.

    Args:
        command: what to do. ``ValueError`` and ``OSError`` say what its user can put right: they end it with
            one line and status 2. So does ``FloatingPointError``, numbers that are no longer finite, with
            status 1. Any other exception is a fault of the program, and shows where.
        interrupted: what to say when Ctrl-C ends it, with status 130.
        log_level: from which level on the log is shown.
    """
    logging.basicConfig(level=log_level, format="%(message)s")
    try:
        command()
    except (ValueError, OSError, FloatingPointError) as error:
        _say(f"error: {error}")
        return 1 if isinstance(error, FloatingPointError) else 2
    except KeyboardInterrupt:
        _say(f"interrupted; {interrupted}")
        return 130
    return 0


def _say(text: str) -> None:
    """One of the processes that accelerate launched says what all have found."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)
