"""Settings of a CatbAbI run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from deqseq.curriculum import Curriculum
from deqseq.tasks.catbabi.stories import TASKS
from deqseq.tasks.common.settings import (
    BelowOne,
    ClosedUnitInterval,
    NonNegativeFinite,
    PositiveFinite,
    PositiveInt,
)
from deqseq.tasks.common.two_stages import TwoStageSettings

if TYPE_CHECKING:  # transformers, which takes seconds to import
    from deqseq.causal_lm import ImplicitConfig


@dataclass(frozen=True, kw_only=True)
class TrainSettings(TwoStageSettings):
    """Settings of a training run. Each run saves its settings as ``settings.json``.

    The defaults are the settings of Schöne et al. (2025, arXiv 2502.07827), as far as they are known.

    Args:
        data: folder written by the build command
        mode: tokens in the loss: only the answers (qa) or all tokens (lm)
        tasks: train only on these tasks, numbers from 1 to 20; all by default
        batch_size: number of parallel streams
        cut: tokens of each stream per step; the state is carried to the next step
        checkpoint: recompute unrolled iterations in the backward pass; this saves memory but takes more time
    """

    data: str
    mode: Literal["qa", "lm"] = "qa"
    tasks: list[int] | None = None
    cut: PositiveInt = 200
    checkpoint: bool = True
    d_model: PositiveInt = 256
    d_state: PositiveInt = 128
    headdim: PositiveInt = 64
    damping: float = 1.0
    steps: PositiveInt = 15000
    batch_size: PositiveInt = 128
    learning_rate: PositiveFinite = 1e-3
    weight_decay: NonNegativeFinite = 0.0
    max_grad_norm: NonNegativeFinite = 0.25
    label_smoothing: BelowOne = 0.0
    unrolled_share: ClosedUnitInterval = 1 / 3
    unrolled_iterations: PositiveInt = 32
    tolerance: PositiveFinite = 0.03
    max_iter: PositiveInt = 50
    eval_max_iter: PositiveInt = 200
    phantom_steps: PositiveInt = 6
    phantom_damping: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = sorted(set(self.tasks or ()) - set(TASKS))
        if unknown or self.tasks == []:
            raise ValueError(f"tasks must be numbers from 1 to 20, got {unknown or 'none'}")
        self.curriculum()
        from deqseq.causal_lm import ImplicitForCausalLM

        with torch.device("meta"):  # raises an error if the sizes do not fit together
            ImplicitForCausalLM(self.config(vocab_size=2))

    def config(self, vocab_size: int) -> "ImplicitConfig":
        """The model's configuration."""
        return self._config(vocab_size, pad_token_id=0, eos_token_id=1)

    def curriculum(self) -> Curriculum | None:
        """The two stages of training, unrolled and fixed-point; ``None`` for an explicit model."""
        return self._curriculum(checkpoint=self.checkpoint)
