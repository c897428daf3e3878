"""Evaluations of runs side by side: overall, by task, and drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deqseq.tasks.catbabi.evaluate import Evaluation
from deqseq.tasks.common.figures import pyplot
from deqseq.tasks.common.results import column, table

Named = tuple[str, Evaluation]

_SUMMARY = (
    ("run", lambda row: row[0]),
    *(
        (title, lambda row, write=write: write(row[1]))
        for title, write in (
            column("accuracy", ".4f"), column("perplexity", ".3f"), column("questions", ","),
            column("iterations", ".1f"), column("converged", ".3f"), column("seconds", ".1f"),
        )
    ),
)  # fmt: skip


def file_of(run: str | Path, split: str) -> Path:
    """Where the evaluation of a run on a split is kept."""
    return Path(run) / "evaluation" / f"{split}.json"


def save(found: Evaluation, file: Path, **more: Any) -> None:
    """Write an evaluation as JSON, with ``more`` about how it was made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**asdict(found), **more}, indent=2) + "\n")


def read(run: str | Path, split: str) -> Named:
    """The name of a run's folder, and what :func:`save` wrote about it.

    Raises:
        ValueError: nothing there, or something else.
    """
    file = file_of(run, split)
    try:
        found = json.loads(file.read_text())
        values = {name: found[name] for name in Evaluation.__dataclass_fields__}
        values["accuracy_by_task"] = {int(task): x for task, x in values["accuracy_by_task"].items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{run} has no evaluation on {split} ({error}): python -m deqseq.tasks.catbabi evaluate {run} "
            f"--split {split}"
        ) from error
    return Path(run).name, Evaluation(**values)


def check_comparable(rows: Sequence[Named]) -> None:
    """Raise ``ValueError`` unless all evaluations read the same data and tasks; says which did not."""
    (first, expected), *others = rows
    for name, found in others:
        for what, one, other in (
            ("data", expected.data, found.data),
            ("tasks", sorted(expected.accuracy_by_task), sorted(found.accuracy_by_task)),
        ):
            if one != other:
                raise ValueError(
                    f"runs must be evaluated on the same {what}: {first} on {one}, {name} on {other}"
                )


def summary(rows: Sequence[Named]) -> str:
    """A line for every evaluation."""
    return table(_SUMMARY, rows)


def by_task(rows: Sequence[Named]) -> str:
    """A line for every task, a column for every evaluation."""
    tasks = sorted({task for _, e in rows for task in e.accuracy_by_task})
    columns = [("task", str)] + [
        (name, lambda task, e=e: f"{e.accuracy_by_task[task]:.4f}" if task in e.accuracy_by_task else "-")
        for name, e in rows
    ]
    return table(columns, tasks)


def better(rows: Sequence[Named]) -> dict[str, dict[str, list[int]]]:
    """By names of an implicit and an explicit run: the tasks on which the first one is above the second."""
    explicit = [row for row in rows if row[1].iterations is None]
    return {
        name: {
            other: [
                task
                for task, accuracy in found.accuracy_by_task.items()
                if task in twin.accuracy_by_task and accuracy > twin.accuracy_by_task[task]
            ]
            for other, twin in explicit
        }
        for name, found in rows
        if found.iterations is not None
    }


def plot(rows: Sequence[Named], path: Path) -> bool:
    """Draw a group of bars for every task and write a PNG; whether it could."""
    plt = pyplot()
    if plt is None:
        return False
    tasks = sorted({task for _, e in rows for task in e.accuracy_by_task})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axis = plt.subplots(figsize=(max(5, 0.55 * len(tasks) + 2), 4), layout="constrained")
    width = 0.8 / len(rows)
    for i, (name, e) in enumerate(rows):
        place = [at + (i - (len(rows) - 1) / 2) * width for at in range(len(tasks))]
        heights = [e.accuracy_by_task.get(task, 0) for task in tasks]
        axis.bar(place, heights, width, label=f"{name}: {e.accuracy:.3f}")
    axis.set_xticks(range(len(tasks)), [str(task) for task in tasks])
    axis.set(xlabel="task", ylabel="accuracy of answers", ylim=(0, 1))
    axis.grid(axis="y", alpha=0.3)
    figure.legend(fontsize="small", loc="outside upper center", ncols=min(len(rows), 3))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
