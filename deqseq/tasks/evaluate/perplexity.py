"""Perplexity of a text: over all of it, by position, by length and by the iterations allowed.

Shapes: N tokens of a text, S sequences, B of them in a batch, L tokens in each, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from deqseq.convergence import FixedIterations, Residual, check_count
from deqseq.statistics import SolveStatistics
from deqseq.tasks.common.models import (
    Window,
    check_tokens,
    implicit_layer,
    needed_layer,
    solving,
    window_name,
)

# Rows of logits that are turned into float32 at once: a copy of all would double the memory.
_ROWS = 4096
_FIRST_BUCKET = 16


@dataclass
class Positions:
    """The tokens that stand ``first`` to ``last`` in their sequences, counted from 1.

    Attributes:
        tokens: how many.
        nll, nll_stderr: mean negative log-likelihood and its standard error.
        perplexity: ``exp(nll)``.
        iterations: evaluations a token took part in, mean; ``None`` for explicit models.
        change, change_stderr: mean, over these tokens, of what the nll is more than in sequences of the
            first length; ``None`` where there is none to compare with.

    Standard errors take tokens as independent; ``None`` for a single one.
    """

    first: int
    last: int
    tokens: int
    nll: float
    nll_stderr: float | None
    perplexity: float
    iterations: float | None
    change: float | None
    change_stderr: float | None


@dataclass
class Score:
    """A text under one model, cut into sequences of one length and solved in one way.

    Attributes:
        length: tokens of a sequence; the last may be shorter.
        tokens: predicted, which is all but the first.
        nll: mean negative log-likelihood of a predicted token.
        perplexity: ``exp(nll)``.
        window: tokens solved at a time, or ``"all"``.
        policy, budget: when a token was done, and the evaluations it could take part in at most.
        iterations: evaluations a token took part in, mean.
        residual: relative, mean over tokens.
        converged: share of tokens that met the tolerance; ``None`` where there is none.
        passes_per_batch: calls of f over a window, mean over batches.
        seconds, tokens_per_second: of the model and the loss.
        by_position: tokens 1 to 16 of their sequences, 17 to 32, 33 to 64 and so on.

    What belongs to a search is ``None`` for explicit models.
    """

    length: int
    tokens: int
    nll: float
    perplexity: float
    window: int | str | None
    policy: str | None
    budget: int | None
    iterations: float | None
    residual: float | None
    converged: float | None
    passes_per_batch: float | None
    seconds: float
    tokens_per_second: float
    by_position: list[Positions]


def exponential(nll: float) -> float:
    """``exp`` that is infinite where it overflows."""
    return torch.tensor(nll, dtype=torch.float64).exp().item()


def batches(tokens: Tensor, length: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and the tokens that follow them, each (B, L): every token of (N,) but the first is a target.

    The last batch is the rest, one shorter sequence, if the text does not divide.

    Raises:
        ValueError: fewer tokens than one sequence and what follows it; sizes below 1.
    """
    check_count("length", length)
    check_count("batch_size", batch_size)
    if len(tokens) <= length:
        raise ValueError(
            f"the text has {len(tokens)} tokens; one sequence of length {length} needs {length + 1}, "
            "for its last token predicts one more: give more text (or raise --limit), or a smaller length"
        )
    return _batches(tokens, length, batch_size)


def _batches(tokens: Tensor, length: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    inputs, targets = tokens[:-1], tokens[1:]
    whole = len(inputs) // length * length
    for i in range(0, whole, length * batch_size):
        part = slice(i, min(i + length * batch_size, whole))
        yield inputs[part].view(-1, length), targets[part].view(-1, length)
    if whole < len(inputs):
        yield inputs[None, whole:], targets[None, whole:]


def run(model: PreTrainedModel, inputs: Tensor) -> Any:
    """The model's output on ``inputs`` (B, L).

    Raises:
        ValueError: more positions than the model has.
    """
    try:
        return model(input_ids=inputs.to(model.device))
    except IndexError as error:
        raise ValueError(f"the model has no positions for sequences of {inputs.shape[1]} tokens") from error


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood (B, L) float64, on the CPU, of ``targets`` (B, L) under (B, L, V)."""
    rows, wanted = logits.flatten(0, 1), targets.to(logits.device).flatten()
    parts = [
        F.cross_entropy(rows[i : i + _ROWS].float(), wanted[i : i + _ROWS], reduction="none")
        for i in range(0, len(rows), _ROWS)
    ]
    return torch.cat(parts).view(targets.shape).cpu().double()


def search_means(solves: SolveStatistics) -> dict[str, Any]:
    """The fields of :class:`Score` that describe the search; all ``None`` if nothing was solved."""
    found = solves.read()
    judged = found.get("share_completed", 1) < 1
    return {
        "iterations": found.get("iterations"),
        "residual": found.get("residual"),
        "converged": found["share_converged"] if judged else None,
        "passes_per_batch": found.get("nfe"),
    }


def score(
    model: PreTrainedModel, tokens: Tensor, length: int, batch_size: int = 8, progress: bool = False
) -> Score:
    """Perplexity of ``tokens`` (N,) in sequences of ``length``, as the model is set to solve them.

    Every token but the first is predicted once, whatever the length, so lengths compare; results do not
    depend on ``batch_size``.

    Raises:
        ValueError: tokens outside the vocabulary; as :func:`batches` and :func:`run`.
    """
    return _score(model, tokens, length, batch_size, progress)[0]


@torch.no_grad()
def _score(
    model: PreTrainedModel, tokens: Tensor, length: int, batch_size: int, progress: bool,
    first: Tensor | None = None,
) -> tuple[Score, Tensor]:  # fmt: skip
    """The score, and the nll (N - 1,) of every predicted token; ``first``: theirs at the first length."""
    model.eval()
    cut = batches(tokens, length, batch_size)
    check_tokens(model, tokens)
    solves = SolveStatistics()
    nll_parts, iterations_parts = [], []  # in the order of the text
    start = time.perf_counter()
    bar = tqdm(total=len(tokens) - 1, desc=f"length {length}", unit="tok", leave=False, disable=not progress)
    for inputs, targets in cut:
        out = run(model, inputs)
        nll_parts.append(losses(out.logits, targets).flatten())
        solution = getattr(out, "solution", None)
        if solution is not None:
            solves.add(solution)
            iterations_parts.append(solution.iterations.cpu().double().flatten())
        bar.update(targets.numel())
    bar.close()
    seconds = time.perf_counter() - start
    layer = implicit_layer(model)
    nll = torch.cat(nll_parts)
    iterations = torch.cat(iterations_parts) if iterations_parts else None
    nll_mean = nll.mean().item()
    found = Score(
        length=length,
        tokens=len(nll),
        nll=nll_mean,
        perplexity=exponential(nll_mean),
        window=window_name(layer),
        policy=None if layer is None else repr(layer.eval_convergence),
        budget=None if layer is None else layer.eval_convergence.max_iter,
        **search_means(solves),
        seconds=seconds,
        tokens_per_second=len(nll) / seconds,
        by_position=_by_position(length, nll, iterations, None if first is None else nll - first),
    )
    return found, nll


def _by_position(
    length: int, nll: Tensor, iterations: Tensor | None, change: Tensor | None
) -> list[Positions]:
    """Means of what was found for every token (N - 1,), by its place in its sequence."""
    position = torch.arange(len(nll)) % length
    doublings = max(0, math.ceil(math.log2(length / _FIRST_BUCKET)))
    edges = [0, *(min(length, _FIRST_BUCKET * 2**i) for i in range(doublings + 1))]
    found = []
    for first, last in pairwise(edges):
        here = (position >= first) & (position < last)
        mean, error = _mean(nll[here])
        changed, change_error = (None, None) if change is None else _mean(change[here])
        found.append(
            Positions(
                first=first + 1,
                last=last,
                tokens=int(here.sum()),
                nll=mean,
                nll_stderr=error,
                perplexity=exponential(mean),
                iterations=None if iterations is None else iterations[here].mean().item(),
                change=changed,
                change_stderr=change_error,
            )
        )
    return found


def _mean(values: Tensor) -> tuple[float, float | None]:
    """Mean and standard error."""
    error = (values.std() / len(values) ** 0.5).item() if len(values) > 1 else None
    return values.mean().item(), error


def score_by_length(
    model: PreTrainedModel,
    tokens: Tensor,
    lengths: Sequence[int],
    batch_size: int = 8,
    progress: bool = False,
) -> list[Score]:
    """The same tokens in sequences of several lengths.

    What a position makes of the loss hides behind which tokens happen to stand there: of a long sequence
    there are few. So ``by_position`` also has the change against the same tokens at the first length.

    Args:
        batch_size: sequences of the shortest length in a batch. Longer ones go fewer at a time, so that
            a batch holds as many tokens.
    """
    for length in lengths:
        batches(tokens, length, batch_size)  # the longest may be too long: say so before hours of work
    found: list[Score] = []
    first: Tensor | None = None
    for length in lengths:
        fitting = max(1, batch_size * min(lengths) // length)
        one, nll = _score(model, tokens, length, fitting, progress, first)
        found.append(one)
        first = nll if first is None else first
    return found


def score_by_budget(
    model: PreTrainedModel, tokens: Tensor, length: int, budgets: Sequence[int], window: Window = "model",
    rtol: float | None = None, batch_size: int = 8, progress: bool = False,
) -> list[Score]:  # fmt: skip
    """The same sequences with several numbers of iterations; last, with the model's own policy.

    All tokens do exactly that many iterations together; in a smaller window, or with a tolerance
    ``rtol``, at most that many, for a window only slides as tokens settle.

    Raises:
        ValueError: the model is explicit; a budget below 1; as :func:`score`.
    """
    layer = needed_layer(model, "a number of iterations")
    own = layer.eval_convergence
    if rtol is None and (layer.window if window == "model" else window) is not None:
        rtol = own.rtol if isinstance(own, Residual) and own.rtol > 0 else 1e-3
    policies = [FixedIterations(n) if rtol is None else Residual(rtol=rtol, max_iter=n) for n in budgets]
    found = []
    for policy in (*policies, None):
        with solving(model, window, policy):
            found.append(score(model, tokens, length, batch_size, progress))
    return found
