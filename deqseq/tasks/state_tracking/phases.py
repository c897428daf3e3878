"""The sequences that a run trains on. They get longer from phase to phase.

The settings fix the step at which a phase ends. If the setting ``grow_at`` is given, a phase ends earlier
when the accuracy of the predictions reaches ``grow_at``. The last phase never ends earlier.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from deqseq.curriculum import Curriculum, Stage
from deqseq.tasks.state_tracking.data import Batch, WordProblemStream
from deqseq.tasks.state_tracking.settings import TrainSettings

_JUDGED = 20  # number of batches over which an accuracy is averaged
_AHEAD = 2  # the trainer makes batches two steps ahead, so a phase ends two steps after the decision


@dataclass(frozen=True)
class Phase:
    """A part of training, with sequences of certain lengths.

    Attributes:
        end: the first step after the phase, counted from 0. With ``grow_at``, the phase may end earlier.
        lengths: number of tokens of the shortest and of the longest sequence.
        identity_probability: probability that a token is the group's identity.
    """

    end: int
    lengths: tuple[int, int]
    identity_probability: float


def phases(settings: TrainSettings) -> list[Phase]:
    """The phases of a run.

    Phase 1 has very short sequences, phase 2 short ones, and phase 3 long ones (see :class:`TrainSettings`).
    If ``grow_at`` is given, several phases replace phase 2. Their sequences get longer from phase to phase.
    """
    s, p = settings, settings.identity_probability
    easy = p if s.short_identity_probability is None else s.short_identity_probability
    first = easy if s.unrolled_identity_probability is None else s.unrolled_identity_probability
    short = [(s.unrolled_length, s.short_length)] if s.grow_at is None else _growing(s)
    unrolled_end, short_end = round(s.unrolled_share * s.steps), round(s.short_share * s.steps)
    return [
        Phase(unrolled_end, (2, s.unrolled_length), first),
        *(Phase(short_end, lengths, easy) for lengths in short),
        Phase(s.steps, (s.min_length, s.length), p),
    ]


def _growing(settings: TrainSettings) -> list[tuple[int, int]]:
    """Shortest and longest length of each phase that replaces phase 2 if ``grow_at`` is given.

    The longest length grows by half from phase to phase. If the longest sequences of phase 1 have 4
    tokens, the lengths are (4, 6), (6, 9), (9, 13) and so on.
    """
    shortest, found = settings.unrolled_length, []
    while shortest < settings.short_length:
        longest = min(max(shortest + 1, shortest * 3 // 2), settings.short_length)
        found.append((shortest, longest))
        shortest = longest
    return found or [(settings.unrolled_length, settings.short_length)]


class Progress(TrainerCallback, ExportableState):
    """Tells which phase a step belongs to. With ``grow_at``, ends a phase early.

    A phase ends early when the accuracy on the last two tokens of the training sequences reaches ``grow_at``.

    Checkpoints save this object, so a resumed run makes the same batches as an uninterrupted run.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self.grow_at = settings.grow_at
        self.ends = [phase.end for phase in phases(settings)]
        self.accuracy: float | None = None  # on the last two tokens, over the last complete set of 20 batches
        self._right: Tensor | float = 0.0  # sum of the accuracies of the batches of the current set
        self._judged = 0
        self._judged_phase = 0
        self._longest = [phase.lengths[1] for phase in phases(settings)]

    def phase(self, step: int) -> int:
        """The number of the phase that ``step`` belongs to. Phases and steps are counted from 0."""
        return next((i for i, end in enumerate(self.ends) if step < end), len(self.ends) - 1)

    def log(self, step: int) -> dict[str, float]:
        """Values to log: tokens of the phase's longest sequence, and the last accuracy if there is one."""
        accuracy = {} if self.accuracy is None else {"accuracy": round(self.accuracy, 4)}
        return {"longest": self._longest[self.phase(step)], **accuracy}

    def add(self, step: int, logits: Tensor, labels: Tensor) -> None:
        """Add a training batch to the accuracy. ``logits`` are (B, L, N) and ``labels`` (B, L).

        B sequences, L tokens, N elements. After every 20 batches, the method computes their accuracy, and
        ends the phase early if the accuracy has reached ``grow_at``. The host waits for the GPU only after
        every 20 batches.
        """
        phase = self.phase(step)
        if self.grow_at is None or phase == len(self.ends) - 1 or self.ends[phase] <= step + _AHEAD:
            return
        if phase != self._judged_phase:
            self._right, self._judged, self._judged_phase = 0.0, 0, phase
        self._right += (logits[:, -2:].argmax(-1) == labels[:, -2:]).double().mean()
        self._judged += 1
        if self._judged == _JUDGED:
            self.accuracy = float(self._right) / _JUDGED
            if self.accuracy >= self.grow_at:
                self.ends[phase] = step + 1 + _AHEAD
            self._right, self._judged = 0.0, 0

    def state(self) -> dict[str, Any]:
        attributes = {
            "ends": self.ends, "accuracy": self.accuracy, "right": float(self._right), "judged": self._judged,
            "judged_phase": self._judged_phase,
        }  # fmt: skip
        return {"args": {}, "attributes": attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and saved:
            found = saved["attributes"]
            self.ends, self.accuracy = found["ends"], found["accuracy"]
            self._right, self._judged = found["right"], found["judged"]
            self._judged_phase = found["judged_phase"]


class PhaseCurriculum(Curriculum):
    """Uses the unrolled stage in the first phase, and the fixed-point stage in all later phases."""

    def __init__(self, stages: list[Stage], progress: Progress) -> None:
        super().__init__(stages)
        self.progress = progress

    def at(self, step: int, steps: int) -> Stage:
        return self.stages[0] if self.progress.phase(step) == 0 else self.stages[-1]


class Batches(IterableDataset[Batch]):
    """The batches of all phases, made on the training device.

    In the last phase, a share ``rehearsal`` of the batches comes from the phase before.
    """

    def __init__(self, settings: TrainSettings, device: torch.device, progress: Progress) -> None:
        super().__init__()
        self.start = 0
        self.progress = progress
        self.rehearsal = settings.rehearsal
        sizes: Any = {"seed": settings.seed, "batch_size": settings.batch_size, "device": device}
        self.streams = [
            WordProblemStream(
                settings.algebra, phase.lengths, identity_probability=phase.identity_probability, **sizes
            )
            for phase in phases(settings)
        ]

    def __iter__(self) -> Iterator[Batch]:
        for index in count(self.start):
            phase, last = self.progress.phase(index), len(self.streams) - 1
            rehearses = int((index + 1) * self.rehearsal) > int(index * self.rehearsal)  # spreads them evenly
            yield self.streams[last - 1 if phase == last and rehearses else phase].batch(index)
