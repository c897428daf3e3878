"""Iterates that persist over optimiser steps.

Every optimiser step does a few iterations for each sequence of its batch. The next step with this batch
continues from the iterates at which this step ends. A sequence stays in the batch until it has been solved
in a few steps in a row, or until its budget of steps is spent. Then a fresh sequence takes its place. The
method was published as deep supervision in segments (HRM, arXiv 2506.21734; TRM, arXiv 2510.04871;
Equilibrium Reasoners, arXiv 2605.21488).

Several batches can take turns, one in each step. With a single batch, many steps in a row train on the same
sequences. The weights can then fit these few answers, so that training solves its sequences but not fresh
ones.

Iterates can be damaged: some tokens return to the initial guess, and the other tokens continue. This is meant
to teach the model to repair answers, as in neural cellular automata (Mordvintsev et al., 2020,
doi:10.23915/distill.00023).

The gradient strategy decides which iterations a step does. For example, ``unrolled`` with ``iterations: 1``
does one iteration and records its autograd graph.

Shapes: B sequences, L tokens, D width.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deqseq.tasks.common.trainer import AlignedTrainer

_STATE = ("z", "left", "solved")


class Iterates:
    """A batch: its sequences, their iterates, and the number of steps that each sequence has left.

    Only steps with this batch count.

    Args:
        budget: maximum number of steps for which a sequence stays in the batch. The batch's first
            sequences get different budgets, from 1 to ``budget``. With equal budgets, all of them could leave
            in the same step.
        solved_steps: a sequence leaves when it has been solved in this many steps in a row. With 1, it leaves
            as soon as it is solved, so the model is not trained to stay at an answer.
        damage: probability that a step damages the iterates of a sequence. Each token of this sequence then
            returns to the guess with probability p. For each damaged sequence, p is drawn uniformly from 0
            to 1.
        number: number of this batch among the batches that take turns; checkpoints store this
            batch in the file ``iterates-NUMBER.safetensors``.
    """

    def __init__(self, budget: int, solved_steps: int = 1, damage: float = 0.0, number: int = 0) -> None:
        self.budget = budget
        self.solved_steps = solved_steps
        self.damage = damage
        self._file = f"iterates-{number}.safetensors"
        self.batch: dict[str, Tensor] = {}
        self.z: Tensor | None = None
        self.left: Tensor | None = None  # (B,) int64, steps left
        self.solved: Tensor | None = None  # (B,) int64, steps in a row in which the sequence was solved

    def take(self, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make the batch of the next step. Sequences in ``fresh`` replace sequences without steps left.

        The batch gets two more entries: ``z0`` (B, L, D), the iterates to continue from, and ``fresh`` (B, L)
        or (B, 1) bool, true for tokens that start at the guess instead. The first step of a batch has
        neither entry.
        """
        if self.left is None or self.solved is None:
            size, device = len(fresh["labels"]), fresh["labels"].device
            self.left = torch.arange(size, device=device) % self.budget + 1
            self.solved = torch.zeros_like(self.left)
            self.batch = fresh
            return fresh
        ended = self.left == 0
        self.batch = {
            name: torch.where(ended.view(-1, *[1] * (old.dim() - 1)), fresh[name], old)
            for name, old in self.batch.items()
        }
        self.left = self.left.masked_fill(ended, self.budget)
        self.solved = self.solved.masked_fill(ended, 0)
        if self.z is None:
            return self.batch
        fresh_tokens = ended[:, None]
        if self.damage:
            fresh_tokens = fresh_tokens | self._damaged(self.z)
        return {**self.batch, "z0": self.z, "fresh": fresh_tokens}

    def _damaged(self, z: Tensor) -> Tensor:
        """(B, L) bool, true for the tokens of ``z`` (B, L, D) that return to the guess."""
        of_sequence = torch.rand(2, len(z), 1, device=z.device)
        share = of_sequence[0].where(of_sequence[1] < self.damage, of_sequence.new_zeros(()))
        return torch.rand(z.shape[:2], device=z.device) < share

    def put(self, z: Tensor | None, solved: Tensor) -> None:
        """Store the iterates ``z`` (B, L, D) of a step, and which sequences are ``solved``, (B,) bool."""
        assert self.left is not None and self.solved is not None
        self.z = None if z is None else z.detach()
        self.solved = (self.solved + 1).masked_fill(~solved, 0)
        self.left = (self.left - 1).masked_fill(self.solved >= self.solved_steps, 0)

    def save(self, folder: Path) -> None:
        found = {f"batch.{name}": value for name, value in self.batch.items()}
        found |= {name: value for name in _STATE if (value := getattr(self, name)) is not None}
        save_file({name: value.contiguous() for name, value in found.items()}, folder / self._file)

    def load(self, folder: Path, device: torch.device) -> None:
        found = load_file(folder / self._file, device=str(device))
        self.z, self.left, self.solved = (found.pop(name, None) for name in _STATE)
        self.batch = {name.removeprefix("batch."): value for name, value in found.items()}


class PersistentTrainer(AlignedTrainer):
    """Trains with iterates that persist over optimiser steps.

    For every step, the stream yields a whole batch of fresh sequences. The trainer uses only the sequences
    that replace another sequence. The model must take ``z0`` and ``fresh`` (see :meth:`Iterates.take`), and
    its output must have the iterates ``z``. A sequence is solved if the model predicts all its labels.

    Args:
        budget, solved_steps, damage: as in :class:`Iterates`.
        batches: number of batches that take turns. All their iterates are kept in the device's memory.
    """

    def __init__(
        self, *args: Any, budget: int, solved_steps: int = 1, damage: float = 0.0, batches: int = 1,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **options)
        self.batches = [Iterates(budget, solved_steps, damage, number) for number in range(batches)]
        self.parts.extend(self.batches)
        self._ended: list[Any] = [0, 0]  # counts since the last log: left, and left as solved

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        iterates = self.batches[self.state.global_step % len(self.batches)]
        inputs = iterates.take(inputs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        solved = (outputs.logits.argmax(-1) == inputs["labels"]).all(1)
        iterates.put(outputs.z, solved)
        assert iterates.left is not None
        ended = iterates.left == 0
        self._ended = [self._ended[0] + ended.sum(), self._ended[1] + (ended & solved).sum()]
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            ended, solved = map(float, self._ended)
            logs = {**logs, **({"solved": round(solved / ended, 4)} if ended else {})}
            self._ended = [0, 0]
        super().log(logs, start_time)
