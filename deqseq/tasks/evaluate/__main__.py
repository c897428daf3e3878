"""The command line: ``python -m deqseq.tasks.evaluate {perplexity,length,iterations,duality,downstream}``.

The program checks the arguments before it imports transformers, because the import takes seconds.
"""

import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from deqseq.tasks.common import command_line
from deqseq.tasks.common.settings import PositiveFinite, PositiveInt
from deqseq.tasks.evaluate.downstream import TASKS, check_tasks, local_files

_ABOUT = """\
Evaluate a causal language model, given as a folder or a name on the hub: an implicit or explicit model, or
any other that transformers' AutoModelForCausalLM loads. Each report prints a table; --output DIR also writes
JSON and a figure.

  python -m deqseq.tasks.evaluate perplexity runs/model --text test.txt --length 2048 --output runs/ppl"""

Window = PositiveInt | Literal["all", "model"]


@dataclass
class _Report:
    """The options of all reports.

    Args:
        model: folder of a model or of a pretraining run, or name of a model on the hub
        tokenizer: tokenizer.json, folder or name on the hub; the model's by default
        rtol: stop the search of a token at this relative residual; the model's by default. A smaller value
            may also need a larger maximum number of iterations
        batch_size: sequences solved together; does not change results
        device: cpu, cuda, cuda:1 ...; by default a GPU if there is one
        dtype: type of the weights; auto keeps the checkpoint's type
        output: folder for the report (JSON and a figure). A result with the same settings is overwritten. If
            the folder has other files, or a result with other settings, the option --force is needed
        force: also write to a folder that has other files, or a result with other settings. Other files stay,
            and the old result is overwritten
        text: plain text files in UTF-8; the tokens of several files are concatenated
        limit: maximum number of tokens to predict; all by default
        length: tokens per sequence
        window: tokens solved at a time: a number, 'all', or 'model' for the model's own window
        max_iter: maximum number of iterations per token; the model's by default
    """

    model: str
    _: KW_ONLY
    tokenizer: str | None = None
    rtol: PositiveFinite | None = None
    batch_size: PositiveInt = 8
    limit: PositiveInt | None = None
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    output: Path | None = None
    force: bool = False

    def run(self) -> None:
        """Make the report."""
        if self.output is not None:
            command_line.check_folder(self.output)
        from deqseq.tasks.evaluate.reports import report

        report(self)


@dataclass(kw_only=True)
class _TextReport(_Report):
    text: list[str]


@dataclass(kw_only=True)
class Perplexity(_TextReport):
    """Perplexity of a text, overall and by position in the sequence, with the iterations and time used.

    The text is cut into sequences of equal length. Every token is predicted once, except the first token of
    the text. All predicted tokens have the same weight.
    """

    length: PositiveInt = 2048
    window: Window = "model"
    max_iter: PositiveInt | None = None


@dataclass(kw_only=True)
class Length(_TextReport):
    """Perplexity of a text in sequences of several lengths: does the model work beyond its training length?

    The predicted tokens are the same for every length. The figure also compares each length with the first:
    for every position in the sequence, it shows the change of a token's loss.

    Args:
        length: tokens per sequence; longer sequences run in smaller batches
    """

    length: list[PositiveInt] = field(default_factory=lambda: [2048, 4096, 8192, 16384])
    window: Window = "model"
    max_iter: PositiveInt | None = None


@dataclass(kw_only=True)
class Iterations(_TextReport):
    """Perplexity of a text after 1, 2, 4 ... iterations: does more computation at test time help?

    For implicit models. Without --rtol and without a window, every token does exactly the given number of
    iterations. With --rtol or a window, a token stops earlier if it has converged. The last row uses the
    model's own convergence policy.

    Args:
        iterations: numbers of iterations, one row of the table for each
    """

    length: PositiveInt = 2048
    window: Window = "model"
    iterations: list[PositiveInt] = field(default_factory=lambda: [2**i for i in range(8)])


@dataclass(kw_only=True)
class Duality(_TextReport):
    """Predictions with several windows: are they the same if tokens are solved together or one by one?

    For implicit models. The report compares the predictions of every window with those of the first window.
    With a smaller --rtol, the predictions agree better. Choose --max-iter large enough for all tokens to
    converge.
    """

    length: PositiveInt = 2048
    window: list[Window] = field(default_factory=lambda: ["all", 64, 8, 1])
    max_iter: PositiveInt | None = None


@dataclass(kw_only=True)
class Downstream(_Report):
    """LAMBADA, HellaSwag, PIQA, ARC, WinoGrande and OpenBookQA through lm-eval, zero-shot.

    Needs pip install 'deqseq[eval]'. The average uses each task's usual metric.

    Args:
        tasks: tasks to run
        data_dir: folder of JSONL files named after the tasks, with the fields of the hub's dataset or of the
            original release; by default the data come from the hub
        limit: documents per task; all by default
    """

    window: Window = "model"
    max_iter: PositiveInt | None = None
    tasks: list[Literal[tuple(TASKS)]] = field(default_factory=lambda: list(TASKS))  # type: ignore[valid-type]
    data_dir: str | None = None
    files: dict[str, Path] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_tasks(self.tasks)
        if self.data_dir is not None:
            self.files = local_files(self.tasks, self.data_dir)


REPORTS = {kind.__name__.lower(): kind for kind in (Perplexity, Length, Iterations, Duality, Downstream)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    return command_line.main(
        "python -m deqseq.tasks.evaluate", _ABOUT, REPORTS, arguments, interrupted="nothing was written"
    )


if __name__ == "__main__":
    sys.exit(main())
