"""Finds losses, equilibria and gradients that are not finite, while the device computes."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deqseq.solution import Solution, Status


class Diverged(FloatingPointError):
    """A loss, gradient or equilibrium is not finite."""


class Faults:
    """Finds losses, equilibria and gradients that are not finite, on any process.

    In a step with faults, the optimiser must not change the weights. There are two ways:

    - With ``optimizer``, which must be fused, the device decides: a fused optimiser skips its step if its
      ``found_inf`` is 1. The host reads the faults of a step during the next step, so it never waits for the
      device.
    - Without, :meth:`end_step` waits for the device, and raises the error before the optimiser's step.

    Args:
        optimizer: the optimiser of all weights, or ``None``.
    """

    def __init__(self, device: torch.device, optimizer: Any = None) -> None:
        self.device, self.optimizer = device, optimizer
        self._found = torch.zeros(2, device=device)  # sum of losses, count of tokens that are not finite
        self._unread: tuple[int, Tensor, Any] | None = (
            None  # step, faults of all processes, when they are there
        )

    def add(self, loss: Tensor, solution: Solution | None) -> None:
        """Add a forward pass of this step."""
        self._found[0] += loss.detach()
        if solution is not None:
            self._found[1] += (solution.status == Status.NON_FINITE).sum()

    def end_step(self, step: int, norm: Tensor, gather: Any) -> None:
        """Call this before the optimiser's step.

        Args:
            step: number of the step, for the message.
            norm: norm of the gradient.
            gather: stacks the tensors (1, 3) of all processes.

        Raises:
            Diverged: with ``optimizer``, the step before has faults; without, this step has.
        """
        self.check()
        mine = torch.cat([self._found, torch.as_tensor(norm, device=self.device).float().view(1)])
        self._found = torch.zeros_like(self._found)
        found = gather(mine[None])
        if self.optimizer is not None:
            broken = ~found.isfinite().all() | found[:, 1].any()
            self.optimizer.found_inf = broken.float()
        event = torch.cuda.Event() if found.is_cuda else None
        self._unread = step, found.to("cpu", non_blocking=True), event
        if event is not None:
            event.record()
        if self.optimizer is None:
            self.check()

    def check(self) -> None:
        """Wait for the device, and raise :class:`Diverged` if the last step has faults."""
        if self._unread is None:
            return
        (step, found, event), self._unread = self._unread, None
        if event is not None:
            event.synchronize()
        if faults := _sentences(found.tolist()):
            raise Diverged(
                f"step {step}: {'; '.join(faults)}. The weights are those of the step before. Start again "
                "from the last checkpoint with a lower learning rate, a smaller max_grad_norm or a damped "
                "solver, in a new folder (--start_from CHECKPOINT)"
            )


def _sentences(found: Iterable[list[float]]) -> list[str]:
    """The faults in words. ``found``: sum of losses, broken tokens and norm of the gradient, by process."""
    faults = []
    for rank, (loss, broken, norm) in enumerate(found):
        if not math.isfinite(loss):
            faults.append(f"the loss is {loss} on process {rank}")
        if broken:
            faults.append(f"{broken:.0f} tokens have no finite equilibrium on process {rank}")
        if not faults and not math.isfinite(norm):
            faults.append(f"the gradient's norm is {norm}")
    return faults
