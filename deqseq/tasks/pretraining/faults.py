"""Finds losses, equilibria and gradients that are not finite. A GPU goes on computing meanwhile."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deqseq.solution import Solution
from deqseq.status import Status


class Diverged(FloatingPointError):
    """A loss, gradient or equilibrium is not finite."""


class Faults:
    """Finds losses, equilibria and gradients that are not finite, on all processes of the run.

    A step with faults must not change the weights:

    - If the optimiser is fused, the device decides: a fused optimiser skips its step if its ``found_inf`` is
      1. The host reads the faults of a step after it has started the next step, so the device always has
      work.
    - Otherwise, :meth:`end_step` waits for the device, and raises the error before the optimiser's step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The sum of the losses, and the number of tokens without a finite equilibrium.
        self._found = torch.zeros(2, device=device)
        # The step, the faults of all processes, and the event that marks the end of their copy to the CPU.
        self._unread: tuple[int, Tensor, Any] | None = None

    def add(self, loss: Tensor, solution: Solution | None) -> None:
        """Add a forward pass of this step.

        Args:
            loss: a scalar.
            solution: of this forward pass; ``None`` for an explicit model.
        """
        self._found[0] += loss.detach()
        if solution is not None:
            self._found[1] += (solution.status == Status.NON_FINITE).sum()

    def end_step(self, step: int, norm: Tensor, gather: Any, optimizer: Any = None) -> None:
        """Call this before the optimiser's step.

        Args:
            step: number of the step, for the message.
            norm: norm of the gradient, a scalar.
            gather: a function that collects a (1, 3) tensor from each of P processes, as (P, 3).
            optimizer: the optimiser of all weights; ``None`` if it is not fused, or ignores ``found_inf``.

        Raises:
            Diverged: with ``optimizer``, the previous step has faults. Without it, this step has faults.
        """
        self.check()
        mine = torch.cat([self._found, torch.as_tensor(norm, device=self.device).float().view(1)])
        self._found = torch.zeros_like(self._found)
        found = gather(mine[None])
        if optimizer is not None:
            broken = ~found.isfinite().all() | found[:, 1].any()
            optimizer.found_inf = broken.float()
        event = torch.cuda.Event() if found.is_cuda else None
        self._unread = step, found.to("cpu", non_blocking=found.is_cuda), event
        if event is not None:
            event.record()
        if optimizer is None:
            self.check()

    def check(self) -> None:
        """Wait for the newest unchecked step, and raise :class:`Diverged` if it has faults."""
        if self._unread is None:
            return
        (step, found, event), self._unread = self._unread, None
        if event is not None:
            event.synchronize()
        if faults := _sentences(found.tolist()):
            raise Diverged(
                f"step {step}: {'; '.join(faults)}. The step did not change the weights. Start again from "
                "the last checkpoint in a new folder (--start_from CHECKPOINT), with a lower learning rate, "
                "a smaller max_grad_norm or a damped solver"
            )


def _sentences(found: Sequence[Sequence[float]]) -> list[str]:
    """The faults in words. ``found``: sum of losses, broken tokens and norm of the gradient, by process."""
    faults = []
    for rank, (loss, broken, _) in enumerate(found):
        if not math.isfinite(loss):
            faults.append(f"the loss is {loss} on process {rank}")
        if broken:
            faults.append(f"{broken:.0f} tokens have no finite equilibrium on process {rank}")
    norms = [norm for _, _, norm in found if not math.isfinite(norm)]
    return faults or [f"the gradient's norm is {norm}" for norm in norms[:1]]
