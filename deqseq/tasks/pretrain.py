"""Pretrain a language model: ``accelerate launch tasks/pretrain.py RUN [--field value ...]``.

On one device, ``python -m deqseq.tasks.pretrain RUN`` does the same.
"""

import gc
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from tqdm.contrib.logging import logging_redirect_tqdm

from deqseq.tasks.common import command_line
from deqseq.tasks.common.settings import PositiveInt
from deqseq.tasks.pretraining.compare import compare
from deqseq.tasks.pretraining.settings import RunSettings

_ABOUT = """\
Pretrain a language model, implicit or not, stage by stage, with checkpoints, scores and a model card.

RUN is a run file (YAML) or the name of one of the paper's models: mamba2-130m, llama-1.3b, ... NAME-explicit
is the explicit twin of NAME. NAME-injected evaluates the map of NAME once: the control that shows what
iterating contributes. NAME-growth begins training with one evaluation of this map, and adds iterations in
later stages. Options override any field of the run; nested fields have dotted names. `RUN --help` lists all
fields with the values of RUN.

  python -m deqseq.tasks.prepare books/*.txt --output data/books
  python -m deqseq.tasks.pretrain llama-130m --data data/books --tokens 1e9 --dry-run
  accelerate launch --config_file tasks/pretraining/accelerate/ddp.yaml --num_processes 8 \\
      tasks/pretrain.py llama-130m --data data/books --tokens 1e9 --stages.0.until 0.7

To resume an interrupted run, repeat its command, on any number of processes.

  python -m deqseq.tasks.pretrain compare runs/a runs/b    print and plot perplexity
  python -m deqseq.tasks.pretrain demo --text FILE    train small models, minutes on two cores"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return command_line.main(
        "pretrain", _ABOUT, {"demo": _demo, "compare": compare}, arguments, default=_pretrain,
        interrupted="the same command resumes from the last checkpoint, if there is one",
        log_level=logging.INFO,
    )  # fmt: skip


def _fields(run: str) -> Mapping[str, Any]:
    """The fields of a run, by name."""
    from deqseq.tasks.pretraining.run_files import load_run

    return vars(load_run(run))


def _pretrain(
    run: str,
    *,
    output: Path | None = None,
    dry_run: bool = False,
    plot: Path | None = None,
    processes: PositiveInt = 1,
    settings: Annotated[dict[str, Any], RunSettings, _fields],
) -> None:
    """Train a model, or print what its training would cost.

    Args:
        run: run file, name of a shipped run file, or the command 'demo' or 'compare'
        output: folder of the run; runs/RUN by default
        dry_run: do not train; print the run's costs (FLOPs, memory) and draw its schedule. If the data, the
            model to start from or the tracker are missing, end with the error of a real run and draw nothing;
            --data null plans without them
        plot: PNG file to which a dry run draws the schedule; beside the output folder by default
        processes: number of processes that a dry run assumes
    """
    if plot is not None:
        command_line.check_png("--plot", plot)
    if not dry_run and plot is not None:
        raise ValueError("--plot is for a dry run only: also give --dry-run")
    if not dry_run and processes != 1:
        raise ValueError(
            "--processes is for a dry run only: also give --dry-run, or start several processes with "
            "accelerate launch --num_processes"
        )
    # Import these modules late, so that wrong arguments are reported at once. The imports take seconds.
    from deqseq.tasks.common.seals import checkpoints
    from deqseq.tasks.pretraining.data import open_data
    from deqseq.tasks.pretraining.plan import describe, held_out_rows, plot_schedule
    from deqseq.tasks.pretraining.run_files import load_run
    from deqseq.tasks.pretraining.train import check_start, pretrain

    found = load_run(run, settings)
    output = output or Path("runs") / Path(run).name.removesuffix(".yaml").removesuffix(".yml")
    if dry_run:
        print(describe(found, processes))
        # Raise the error that would end a real run, before anything is written.
        if isinstance(found.data, str):
            held_out_rows(found)
        if found.data is not None:
            data = open_data(found) if isinstance(found.data, str) else None
            check_start(found, next(iter(checkpoints(output)), None), data)
        named = output if output.name else output.resolve()  # Path(".") has no name
        plot = plot or named.with_name(f"{named.name}-schedule.png")
        if plot_schedule(found, plot):
            print(f"drew the schedule in {plot}")
        return
    with logging_redirect_tqdm():  # print log lines above the progress bars
        model = pretrain(found, output)
    from accelerate import PartialState

    state = PartialState()
    if state.is_main_process:
        print(f'the model is in {model}; to try it: python -m deqseq.tasks.generate {output} "PROMPT"')
    # gloo threads that still run when Python exits abort the process (pytorch/pytorch#179291). Destroying the
    # process group ends them only if no object refers to the group any more.
    gc.collect()
    state.destroy_process_group()


def _demo(
    *,
    text: list[str] | None = None,
    output: Path = Path("runs/pretrain-demo"),
    steps: PositiveInt | None = None,
) -> None:
    """Pretrain six small models: Llama and Mamba2, each implicit (in two stages), injected and explicit.

    First trains a tokenizer and prepares the text. At the end, compares the models, plots their curves,
    samples from the implicit models and evaluates them. Takes minutes on two cores. Repeat the command to
    resume an interrupted demo.

    Args:
        text: plain text files, together 0.5 MB or more; Python's help pages by default
        output: folder for all results
        steps: optimiser steps of every model, a multiple of 5; 400 by default
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from deqseq.tasks.pretraining.demo import demo

    with logging_redirect_tqdm():
        demo(text, output, steps)


if __name__ == "__main__":
    sys.exit(main())
