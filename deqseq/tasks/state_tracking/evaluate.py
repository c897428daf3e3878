"""Evaluation on a word problem, at any length and in any window."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.checks import check_count
from deqseq.layer import ImplicitSequenceLayer
from deqseq.policies import Residual
from deqseq.solution import Status
from deqseq.solvers import Picard
from deqseq.tasks.state_tracking.data import WordProblemDataset
from deqseq.tasks.state_tracking.lstm import LSTM
from deqseq.tasks.state_tracking.metrics import Accuracies
from deqseq.tasks.state_tracking.settings import TrainSettings, load_settings

logger = logging.getLogger(__name__)


@dataclass
class Evaluation:
    """One model on one set of sequences, solved in one way. Shares are in [0, 1].

    Attributes:
        length: tokens of a sequence.
        window: tokens solved at a time; ``None``: all.
        accuracy, accuracy_last10, accuracy_sequence: over all tokens, over the last ten of each
            sequence, and of whole sequences.
        iterations: evaluations a token took part in while unsettled, mean.
        passes: calls of f over a window, mean over batches.
        residual: relative, mean over tokens.
        converged: share of tokens whose search met the tolerance.
        seconds: of the whole evaluation.
        accuracy_by_position, iterations_by_position, converged_by_position: per token; only the first for
            explicit models.
        identity_probability: of the sequences, where it is known.
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


def load(path: str | Path) -> tuple[ImplicitForCausalLM | LSTM, TrainSettings]:
    """A trained model and the settings of its run.

    Raises:
        ValueError: no run there, one that is not finished, or a checkpoint that cannot be read.
    """
    settings = load_settings(path)
    if not (Path(path) / "model.safetensors").exists():
        raise ValueError(f"the run in {path} is not finished: it has no model.safetensors yet")
    try:
        kind: Any = LSTM if settings.backbone == "lstm" else ImplicitForCausalLM
        model = kind.from_pretrained(path)
    except (OSError, RuntimeError, json.JSONDecodeError) as error:
        raise ValueError(f"the checkpoint in {path} cannot be read: {error}") from error
    except Exception as error:
        # safetensors reports a damaged file with an exception class of its own.
        if type(error).__module__.startswith("safetensors"):
            raise ValueError(f"the checkpoint in {path} is damaged: {error}") from error
        raise
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), settings


@torch.no_grad()
def evaluate(
    model: ImplicitForCausalLM | LSTM,
    tokens: Tensor,
    targets: Tensor,
    window: int | None = None,
    tolerance: float | None = None,
    max_iter: int | None = None,
    damping: float | None = None,
    batch_size: int = 256,
    progress: bool = False,
) -> Evaluation:
    """Solve ``tokens`` (S, L) int64 and compare the predictions with ``targets`` (S, L).

    Args:
        window: tokens solved at a time; all by default. No matter for explicit models.
        tolerance, max_iter: of the search; the model's evaluation policy by default.
        damping: of Picard's iteration; the model's by default. Tokens that swing between two values for
            ever come to rest under more damping, a smaller value.
        batch_size: sequences solved together; results do not depend on it.

    Raises:
        ValueError: shapes that differ, tokens outside the vocabulary, a window, tolerance, budget or
            damping out of range.
    """
    if tokens.shape != targets.shape or tokens.dim() != 2:
        raise ValueError(
            f"tokens and targets must have one shape (S, L), got {tuple(tokens.shape)} "
            f"and {tuple(targets.shape)}"
        )
    check_count("batch_size", batch_size)
    if not tokens.numel():
        raise ValueError("there is nothing to evaluate: no sequences, or no tokens in them")
    for extreme in (int(tokens.min()), int(tokens.max())):
        if not 0 <= extreme < model.config.vocab_size:
            raise ValueError(
                f"token {extreme} is outside the model's vocabulary of {model.config.vocab_size}"
            )
    model.eval()
    layer = next((m for m in model.modules() if isinstance(m, ImplicitSequenceLayer)), None)
    options: dict[str, Any] = {} if layer is None else {"window": window}
    accuracies = Accuracies()
    solved: dict[str, list[Tensor]] = {"iterations": [], "residual": [], "status": []}
    passes = []
    start = time.perf_counter()
    batches = range(0, len(tokens), batch_size)
    description = f"length {tokens.shape[1]}, window {window or 'all'}"
    with _search(layer, tolerance, max_iter, damping):
        for i in tqdm(batches, desc=description, leave=False, disable=not progress):
            out = model(tokens[i : i + batch_size].to(model.device), **options)
            accuracies.update(out.logits, targets[i : i + batch_size].to(model.device))
            if out.solution is not None:
                passes.append(out.solution.nfe)
                for name, values in solved.items():
                    values.append(getattr(out.solution, name).cpu())
    report = accuracies.compute()
    implicit = bool(passes)
    every = {name: torch.cat(values).double() for name, values in solved.items()} if implicit else {}
    converged = (every["status"] == Status.CONVERGED).double() if implicit else torch.empty(0)
    return Evaluation(
        length=tokens.shape[1],
        window=window if implicit else None,
        accuracy=report["accuracy"],
        accuracy_last10=report["accuracy_last10"],
        accuracy_sequence=report["accuracy_sequence"],
        iterations=every["iterations"].mean().item() if implicit else None,
        passes=sum(passes) / len(passes) if implicit else None,
        residual=every["residual"].mean().item() if implicit else None,
        converged=converged.mean().item() if implicit else None,
        seconds=time.perf_counter() - start,
        accuracy_by_position=report["accuracy_by_position"].tolist(),
        iterations_by_position=every["iterations"].mean(0).tolist() if implicit else None,
        converged_by_position=converged.mean(0).tolist() if implicit else None,
    )


def evaluate_fresh(
    model: ImplicitForCausalLM | LSTM,
    settings: TrainSettings,
    length: int,
    sequences: int,
    seed: int = 0,
    identity_probability: float | None = None,
    **options: Any,
) -> Evaluation:
    """:func:`evaluate` on fresh sequences of the task that the model was trained on, at another length.

    Args:
        identity_probability: that of training by default.
        options: of :func:`evaluate`.
    """
    p = settings.identity_probability if identity_probability is None else identity_probability
    fresh = held_out(replace(settings, identity_probability=p), length, sequences, seed)
    found = evaluate(model, fresh.tokens, fresh.targets, **options)
    return replace(found, identity_probability=p)


@contextmanager
def _search(
    layer: ImplicitSequenceLayer | None,
    tolerance: float | None,
    max_iter: int | None,
    damping: float | None,
) -> Iterator[None]:
    """The layer with another tolerance, budget or damping for evaluation, for a while."""
    if layer is None:
        yield
        return
    policy, solver = layer.eval_convergence, layer.solver
    if tolerance is not None or max_iter is not None:
        base = policy if isinstance(policy, Residual) else Residual(rtol=1e-3, max_iter=policy.max_iter)
        layer.eval_convergence = replace(
            base,
            rtol=base.rtol if tolerance is None else tolerance,
            max_iter=base.max_iter if max_iter is None else max_iter,
        )
    if damping is not None:
        layer.solver = Picard(damping)
    try:
        yield
    finally:
        layer.eval_convergence, layer.solver = policy, solver


def held_out(settings: TrainSettings, length: int, sequences: int, seed: int) -> WordProblemDataset:
    """Fresh sequences of the task that the model was trained on, at another length."""
    return WordProblemDataset.generate(
        settings.algebra,
        sequences=sequences,
        length=length,
        identity_probability=settings.identity_probability,
        seed=seed,
    )


def table(rows: Sequence[tuple[str, Evaluation]]) -> str:
    """The evaluations as text, one row each."""
    head = ("model", "p", "length", "window", "all", "last 10", "sequence", "iterations", "passes",
            "converged", "seconds")  # fmt: skip
    lines: list[tuple[str, ...]] = [head]
    for name, e in rows:
        window = "-" if e.iterations is None else "all" if e.window is None else str(e.window)
        accuracy = (f"{x:.4f}" for x in (e.accuracy, e.accuracy_last10, e.accuracy_sequence))
        solved = (
            "-" if x is None else f"{x:.{digits}f}"
            for x, digits in ((e.iterations, 1), (e.passes, 0), (e.converged, 4))
        )
        p = "-" if e.identity_probability is None else f"{e.identity_probability:g}"
        lines.append((name, p, str(e.length), window, *accuracy, *solved, f"{e.seconds:.1f}"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def save(rows: Sequence[tuple[str, Evaluation]], path: Path, asked: Mapping[str, Any] | None = None) -> None:
    """Write the evaluations as JSON, each with how it was ``asked`` for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = [{"model": name, **(asked or {}), **asdict(found)} for name, found in rows]
    path.write_text(json.dumps(told, indent=2) + "\n")
