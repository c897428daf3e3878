"""The command line's arguments. They import no model library: help and mistakes should not wait for one."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from deqseq.tasks.evaluate.downstream import TASKS

_ABOUT = """\
Evaluate a causal language model: a folder or a name on the hub, implicit, explicit, or any other that
transformers' AutoModelForCausalLM loads.

  perplexity  perplexity of a text, by position too, and what solving it took
  length      the same text in sequences of several lengths: does the model reach beyond its training?
  iterations  the same text with 1, 2, 4 ... iterations: what does more computing at test time buy?
  duality     the same text in several windows: does solving all tokens together say what one by one says?
  downstream  LAMBADA, HellaSwag, PIQA, ARC, WinoGrande and OpenBookQA through lm-eval, zero-shot

Each prints a table; --output DIR keeps it as JSON, with a figure. `... COMMAND --help` explains each.

  python -m deqseq.tasks.evaluate perplexity runs/model --text test.txt --length 2048 --output runs/ppl"""


def count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return found


def tolerance(text: str) -> float:
    """A positive number."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return found


def window(text: str) -> int | str | None:
    """A number of tokens; ``'all'``, which the layers call ``None``; or ``'model'``, the model's own."""
    if text in ("all", "model"):
        return None if text == "all" else text
    try:
        return count(text)
    except argparse.ArgumentTypeError:
        rule = f"must be 'all', 'model' or a whole number >= 1, got {text!r}"
        raise argparse.ArgumentTypeError(rule) from None


def folder(text: str) -> Path:
    """A folder that files can be written to, or that can be made."""
    path = Path(text)
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"{nearest} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=nearest):  # permissions do not tell: root has all, even in /proc
            pass
    except OSError as error:
        rule = f"nothing can be written to the folder {nearest}: {error.strerror}"
        raise argparse.ArgumentTypeError(rule) from None
    return path


def parser() -> argparse.ArgumentParser:
    """The program's arguments; ``report`` names the command."""
    found = argparse.ArgumentParser(
        prog="python -m deqseq.tasks.evaluate",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = found.add_subparsers(required=True, metavar="COMMAND", dest="report")

    added = _command(commands, "perplexity", "Perplexity of a text, and of the positions in a sequence. "
                     "The text is cut into sequences of one length; every token but the first is predicted "
                     "once and weighs the same.")  # fmt: skip
    for add in (_text, _length, _window, _budget):
        add(added)

    added = _command(commands, "length", "Perplexity of the same tokens in sequences of several lengths. The "
                     "figure shows, by position, how much the loss of the same tokens changes against the "
                     "first length.")  # fmt: skip
    for add in (_text, _window, _budget):
        add(added)
    added.add_argument("--length", type=count, nargs="+", default=[2048, 4096, 8192, 16384], metavar="N",
                       help="tokens of a sequence (default: 2048 4096 8192 16384); longer ones go in "
                       "smaller batches")  # fmt: skip

    added = _command(commands, "iterations", "Perplexity with several numbers of iterations, for implicit "
                     "models. All tokens do exactly that many; with --rtol or a window, at most that many. "
                     "The last row is the model's own policy.")  # fmt: skip
    for add in (_text, _length, _window):
        add(added)
    added.add_argument("--iterations", type=count, nargs="+", default=[2**i for i in range(8)], metavar="N",
                       help="default: 1 2 4 ... 128")  # fmt: skip

    added = _command(commands, "duality", "Solve the same text in several windows and compare the "
                     "predictions with those of the first, for implicit models. They agree as well as "
                     "--rtol asks for, if --max-iter lets all tokens converge.")  # fmt: skip
    for add in (_text, _length, _budget):
        add(added)
    added.add_argument("--window", type=window, nargs="+", default=[None, 64, 8, 1], metavar="W",
                       help="tokens solved at a time (default: all 64 8 1)")  # fmt: skip

    metrics = ", ".join(f"{name} {task.metric}" for name, task in TASKS.items())
    added = _command(commands, "downstream", "Zero-shot tasks through lm-eval (pip install 'deqseq[eval]'). "
                     f"The average is of {metrics}.")  # fmt: skip
    for add in (_window, _budget):
        add(added)
    added.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK",
                       help="default: all of " + " ".join(TASKS))  # fmt: skip
    added.add_argument("--data-dir", metavar="DIR", help="folder of JSONL files in the original or the "
                       "hub's schema, named like the tasks: " + " ".join(t.pattern for t in TASKS.values())
                       + " (default: from the hub)")  # fmt: skip
    added.add_argument("--limit", type=count, metavar="N", help="documents of each task (default: all)")
    return found


def _command(commands: Any, name: str, description: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(name, description=description)
    added.add_argument("model", metavar="MODEL", help="folder of a model, or its name on the hub")
    added.add_argument("--tokenizer", metavar="PATH",
                       help="tokenizer.json, folder or name on the hub (default: the model's)")  # fmt: skip
    added.add_argument("--rtol", type=tolerance, metavar="R",
                       help="relative residual to solve to (default: the model's); the iterations allowed "
                       "stay, so allow more for a smaller one")  # fmt: skip
    added.add_argument("--batch-size", type=count, default=8, metavar="N",
                       help="sequences solved together (default: 8); no matter for results")  # fmt: skip
    added.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    added.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
                       help="of the weights (default: auto, the checkpoint's)")  # fmt: skip
    added.add_argument("--output", type=folder, metavar="DIR",
                       help=f"folder for {name}.json and {name}.png (default: none); a former result with "
                       "the same settings is overwritten, any other only with --force")  # fmt: skip
    added.add_argument("--force", action="store_true",
                       help="write beside other files, and over a result with other settings")  # fmt: skip
    return added


def _text(added: argparse.ArgumentParser) -> None:
    added.add_argument("--text", nargs="+", required=True, metavar="FILE",
                       help="plain text, UTF-8; several files are read one after the other")  # fmt: skip
    added.add_argument("--limit", type=count, metavar="N", help="predict this many tokens (default: all)")


def _length(added: argparse.ArgumentParser) -> None:
    added.add_argument("--length", type=count, default=2048, metavar="N",
                       help="tokens of a sequence (default: 2048)")  # fmt: skip


def _window(added: argparse.ArgumentParser) -> None:
    added.add_argument("--window", type=window, default="model", metavar="W",
                       help="tokens solved at a time: 'all', 1 for one by one, or a number (default: "
                       "'model', the model's own)")  # fmt: skip


def _budget(added: argparse.ArgumentParser) -> None:
    added.add_argument("--max-iter", type=count, metavar="N",
                       help="iterations that a token may take (default: the model's)")  # fmt: skip
