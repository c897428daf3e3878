"""Keeps a moving average of a model's weights during training."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import TrainerCallback

_FILE = "average.safetensors"


class Averaging(TrainerCallback):
    """An exponential moving average of the weights, updated after every optimiser step.

    Update n is average <- d average + (1 - d) weights, where d is the smaller of ``decay`` and n / (n + 9).
    The first updates have a small d, so the average soon forgets the initial weights.

    Args:
        decay: in [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        def update(averages: Any, weights: Any, updates: Tensor | int) -> None:
            number = int(updates)
            torch._foreach_lerp_(averages, weights, 1 - min(decay, number / (number + 9)))

        self._averaged = AveragedModel(model, multi_avg_fn=update)
        self._averaged.requires_grad_(False).eval()

    @property
    def model(self) -> Any:
        """The model with averaged weights."""
        return self._averaged.module

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Move only the averaged weights to the device. The number of updates stays on the CPU, because
        # reading it from a GPU would wait for the GPU.
        self._averaged.module.to(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._averaged.update_parameters(model)

    def save(self, folder: Path) -> None:
        found = {name: value.contiguous() for name, value in self._averaged.state_dict().items()}
        save_file(found, folder / _FILE)

    def load(self, folder: Path, device: torch.device) -> None:
        self._averaged.load_state_dict(load_file(folder / _FILE))
        self._averaged.module.to(device)
