"""The command line: ``python -m deqseq.tasks.evaluate {perplexity,length,iterations,duality,downstream}``.

The libraries of models are imported once the arguments are right: help and mistakes do not wait for them.
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
Evaluate a causal language model: a folder or a name on the hub, implicit, explicit, or any other that
transformers' AutoModelForCausalLM loads. Each report prints a table; --output DIR keeps it as JSON, with a
figure.

  python -m deqseq.tasks.evaluate perplexity runs/model --text test.txt --length 2048 --output runs/ppl"""

Window = PositiveInt | Literal["all", "model"]


@dataclass
class _Report:
    """The options of all reports.

    Args:
        model: folder of a model, or its name on the hub
        tokenizer: tokenizer.json, folder or name on the hub; the model's by default
        rtol: relative residual to solve to, the model's by default; the iterations allowed stay, so allow
            more for a smaller one
        batch_size: sequences solved together; does not change results
        device: cpu, cuda, cuda:1 ...; a GPU if there is one by default
        dtype: type of the weights; auto is the checkpoint's
        output: folder for the report as JSON with a figure; a former result with the same settings is
            overwritten, any other only with --force
        force: write beside other files, and over a result with other settings
        text: plain text files, UTF-8; several are read one after the other
        limit: predict this many tokens; all by default
        length: tokens of a sequence
        window: tokens solved at a time: 'all', 1 for one by one, a number, or 'model', the model's own
        max_iter: iterations that a token may take; the model's by default
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
        from deqseq.tasks.common.models import quiet_transformers
        from deqseq.tasks.evaluate.reports import report

        quiet_transformers()
        report(self)


@dataclass(kw_only=True)
class _TextReport(_Report):
    text: list[str]


@dataclass(kw_only=True)
class Perplexity(_TextReport):
    """Perplexity of a text, by position too, and what solving it took.

    The text is cut into sequences of one length; every token but the first is predicted once and weighs the
    same.
    """

    length: PositiveInt = 2048
    window: Window = "model"
    max_iter: PositiveInt | None = None


@dataclass(kw_only=True)
class Length(_TextReport):
    """The same text in sequences of several lengths: does the model work beyond its training length?

    The figure shows, by position, how much the loss of the same tokens changes against the first length.

    Args:
        length: tokens of a sequence; longer ones go in smaller batches
    """

    length: list[PositiveInt] = field(default_factory=lambda: [2048, 4096, 8192, 16384])
    window: Window = "model"
    max_iter: PositiveInt | None = None


@dataclass(kw_only=True)
class Iterations(_TextReport):
    """The same text with 1, 2, 4 ... iterations: what does more computing at test time buy?

    For implicit models. All tokens do exactly that many; with --rtol or a window, at most that many. The last
    row is the model's own policy.

    Args:
        iterations: numbers of iterations
    """

    length: PositiveInt = 2048
    window: Window = "model"
    iterations: list[PositiveInt] = field(default_factory=lambda: [2**i for i in range(8)])


@dataclass(kw_only=True)
class Duality(_TextReport):
    """The same text in several windows: does solving all tokens together say what one by one says?

    For implicit models. Compares the predictions with those of the first window. They agree as well as --rtol
    asks for, if --max-iter lets all tokens converge.
    """

    length: PositiveInt = 2048
    window: list[Window] = field(default_factory=lambda: ["all", 64, 8, 1])
    max_iter: PositiveInt | None = None


@dataclass(kw_only=True)
class Downstream(_Report):
    """LAMBADA, HellaSwag, PIQA, ARC, WinoGrande and OpenBookQA through lm-eval, zero-shot.

    Needs pip install 'deqseq[eval]'. The average takes each task's usual metric.

    Args:
        tasks: tasks to run
        data_dir: folder of JSONL files in the original or the hub's schema, with the tasks' own names; from
            the hub by default
        limit: documents of each task; all by default
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
    """Run a command; returns the exit status."""
    return command_line.main(
        "python -m deqseq.tasks.evaluate", _ABOUT, REPORTS, arguments, interrupted="nothing was written"
    )


if __name__ == "__main__":
    sys.exit(main())
