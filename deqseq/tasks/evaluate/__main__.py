"""The command line: ``python -m deqseq.tasks.evaluate {perplexity,length,iterations,duality,downstream}``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deqseq.tasks.common.command_line import run
from deqseq.tasks.evaluate.arguments import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = parser().parse_args(arguments)
    return run(lambda: report(options), interrupted="nothing was written")


def report(options: argparse.Namespace) -> None:
    """Make the report that the options ask for.

    Raises:
        ValueError: what cannot be loaded; options that do not fit the model or the text.
    """
    # Models take seconds to import: not before the arguments are right.
    from deqseq.tasks.common.models import quiet_transformers
    from deqseq.tasks.evaluate.reports import REPORTS

    quiet_transformers()
    REPORTS[options.report](options)


if __name__ == "__main__":
    sys.exit(main())
