"""Iterates that persist over optimiser steps.

Every optimiser step does a few iterations for each sequence of its batch. They continue from the iterates of
the step before. A sequence stays in the batch until it is solved, or until its budget of steps is spent. Then
a fresh sequence takes its place. The method was published as deep supervision in segments (HRM, arXiv
2506.21734; TRM, arXiv 2510.04871; Equilibrium Reasoners, arXiv 2605.21488).

The gradient strategy decides which iterations a step does: ``unrolled`` with ``iterations: 1`` does one
iteration, with a graph.

Shapes: B sequences, L tokens, D width.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deqseq.tasks.common.trainer import AlignedTrainer

_FILE = "iterates.safetensors"


class Iterates:
    """The sequences in the batch, their iterates, and how many steps are left of their budgets.

    Args:
        budget: maximum number of optimiser steps for which a sequence stays in the batch. The sequences of
            the first batch get budgets from 1 to ``budget``, so that they do not all leave in the same step.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.batch: dict[str, Tensor] = {}
        self.z: Tensor | None = None
        self.left: Tensor | None = None  # (B,) int64, steps left

    def take(self, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch of the next step. Sequences without steps left are replaced by those in ``fresh``.

        Returns the batch with two more entries: ``z0`` (B, L, D), the iterates to continue from, and
        ``fresh`` (B,) bool, the sequences that have no iterate yet. The first batch has neither entry.
        """
        if self.left is None:
            size, device = len(fresh["labels"]), fresh["labels"].device
            self.left = torch.arange(size, device=device) % self.budget + 1
            self.batch = fresh
            return fresh
        ended = self.left == 0
        self.batch = {
            name: torch.where(ended.view(-1, *[1] * (old.dim() - 1)), fresh[name], old)
            for name, old in self.batch.items()
        }
        self.left = self.left.masked_fill(ended, self.budget)
        return {**self.batch, **({} if self.z is None else {"z0": self.z, "fresh": ended})}

    def put(self, z: Tensor | None, solved: Tensor) -> None:
        """Store the iterates ``z`` (B, L, D) of a step. Sequences that are ``solved`` (B,) leave."""
        assert self.left is not None
        self.z = None if z is None else z.detach()
        self.left = (self.left - 1).masked_fill(solved, 0)

    def save(self, folder: Path) -> None:
        found = {f"batch.{name}": value for name, value in self.batch.items()}
        found |= {name: value for name in ("z", "left") if (value := getattr(self, name)) is not None}
        save_file({name: value.contiguous() for name, value in found.items()}, folder / _FILE)

    def load(self, folder: Path, device: torch.device) -> None:
        found = load_file(folder / _FILE, device=str(device))
        self.z, self.left = found.pop("z", None), found.pop("left", None)
        self.batch = {name.removeprefix("batch."): value for name, value in found.items()}


class PersistentTrainer(AlignedTrainer):
    """Trains with iterates that persist. The stream yields a whole batch of fresh sequences for every step.

    The model must take ``z0`` and ``fresh`` (see :meth:`Iterates.take`), and its output must have ``z``. A
    sequence is solved if all its labels are predicted.

    Args:
        budget: see :class:`Iterates`.
    """

    def __init__(self, *args: Any, budget: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.iterates = Iterates(budget)
        self.parts.append(self.iterates)
        self._ended: list[Any] = [0, 0]  # sequences that left since the last log: all, and solved ones

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = self.iterates.take(inputs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        solved = (outputs.logits.argmax(-1) == inputs["labels"]).all(1)
        self.iterates.put(outputs.z, solved)
        left = self.iterates.left
        assert left is not None
        self._ended = [self._ended[0] + (left == 0).sum(), self._ended[1] + solved.sum()]
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            ended, solved = map(float, self._ended)
            logs = {**logs, **({"solved": round(solved / ended, 4)} if ended else {})}
            self._ended = [0, 0]
        super().log(logs, start_time)
