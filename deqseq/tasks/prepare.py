"""Text to token shards for pretraining: ``python -m deqseq.tasks.prepare TEXT... --output DIR``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from deqseq.tasks.common.command_line import run
from deqseq.tasks.evaluate.arguments import count, folder

_ABOUT = """\
Tokenise text into shards that pretraining reads: plain text, JSONL (.jsonl, .ndjson, .json: an object a
line), parquet, or any dataset of the datasets library. Every document ends with the tokenizer's end of text;
a random share of them, chosen by a hash of their text, is held out for validation.

  python -m deqseq.tasks.prepare book.txt --output data/book --validation-share 0.01
  python -m deqseq.tasks.prepare pile/*.jsonl --output data/pile --tokenizer tokenizer.json
  python -m deqseq.tasks.prepare --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT --output data/web

Run the same command again after an interruption: finished shards are kept, and the result is the same,
whatever the number of workers. `--verify --output DIR` compares finished shards with their checksums."""


def share(text: str) -> float:
    """A number in [0, 1)."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {text!r}")
    return found


def parser() -> argparse.ArgumentParser:
    """The command line's arguments."""
    found = argparse.ArgumentParser(
        prog="python -m deqseq.tasks.prepare",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("text", nargs="*", metavar="TEXT", help="files; with --dataset, its data files")
    add("--output", type=folder, required=True, metavar="DIR", help="folder for the shards")
    add("--tokenizer", default="EleutherAI/gpt-neox-20b", metavar="NAME_OR_FILE",
        help="name on the hub, tokenizer.json or folder (default: EleutherAI/gpt-neox-20b)")  # fmt: skip
    add("--documents", choices=("file", "blank", "line"), default="file",
        help="a document of plain text: the whole file (default), of which pieces of some 1,000 tokens are "
        "held out; what stands between blank lines; or a line")  # fmt: skip
    add("--column", default="text", metavar="NAME",
        help="of JSONL, parquet and datasets, where the text is (default: text)")  # fmt: skip
    add("--dataset", metavar="NAME", help="on the hub, or a format such as json with TEXT as its files")
    add("--subset", metavar="NAME", help="configuration of the dataset")
    add("--split", default="train", metavar="NAME", help="of the dataset (default: train)")
    add("--validation-share", type=share, default=0.001, metavar="S",
        help="of the documents, held out (default: 0.001)")  # fmt: skip
    add("--shard-tokens", type=count, default=100_000_000, metavar="N",
        help="tokens after which a shard ends, and which an interruption loses at most (default: "
        "100,000,000)")  # fmt: skip
    add("--workers", type=count, default=os.cpu_count() or 1, metavar="N",
        help="threads that tokenise (default: one a processor)")  # fmt: skip
    add("--force", action="store_true",
        help="begin anew, beside other files and over shards of other sources or settings")  # fmt: skip
    add("--verify", action="store_true", help="check finished shards instead")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare or verify a folder; returns the exit status."""
    known = parser()
    options = known.parse_args(arguments)
    if options.verify and (options.text or options.dataset):
        known.error("--verify reads the shards of --output alone: leave out TEXT and --dataset")
    # The workers are the parallelism; the library's own would get in their way, and warn about forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return run(
        lambda: verify(options) if options.verify else prepare(options),
        interrupted="the same command goes on after the last finished shard",
    )


def verify(options: Any) -> None:
    """Compare the shards of a folder with their checksums.

    Raises:
        ValueError: no shards there, or damaged ones.
    """
    from deqseq.tasks.common.corpus import TokenFolder

    held = TokenFolder(options.output)
    held.verify(progress=sys.stderr.isatty())
    print(f"{options.output}: all shards are as they were written")


def prepare(options: Any) -> None:
    """Make the shards, or what is missing of them, and say what there is.

    Raises:
        ValueError: sources that cannot be read; a folder that holds something else, or that another process
            prepares.
    """
    # Tokenizers and datasets take seconds to import: not before the arguments are right.
    from deqseq.tasks.common.corpus import HoldOut, TokenFolder, pipeline
    from deqseq.tasks.common.corpus.documents import sources
    from deqseq.tasks.common.corpus.encoder import Encoder
    from deqseq.tasks.common.corpus.holdout import SPLITS
    from deqseq.tasks.common.corpus.shards import Preparation, locked
    from deqseq.tasks.common.tokenizer import load_tokenizer

    progress = sys.stderr.isatty()
    read = sources(
        options.text, options.documents, options.column, options.dataset, options.subset, options.split
    )
    tokenizer = load_tokenizer(options.tokenizer)
    encoder = Encoder(tokenizer, remember=options.workers <= 3)
    hold_out = HoldOut(options.validation_share)
    head = pipeline.describe(encoder, options.tokenizer, read, hold_out, options.shard_tokens)
    preparation = Preparation(options.output, head, options.force)
    start = time.perf_counter()
    size = 0
    if preparation.manifest.next is not None:
        if preparation.fresh:
            pipeline.check(read, progress)
        with locked(options.output):
            preparation.start(tokenizer)
            size = pipeline.write(
                preparation, read, encoder, hold_out, options.shard_tokens, options.workers, progress
            )
    seconds = time.perf_counter() - start
    made = TokenFolder(options.output)
    if hold_out.share and not made.tokens("validation"):
        print("nothing was held out: a larger --validation-share holds out some", file=sys.stderr)
    rate = f"{size / 1e6:.1f} MB in {seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s"
    counts = [
        f"{split} {made.tokens(split):,} tokens in {made.documents(split):,} documents" for split in SPLITS
    ]
    print(f"{options.output}: {', '.join(counts)}; {rate if size else 'finished before'}")


if __name__ == "__main__":
    sys.exit(main())
