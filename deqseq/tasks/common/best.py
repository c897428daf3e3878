"""Keeps the weights of the best test during training."""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_FILE = "best.safetensors"
_SCORE = "score"


class Best:
    """The weights with the highest score so far. Checkpoints save them.

    Attributes:
        score: the highest score; minus infinity before the first test.
        weights: a copy of the model's state with this score. Among equal scores, the last one counts.
    """

    def __init__(self) -> None:
        self.score = -math.inf
        self.weights: dict[str, Tensor] = {}

    def offer(self, score: float, model: nn.Module) -> None:
        """Keep a copy of the weights of ``model``, unless an earlier score is higher."""
        if score >= self.score:
            self.score = score
            self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def save(self, folder: Path) -> None:
        score = torch.tensor(self.score, dtype=torch.float64)
        weights = {name: value.contiguous() for name, value in self.weights.items()}
        save_file({**weights, _SCORE: score}, folder / _FILE)

    def load(self, folder: Path, device: torch.device) -> None:
        if not (folder / _FILE).exists():  # a checkpoint of an older version
            return
        self.weights = load_file(folder / _FILE, device=str(device))
        self.score = float(self.weights.pop(_SCORE))
