"""How many running products a model gets right.

Shapes: B batch, L tokens, V vocabulary.
"""

from typing import TypedDict

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of positions that do not count."""

LAST = 10
"""How many labels at the end of a sequence ``accuracy_last10`` looks at."""


class AccuracyReport(TypedDict):
    """Fractions in [0, 1]; NaN where nothing was counted."""

    accuracy: float
    """Over all labels."""
    accuracy_last10: float
    """Over the last ten labels of each sequence, or all of a shorter one."""
    accuracy_sequence: float
    """Of sequences with every label right; those without labels do not count."""
    accuracy_by_position: Tensor
    """(L,) float64 on the CPU."""


class Accuracies:
    """Accumulates accuracies over batches, whose lengths may differ.

    Counts stay on the labels' device until :meth:`compute`, so :meth:`update` never waits for it.
    """

    def __init__(self) -> None:
        # Rows: right, counted. Columns of _totals: all labels, last ten, whole sequences.
        self._totals = torch.zeros(2, 3, dtype=torch.int64)
        self._by_position = torch.zeros(2, 0, dtype=torch.int64)

    def update(self, logits_or_predictions: Tensor, labels: Tensor) -> None:
        """Count one batch.

        Args:
            logits_or_predictions: (B, L, V) logits, or (B, L) predicted tokens.
            labels: (B, L) integers, aligned; ``IGNORE_INDEX`` where nothing counts.

        Raises:
            ValueError: if the shapes do not fit.
        """
        predictions = logits_or_predictions
        if predictions.ndim == 3:
            predictions = predictions.argmax(dim=-1)
        if labels.ndim != 2 or predictions.shape != labels.shape:
            raise ValueError(
                f"got {tuple(logits_or_predictions.shape)} for labels {tuple(labels.shape)}, must "
                "be (B, L, V) logits or (B, L) predictions for (B, L) labels"
            )
        counted = labels != IGNORE_INDEX
        right = counted & (predictions == labels)
        rank_from_end = counted.flip(1).cumsum(1).flip(1)
        last = counted & (rank_from_end <= LAST)
        solved = (right == counted).all(dim=1)
        nonempty = counted.any(dim=1)
        totals = torch.stack(
            [
                torch.stack([right.sum(), (right & last).sum(), (solved & nonempty).sum()]),
                torch.stack([counted.sum(), last.sum(), nonempty.sum()]),
            ]
        )
        self._totals = self._totals.to(totals.device) + totals

        by_position = torch.stack([right.sum(dim=0), counted.sum(dim=0)])
        before = self._by_position.to(by_position.device)
        shorter, longer = sorted((before, by_position), key=lambda counts: counts.shape[1])
        longer[:, : shorter.shape[1]] += shorter
        self._by_position = longer

    def compute(self) -> AccuracyReport:
        """The accuracies over everything counted so far."""
        right, counted = self._totals.cpu().double()
        overall, last10, sequence = (right / counted).tolist()
        right_at, counted_at = self._by_position.cpu().double()
        return {
            "accuracy": overall,
            "accuracy_last10": last10,
            "accuracy_sequence": sequence,
            "accuracy_by_position": right_at / counted_at,
        }


def accuracies(logits_or_predictions: Tensor, labels: Tensor) -> AccuracyReport:
    """The accuracies of one batch; see :class:`Accuracies` for arguments and errors."""
    counter = Accuracies()
    counter.update(logits_or_predictions, labels)
    return counter.compute()
