"""The command line: ``python -m deqseq.tasks.evaluate {perplexity,length,iterations,duality,downstream}``."""

import sys
from collections.abc import Sequence

from deqseq.tasks.common import command_line
from deqseq.tasks.evaluate.arguments import REPORTS

_ABOUT = """\
Evaluate a causal language model: a folder or a name on the hub, implicit, explicit, or any other that
transformers' AutoModelForCausalLM loads. Each report prints a table; --output DIR keeps it as JSON, with a
figure.

  python -m deqseq.tasks.evaluate perplexity runs/model --text test.txt --length 2048 --output runs/ppl"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    return command_line.main(
        "python -m deqseq.tasks.evaluate", _ABOUT, REPORTS, arguments, interrupted="nothing was written"
    )


if __name__ == "__main__":
    sys.exit(main())
