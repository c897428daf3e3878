"""Keeps the weights of the best test during training."""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_FILE = "best.safetensors"
_SCORE, _STEP = "score", "step"


class Best:
    """The weights with the highest score so far. Checkpoints save them.

    Attributes:
        score: the highest score; minus infinity before the first test.
        step: the step of the test with this score.
        weights: a copy of the model's state with this score. Among equal scores, the last one counts.
    """

    def __init__(self) -> None:
        self.score = -math.inf
        self.step = 0
        self.weights: dict[str, Tensor] = {}

    def offer(self, score: float, step: int, model: nn.Module) -> None:
        """Keep a copy of the weights of ``model``, unless an earlier score is higher."""
        if score >= self.score:
            self.score, self.step = score, step
            self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def save(self, folder: Path) -> None:
        found = {name: value.contiguous() for name, value in self.weights.items()}
        score = torch.tensor(self.score, dtype=torch.float64)
        save_file({**found, _SCORE: score, _STEP: torch.tensor(self.step)}, folder / _FILE)

    def load(self, folder: Path, device: torch.device) -> None:
        self.weights = load_file(folder / _FILE, device=str(device))
        self.score, self.step = float(self.weights.pop(_SCORE)), int(self.weights.pop(_STEP))
