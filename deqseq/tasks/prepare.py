"""Turn text into token shards for pretraining: ``python -m deqseq.tasks.prepare TEXT... --output DIR``."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from deqseq.tasks.common import command_line
from deqseq.tasks.common.settings import BelowOne, PositiveInt

_PROCESSORS = os.cpu_count() or 1
_ABOUT = """\
Tokenise text into shards that pretraining reads: plain text, JSONL (.jsonl, .ndjson, .json: one object per
line), parquet, or any dataset of the datasets library. Text and JSONL may be compressed (.gz, .zst, .xz,
.bz2, or .zip with one file in it) and remote (s3://, gs://, hf://). Every document ends with the tokenizer's
end-of-text token. A random share of the documents, chosen by a hash of the text, is held out for validation.

If you name a folder, every text file below it is one document. Hidden files, files that are not UTF-8 and
repeated texts are dropped, and so are generated files (see --rules).

  python -m deqseq.tasks.prepare book.txt --output data/book --validation-share 0.01
  python -m deqseq.tasks.prepare pile/*.jsonl --output data/pile --tokenizer tokenizer.json
  python -m deqseq.tasks.prepare --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT --output data/web
  python -m deqseq.tasks.prepare --files '*.py,*.md' ~/projects --output data/mine --tokenizer train:16000
  python -m deqseq.tasks.prepare --installed --output data/python --tokenizer train:32000

Run the same command again after an interruption: finished shards are kept. The result does not depend on
interruptions or the number of workers. Several machines can prepare `--part 1/8`, `--part 2/8` ..., each into
another folder; `--merge FOLDER... --output DIR` merges these folders. `--verify --output DIR` compares
finished shards with their checksums."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare or verify a folder; returns the exit status."""
    # Switch off the threads of the tokenizers library. They would compete with our workers, and the library
    # would warn about forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return command_line.main(
        "python -m deqseq.tasks.prepare", _ABOUT, {}, arguments, default=prepare,
        interrupted="the same command goes on after the last finished shard",
    )  # fmt: skip


def prepare(
    text: list[str] = [],  # noqa: B006
    *,
    output: Path,
    files: str | None = None,
    installed: bool = False,
    rules: Literal["code", "none"] = "code",
    tokenizer: str = "EleutherAI/gpt-neox-20b",
    documents: Literal["file", "blank", "line"] = "file",
    column: str = "text",
    dataset: str | None = None,
    subset: str | None = None,
    split: str = "train",
    validation_share: BelowOne = 0.001,
    shard_tokens: PositiveInt = 100_000_000,
    workers: PositiveInt = _PROCESSORS,
    part: str = "1/1",
    merge: list[str] = [],  # noqa: B006
    force: bool = False,
    verify: bool = False,
) -> None:
    """Make all shards that are missing, and print the numbers of tokens and documents.

    Args:
        text: text files or folders; with --dataset, the data files of the dataset
        output: folder for the shards
        files: names of the files to read in folders, such as '*.py'; separate several patterns by commas. By
            default all files (*), or *.py with --installed
        installed: also read the packages and the standard library of the running Python; name folders of your
            own before this option
        rules: which files of folders to drop. code: files that are probably generated (more than 1
            MiB, fewer than 100 characters, a line of more than 1,000 characters, more than 100 characters a
            line on average, or less than 25 % letters and digits). none: empty files and files of more than
            10 MiB; use this for prose
        tokenizer: name on the hub, a tokenizer.json file or a folder; train:32000 trains a tokenizer of
            32,000 tokens on about 50 MB of the training documents and saves it in --output/tokenizer
        documents: where plain text is divided into documents: never (file), at blank lines (blank) or after
            each line (line). With file, random pieces of about 1,000 tokens are held out. In folders, every
            file is one document, which is held out as a whole
        column: column with the text; only for JSONL, parquet and datasets
        dataset: name on the hub; or a file format such as json, which then reads the files TEXT
        subset: configuration of the dataset
        split: split of the dataset
        validation_share: share of the documents that is held out for validation
        shard_tokens: approximate number of tokens per shard; an interruption loses only unfinished shards
        workers: number of threads that tokenise; one for each processor by default
        part: K/N divides the text into N parts of about equal size and prepares only part K
        merge: folders to merge into --output by hard links, one folder for each part; tokenises nothing
        force: start again; replaces all shards in the folder and keeps its other files
        verify: only compare finished shards with their checksums; prepares nothing
    """
    # Import here, after the arguments are parsed: tokenizers and datasets take seconds to import.
    from deqseq.tasks.common.corpus import HoldOut, TokenFolder, parts, pipeline
    from deqseq.tasks.common.corpus.folders import FolderFiles
    from deqseq.tasks.common.corpus.sources import sources
    from deqseq.tasks.common.corpus.vocabulary import trained_tokenizer
    from deqseq.tasks.common.tokenizer import load_tokenizer, trained_size

    leave_out = "leave out TEXT, --dataset and --installed"
    if verify:
        if text or dataset or installed:
            raise ValueError(f"--verify reads the shards of --output alone: {leave_out}")
        TokenFolder(output).verify()
        print(f"{output}: all shards are as they were written")
        return
    command_line.check_folder(output)
    if merge:
        if text or dataset or installed:
            raise ValueError(f"--merge reads the folders of parts alone: {leave_out}")
        parts.merge(output, merge, force)
        print(f"{output}: {_counts(output)}")
        return
    number = parts.parse_part(part)
    hold_out, train = HoldOut(validation_share), trained_size(tokenizer)
    read = sources(
        text, documents, column, dataset, subset, split, files, rules, installed, without=[str(output)]
    )
    for source in read:
        if isinstance(source, FolderFiles):
            print(f"{source.contents.tables()}\n", flush=True)
            if source.rules == "code" and source.contents.mostly_dropped():
                print("most of the text was dropped: --rules none keeps prose", file=sys.stderr)
    if train:
        vocabulary = trained_tokenizer(output, tokenizer, train, read, hold_out, force)
        if len(vocabulary) < train:
            print(f"the text is too short for {train:,} tokens: made {len(vocabulary):,}", file=sys.stderr)
    else:
        vocabulary = load_tokenizer(tokenizer)
    start = time.perf_counter()
    size = pipeline.prepare(
        output,
        read,
        vocabulary,
        tokenizer,
        hold_out,
        shard_tokens,
        workers,
        force,
        number,
    )
    seconds = time.perf_counter() - start
    if validation_share and not TokenFolder(output).tokens("validation"):
        print(
            "nothing was held out, and pretraining needs held-out text: repeat the command with --force and "
            f"a larger --validation-share than {validation_share:g}",
            file=sys.stderr,
        )
    rate = f"{size / 1e6:.1f} MB in {seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s"
    print(f"{output}: {_counts(output)}; {rate if size else 'finished before'}")


def _counts(folder: Path) -> str:
    """The numbers of tokens and documents of a prepared folder, in words."""
    from deqseq.tasks.common.corpus import TokenFolder
    from deqseq.tasks.common.corpus.holdout import SPLITS

    made = TokenFolder(folder)
    return ", ".join(
        f"{split} {made.tokens(split):,} tokens in {made.documents(split):,} documents" for split in SPLITS
    )


if __name__ == "__main__":
    sys.exit(main())
