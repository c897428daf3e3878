"""What does iterating buy in a language model? Trains ordinary and implicit models, and forms in between.

An implicit model differs from an ordinary one in two ways: its input goes into every block, and it iterates.
So the study also trains forms in between, on the same data, with the same batches and schedules:

    transformers   transformers' own Llama or Mamba2: its initial weights, without weight normalisation
    explicit       the explicit twin: the same blocks with weight normalisation, applied once
    injected       the input goes into every block, and f is evaluated once: the control
    1+1, 2+1, 4+1  a search of 1, 2 or 4 evaluations without a graph, then one phantom step with a graph
    free           two stages, as in the paper: 4+1, then a search until every token has converged and four
                   phantom steps
    adaptive       like free, but with the adaptive budget of the run files: fewer evaluations in a search
    growth         stages 1, 1+1, 2+1 and free; stage 1 evaluates f once, with a graph

Every form is trained with every budget, learning rate and seed. A budget is a number of tokens, or a number
of seconds. The learning rate falls over the second half of the budget. Evaluations and compilation do not
count as seconds. The script measures the time of a step in every stage before it trains, or takes the times
from the logs of finished runs: `time --runs FOLDER`. From these times it computes the number of steps in a
budget of seconds. It assumes that a search until convergence takes --timed-search evaluations, by default the
maximum. On a CPU, seconds are processor seconds, which other programs change less. The tokenizer of the data
may have at most as many tokens as the models: 50,277, or 1,024 with `--size tiny`.

    python -m deqseq.tasks.prepare --installed --tokenizer train:50277 --validation-share 0.005 --output DATA
    python benchmarks/what_iteration_buys.py time --data DATA --output runs/what-iteration-buys/llama
    python benchmarks/what_iteration_buys.py train --data DATA --output runs/what-iteration-buys/llama \\
        --forms explicit injected 2+1 --budget-tokens 26e6 --budget-seconds 180 --seeds 1 2
    python benchmarks/what_iteration_buys.py report runs/what-iteration-buys/llama

To resume, repeat a command: finished parts are not repeated. Several processes can train different forms or
seeds in one folder at the same time. Before you start them, run the command time alone. `--size tiny` is for
CPUs."""

import logging
import os
import sys
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from iteration.forms import FORMS, Budget, Form, Study
from iteration.results import collect, save, tables
from iteration.training import seconds_of_a_step, take_times, train_one
from tqdm.contrib.logging import logging_redirect_tqdm

from deqseq.tasks.common import command_line
from deqseq.tasks.common.models import quiet_transformers
from deqseq.tasks.common.settings import PositiveFinite, PositiveInt, Seed, build


def measure(
    *,
    forms: list[Form] = FORMS,
    runs: list[Path] = [],  # noqa: B006
    settings: Annotated[dict[str, Any], Study],
) -> None:
    """Measure the time of a step in every stage of the forms. Measured stages are not measured again.

    Args:
        forms: forms whose stages are measured
        runs: folders with finished runs of the study. Take the times of a step from the logs of these runs,
            and measure nothing. On a CPU, these are wall-clock times
    """
    study = build(Study, settings)
    stages = list(dict.fromkeys(stage for form in forms for stage, _ in study.stages(form)))
    if runs:
        take_times(study, stages, runs)
    for name in stages:
        print(f"{study.name}, stage {name}: {1e3 * seconds_of_a_step(study, name):.1f} ms a step")


def train(
    *,
    forms: list[Form] = FORMS,
    budget_tokens: list[PositiveInt] = [],  # noqa: B006
    budget_seconds: list[PositiveFinite] = [],  # noqa: B006
    learning_rates: list[PositiveFinite] = [],  # noqa: B006
    seeds: list[Seed] = [1],  # noqa: B006
    points: PositiveInt = 10,
    keep_models: bool = False,
    settings: Annotated[dict[str, Any], Study],
) -> None:
    """Train every form with every budget, learning rate and seed. Finished runs are not repeated.

    If a run diverges, the other runs are trained nevertheless, and the exit status is 1.

    Args:
        forms: forms to train
        budget_tokens: numbers of tokens to train on
        budget_seconds: numbers of seconds to train for
        learning_rates: highest learning rates; by default 1e-3 for 130m, and the run file's for other sizes
        seeds: seeds of the initial weights and of the order of the rows
        points: number of evaluations in a run, at equal shares of its budget
        keep_models: keep the models and checkpoints of finished runs; for 130m, each run has gigabytes
    """
    study = build(Study, settings)
    budgets = [Budget("tokens", amount) for amount in budget_tokens]
    budgets += [Budget("seconds", amount) for amount in budget_seconds]
    if not budgets:
        raise ValueError("no budget: give numbers of tokens or seconds, such as --budget-seconds 180")
    usual = 1e-3 if study.size == "130m" else study.base.learning_rate
    diverged = []
    for seed, budget, rate, form in product(seeds, budgets, learning_rates or [usual], forms):
        run = f"{budget.name}, {form}, learning rate {rate:g}, seed {seed}"
        try:
            with logging_redirect_tqdm():
                result = train_one(study, form, budget, rate, seed, points, keep_models)
        except FloatingPointError as error:
            print(f"{run}: {error}")
            diverged.append(run)
        else:
            print(f"{run}: perplexity {result.perplexity:.3f}")
    if diverged:
        raise FloatingPointError(f"these runs have diverged and have no result: {'; '.join(diverged)}")


def report(folders: list[Path], *, output: Path = Path("runs/what-iteration-buys/report")) -> None:
    """Join the finished runs of one or more studies: a table for each budget, one JSON file and one figure.

    Args:
        folders: folders of studies
        output: path of the JSON file and the figure, without a suffix
    """
    command_line.check_stem("--output", output)
    results = collect(folders)
    for title, text in tables(results).items():
        print(f"{title}\n\n{text}\n")
    print(f"wrote {', '.join(map(str, save(results, output)))}")


def main() -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    quiet_transformers()
    commands = {"time": measure, "train": train, "report": report}
    return command_line.main(
        "what_iteration_buys.py", __doc__ or "", commands, None,
        interrupted="repeat the command to resume", log_level=logging.INFO,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
