"""Duality: whether a model makes the same predictions in different windows, and the cost of each window.

A window is the number of tokens that are solved together.

Shapes: N tokens of a text, B sequences, L tokens, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from deqseq.policy import ConvergencePolicy
from deqseq.problem import SolveOptions
from deqseq.statistics import SolveStatistics
from deqseq.status import Status
from deqseq.tasks.common.models import Window, check_tokens, needed_layer
from deqseq.tasks.evaluate.perplexity import Search, batches, exponential, losses, run, search_fields

# Number of rows of logits that are converted to float32 and compared at a time. All rows together would need
# much memory.
_ROWS = 1024
# Number of tokens in ``Agreement.worst``.
_WORST = 5


@dataclass
class Difference:
    """A token whose logits differ between one window and the first window.

    ``sequence`` and ``position`` count from 1. ``max_logit_diff`` is the largest absolute difference of the
    token's logits. The fields ``first_...`` describe the token's search in the first window.
    """

    sequence: int
    position: int
    max_logit_diff: float
    iterations: int
    first_iterations: int
    residual: float
    first_residual: float
    converged: bool
    first_converged: bool


@dataclass(kw_only=True)
class Agreement(Search):
    """A comparison of one window with the first window.

    Attributes:
        tokens: number of tokens compared.
        agreement: share of tokens whose most likely next token is the same in both windows.
        max_logit_diff, mean_logit_diff: largest and mean absolute difference of logits.
        kl: mean Kullback-Leibler divergence KL(first window || this window), nats per token.
        perplexity: perplexity of the text in this window.
        seconds: time in the model and the loss.
        worst: the tokens with the largest differences. Converged tokens can differ too: a small residual does
            not mean a small distance to the fixed point.
    """

    tokens: int
    agreement: float
    max_logit_diff: float
    mean_logit_diff: float
    kl: float
    perplexity: float
    seconds: float
    worst: list[Difference]


class _Comparison:
    """Differences between one window and the first window, summed over batches."""

    def __init__(self, options: SolveOptions) -> None:
        self.options = options
        self.solves = SolveStatistics()
        self.seconds = 0.0
        self.nll = 0.0
        self.worst: list[Difference] = []
        self._sequences = 0
        # Sums over tokens: same argmax (0 or 1), mean |difference| of the logits, KL divergence.
        self._sums = torch.zeros(3, dtype=torch.float64)

    def add(self, out: Any, first: Any) -> None:
        """Add one batch: the model's output ``out`` in this window and ``first`` in the first window."""
        largest = []
        rows = (found.logits.flatten(0, 1).split(_ROWS) for found in (out, first))
        for here, there in zip(*rows, strict=True):
            here, there = here.float(), there.float()
            difference = (here - there).abs()
            p = there.log_softmax(-1)
            divergence = (p.exp() * (p - here.log_softmax(-1))).sum(-1)
            parts = (here.argmax(-1) == there.argmax(-1), difference.mean(-1), divergence)
            self._sums += torch.stack([part.cpu().double().sum() for part in parts])
            largest.append(difference.amax(-1).cpu())
        self.solves.add(out.solution)
        B, L = out.solution.status.shape
        for value, i in zip(*torch.cat(largest).topk(min(_WORST, B * L)), strict=True):
            at = divmod(int(i), L)
            solves: dict[str, Any] = {}
            for prefix, solution in (("", out.solution), ("first_", first.solution)):
                solves[f"{prefix}iterations"] = int(solution.iterations[at])
                solves[f"{prefix}residual"] = solution.residual[at].item()
                solves[f"{prefix}converged"] = bool(solution.status[at] == Status.CONVERGED)
            sequence = self._sequences + at[0] + 1
            self.worst.append(Difference(sequence, at[1] + 1, value.item(), **solves))
        self._sequences += B
        self.worst = sorted(self.worst, key=lambda found: -found.max_logit_diff)[:_WORST]

    def read(self, tokens: int) -> Agreement:
        """The result; ``tokens`` is the number of tokens in all batches."""
        same, mean, divergence = (self._sums / tokens).tolist()
        return Agreement(
            **search_fields(self.options, self.solves), tokens=tokens, agreement=same,
            max_logit_diff=self.worst[0].max_logit_diff, mean_logit_diff=mean,
            kl=max(0.0, divergence),  # rounding can make a mean near 0 negative
            perplexity=exponential(self.nll / tokens), seconds=self.seconds,
            worst=[found for found in self.worst if found.max_logit_diff > 0],
        )  # fmt: skip


@torch.no_grad()
def compare_windows(
    model: PreTrainedModel, tokens: Tensor, length: int, windows: Sequence[Window],
    policy: ConvergencePolicy | None = None, batch_size: int = 8,
) -> list[Agreement]:  # fmt: skip
    """Solve ``tokens`` (N,) in every window and compare each window with the first.

    Args:
        length: tokens per sequence.
        windows: two or more windows, each a number of tokens, ``None`` (all tokens) or ``"model"`` (the
            window of the model).
        policy: convergence policy for every window; the model's evaluation policy by default.

    Raises:
        ValueError: fewer than two windows; a window below 1; the model is explicit; tokens outside the
            vocabulary; too little text.
    """
    if len(windows) < 2:
        raise ValueError(
            f"windows are compared with the first: give at least two, got "
            f"{', '.join('all' if w is None else str(w) for w in windows) or 'none'}"
        )
    model.eval()
    cut = batches(tokens, length, batch_size)
    check_tokens(model, tokens)
    own = needed_layer(model, "a comparison of windows").eval_solve
    own = replace(own, convergence=policy or own.convergence)
    every = [own if window == "model" else replace(own, window=window) for window in windows]
    comparisons = [_Comparison(options) for options in every]
    for inputs, targets in tqdm(cut, desc="duality", leave=False, disable=None):
        first: Any = None
        for comparison in comparisons:
            start = time.perf_counter()
            out = run(model, inputs, comparison.options)
            comparison.nll += losses(out.logits, targets).sum().item()
            comparison.seconds += time.perf_counter() - start  # item() has waited for the device
            first = out if first is None else first
            comparison.add(out, first)
    return [comparison.read(len(tokens) - 1) for comparison in comparisons]


def unconverged(found: Sequence[Agreement]) -> list[str]:
    """A list with one warning if tokens did not converge, else an empty list.

    The predictions of tokens that did not converge may differ between windows.
    """
    short = [a for a in found if a.converged is not None and a.converged < 1]
    if not short:
        return []
    shares = ", ".join(f"{1 - (a.converged or 0):.2%} in window {a.window}" for a in short)
    return [
        f"warning: tokens that have not converged after {short[0].budget} iterations: {shares}. "
        "Their predictions may differ between windows: raise --max-iter or --rtol"
    ]


def describe_worst(found: Sequence[Agreement]) -> str:
    """One line about the token with the largest difference."""
    every = [(a, a.worst[0]) for a in found if a.worst]
    if not every:
        return "all logits are the same"
    a, token = max(every, key=lambda pair: pair[1].max_logit_diff)
    return (
        f"largest difference: {token.max_logit_diff:.1e} in sequence {token.sequence}, position "
        f"{token.position}; iterations {token.iterations} in window {a.window}, {token.first_iterations} in "
        f"window {found[0].window}; residuals {token.residual:.1e}, {token.first_residual:.1e}"
    )
