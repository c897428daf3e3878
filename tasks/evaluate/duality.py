"""Duality: whether one model solved in different windows says the same, and what each costs.

Shapes: N tokens of a text, B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from deqseq.convergence import ConvergencePolicy
from deqseq.tasks.evaluate.models import solving
from deqseq.tasks.evaluate.perplexity import SolveTally, batches, exponential, losses, run

# Rows of logits compared at once, in float32.
_ROWS = 1024


@dataclass
class Agreement:
    """One window against the first.

    Attributes:
        window: tokens solved at a time; ``None``: all.
        policy: when a token was done.
        tokens: compared.
        same: share of tokens with the same most likely next token.
        largest, mean: absolute differences of logits.
        divergence: Kullback-Leibler, of this window's prediction from the first's, nats a token.
        perplexity: of the text, in this window.
        iterations: evaluations a token took part in, mean.
        residual, converged, nfe: as in :class:`~deqseq.tasks.evaluate.perplexity.Score`.
        seconds: of the model.
    """

    window: int | None
    policy: str
    tokens: int
    same: float
    largest: float
    mean: float
    divergence: float
    perplexity: float
    iterations: float | None
    residual: float | None
    converged: float | None
    nfe: int | None
    seconds: float


class _Comparison:
    """Differences from the reference, added up over batches."""

    def __init__(self) -> None:
        self.solves = SolveTally()
        self.seconds = 0.0
        self.nll = 0.0
        self._sums = torch.zeros(3, dtype=torch.float64)  # same, mean over V of |difference|, divergence
        self._largest = torch.zeros((), dtype=torch.float64)

    def add(self, logits: Tensor, reference: Tensor) -> None:
        """Take in one batch, both (B, L, V)."""
        for here, there in zip(
            logits.flatten(0, 1).split(_ROWS), reference.flatten(0, 1).split(_ROWS), strict=True
        ):
            here, there = here.float(), there.float()
            difference = (here - there).abs()
            p = there.log_softmax(-1)
            divergence = (p.exp() * (p - here.log_softmax(-1))).sum(-1)
            parts = (here.argmax(-1) == there.argmax(-1), difference.mean(-1), divergence)
            self._sums += torch.stack([part.cpu().double().sum() for part in parts])
            self._largest = torch.maximum(self._largest, difference.max().cpu().double())

    def read(self, window: int | None, policy: str, tokens: int) -> Agreement:
        same, mean, divergence = (self._sums / tokens).tolist()
        return Agreement(
            window=window,
            policy=policy,
            tokens=tokens,
            same=same,
            largest=self._largest.item(),
            mean=mean,
            divergence=divergence,
            perplexity=exponential(self.nll / tokens),
            **self.solves.read(),
            seconds=self.seconds,
        )


@torch.no_grad()
def compare_windows(
    model: PreTrainedModel, tokens: Tensor, length: int, windows: Sequence[int | None],
    policy: ConvergencePolicy | None = None, batch_size: int = 8, progress: bool = False,
) -> list[Agreement]:  # fmt: skip
    """Solve ``tokens`` (N,), in sequences of ``length``, in every window and compare with the first.

    Args:
        windows: at least two.
        policy: of all windows; the model's evaluation policy by default.

    Raises:
        ValueError: fewer than two windows; the model is explicit; too little text.
    """
    if len(windows) < 2:
        raise ValueError(f"windows are compared with the first: give at least two, got {list(windows)}")
    model.eval()
    cut = batches(tokens, length, batch_size)
    with solving(model, windows[0], policy) as layer:
        assert layer is not None  # a window is given, which explicit models refuse
        rule = repr(layer.eval_convergence)
    found = [_Comparison() for _ in windows]
    bar = tqdm(total=len(tokens) - 1, desc="duality", unit="tok", leave=False, disable=not progress)
    for inputs, targets in cut:
        reference: Tensor | None = None
        for window, comparison in zip(windows, found, strict=True):
            start = time.perf_counter()
            with solving(model, window, policy):
                out: Any = run(model, inputs)
            comparison.nll += losses(out.logits, targets).sum().item()
            comparison.seconds += time.perf_counter() - start  # the loss waits for the device
            comparison.solves.add(out.solution)
            reference = out.logits if reference is None else reference
            comparison.add(out.logits, reference)
        bar.update(targets.numel())
    bar.close()
    return [
        comparison.read(window, rule, len(tokens) - 1)
        for window, comparison in zip(windows, found, strict=True)
    ]
