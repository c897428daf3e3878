"""Compares evaluations of several runs: overall, by task, and in a figure."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from deqseq.tasks.catbabi.evaluate import Evaluation
from deqseq.tasks.common.figures import save_figure
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.results import Column, column, table

Named = tuple[str, Evaluation]

_measure = partial(column, of=itemgetter(1))
_SUMMARY: tuple[Column, ...] = (
    ("run", itemgetter(0)), _measure("accuracy", ".4f"), _measure("perplexity", ".3f"),
    _measure("questions", ","), _measure("iterations", ".1f"), _measure("converged", ".3f"),
    _measure("seconds", ".1f"),
)  # fmt: skip


def save(found: Evaluation, run: Path, **more: Any) -> None:
    """Write the evaluation ``found`` of a run as JSON. ``more``: further fields, such as the batch size."""
    file = _file(run, found.split)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {**asdict(found), **more})


def _file(run: str | Path, split: str) -> Path:
    return Path(run) / "evaluation" / f"{split}.json"


def read(run: str | Path, split: str) -> Evaluation:
    """Read an evaluation that :func:`save` wrote.

    Raises:
        ValueError: the evaluation does not exist or cannot be read.
    """
    try:
        found = json.loads(_file(run, split).read_text())
        values = {name: found[name] for name in Evaluation.__dataclass_fields__}
        values["accuracy_by_task"] = {int(task): x for task, x in values["accuracy_by_task"].items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{run} has no evaluation on {split} ({error}): python -m deqseq.tasks.catbabi evaluate {run} "
            f"--split {split}"
        ) from error
    return Evaluation(**values)


def check_comparable(rows: Sequence[Named]) -> None:
    """Raise ``ValueError`` if the runs were evaluated on different data or on different tasks."""
    (first, expected), *others = ((name, (e.data, sorted(e.accuracy_by_task))) for name, e in rows)
    for name, found in others:
        for what, one, other in zip(("data", "tasks"), expected, found, strict=True):
            if one != other:
                raise ValueError(
                    f"runs must be evaluated on the same {what}: {first} on {one}, {name} on {other}"
                )


def tables(rows: Sequence[Named]) -> str:
    """Two tables as text: the accuracy of each run (column) on each task (row), and a summary of each run."""

    def accuracy(name: str, found: Evaluation) -> Column:
        shares = found.accuracy_by_task
        return name, lambda task: f"{shares[task]:.4f}" if task in shares else "-"

    columns: list[Column] = [("task", str), *(accuracy(*row) for row in rows)]
    return f"{table(columns, _tasks(rows))}\n{table(_SUMMARY, rows)}"


def _tasks(rows: Sequence[Named]) -> list[int]:
    return sorted({task for _, e in rows for task in e.accuracy_by_task})


def better(rows: Sequence[Named]) -> dict[str, dict[str, list[int]]]:
    """For every implicit and every explicit run, the tasks on which the implicit run is more accurate.

    Returns ``{name of implicit run: {name of explicit run: tasks}}``.
    """
    implicit, explicit = (
        {name: e.accuracy_by_task for name, e in rows if (e.iterations is None) == is_explicit}
        for is_explicit in (False, True)
    )
    return {
        name: {
            other: [task for task, share in found.items() if share > twin.get(task, 1)]
            for other, twin in explicit.items()
        }
        for name, found in implicit.items()
    }


def plot(rows: Sequence[Named], path: Path) -> bool:
    """Write a bar chart of the accuracy by task as PNG; returns false if matplotlib is not installed."""
    tasks = _tasks(rows)
    width = 0.8 / len(rows)

    def draw(axes: list[Any]) -> None:
        (axis,) = axes
        for i, (name, e) in enumerate(rows):
            place = [at + (i - (len(rows) - 1) / 2) * width for at in range(len(tasks))]
            heights = [e.accuracy_by_task.get(task, 0) for task in tasks]
            axis.bar(place, heights, width, label=f"{name}: {e.accuracy:.3f}")
        axis.set_xticks(range(len(tasks)), [str(task) for task in tasks])
        axis.set(xlabel="task", ylabel="accuracy of answers", ylim=(0, 1))
        axis.figure.legend(loc="outside upper center", ncols=min(len(rows), 3))

    return save_figure(path, draw, size=(max(5, 0.55 * len(tasks) + 2), 4))
