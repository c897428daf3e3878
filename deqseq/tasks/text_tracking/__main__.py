"""The command line: ``python -m deqseq.tasks.text_tracking {data,evaluate}``.

The program checks the arguments before it imports transformers, because the import takes seconds.
"""

import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from deqseq.tasks.common import command_line
from deqseq.tasks.common.settings import BelowOne, PositiveFinite, PositiveInt, Seed
from deqseq.tasks.text_tracking.documents import Kind

_ABOUT = """\
State tracking in text. Documents describe programs, boxes or cards that change step by step, and contain
answers that follow from many earlier sentences. Does a language model keep track of the state?

  python -m deqseq.tasks.text_tracking data --output data/tracking --length 128
  python -m deqseq.tasks.pretrain llama-tiny --data data/tracking/shards --length 128 \\
      --model.vocab_size 65 --output runs/llama
  python -m deqseq.tasks.text_tracking evaluate runs/llama --data data/tracking --output runs/tracking"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    return command_line.main(
        "python -m deqseq.tasks.text_tracking", _ABOUT, {"data": make_data, "evaluate": Evaluate}, arguments,
        interrupted="the command data continues if it is repeated; evaluate has written nothing",
    )  # fmt: skip


def make_data(
    *,
    output: Path,
    kinds: list[Kind] = ["programs", "boxes", "cards"],  # noqa: B006
    length: PositiveInt = 256,
    test_lengths: list[PositiveInt] | None = None,
    places: PositiveInt = 5,
    longest_run: PositiveInt | None = 1,
    documents: PositiveInt = 100_000,
    test_documents: PositiveInt = 500,
    validation_share: BelowOne = 0.01,
    seed: Seed = 0,
) -> None:
    """Generate documents, and prepare their token shards for pretraining.

    Every document fills exactly one row of LENGTH tokens. So pretraining with this length does not cut
    documents. Repeat the command to continue after an interruption.

    Args:
        output: folder to make. Pretraining reads the folder shards in it
        kinds: kinds of documents. Each document has one kind, chosen at random
        length: number of tokens in a training document, including the end-of-text token
        test_lengths: numbers of tokens in the test documents; by default LENGTH, 2 LENGTH and 4 LENGTH
        places: number of variables in a program, of things in boxes, or of cards; 3 to 8
        longest_run: largest number of operations between two answers; loops may exceed it. 1 asks after
            every operation, so small models learn early. null sets no limit: documents have fewer answers,
            and longer ones need more operations
        documents: number of training documents, including those held out for validation
        test_documents: number of test documents of each length
        validation_share: share of the training documents that pretraining evaluates on
        seed: seed of all documents
    """
    command_line.check_folder(output)
    from deqseq.tasks.common.corpus import TokenFolder
    from deqseq.tasks.text_tracking.data import make_folder

    made = make_folder(
        output, kinds, length, test_lengths or [length, 2 * length, 4 * length], places,
        longest_run, documents, test_documents, validation_share, seed,
    )  # fmt: skip
    shards = TokenFolder(output / "shards")
    print(
        f"{shards.path}: {shards.tokens('train'):,} tokens to train on, {shards.tokens('validation'):,} held "
        f"out; a vocabulary of {shards.vocab_size} tokens"
    )
    print(f"{output}: tests of {', '.join(map(str, made['test_lengths']))} tokens")
    print(
        f"to train a model: python -m deqseq.tasks.pretrain llama-tiny --data {shards.path} "
        f"--length {length} --model.vocab_size {shards.vocab_size}"
    )


@dataclass
class Evaluate:
    """Score the answers of one or more models at several lengths, in one table.

    Each model is a run of pretraining, or a folder that transformers' AutoModelForCausalLM loads: implicit,
    explicit, or any other causal language model with the vocabulary of the data. Two simple rules, which
    ignore all operations, are in the table too.

    Args:
        models: folders of models or runs
        data: folder made by the command data
        length: lengths to test; all test lengths of the data by default
        limit: number of documents of each length; all by default
        window: tokens that implicit models solve together: a number, 'all', or 'model' for the model's own
        rtol: implicit models stop the search of a token at this relative residual; the model's by default
        max_iter: maximum number of iterations per token in implicit models; the model's by default
        batch_size: documents solved together at the shortest length; longer documents run in smaller batches
        device: cpu, cuda, cuda:1 ...; by default a GPU if there is one
        dtype: type of the weights; auto keeps the checkpoint's type
        output: folder for tracking.json and tracking.png, which are overwritten
    """

    models: list[Path]
    _: KW_ONLY
    data: Path
    length: list[PositiveInt] | None = None
    limit: PositiveInt | None = None
    window: PositiveInt | Literal["all", "model"] = "model"
    rtol: PositiveFinite | None = None
    max_iter: PositiveInt | None = None
    batch_size: PositiveInt = 64
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    output: Path | None = None

    def run(self) -> None:
        """Make the report."""
        if self.output is not None:
            command_line.check_folder(self.output, "tracking.json", "tracking.png")
        from deqseq.tasks.text_tracking.report import make_report

        make_report(self)


if __name__ == "__main__":
    sys.exit(main())
