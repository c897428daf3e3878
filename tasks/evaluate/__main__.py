"""The command line: ``python -m deqseq.tasks.evaluate {perplexity,length,iterations,duality,downstream}``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from deqseq.tasks.evaluate import plots
from deqseq.tasks.evaluate.downstream import TASKS, average, check_tasks, evaluate_tasks, local_files
from deqseq.tasks.evaluate.duality import compare_windows
from deqseq.tasks.evaluate.models import (
    DTYPES,
    Window,
    load_model,
    load_tokenizer,
    read_tokens,
    solving,
    tolerance_and_budget,
)
from deqseq.tasks.evaluate.perplexity import score, score_by_budget, score_by_length
from deqseq.tasks.evaluate.results import Column, ResultFolder, column, table, window_label

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

_SEARCH = [
    column("iterations", "iterations", ".1f"), column("converged", "converged", ".4f"),
    column("nfe", "nfe"), column("seconds", "seconds", ".1f"),
]  # fmt: skip
_SCORE: list[Column] = [
    column("length", "length"), ("window", window_label), column("tokens", "tokens"),
    column("nll", "nll", ".4f"), column("perplexity", "perplexity", ".3f"), *_SEARCH,
    column("tokens/s", "tokens_per_second", ".0f"),
]  # fmt: skip
_BUDGET: list[Column] = [
    column("budget", "budget"), column("nll", "nll", ".4f"), column("perplexity", "perplexity", ".3f"),
    column("residual", "residual", ".1e"), *_SEARCH, column("policy", "policy"),
]  # fmt: skip
_DUALITY: list[Column] = [
    ("window", window_label), column("agreement", "same", ".4f"), column("max diff", "largest", ".1e"),
    column("mean diff", "mean", ".1e"), column("KL", "divergence", ".1e"),
    column("perplexity", "perplexity", ".3f"), *_SEARCH,
]  # fmt: skip
_TASKS: list[Column] = [
    column("task", "task"), column("documents", "documents"),
    *(column(name, key, ".4f") for metric in ("acc", "acc_norm")
      for name, key in ((metric, metric), ("±", f"{metric}_stderr"))),
    column("perplexity", "perplexity", ".2f"), column("±", "perplexity_stderr", ".2f"),
    column("in the average", "metric"), column("source", "source"),
]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deqseq.tasks.evaluate",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="report")

    def command(name: str, run: Callable[[Any], None], description: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, description=description)
        added.set_defaults(run=run)
        added.add_argument("model", metavar="MODEL", help="folder of a model, or its name on the hub")
        added.add_argument("--tokenizer", metavar="FILE_OR_FOLDER",
                           help="a tokenizer.json or a folder (default: the model's)")  # fmt: skip
        added.add_argument("--rtol", type=float, help="relative residual to solve to (default: the model's)")
        added.add_argument("--batch-size", type=int, default=8,
                           help="sequences solved together (default: 8); no matter for results")  # fmt: skip
        added.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
        added.add_argument("--dtype", choices=DTYPES, default="auto",
                           help="of the weights (default: auto, the checkpoint's)")  # fmt: skip
        added.add_argument("--output", metavar="DIR",
                           help=f"folder for {name}.json and {name}.png (default: none)")  # fmt: skip
        added.add_argument("--force", action="store_true", help="write there beside other files")
        return added

    def text(added: argparse.ArgumentParser) -> None:
        added.add_argument("--text", nargs="+", required=True, metavar="FILE",
                           help="plain text, UTF-8; several files are read one after the other")  # fmt: skip
        added.add_argument("--limit", type=int, help="predict this many tokens (default: all)")

    def length(added: argparse.ArgumentParser) -> None:
        added.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default: 2048)")

    def window(added: argparse.ArgumentParser) -> None:
        added.add_argument("--window", type=_window, default="model",
                           help="tokens solved at a time: 'all', 1 for one by one, or a number (default: "
                           "the model's)")  # fmt: skip

    def budget(added: argparse.ArgumentParser) -> None:
        added.add_argument("--max-iter", type=int,
                           help="evaluations that a token may take (default: the model's)")  # fmt: skip

    added = command("perplexity", _perplexity, "Perplexity of a text. It is cut into sequences of one "
                    "length; every token but the first is predicted once and weighs the same.")  # fmt: skip
    for add in (text, length, window, budget):
        add(added)
    added = command("length", _length, "Perplexity of the same tokens in sequences of several lengths, and "
                    "by position in each.")  # fmt: skip
    for add in (text, window, budget):
        add(added)
    added.add_argument("--length", type=int, nargs="+", default=[2048, 4096, 8192, 16384],
                       help="tokens of a sequence (default: 2048 4096 8192 16384); longer ones go in "
                       "smaller batches")  # fmt: skip
    added = command("iterations", _iterations, "Perplexity with several numbers of iterations, for implicit "
                    "models. All tokens do exactly that many; with --rtol or a window, at most that many. "
                    "The last row is the model's own policy.")  # fmt: skip
    for add in (text, length, window):
        add(added)
    added.add_argument("--iterations", type=int, nargs="+", default=[2**i for i in range(8)],
                       help="default: 1 2 4 ... 128")  # fmt: skip
    added = command("duality", _duality, "Solve the same text in several windows and compare the predictions "
                    "with those of the first, for implicit models. The tighter --rtol, the better they "
                    "agree.")  # fmt: skip
    for add in (text, length, budget):
        add(added)
    added.add_argument("--window", type=_window, nargs="+", default=[None, 64, 8, 1],
                       help="tokens solved at a time (default: all 64 8 1)")  # fmt: skip
    metrics = ", ".join(f"{name} {task.metric}" for name, task in TASKS.items())
    added = command("downstream", _downstream, "Zero-shot tasks through lm-eval (pip install "
                    f"'deqseq[eval]'). The average is of {metrics}.")  # fmt: skip
    for add in (window, budget):
        add(added)
    added.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK",
                       help="default: all of " + " ".join(TASKS))  # fmt: skip
    added.add_argument("--data-dir", metavar="DIR", help="folder of JSONL files in the original or the "
                       "hub's schema, named like the tasks: " + " ".join(t.pattern for t in TASKS.values())
                       + " (default: from the hub)")  # fmt: skip
    added.add_argument("--limit", type=int, help="documents of each task (default: all)")
    return parser


def _window(text: str) -> Window:
    if text == "model":
        return "model"
    if text in ("all", "none", "None"):
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'all' or a number of tokens, got {text!r}") from None


def _prepare(options: Any) -> tuple[Any, Any, ResultFolder | None]:
    """Model, tokenizer and, if wanted, the folder: what can be wrong is found before any work."""
    folder = None
    if options.output is not None:
        folder = ResultFolder(options.output, options.report, options.force)
    tokenizer = load_tokenizer(options.model, options.tokenizer)
    return load_model(options.model, options.device, options.dtype), tokenizer, folder


def _finish(
    options: Any, folder: ResultFolder | None, columns: Sequence[Column], rows: Sequence[Any],
    plot: Callable[[Any, Path], bool], **more: Any,
) -> None:  # fmt: skip
    print(table(columns, rows))
    for name, value in more.items():
        print(f"{name} {value:.4f}")
    if folder is None:
        return
    unrecorded = {"run", "report", "model", "output", "force"}
    settings = {name: value for name, value in vars(options).items() if name not in unrecorded}
    folder.write(options.model, settings, rows, **more)
    drawn = plot(rows, folder.figure)
    print(f"wrote {folder.json}" + (f" and {folder.figure}" if drawn else ""))


def _perplexity(options: Any) -> None:
    model, tokenizer, folder = _prepare(options)
    tokens = read_tokens(options.text, tokenizer, options.limit)
    with solving(model, options.window, tolerance_and_budget(model, options.rtol, options.max_iter)):
        found = score(model, tokens, options.length, options.batch_size, progress=True)
    _finish(options, folder, _SCORE, [found], plots.plot_positions)


def _length(options: Any) -> None:
    model, tokenizer, folder = _prepare(options)
    tokens = read_tokens(options.text, tokenizer, options.limit)
    with solving(model, options.window, tolerance_and_budget(model, options.rtol, options.max_iter)):
        found = score_by_length(model, tokens, options.length, options.batch_size, progress=True)
    _finish(options, folder, _SCORE, found, plots.plot_lengths)


def _iterations(options: Any) -> None:
    model, tokenizer, folder = _prepare(options)
    tokens = read_tokens(options.text, tokenizer, options.limit)
    found = score_by_budget(
        model, tokens, options.length, options.iterations, options.window, options.rtol,
        options.batch_size, progress=True,
    )  # fmt: skip
    _finish(options, folder, _BUDGET, found, plots.plot_budgets)


def _duality(options: Any) -> None:
    model, tokenizer, folder = _prepare(options)
    tokens = read_tokens(options.text, tokenizer, options.limit)
    policy = tolerance_and_budget(model, options.rtol, options.max_iter)
    found = compare_windows(
        model, tokens, options.length, options.window, policy, options.batch_size, progress=True
    )
    _finish(options, folder, _DUALITY, found, plots.plot_duality)


def _downstream(options: Any) -> None:
    check_tasks(options.tasks)
    files = None if options.data_dir is None else local_files(options.tasks, options.data_dir)
    model, tokenizer, folder = _prepare(options)
    with solving(model, options.window, tolerance_and_budget(model, options.rtol, options.max_iter)):
        found = evaluate_tasks(
            model, tokenizer, options.tasks, files, options.limit, options.batch_size,
            progress=True,
        )  # fmt: skip
    _finish(options, folder, _TASKS, found, plots.plot_tasks, average=average(found))


if __name__ == "__main__":
    sys.exit(main())
