"""The report on several models: one table, a JSON file and a figure."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deqseq.tasks.common.figures import log_scale, save_figure
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.models import implicit_layer, load_model, solve_options
from deqseq.tasks.common.results import Column, column, provenance, table
from deqseq.tasks.common.runs import model_folder, names_of
from deqseq.tasks.common.tokenizer import load_tokenizer
from deqseq.tasks.text_tracking.data import read_settings, read_test, read_tokenizer
from deqseq.tasks.text_tracking.evaluate import RULES, Score, score_model, score_rules

# The figure shows only means over at least this many answers. Other means are too noisy.
_ENOUGH = 20


def make_report(options: Any) -> None:
    """Score all models at all lengths and print the table. With ``options.output``, also write files."""
    folders = model_folders(options.models)
    settings = read_settings(options.data)
    tokenizer = read_tokenizer(options.data)
    lengths = sorted(set(options.length or settings["test_lengths"]))
    tests = {length: read_test(options.data, length)[: options.limit] for length in lengths}
    window = None if options.window == "all" else options.window
    scores = [score for length, documents in tests.items() for score in score_rules(documents, length)]
    models: dict[str, Any] = {}
    for name, folder in folders.items():
        _check_tokenizer(folder, tokenizer)
        model = load_model(str(folder), options.device, options.dtype)
        implicit = implicit_layer(model) is not None
        solve = solve_options(model, window, options.rtol, options.max_iter) if implicit else None
        for length, documents in tests.items():
            size = max(1, options.batch_size * lengths[0] // length)
            scores.append(score_model(name, model, tokenizer, documents, length, size, solve))
        models[name] = {
            "folder": str(folder), "parameters": model.num_parameters(), "solve": solve and repr(solve),
            "config": json.loads(model.config.to_json_string()),
        }  # fmt: skip
    print(table(columns(scores), sorted(scores, key=lambda score: score.length)))
    if options.output is None:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(options.output / "tracking.json", {
        "data": settings, "models": models, **provenance(model.device),
        "scores": [asdict(score) for score in scores],
    })  # fmt: skip
    drawn = draw(scores, settings["length"], options.output / "tracking.png")
    print(f"wrote {options.output / 'tracking.json'}" + (" and tracking.png" if drawn else ""))


def model_folders(models: Sequence[Path]) -> dict[str, Path]:
    """Map the name of every model to its folder. In a pretraining run, this is the folder ``model``.

    The name of a model is that of its run.

    Raises:
        ValueError: a model is given twice.
    """
    folders = [model_folder(path) for path in models]
    runs = [whole.parent if whole.name == "model" else whole for whole in map(Path.absolute, folders)]
    return dict(zip(names_of(runs), folders, strict=True))


def columns(scores: Sequence[Score]) -> list[Column]:
    """The columns of the table. If there are several kinds of documents, each has a column."""
    kinds = sorted({kind for score in scores for kind in score.by_kind})

    def of_kind(kind: str) -> Column:
        return kind, lambda score: format(score.by_kind[kind], ".3f") if kind in score.by_kind else "-"

    return [
        column("length"), column("model"), column("answers"), column("accuracy", ".3f"),
        column("stderr", ".3f", "±"), *(of_kind(kind) for kind in kinds if len(kinds) > 1),
        column("answer_nll", ".3f", "loss of answers"), column("other_nll", ".3f", "loss of the rest"),
        column("iterations", ".1f"), column("converged", ".3f"), column("seconds", ".1f"),
    ]  # fmt: skip


def draw(scores: Sequence[Score], trained: int, path: Path) -> bool:
    """Draw the accuracy against the length, and for every length against the number of operations.

    ``trained``: the length of the training documents. Returns whether the figure was drawn.
    """
    lengths = sorted({score.length for score in scores})
    names = list(dict.fromkeys(score.model for score in scores))

    def plot(axes: list[Any]) -> None:
        for name in names:
            own = sorted((s for s in scores if s.model == name), key=lambda s: s.length)
            style: Any = {"marker": "o"}
            if name in RULES:
                style = {"color": "grey", "ls": ("--", ":")[list(RULES).index(name)]}
            (line,) = axes[0].plot([s.length for s in own], [s.accuracy for s in own], label=name, **style)
            for axis, score in zip(axes[1:], own, strict=False):
                shown = [depth for depth in score.by_operations if depth.answers >= _ENOUGH]
                style["color"] = line.get_color()
                axis.plot([d.last for d in shown], [d.accuracy for d in shown], **style)
        axes[0].axvline(trained, color="black", lw=0.8, label="length in training")
        axes[0].set(xlabel="length of the documents, tokens", title="all answers")
        axes[0].legend()
        for axis, length in zip(axes[1:], lengths, strict=False):
            axis.set(xlabel="operations since the value was stated, up to", title=f"{length} tokens")
        for axis in axes[: 1 + len(lengths)]:
            axis.set(ylabel="accuracy of answers", ylim=(-0.03, 1.03))
            if any(len(line.get_xdata()) for line in axis.lines):
                log_scale(axis.xaxis, 2)
        for axis in axes[1 + len(lengths) :]:
            axis.set_visible(False)

    rows = (2 + len(lengths)) // 2
    return save_figure(path, plot, rows, 2, size=(10, 3.5 * rows))


def _check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Raise ``ValueError`` if a model has a tokenizer of its own, and it is not the tokenizer of the data."""
    if not (folder / "tokenizer.json").exists():
        return
    if load_tokenizer(str(folder)).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"{folder} was trained with another tokenizer than that of the data")
