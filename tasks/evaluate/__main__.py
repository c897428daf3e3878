"""The command line: ``python -m deqseq.tasks.evaluate {perplexity,length,iterations,duality,downstream}``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from deqseq.tasks.evaluate.arguments import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    options = parser().parse_args(arguments)
    try:
        # Models take seconds to import: not before the arguments are right.
        from deqseq.tasks.evaluate.models import quiet_transformers
        from deqseq.tasks.evaluate.reports import REPORTS

        quiet_transformers()
        REPORTS[options.report](options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
