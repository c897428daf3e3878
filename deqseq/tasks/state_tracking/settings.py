"""Settings of a state-tracking run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from deqseq.curriculum import Curriculum
from deqseq.tasks.common.settings import ClosedUnitInterval, PositiveFinite, PositiveInt
from deqseq.tasks.common.two_stages import TwoStageSettings
from deqseq.tasks.state_tracking.algebra import Algebra, algebra

if TYPE_CHECKING:  # transformers, which takes seconds to import
    from deqseq.causal_lm import ImplicitForCausalLM
    from deqseq.tasks.state_tracking.linear_rnn import LinearRNN
    from deqseq.tasks.state_tracking.lstm import LSTM

RUNS = Path(__file__).parent / "runs"
Model: TypeAlias = "ImplicitForCausalLM | LSTM | LinearRNN"
BASELINES = ("lstm", "deltaproduct", "rwkv7")
"""The explicit baselines by name. They are not backbones, but the setting ``backbone`` takes their names."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(TwoStageSettings):
    """All settings of a training run; saved in the folder of the run as ``settings.json``.

    The sequences get longer in three phases:

    1. the steps up to ``unrolled_share`` (a share of all steps) use very short sequences, in the unrolled
       stage;
    2. the steps up to ``short_share`` use short sequences, in the fixed-point stage;
    3. all later steps use long sequences. A share ``rehearsal`` of these steps uses short sequences again.

    If ``short_share`` is 0, there is no phase 2. If ``grow_at`` is given, the sequences of phase 2 are at
    first a little longer than the sequences of phase 1. They grow by half whenever the model predicts them
    well. The phases 1 and 2 may then end before ``unrolled_share`` and ``short_share``. Rehearsal uses the
    longest sequences of phase 2.

    Args:
        group: name of a group or monoid: Z60, S5, A5, products such as A4xZ5, or A5xM, where M is a monoid
        backbone: name of any installed backbone, or a mapping {name: NAME, option: value}. The explicit
            baselines are lstm, rwkv7 and deltaproduct (option: reflections, 4 by default)
        length: tokens of the longest training sequence
        min_length: tokens of the shortest sequence after short_share. Each batch has a random length
        grow_at: training sequences get longer when the accuracy of their last two tokens, over 20 batches,
            reaches this value. They grow from unrolled_length to short_length by half at a time, and then to
            length. Short sequences start at unrolled_share at the latest, and long sequences at short_share
            at the latest. By default, they start exactly at these two shares
        unrolled_length: tokens of the longest sequence up to unrolled_share; the shortest has 2 tokens
        short_length: tokens of the longest sequence between unrolled_share and short_share; the shortest has
            unrolled_length tokens
        short_identity_probability: identity_probability of the short sequences, up to short_share and in
            rehearsal; by default the same as identity_probability
        unrolled_identity_probability: identity_probability of the sequences up to unrolled_share; by default
            the same as short_identity_probability
        short_share: share of the steps after which long sequences start; 0 means unrolled_share
        rehearsal: share of the steps after short_share that use short sequences again, so that the model does
            not forget them
        identity_probability: probability that a token is the group's identity. The identity leaves the state
            unchanged; all other tokens are called hard
        dt_min: smallest initial step size of Mamba2's heads; a head's step size is drawn log-uniformly from
            [dt_min, dt_max]
        dt_max: largest initial step size; heads with large steps forget quickly
        train_window: tokens solved at a time in training; all by default
        phantom_damping: damping of the phantom steps; 1 means none. If the solver's damping is smaller than
            this value, the search converges wherever the phantom steps are stable
    """

    group: str = "A5"
    length: PositiveInt = 16
    min_length: PositiveInt = 8
    unrolled_length: PositiveInt = 8
    short_length: PositiveInt = 8
    grow_at: ClosedUnitInterval | None = None
    unrolled_identity_probability: ClosedUnitInterval | None = None
    short_identity_probability: ClosedUnitInterval | None = None
    short_share: ClosedUnitInterval = 0.0
    rehearsal: ClosedUnitInterval = 0.0
    identity_probability: ClosedUnitInterval = 0.5
    train_window: PositiveInt | None = None
    dt_min: PositiveFinite = 1e-3
    dt_max: PositiveFinite = 1e-1

    def __post_init__(self) -> None:
        super().__post_init__()
        algebra(self.group)
        if self.baseline and not self.explicit:
            raise ValueError(f"backbone {self.baseline} has no implicit form: set explicit")
        lengths = [("min_length", 1), ("unrolled_length", 2)]
        if self.short_share:
            lengths.append(("short_length", self.unrolled_length))
        for name, least in lengths:
            value = getattr(self, name)
            if not least <= value <= self.length:
                raise ValueError(f"{name} must be between {least} and length = {self.length}, got {value}")
        if self.short_share and self.short_share < self.unrolled_share:
            raise ValueError(
                f"short_share must be 0 or between unrolled_share = {self.unrolled_share} and 1, "
                f"got {self.short_share}"
            )
        if self.grow_at is not None and not self.short_share:
            raise ValueError(f"grow_at needs a short_share above 0, got grow_at = {self.grow_at}")
        if self.rehearsal and not self.short_share:
            raise ValueError(f"rehearsal needs a short_share above 0, got rehearsal = {self.rehearsal}")
        self.curriculum()
        with torch.device("meta"):  # build the model without memory, to check its sizes
            self.model()

    @property
    def algebra(self) -> Algebra:
        return algebra(self.group)

    @property
    def baseline(self) -> str | None:
        """The name of the baseline, one of ``BASELINES``; ``None`` if the model has a backbone."""
        name = self.backbone.get("name") if isinstance(self.backbone, dict) else self.backbone
        return name if name in BASELINES else None

    @property
    def form(self) -> str:
        """The name of the baseline, or the form of the model: implicit, injected or explicit."""
        return self.baseline or self._config(len(self.algebra)).form

    def model(self) -> Model:
        """A new model with random weights."""
        from deqseq.causal_lm import ImplicitForCausalLM
        from deqseq.tasks.state_tracking.linear_rnn import LinearRNN, LinearRNNConfig
        from deqseq.tasks.state_tracking.lstm import LSTM, LSTMConfig

        if not self.baseline:
            return ImplicitForCausalLM(self._config(len(self.algebra), window=self.train_window))
        options = {} if isinstance(self.backbone, str) else {**self.backbone}
        options.pop("name", None)
        if unknown := set(options) - ({"reflections"} if self.baseline == "deltaproduct" else set()):
            raise ValueError(f"backbone {self.baseline} has no option {', '.join(sorted(unknown))}")
        options |= {"vocab_size": len(self.algebra), "d_model": self.d_model, "n_layer": self.n_layer}
        if self.baseline == "lstm":
            return LSTM(LSTMConfig(**options))
        return LinearRNN(LinearRNNConfig(mixer=self.baseline, headdim=self.headdim, **options))

    def curriculum(self) -> Curriculum | None:
        """The two stages of training: unrolled, then fixed-point. ``None`` for an explicit model."""
        return self._curriculum(self.train_window)
