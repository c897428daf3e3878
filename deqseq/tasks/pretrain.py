"""Pretrain a language model: ``accelerate launch tasks/pretrain.py RUN [--field value ...]``.

Also ``python -m deqseq.tasks.pretrain``, on one device.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm.contrib.logging import logging_redirect_tqdm

from deqseq.tasks.common.command_line import run

_ABOUT = """\
Pretrain a language model, implicit or explicit, stage by stage, with checkpoints, scores and a model card.

RUN is a run file (YAML), or one of the paper's models by name: mamba2-130m, llama-1.3b, ...; with -explicit
behind it, its explicit twin. Any field of the run can be given here, deep ones by dotted names:

  python -m deqseq.tasks.prepare books/*.txt --output data/books
  python -m deqseq.tasks.pretrain llama-130m --data data/books --tokens 1e9 --dry-run
  accelerate launch --config_file tasks/pretraining/accelerate/ddp.yaml --num_processes 8 \\
      tasks/pretrain.py llama-130m --data data/books --tokens 1e9 --stages.0.until 0.7

The same command goes on where an interrupted run stopped, on any number of processes.

  python -m deqseq.tasks.pretrain compare runs/a runs/b    perplexity against tokens and time, drawn
  python -m deqseq.tasks.pretrain demo --text FILE    minutes on two cores: both models, both stages"""


def parser() -> argparse.ArgumentParser:
    """The command line's arguments, without the fields of a run."""
    found = argparse.ArgumentParser(
        prog="pretrain", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    found.add_argument(
        "run", metavar="RUN", nargs="?", help="run file, name of one that comes along, or 'demo'"
    )
    found.add_argument("--output", metavar="DIR", help="folder of the run (default: runs/RUN)")
    found.add_argument("--dry-run", action="store_true", help="say what the run would take, and stop")
    found.add_argument(
        "--plot", metavar="PNG", help="draw the schedule (dry run; default: beside the folder)"
    )
    found.add_argument("--fields", action="store_true", help="list the fields of a run, and stop")
    found.add_argument("--processes", type=int, metavar="N", help="for a dry run: processes to plan for")
    return found


def overrides(rest: Sequence[str]) -> list[tuple[str, str]]:
    """``--name value`` and ``--name=value`` as pairs.

    Raises:
        ValueError: a name without a value, a value without a name.
    """
    pairs, arguments = [], iter(rest)
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise ValueError(f"expected --field value, got {argument!r}")
        if not equals:
            given = next(arguments, None)
            if given is None or (given.startswith("--") and len(given) > 2):
                raise ValueError(f"--{name} needs a value")
            value = given
        pairs.append((name.replace("-", "_"), value))
    return pairs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run(
        lambda: _command(given),
        interrupted="the same command goes on from the last checkpoint",
        log_level=logging.INFO,
    )


def _command(given: list[str]) -> None:
    with logging_redirect_tqdm():  # above the bars, not into them
        if given[:1] == ["demo"]:
            from deqseq.tasks.pretraining.demo import command as demo

            demo(given[1:])
        elif given[:1] == ["compare"]:
            from deqseq.tasks.pretraining.compare import command as compare

            compare(given[1:])
        else:
            options, rest = parser().parse_known_args(given)
            _run(options, overrides(rest))


def _run(options: argparse.Namespace, fields: list[tuple[str, str]]) -> None:
    # Models take seconds to import: not before the arguments are right.
    from deqseq.tasks.common.models import quiet_transformers
    from deqseq.tasks.pretraining.plan import describe, plot_schedule
    from deqseq.tasks.pretraining.run_files import describe_fields, load_run
    from deqseq.tasks.pretraining.train import pretrain

    quiet_transformers()
    if options.fields:
        print(describe_fields())
        return
    if options.run is None:
        raise ValueError("name a run: a run file, or one that comes along, such as llama-130m")
    settings = load_run(options.run, fields)
    name = Path(options.run).name.removesuffix(".yaml").removesuffix(".yml")
    output = Path(options.output or Path("runs") / name)
    if options.dry_run:
        print(describe(settings, options.processes))
        plot = Path(options.plot or output.with_name(f"{output.name}-schedule.png"))
        if plot_schedule(settings, plot):
            print(f"drew the schedule in {plot}")
        return
    model = pretrain(settings, output)
    from accelerate import PartialState

    if PartialState().is_main_process:
        print(f"the model is in {model}")


if __name__ == "__main__":
    sys.exit(main())
