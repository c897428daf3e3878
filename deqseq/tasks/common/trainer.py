"""What the training runs share: transformers' Trainer with a curriculum and a watch on the solves.

Shapes: B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
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
from deqseq.tasks.common.runs import RunFolder

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
        # The configuration follows, so that what is saved loads as it was trained.
        for name in ("gradient", "convergence", "eval_convergence", "window"):
            value = getattr(stage, name)
            if hasattr(model, "config") and (value is not None or name == "window"):
                setattr(model.config, name, value)


class SolveWatch:
    """How the solves since the last look went: means of evaluations, iterations, residual, statuses.

    The device is waited for when it is read, not before.
    """

    _MEANS = ("iterations", "residual", "share_converged", "share_budget_exhausted", "share_non_finite")
    _STATUSES = (Status.CONVERGED, Status.BUDGET_EXHAUSTED, Status.NON_FINITE)
    _SAMPLE = 4096

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._residuals = torch.empty(0)
        self._nfe = 0
        self._solves = 0

    def add(self, solution: Solution) -> None:
        """Take in one solve."""
        residual = solution.residual.detach()
        keep = (solution.iterations > 0) | (solution.status == Status.NON_FINITE)  # all but padding
        counted = [solution.iterations, residual, *(solution.status == status for status in self._STATUSES)]
        sums = torch.stack([(values * keep).sum() for values in counted]) / keep.sum().clamp_min(1)
        self._sums = sums if self._sums is None else self._sums + sums
        every = -(-residual.numel() // self._SAMPLE)
        self._residuals = residual.flatten()[::every].clone()  # the tail is that of the last solve
        self._nfe += solution.nfe
        self._solves += 1

    def read(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """The means, and the residual that 99 % of the tokens of the last solve are below, by name.

        Starts afresh. Nothing if nothing was solved.

        Args:
            reduce: the mean over processes, which all have solved equally often.
        """
        if self._sums is None:
            return {}
        tail = torch.quantile(self._residuals.float(), 0.99)
        nfe = self._sums.new_tensor(self._nfe / self._solves)
        values = torch.cat([self._sums / self._solves, torch.stack([tail, nfe])])
        if reduce is not None:
            values = reduce(values)
        self._sums, self._nfe, self._solves = None, 0, 0
        names = (*self._MEANS, "residual_p99", "nfe")
        return {name: round(value, 5) for name, value in zip(names, values.tolist(), strict=True)}


class _StreamPosition(TrainerCallback):
    """Moves an endless stream to the batch at which a resumed run goes on."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stream.start = state.global_step * args.gradient_accumulation_steps


_SEAL = "complete.json"


def seal(checkpoint: Path) -> None:
    """Mark a checkpoint as whole, once all its files are on the disk: lists them with their sizes."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != _SEAL)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}
    part = checkpoint / f"{_SEAL}.part"
    with part.open("w") as file:
        json.dump(sizes, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(checkpoint / _SEAL)


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was sealed, and all its files are still as large as they were then."""
    try:
        sizes = json.loads((checkpoint / _SEAL).read_text())
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint in ``folder`` that was written to its end; ``None`` if there is none.

    A run that is killed while it writes one leaves a torn folder, without its seal.
    """
    found = [path for path in folder.glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        if is_whole(path):
            return str(path)
        logger.warning("%s was not written to its end: going back to the one before", path)
    return None


class CurriculumTrainer(Trainer):
    """Trainer that follows a curriculum, watches the solves, and leaves whole checkpoints.

    Args:
        curriculum: what to train with and when; ``None`` for an explicit model.
        options: as transformers' ``Trainer`` takes them.
    """

    def __init__(self, curriculum: Curriculum | None = None, **options: Any) -> None:
        if curriculum is not None:
            options["callbacks"] = [*(options.get("callbacks") or []), CurriculumCallback(curriculum)]
        super().__init__(**options)
        self.model_accepts_loss_kwargs = False  # the loss is the mean of its own batch
        self.watch = SolveWatch()

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay; biases, norms, A, D, dt and the lengths g of weight-normalised rows do not."""
        return [
            name for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("original0")
        ]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **self.watch.read(self._mean_of_processes)}
        super().log(logs, start_time)

    def _mean_of_processes(self, values: Tensor) -> Tensor:
        reduced: Tensor = self.accelerator.reduce(values, reduction="mean")
        return reduced

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # transformers writes trainer_state.json last, but only of the first process's files, and forces none
        # of them to the disk.
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        (folder / _SEAL).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(folder)


class AlignedTrainer(CurriculumTrainer):
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
        super().__init__(curriculum, model=model, args=args, train_dataset=stream, callbacks=callbacks)
        self.stream = stream
        self.label_smoothing = label_smoothing

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(cast(IterableDataset[Any], self.stream), batch_size=None)

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
        loss = self.cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten())
        return (loss, outputs) if return_outputs else loss

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over labels (N,) that are not -100; logits (N, V)."""
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def train_in(self, folder: RunFolder) -> None:
        """Train to the end, from the last whole checkpoint in ``folder`` if there is one.

        Then writes the model, and ``training.json``: seconds, and the log.
        """
        checkpoint = last_whole_checkpoint(folder.path)
        if checkpoint is not None:
            logger.info("resuming from %s", checkpoint)
        start = time.perf_counter()
        self.train(resume_from_checkpoint=checkpoint)
        seconds = time.perf_counter() - start
        self.save_model(str(folder.path))
        assert self.model is not None
        record = {
            "seconds": round(seconds, 1),
            "resumed": checkpoint is not None,
            "device": str(self.args.device),
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "log": self.state.log_history,
        }
        folder.finish(record)


def short_run_arguments(
    output: Path, steps: int, save_steps: int, progress: bool, **options: Any
) -> TrainingArguments:
    """For runs of one device on an :class:`AlignedTrainer`'s stream: the rate warms up over 5 % of the steps
    and decays to zero over the last 30 %.

    Args:
        output: folder of the run.
        steps: of the optimiser.
        save_steps: steps between checkpoints, of which the last two are kept.
        progress: show a progress bar.
        options: of ``TrainingArguments``.
    """
    return TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        adam_beta2=0.95,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": round(0.3 * steps), "decay_type": "linear"},
        warmup_steps=round(0.05 * steps),
        logging_steps=50,
        save_steps=save_steps,
        save_total_limit=2,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=not progress,
        **options,
    )
