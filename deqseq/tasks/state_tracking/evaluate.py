"""Evaluation on word problems (running products in a group or monoid), at any length and with any window."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from deqseq.checks import check_count
from deqseq.statistics import SolveStatistics
from deqseq.tasks.common import results
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.models import implicit_layer, solve_options
from deqseq.tasks.common.results import Column, column
from deqseq.tasks.common.runs import check_model
from deqseq.tasks.common.two_stages import load_settings
from deqseq.tasks.state_tracking.data import WordProblems, generate
from deqseq.tasks.state_tracking.settings import Model, TrainSettings


@dataclass
class Evaluation:
    """The result of one model on one set of sequences, with fixed solve options. Shares are in [0, 1].

    Attributes:
        length: tokens per sequence.
        window: number of tokens that are solved together; ``None`` means all.
        accuracy: share of tokens with the right answer.
        accuracy_last10: share of right answers among the last ten tokens of each sequence.
        accuracy_sequence: share of sequences without a wrong answer.
        iterations: mean number of evaluations of f until a token's search ended.
        passes: mean number of calls of f per batch. One call evaluates all tokens in the window.
        residual: mean relative residual of the tokens.
        converged: share of tokens whose search met the tolerance.
        seconds: duration of the whole evaluation.
        accuracy_by_position, iterations_by_position, converged_by_position: means over the sequences, for
            each position.
        identity_probability: probability that a token is the identity; ``None`` if unknown.

    For explicit models, all fields about iterations, passes, residuals and convergence are ``None``.
    """

    length: int
    window: int | None
    accuracy: float
    accuracy_last10: float
    accuracy_sequence: float
    iterations: float | None
    passes: float | None
    residual: float | None
    converged: float | None
    seconds: float
    accuracy_by_position: list[float]
    iterations_by_position: list[float] | None
    converged_by_position: list[float] | None
    identity_probability: float | None = None


def load(path: str | Path) -> tuple[Model, TrainSettings]:
    """Load a trained model and the settings of its run.

    Raises:
        ValueError: ``path`` holds no finished run of this task, or its model is damaged or cannot be read.
    """
    settings, _ = load_settings(TrainSettings, path)
    check_model(path)
    with torch.device("meta"):
        kind: Any = type(settings.model())
    try:
        model = kind.from_pretrained(path)
    except Exception as error:  # transformers and safetensors raise many classes of errors
        raise ValueError(f"the checkpoint in {path} cannot be read: {error}") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), settings


@torch.no_grad()
def evaluate(
    model: Model, tokens: Tensor, targets: Tensor, window: int | None = None,
    tolerance: float | None = None, max_iter: int | None = None, damping: float | None = None,
    batch_size: int = 256, progress: bool = False,
) -> Evaluation:  # fmt: skip
    """Predict the running products of ``tokens``, and compare the predictions with ``targets``.

    Args:
        tokens: (S, L) int64, S sequences of L tokens.
        targets: (S, L) int64, the right products.
        window: number of tokens that are solved together; all by default.
        tolerance, max_iter: a token's search ends at this relative residual, or after this number of
            evaluations. By default, both limits are those of the model's evaluation policy.
        damping: solve with Picard iteration and this damping; by default, solve with the model's own solver.
            Tokens whose iterates oscillate can converge with a smaller damping.
        batch_size: number of sequences that are solved together; does not change results.

    Explicit models ignore ``window``, ``tolerance``, ``max_iter`` and ``damping``.

    Raises:
        ValueError: ``tokens`` and ``targets`` have different shapes or are empty, a token is outside the
            vocabulary, or another argument is out of range.
    """
    if tokens.shape != targets.shape or tokens.dim() != 2:
        shapes = f"{tuple(tokens.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"tokens and targets must have one shape (S, L), got {shapes}")
    check_count("batch_size", batch_size)
    if not tokens.numel():
        raise ValueError("there is nothing to evaluate: no sequences, or no tokens in them")
    for extreme in (int(tokens.min()), int(tokens.max())):
        if not 0 <= extreme < (size := model.config.vocab_size):
            raise ValueError(f"token {extreme} is outside the model's vocabulary of {size}")
    model.eval()
    options: dict[str, Any] = {}
    if implicit_layer(model) is not None:
        options["solve"] = solve_options(model, window, tolerance, max_iter, damping)
    solves = SolveStatistics()
    parts = []
    start = time.perf_counter()
    batches = list(zip(tokens.split(batch_size), targets.split(batch_size), strict=True))
    description = f"length {tokens.shape[1]}, window {window or 'all'}"
    for inputs, expected in tqdm(batches, desc=description, leave=False, disable=not progress):
        out = model(inputs.to(model.device), **options)
        parts.append(out.logits.argmax(-1) == expected.to(model.device))
        if out.solution is not None:
            solves.add(out.solution)
    right = torch.cat(parts).cpu().double()
    search = solves.read()
    return Evaluation(
        length=tokens.shape[1], window=window if search else None, accuracy=right.mean().item(),
        accuracy_last10=right[:, -10:].mean().item(), accuracy_sequence=right.amin(1).mean().item(),
        iterations=search.get("iterations"), passes=search.get("nfe"), residual=search.get("residual"),
        converged=search.get("share_converged"), seconds=time.perf_counter() - start,
        accuracy_by_position=right.mean(0).tolist(),
        iterations_by_position=solves.by_position("iterations").tolist() if search else None,
        converged_by_position=solves.by_position("share_converged").tolist() if search else None,
    )  # fmt: skip


def evaluate_fresh(
    model: Model, settings: TrainSettings, length: int, sequences: int, seed: int = 0,
    identity_probability: float | None = None, **options: Any,
) -> Evaluation:  # fmt: skip
    """Evaluate a model on new random sequences of its task.

    ``identity_probability`` is the probability that a token is the identity; by default the value used in
    training. ``options`` are more arguments of :func:`evaluate`.
    """
    p = settings.identity_probability if identity_probability is None else identity_probability
    fresh = generate(settings.algebra, sequences=sequences, length=length, identity_probability=p, seed=seed)
    return replace(evaluate(model, *fresh, **options), identity_probability=p)


def held_out(settings: TrainSettings, length: int, sequences: int, seed: int) -> WordProblems:
    """New random sequences of the task in ``settings``, each with ``length`` tokens."""
    p = settings.identity_probability
    return generate(settings.algebra, sequences=sequences, length=length, identity_probability=p, seed=seed)


_measure = partial(column, of=itemgetter(1))
_COLUMNS: tuple[Column, ...] = (
    ("model", itemgetter(0)), _measure("identity_probability", "g", "p"), _measure("length"),
    ("window", lambda row: window_name(row[1])), _measure("accuracy", ".4f", "all"),
    _measure("accuracy_last10", ".4f", "last 10"), _measure("accuracy_sequence", ".4f", "sequence"),
    _measure("iterations", ".1f"), _measure("passes", ".0f"), _measure("converged", ".4f"),
    _measure("seconds", ".1f"),
)  # fmt: skip


def window_name(found: Evaluation) -> str:
    """The label of an evaluation's window in tables and figures; ``-`` for explicit models."""
    return "-" if found.iterations is None else str(found.window or "all")


def table(rows: Sequence[tuple[str, Evaluation]]) -> str:
    """A text table with one line for each evaluation."""
    return results.table(_COLUMNS, rows)


def save(rows: Sequence[tuple[str, Evaluation]], path: Path, **asked: Any) -> None:
    """Write the evaluations to ``path`` as a JSON list.

    Every entry has the name of the model and the fields of its evaluation. ``asked``: more fields for every
    entry.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, [{"model": name, **asked, **asdict(found)} for name, found in rows])
