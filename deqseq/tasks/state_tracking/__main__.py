"""The command line: ``python -m deqseq.tasks.state_tracking {train,evaluate,study,data,jacobian,demo}``.

The program checks the arguments before it imports transformers, because the import takes seconds.
"""

import logging
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from deqseq.tasks.common import command_line
from deqseq.tasks.common.runs import read_record
from deqseq.tasks.common.settings import (
    ClosedUnitInterval,
    Damping,
    NonNegativeInt,
    PositiveInt,
    build_changed,
    read_yaml,
)
from deqseq.tasks.state_tracking.data import algebra_of_csv, generate, read_csv, write_csv
from deqseq.tasks.state_tracking.settings import RUNS, TrainSettings

_ABOUT = """\
State tracking: read elements of a group and predict, after each one, the product so far. This task is called
the word problem of the group.

Linear recurrences and attention of fixed depth cannot solve the word problem of A5 (60 elements) at every
length. One implicit layer learns to solve it. A token is the identity with probability p, so a share 1 - p
of the tokens changes the product."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    commands: dict[str, command_line.Command] = {
        "train": _train, "evaluate": _evaluate, "study": _study, "data": _data, "jacobian": _jacobian,
        "demo": _demo,
    }  # fmt: skip
    return command_line.main(
        "python -m deqseq.tasks.state_tracking", _ABOUT, commands, arguments,
        interrupted="train and study resume from their last checkpoint with the same command",
        log_level=logging.INFO,
    )  # fmt: skip


def _train(
    *,
    output: Path,
    run: str | None = None,
    save_steps: PositiveInt = 500,
    settings: Annotated[dict[str, Any], TrainSettings, partial(read_yaml, shipped=RUNS)],
) -> None:
    """Train a model in a folder.

    By default, the settings are those of the demo (group A5, length 16). Training then takes minutes on a
    laptop. With --group S5, the default settings come from the file s5-small, and training takes 25 minutes.
    --run reads default settings from another file. The shipped files a5xm, s5 and s5xm are the tasks of
    Schöne et al. (ICML 2025) at full size. Each takes minutes on a GPU. To resume after an interruption, run
    the same command again.

    Args:
        output: folder of the run
        run: YAML file with default values of the settings below; or a shipped file: a5xm, s5, s5xm, s5-small,
            a5-small. With --help, the list below shows the file's values
        save_steps: steps between checkpoints
    """
    if run is None and settings.get("group") == "S5":
        run = "s5-small"
    defaults = {} if run is None else read_yaml(run, RUNS)
    found = build_changed(TrainSettings, defaults, settings)
    from deqseq.tasks.state_tracking.plots import plot_training
    from deqseq.tasks.state_tracking.train import train

    train(found, output, save_steps=save_steps)
    record = read_record(output)
    plot_training(record["log"], output / "training.png")
    print(f"trained in {record['seconds']:.0f} s; model, log and figure in {output}")


def _evaluate(
    run: Path,
    *,
    length: list[PositiveInt] | None = None,
    window: list[PositiveInt | Literal["all"]] | None = None,
    sequences: PositiveInt | None = None,
    seed: NonNegativeInt | None = None,
    identity_probability: list[ClosedUnitInterval] | None = None,
    tolerance: float | None = None,
    max_iter: PositiveInt | None = None,
    damping: Damping | None = None,
    batch_size: PositiveInt = 256,
    csv: str | None = None,
    output: Path | None = None,
) -> None:
    """Test a trained model at any length and in any window. Writes JSON and a figure.

    Tests on new random sequences, for every combination of length, window and identity probability. With
    --csv, tests instead on the sequences in a file of the word-problem benchmark, in every window.

    Args:
        run: folder of a finished run
        length: tokens per sequence; by default the training length, and four times the training length
        window: number of tokens solved at a time, or 'all' (default 8). All windows give the same answers, at
            different cost. An explicit model has no window
        sequences: number of sequences (default 512)
        seed: seed of the sequences (default 0)
        identity_probability: probability that a token is the identity; by default as in training
        tolerance: relative residual at which a token has converged; by default the model's tolerance
        max_iter: maximum number of evaluations per token; by default the model's maximum
        damping: solve with Picard's iteration and this damping, in (0, 1]; 1 means no damping. By default,
            solve with the model's own solver
        batch_size: sequences solved together
        csv: CSV file to test on instead of new sequences
        output: folder for results, by default RUN/evaluation. Earlier results in the folder are overwritten
    """
    if csv is not None:
        command_line.refuse(
            "--csv tests on the sequences in a file",
            length=length, sequences=sequences, seed=seed, identity_probability=identity_probability,
        )  # fmt: skip
    sequences, seed = sequences or 512, seed or 0
    from deqseq.tasks.state_tracking.evaluate import Evaluation, evaluate, evaluate_fresh, load, save, table
    from deqseq.tasks.state_tracking.plots import plot_by_position

    folder = output or run / "evaluation"
    model, settings = load(run)
    command_line.check_folder(folder, "evaluation.json", "by_position.png")
    search = {"tolerance": tolerance, "max_iter": max_iter, "damping": damping}
    if settings.explicit:
        command_line.refuse("an explicit model has no solver", window=window, **search)
    windows = [None] if settings.explicit else [None if size == "all" else size for size in window or [8]]
    asked = {**search, "csv": csv} | ({} if csv is not None else {"sequences": sequences, "seed": seed})
    options: dict[str, Any] = {**search, "batch_size": batch_size, "progress": True}
    rows: list[tuple[str, Evaluation]] = []

    def keep(found: Evaluation) -> None:  # saves after every test: the next test may take an hour
        rows.append((settings.form, found))
        save(rows, folder / "evaluation.json", **asked)

    if csv is not None:
        group = algebra_of_csv(csv)
        if group.name != settings.algebra.name:
            raise ValueError(f"{csv} has products in {group.name}, but the model learned {settings.group}")
        tokens, targets, _ = read_csv(csv, group)
        for size in windows:
            keep(evaluate(model, tokens, targets, size, **options))
    else:
        shares = identity_probability or [settings.identity_probability]
        for p, long, size in product(shares, length or [settings.length, 4 * settings.length], windows):
            keep(evaluate_fresh(model, settings, long, sequences, seed, p, window=size, **options))
    print(table(rows))
    plot_by_position(rows, folder / "by_position.png", settings.algebra.chance, settings.length)
    print(f"wrote {folder / 'evaluation.json'} and {folder / 'by_position.png'}")


def _study(
    study: str, *, output: Path, variants: list[str] | None = None, seeds: list[int] | None = None
) -> None:
    """Train variants of a run with several seeds, test them and compare the results.

    To resume after an interruption, run the same command again. Finished parts are not repeated.

    Args:
        study: YAML file, or the name of a shipped study: a5xm, s5, s5xm, limits, iterations, words,
            forms
        output: folder of the study
        variants: train and test only these variants; by default all. The results of other variants are shown
            if they are finished
        seeds: train and test only these seeds; by default all. The results of other seeds are shown if they
            are finished
    """
    from deqseq.tasks.state_tracking.study import conduct

    conduct(study, output, variants, seeds)


def _data(
    file: Path,
    *,
    check: bool = False,
    sequences: PositiveInt | None = None,
    identity_probability: ClosedUnitInterval | None = None,
    seed: NonNegativeInt | None = None,
) -> None:
    """Write word problems in the CSV format of the word-problem benchmark, or check such a file.

    Writes random sequences and their running products. With --check, verifies all products in the file.

    Args:
        file: CSV file named GROUP=LENGTH.csv; A5=20.csv holds sequences of 20 elements of A5
        check: verify the file instead of writing it
        sequences: number of sequences (default 1000)
        identity_probability: probability that a token is the group's identity, which does not change the
            product (default 0)
        seed: seed of the sequences (default 0)
    """
    group, length = algebra_of_csv(str(file)), int(file.stem.rpartition("=")[2])
    if check:
        command_line.refuse(
            "--check only reads a file",
            sequences=sequences, identity_probability=identity_probability, seed=seed,
        )  # fmt: skip
        tokens, _, _ = read_csv(file, group)
        if tokens.shape[1] != length:
            raise ValueError(f"{file} must hold sequences of {length} tokens, got {tokens.shape[1]}")
        print(f"{file}: {len(tokens)} sequences of {tokens.shape[1]}, all products are right")
        return
    if file.exists():
        raise ValueError(f"{file} exists: choose another name")
    command_line.check_folder(file.parent)
    sequences, seed = sequences or 1000, seed or 0
    p = identity_probability or 0.0
    fresh = generate(group, sequences=sequences, length=length, identity_probability=p, seed=seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_csv(file, *fresh, seed)
    print(f"wrote {sequences} sequences of {length} to {file}")


def _jacobian(
    runs: list[Path] = [],  # noqa: B006
    *,
    length: PositiveInt = 8,
    seed: NonNegativeInt = 0,
    output: Path = Path("runs/jacobian"),
) -> None:
    """Check Theorem 1 of the paper numerically.

    The theorem says that an implicit layer mixes the entries of its state. This command checks an explicit
    and an implicit layer with random weights, and the trained layers of finished runs. It computes the
    Jacobian of the state from one token to the next in two ways: by the theorem's formula, and by finite
    differences through the solver. It fails if the two Jacobians differ by more than 1e-6, relative to the
    largest entry.

    Args:
        runs: folders of finished runs to check; each model must have one Mamba2 block
        length: tokens of the sequence
        seed: seed of weights and inputs
        output: folder for results
    """
    from deqseq.tasks.state_tracking.jacobian import check

    check(runs, length, seed, output)


def _demo(*, output: Path = Path("runs/demo"), seeds: list[int] = [1]) -> None:  # noqa: B006
    """Train an implicit Mamba2 and two models that apply its blocks once on the group A5, and compare them.

    The injected model is the control: it evaluates the map of the implicit model once. It has as many
    parameters, and its input goes into every block too. The explicit model is an ordinary Mamba2.

    Trains on sequences of up to 16 tokens and tests on 16 and 64 tokens. This takes a few minutes on two
    cores. A second call does not train again; it only tests.

    Args:
        output: folder of the runs
        seeds: seeds of weights and data; each seed trains the three models
    """
    from deqseq.tasks.state_tracking.demo import demo

    demo(output, seeds)


if __name__ == "__main__":
    sys.exit(main())
