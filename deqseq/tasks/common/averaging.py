"""Keeps a moving average of a model's weights during training."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

_FILE = "average.safetensors"
_UPDATES = "updates"


class Averaging(TrainerCallback):
    """An exponential moving average of the weights, updated after every optimiser step.

    Update n = 0, 1, ... is average <- d average + (1 - d) weights, where d is the smaller of ``decay`` and
    n / (n + 9). The first updates have a small d, so the average soon forgets the initial weights.

    torch's ``AveragedModel`` makes the host wait for the GPU in every update. This class does not.

    Args:
        decay: the largest d, in [0, 1).

    Attributes:
        model: a copy of the model, with averaged weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model: Any = deepcopy(model).requires_grad_(False).eval()
        self._decay = decay
        self._updates = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.model.to(args.device)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        decay = min(self._decay, self._updates / (self._updates + 9))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - decay)
        self._updates += 1

    @contextmanager
    @torch.no_grad()
    def lend(self, model: nn.Module) -> Iterator[None]:
        """Within this context, the parameters of ``model`` have their averages; its buffers are its own."""
        weights: list[Tensor] = list(model.parameters())
        own = [weight.clone() for weight in weights]
        try:
            torch._foreach_copy_(weights, list(self.model.parameters()))
            yield
        finally:
            torch._foreach_copy_(weights, own)

    def save(self, folder: Path) -> None:
        found = {name: value.contiguous() for name, value in self.model.state_dict().items()}
        save_file({**found, _UPDATES: torch.tensor(self._updates)}, folder / _FILE)

    def load(self, folder: Path, device: torch.device) -> None:
        found = load_file(folder / _FILE)
        self._updates = int(found.pop(_UPDATES))
        self.model.load_state_dict(found)
        self.model.to(device)
