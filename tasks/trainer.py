"""What the training runs share: transformers' Trainer with a curriculum and a watch on the solves.

Shapes: B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from deqseq.curriculum import Curriculum
from deqseq.layer import ImplicitSequenceLayer
from deqseq.solution import Solution, Status

logger = logging.getLogger(__name__)


class Stream(Protocol):
    """An endless iterable dataset of whole batches that can start at any of them."""

    start: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]: ...


class CurriculumCallback(TrainerCallback, ExportableState):
    """Applies a curriculum to every implicit layer of the model; saved in checkpoints.

    A stage is a function of the step alone, so a resumed run is in the right one at once. That the
    checkpoint's curriculum is this one is checked.
    """

    def __init__(self, curriculum: Curriculum) -> None:
        self.curriculum = curriculum
        self._stage: object = None

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"stages": self.curriculum.to_list()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        callbacks: Any = state.stateful_callbacks
        saved = callbacks.get(type(self).__name__)
        if state.global_step and saved:
            stages = saved["attributes"]["stages"]
            if stages != self.curriculum.to_list():
                raise ValueError(
                    f"the checkpoint was trained with another curriculum: {stages}, "
                    f"now it is {self.curriculum.to_list()}"
                )

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        stage = self.curriculum.at(state.global_step, state.max_steps)
        if stage is self._stage or model is None:
            return
        self._stage = stage
        for module in model.modules():
            if isinstance(module, ImplicitSequenceLayer):
                self.curriculum.apply(stage, module)


class SolveWatch:
    """How the solves since the last look went: means of evaluations, iterations, residual, statuses."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._nfe = 0
        self._solves = 0

    def add(self, solution: Solution) -> None:
        """Take in one solve, without waiting for the device."""
        means = [
            solution.iterations.float().mean(),
            solution.residual.mean(),
            (solution.status == Status.BUDGET_EXHAUSTED).float().mean(),
            (solution.status == Status.NON_FINITE).float().mean(),
        ]
        sums = torch.stack(means)
        self._sums = sums if self._sums is None else self._sums + sums
        self._nfe += solution.nfe
        self._solves += 1

    def read(self) -> dict[str, float]:
        """The means, by name; starts afresh."""
        if self._sums is None:
            return {}
        names = ("iterations", "residual", "share_exhausted", "share_non_finite")
        means = (self._sums / self._solves).tolist()
        read = {name: round(value, 5) for name, value in zip(names, means, strict=True)}
        read["nfe"] = round(self._nfe / self._solves, 2)
        self._sums, self._nfe, self._solves = None, 0, 0
        return read


class _StreamPosition(TrainerCallback):
    """Moves an endless stream to the batch at which a resumed run goes on."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stream.start = state.global_step * args.gradient_accumulation_steps


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint in ``folder`` that was written to its end; ``None`` if there is none.

    A run that is killed while it writes one leaves a torn folder: its state, written last, is missing.
    """
    found = [path for path in folder.glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            logger.warning("%s was not written to its end: going back to the one before", path)
        else:
            return str(path)
    return None


class AlignedTrainer(Trainer):
    """Trainer for targets that stand at their inputs: label t belongs to logit t, nothing is shifted.

    Trains on a stream that yields whole batches and can start at any (``stream.start``), and logs how
    the solves went beside the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        stream: Stream,
        curriculum: Curriculum | None = None,
        label_smoothing: float = 0.0,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        if args.n_gpu > 1 or args.world_size > 1:
            raise ValueError(
                f"this task trains on one device, found {max(args.n_gpu, args.world_size)}: "
                "set CUDA_VISIBLE_DEVICES=0 and start one process"
            )
        args.ignore_data_skip = True  # the stream starts where it should by itself
        callbacks = [*(callbacks or []), _StreamPosition(stream)]
        if curriculum is not None:
            callbacks.append(CurriculumCallback(curriculum))
        super().__init__(model=model, args=args, train_dataset=stream, callbacks=callbacks)
        self.model_accepts_loss_kwargs = False  # the loss is the mean of its own batch
        self.stream = stream
        self.label_smoothing = label_smoothing
        self.watch = SolveWatch()

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(cast(IterableDataset[Any], self.stream), batch_size=None)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay; biases, norms, A, D, dt and the lengths g of weight-normalised rows do not."""
        return [
            name for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("original0")
        ]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        if outputs.solution is not None:
            self.watch.add(outputs.solution)
        logits = outputs.logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=self.label_smoothing)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **self.watch.read()}
        super().log(logs, start_time)
