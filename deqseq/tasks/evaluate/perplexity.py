"""Perplexity of a text: overall, by position, by length and by number of iterations.

Shapes: N tokens of a text, B sequences of a batch, L tokens of a sequence, V vocabulary.
"""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from deqseq.checks import check_count
from deqseq.policies import Residual
from deqseq.policy import FixedIterations
from deqseq.problem import SolveOptions
from deqseq.statistics import SolveStatistics
from deqseq.tasks.common.models import check_tokens, needed_layer, solve_options

# Number of rows of logits that are converted to float32 at a time. A copy of all rows would need too much
# memory.
_ROWS = 4096
_FIRST_BUCKET = 16


@dataclass
class Positions:
    """Means over the tokens at positions ``first`` to ``last`` of their sequences, counted from 1.

    ``nll`` is the negative log-likelihood. :func:`score` cuts the same tokens into sequences of several
    lengths. ``change`` is the ``nll`` at this length minus the nll at the first length. At the first length
    itself, it is ``None``. Standard errors assume independent tokens.
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


@dataclass(kw_only=True)
class Search:
    """How a text was solved. All fields are ``None`` for explicit models.

    Attributes:
        window: tokens solved at a time, or ``"all"``.
        policy, budget: the convergence policy, and its maximum number of evaluations per token.
        iterations: mean number of evaluations of f per token.
        residual: mean relative residual of the tokens.
        converged: share of tokens that met the tolerance; ``None`` for policies without a tolerance.
        passes_per_batch: mean number of calls of f per batch. Each call evaluates all tokens of the window.
    """

    window: int | str | None
    policy: str | None
    budget: int | None
    iterations: float | None
    residual: float | None
    converged: float | None
    passes_per_batch: float | None


def search_fields(solve: SolveOptions | None, solves: SolveStatistics) -> dict[str, Any]:
    """The fields of :class:`Search`, from the options and the statistics of the solves."""
    found = solves.read()
    return {
        "window": None if solve is None else solve.window or "all",
        "policy": None if solve is None else repr(solve.convergence),
        "budget": None if solve is None else solve.convergence.max_iter,
        "iterations": found.get("iterations"),
        "residual": found.get("residual"),
        "converged": found["share_converged"] if found.get("share_completed", 1) < 1 else None,
        "passes_per_batch": found.get("nfe"),
    }


@dataclass(kw_only=True)
class Score(Search):
    """The score of a text under one model, with one sequence length and one set of solve options.

    Attributes:
        tokens: number of predicted tokens; the text's first token is not predicted.
        nll: mean negative log-likelihood of a predicted token.
        seconds: time that the model and the loss took.
        tokens_per_second: ``tokens`` divided by ``seconds``.
        by_position: means over the positions 1 to 16, 17 to 32, 33 to 64 and so on.
    """

    length: int
    tokens: int
    nll: float
    perplexity: float
    seconds: float
    tokens_per_second: float
    by_position: list[Positions]


def exponential(nll: float) -> float:
    """``exp(nll)``; infinite if it overflows."""
    return torch.tensor(nll, dtype=torch.float64).exp().item()


def batches(tokens: Tensor, length: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Cut ``tokens`` (N,) into batches of inputs and targets, each (B, L).

    The target of an input token is the next token. Every token except the first is the target of one input
    token. If ``length`` does not divide N - 1, the last batch has a single, shorter sequence.

    Raises:
        ValueError: fewer than ``length`` + 1 tokens; ``length`` or ``batch_size`` below 1.
    """
    check_count("length", length)
    check_count("batch_size", batch_size)
    if len(tokens) <= length:
        raise ValueError(
            f"the text has {len(tokens)} tokens; one sequence of length {length} needs {length + 1}, "
            "because its last token predicts the next: give more text (or raise --limit) or a smaller length"
        )
    whole = (len(tokens) - 1) // length * length
    inputs, targets = (
        [*text[:whole].view(-1, length).split(batch_size), text[None, whole:]]
        for text in (tokens[:-1], tokens[1:])
    )
    return [pair for pair in zip(inputs, targets, strict=True) if pair[0].numel()]


def run(model: PreTrainedModel, inputs: Tensor, solve: SolveOptions | None) -> Any:
    """The model's output on ``inputs`` (B, L).

    Raises:
        ValueError: sequences longer than the model supports.
    """
    options: dict[str, Any] = {} if solve is None else {"solve": solve}
    try:
        return model(input_ids=inputs.to(model.device), **options)
    except IndexError as error:
        raise ValueError(f"the model has no positions for sequences of {inputs.shape[1]} tokens") from error


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihoods of ``targets`` (B, L) under ``logits`` (B, L, V), as float64 on the CPU."""
    parts = zip(
        logits.flatten(0, 1).split(_ROWS), targets.to(logits.device).flatten().split(_ROWS), strict=True
    )
    found = [F.cross_entropy(rows.float(), wanted, reduction="none") for rows, wanted in parts]
    return torch.cat(found).view(targets.shape).cpu().double()


@torch.no_grad()
def score(
    model: PreTrainedModel, tokens: Tensor, lengths: Sequence[int], batch_size: int = 8,
    solve: SolveOptions | None = None,
) -> list[Score]:  # fmt: skip
    """Perplexity of ``tokens`` (N,) in sequences of each of the ``lengths``.

    Every length predicts the same tokens: all except the first. The mean loss at a position is noisy, because
    few tokens share a position. ``by_position`` therefore also reports the difference between the loss of
    these tokens and their loss at the first length. This difference is less noisy.

    Args:
        batch_size: sequences per batch at the shortest length. Longer sequences get smaller batches, with
            about the same number of tokens. The batch size does not change results.
        solve: solve options; the model's by default.

    Raises:
        ValueError: tokens outside the vocabulary; see also :func:`batches` and :func:`run`.
    """
    model.eval()
    solve = solve_options(model) if solve is None else solve
    sizes = [max(1, batch_size * min(lengths) // length) for length in lengths]
    cuts = [batches(tokens, length, size) for length, size in zip(lengths, sizes, strict=True)]
    check_tokens(model, tokens)
    found: list[Score] = []
    first: Tensor | None = None  # nll of every token at the first length
    for length, cut in zip(lengths, cuts, strict=True):
        solves = SolveStatistics()
        parts: dict[str, list[Tensor]] = defaultdict(list)  # values per token, in the order of the text
        start = time.perf_counter()
        for inputs, targets in tqdm(cut, desc=f"length {length}", leave=False, disable=None):
            out = run(model, inputs, solve)
            parts["nll"].append(losses(out.logits, targets).flatten())
            if (solution := getattr(out, "solution", None)) is not None:
                solves.add(solution)
                parts["iterations"].append(solution.iterations.cpu().double().flatten())
        seconds = time.perf_counter() - start
        measured = {name: torch.cat(values) for name, values in parts.items()}
        nll = measured["nll"]
        if first is not None:
            measured["change"] = nll - first
        first = nll if first is None else first
        mean = nll.mean().item()
        found.append(Score(
            length=length, tokens=len(nll), nll=mean, perplexity=exponential(mean),
            **search_fields(solve, solves), seconds=seconds, tokens_per_second=len(nll) / seconds,
            by_position=_by_position(length, measured),
        ))  # fmt: skip
    return found


def _by_position(length: int, measured: dict[str, Tensor]) -> list[Positions]:
    """Average each tensor (N - 1,) of ``measured`` over ranges of positions in the sequences."""
    position = torch.arange(len(measured["nll"])) % length
    doublings = max(0, math.ceil(math.log2(length / _FIRST_BUCKET)))
    edges = [0, *(min(length, _FIRST_BUCKET * 2**i) for i in range(doublings + 1))]
    found = []
    for first, last in pairwise(edges):
        here = (position >= first) & (position < last)
        count = int(here.sum())
        means = {name: values[here].mean().item() for name, values in measured.items()}
        errors = {name: (v[here].std() / count**0.5).item() for name, v in measured.items() if count > 1}
        found.append(Positions(
            first=first + 1, last=last, tokens=count, nll=means["nll"], nll_stderr=errors.get("nll"),
            perplexity=exponential(means["nll"]), iterations=means.get("iterations"),
            change=means.get("change"), change_stderr=errors.get("change"),
        ))  # fmt: skip
    return found


def score_by_budget(
    model: PreTrainedModel, tokens: Tensor, length: int, budgets: Sequence[int],
    solve: SolveOptions | None = None, rtol: float | None = None, batch_size: int = 8,
) -> list[Score]:  # fmt: skip
    """Score a text with each number of iterations in ``budgets``, and last with the model's own policy.

    Without ``rtol`` and without a window, every token does exactly n iterations for a budget n. If ``rtol``
    or a window is given, a token does at most n iterations and stops once it has converged. If only a window
    is given, the tolerance is the model's own tolerance, or 1e-3 if the model has no tolerance.

    Raises:
        ValueError: the model is explicit; a budget below 1; see also :func:`score`.
    """
    options = solve or needed_layer(model, "a number of iterations").eval_solve
    own = options.convergence
    if rtol is None and options.window is not None:
        rtol = own.rtol if isinstance(own, Residual) and own.rtol > 0 else 1e-3
    policies = [FixedIterations(n) if rtol is None else Residual(rtol=rtol, max_iter=n) for n in budgets]
    return [
        score(model, tokens, [length], batch_size, replace(options, convergence=policy))[0]
        for policy in (*policies, own)
    ]
