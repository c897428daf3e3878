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
from deqseq.solution import Solution, Status
from deqseq.tasks.evaluate.models import Window, implicit_layer, solving

# Rows of logits that are turned into float32 at once: a copy of all would double the memory.
_ROWS = 4096
_FIRST_BUCKET = 16


@dataclass
class Score:
    """A text under one model, cut into sequences of one length and solved in one way.

    Attributes:
        length: tokens of a sequence; the last may be shorter.
        tokens: predicted, which is all but the first.
        nll: mean negative log-likelihood of a predicted token.
        perplexity: ``exp(nll)``.
        window: tokens solved at a time; ``None``: all.
        policy, budget: when a token was done, and the evaluations it could take part in at most.
        iterations: evaluations a token took part in, mean.
        residual: relative, mean over tokens.
        converged: share of tokens that met the tolerance; ``None`` where there is none.
        nfe: calls of f over a window, all batches together.
        seconds, tokens_per_second: of the model and the loss.
        by_position: for tokens ``first`` to ``last`` of their sequences (from 1): how many, their mean
            nll and iterations.

    What belongs to a search is ``None`` for explicit models.
    """

    length: int
    tokens: int
    nll: float
    perplexity: float
    window: int | None
    policy: str | None
    budget: int | None
    iterations: float | None
    residual: float | None
    converged: float | None
    nfe: int | None
    seconds: float
    tokens_per_second: float
    by_position: list[dict[str, float | None]]


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
        ValueError: tokens outside the vocabulary; more positions than the model has.
    """
    vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
    if (largest := int(inputs.max())) >= vocabulary:
        raise ValueError(
            f"token {largest} is outside the model's vocabulary of {vocabulary}: "
            "the tokenizer is not this model's"
        )
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


class SolveTally:
    """Iterations, residual and statuses of solves, added up over tokens."""

    def __init__(self) -> None:
        self.nfe = 0
        self.tokens = 0
        self._sums = torch.zeros(4, dtype=torch.float64)

    def add(self, solution: Solution) -> None:
        """Take in one solve."""
        self.nfe += solution.nfe
        self.tokens += solution.status.numel()
        met, unjudged = (solution.status == s for s in (Status.CONVERGED, Status.COMPLETED))
        parts = (solution.iterations, solution.residual, met, unjudged)
        self._sums += torch.stack([part.cpu().double().sum() for part in parts])

    def read(self) -> dict[str, Any]:
        """``iterations``, ``residual``, ``converged`` and ``nfe``; all ``None`` if nothing was solved."""
        if not self.tokens:
            return dict.fromkeys(("iterations", "residual", "converged", "nfe"))
        iterations, residual, met, unjudged = (self._sums / self.tokens).tolist()
        converged = met if unjudged < 1 else None
        return {"iterations": iterations, "residual": residual, "converged": converged, "nfe": self.nfe}


@torch.no_grad()
def score(
    model: PreTrainedModel, tokens: Tensor, length: int, batch_size: int = 8, progress: bool = False
) -> Score:
    """Perplexity of ``tokens`` (N,) in sequences of ``length``, as the model is set to solve them.

    Every token but the first is predicted once, whatever the length, so lengths compare; results do not
    depend on ``batch_size``.

    Raises:
        ValueError: as :func:`batches` and :func:`run`.
    """
    model.eval()
    cut = batches(tokens, length, batch_size)
    tally = SolveTally()
    sums = torch.zeros(3, length, dtype=torch.float64)  # by position: tokens, nll, iterations
    start = time.perf_counter()
    bar = tqdm(total=len(tokens) - 1, desc=f"length {length}", unit="tok", leave=False, disable=not progress)
    for inputs, targets in cut:
        out = run(model, inputs)
        nll = losses(out.logits, targets)
        sums[0, : nll.shape[1]] += len(nll)
        sums[1, : nll.shape[1]] += nll.sum(0)
        solution = getattr(out, "solution", None)
        if solution is not None:
            tally.add(solution)
            sums[2, : nll.shape[1]] += solution.iterations.cpu().double().sum(0)
        bar.update(targets.numel())
    bar.close()
    seconds = time.perf_counter() - start
    layer = implicit_layer(model)
    predicted = len(tokens) - 1
    nll_mean = sums[1].sum().item() / predicted
    return Score(
        length=length,
        tokens=predicted,
        nll=nll_mean,
        perplexity=exponential(nll_mean),
        window=None if layer is None else layer.window,
        policy=None if layer is None else repr(layer.eval_convergence),
        budget=None if layer is None else layer.eval_convergence.max_iter,
        **tally.read(),
        seconds=seconds,
        tokens_per_second=predicted / seconds,
        by_position=_by_position(sums, searched=layer is not None),
    )


def _by_position(sums: Tensor, searched: bool) -> list[dict[str, float | None]]:
    """Means over tokens 1 to 16 of the sequences, 17 to 32, 33 to 64 and so on."""
    length = sums.shape[1]
    doublings = max(0, math.ceil(math.log2(length / _FIRST_BUCKET)))
    edges = [0, *(min(length, _FIRST_BUCKET * 2**i) for i in range(doublings + 1))]
    found = []
    for first, last in pairwise(edges):
        count, nll, iterations = sums[:, first:last].sum(1).tolist()
        mean = {"nll": nll / count, "iterations": iterations / count if searched else None}
        found.append({"first": first + 1, "last": last, "tokens": int(count), **mean})
    return found


def score_by_length(
    model: PreTrainedModel,
    tokens: Tensor,
    lengths: Sequence[int],
    batch_size: int = 8,
    progress: bool = False,
) -> list[Score]:
    """The same tokens in sequences of several lengths.

    Args:
        batch_size: sequences of the shortest length in a batch. Longer ones go fewer at a time, so that
            a batch holds as many tokens.
    """
    for length in lengths:
        batches(tokens, length, batch_size)  # the longest may be too long: say so before hours of work
    return [
        score(model, tokens, length, max(1, batch_size * min(lengths) // length), progress)
        for length in lengths
    ]  # fmt: skip


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
    layer = implicit_layer(model)
    if layer is None:
        raise ValueError(f"iterations are for implicit models, but this {type(model).__name__} is explicit")
    own = layer.eval_convergence
    if rtol is None and (layer.window if window == "model" else window) is not None:
        rtol = own.rtol if isinstance(own, Residual) and own.rtol > 0 else 1e-3
    policies = [FixedIterations(n) if rtol is None else Residual(rtol=rtol, max_iter=n) for n in budgets]
    found = []
    for policy in (*policies, None):
        with solving(model, window, policy):
            found.append(score(model, tokens, length, batch_size, progress))
    return found
