"""The trainers of all tasks.

They extend transformers' Trainer by a curriculum, and by statistics of the solves.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from deqseq.budget import AdaptiveBudget
from deqseq.curriculum import Curriculum, Stage
from deqseq.layer import ImplicitSequenceLayer
from deqseq.solution import Solution
from deqseq.statistics import SolveStatistics
from deqseq.tasks.common.files import writing
from deqseq.tasks.common.runs import RunFolder, copy_settings
from deqseq.tasks.common.seals import rotate, seal, step_of, unseal

logger = logging.getLogger(__name__)


class Stream(Protocol):
    """An endless iterable dataset of whole batches. ``start`` is the number of the first batch to yield."""

    start: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]: ...


class Part(Protocol):
    """An object whose tensors are saved in every checkpoint, such as an average of the weights."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path, device: torch.device) -> None: ...


class CurriculumCallback(TrainerCallback, ExportableState):
    """Applies a curriculum to every implicit layer of the model. Checkpoints save the curriculum.

    The stage depends only on the step, so a resumed run starts in the right stage. Resuming raises
    ``ValueError`` if the checkpoint was trained with another curriculum.

    Attributes:
        budget: the adaptive budget of the current stage; ``None`` if the stage has none. Checkpoints save its
            ``max_iter``.
    """

    def __init__(self, curriculum: Curriculum) -> None:
        self.curriculum = curriculum
        self.budget: AdaptiveBudget | None = None
        self._stage: object = None
        self._resumed: int | None = None  # the budget in the checkpoint from which the run resumes

    def state(self) -> dict[str, Any]:
        budget = None if self.budget is None else self.budget.max_iter
        return {"args": {}, "attributes": {"stages": self.curriculum.to_list(), "budget": budget}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if not (state.global_step and saved):
            return
        # Checkpoints of older versions lack new fields of Stage, so compare stages instead of plain data.
        plain = json.loads(json.dumps(self.curriculum.to_list()))  # like a checkpoint: tuples become lists
        there, now = (
            Curriculum([Stage(**stage) for stage in stages]).stages
            for stages in (saved["attributes"]["stages"], plain)
        )
        if there != now:
            raise ValueError(f"the checkpoint was trained with another curriculum: {there}, now it is {now}")
        step, steps = state.global_step, state.max_steps
        same = self.curriculum.at(step - 1, steps) is self.curriculum.at(step, steps)
        self._resumed = saved["attributes"].get("budget") if same else None  # every stage has its own budget

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        stage = self.curriculum.at(state.global_step, state.max_steps)
        if stage is self._stage or model is None:
            return
        self._stage, self.budget = stage, None
        for module in model.modules():
            if isinstance(module, ImplicitSequenceLayer):
                self.curriculum.apply(stage, module)
                if stage.adaptive_budget is not None:
                    self.budget = AdaptiveBudget(module, stage.adaptive_budget)
                    if self._resumed is not None:
                        self.budget.set(self._resumed)
        self._resumed = None
        # Update the configuration too, so that a saved model loads with the settings of its last stage.
        for name in ("gradient", "convergence", "eval_convergence", "solver", "window"):
            value = getattr(stage, name)
            if hasattr(model, "config") and (value is not None or name == "window"):
                setattr(model.config, name, value)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.budget is not None:
            self.budget.step(reduce)


class Totals(TrainerCallback, ExportableState):
    """The training time and the sum of losses of the whole run.

    Checkpoints save both totals, so a resumed run continues them.
    """

    def __init__(self) -> None:
        self.seconds = self.losses = 0.0  # totals before this process started
        self.sum_of_losses = 0.0  # total at the last checkpoint
        self._since = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds of training so far."""
        return self.seconds + time.perf_counter() - self._since

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seconds": self.elapsed, "losses": self.sum_of_losses}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and saved:
            self.seconds, self.losses = saved["attributes"]["seconds"], saved["attributes"]["losses"]
            state.compute_steps(args, state.max_steps)  # the checkpoint has those of the earlier start
        self._since = time.perf_counter()


class CurriculumTrainer(Trainer):
    """Trainer that follows a curriculum, logs statistics of the solves, and seals complete checkpoints.

    Entries of the log have ``seconds``, the training time so far. A seal marks a checkpoint as complete
    (see :mod:`deqseq.tasks.common.seals`). The trainer keeps the last ``save_total_limit`` complete
    checkpoints.

    Args:
        curriculum: the stages of training; ``None`` for an explicit model.
        options: other arguments of transformers' ``Trainer``.
    """

    def __init__(self, curriculum: Curriculum | None = None, **options: Any) -> None:
        self.schedule = None if curriculum is None else CurriculumCallback(curriculum)
        if self.schedule is not None:
            options["callbacks"] = [*(options.get("callbacks") or []), self.schedule]
        super().__init__(**options)
        # Keep transformers from removing checkpoints: the method ``complete`` removes them.
        self.keep, self.args.save_total_limit = self.args.save_total_limit, None
        self.totals = Totals()
        self.add_callback(self.totals)
        self.model_accepts_loss_kwargs = False  # the loss is already a mean over its batch
        self.solves = SolveStatistics(tail=True)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay.

        All matrices have weight decay, except the gains of weight normalisation. Vectors have none: biases,
        norms, and A, D and dt of Mamba2.
        """
        found = model.named_parameters()
        return [name for name, p in found if p.dim() > 1 and not name.endswith("original0")]

    @property
    def budget(self) -> AdaptiveBudget | None:
        """The adaptive budget of the current stage; ``None`` if the stage has none."""
        return None if self.schedule is None else self.schedule.budget

    def solved(self, solution: Solution) -> None:
        """Add a solve of a training step to the statistics in the log, and to the adaptive budget."""
        self.solves.add(solution)
        if self.budget is not None:
            self.budget.add(solution)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **self.read(self.solves)}
        seconds = self.totals.elapsed
        if "train_loss" in logs:  # replace values that cover only the steps since the last start
            losses = self.totals.losses + self._total_loss_scalar
            logs |= {"train_loss": losses / self.state.global_step, "train_runtime": seconds}
        else:
            logs = {**logs, "seconds": round(seconds, 2)}
        super().log(logs, start_time)

    def train_from(self, checkpoint: Path | None) -> dict[str, Any]:
        """Train to the last step, and return the record of the run.

        Args:
            checkpoint: the checkpoint to resume from; ``None`` starts at the first step.

        Raises:
            ValueError: the step of the checkpoint is after the last step of the run.
        """
        if checkpoint is not None and step_of(checkpoint) > self.args.max_steps:
            raise ValueError(
                f"{checkpoint} is not of this run, which has {self.args.max_steps} steps: remove it"
            )
        self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        assert self.model is not None
        return {
            "seconds": round(self.totals.elapsed, 1),
            "resumed": checkpoint is not None,
            "device": str(self.args.device),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "log": self.state.log_history,
        }

    def read(self, solves: SolveStatistics) -> dict[str, float]:
        """Return statistics over all processes, rounded for the log, and reset ``solves``."""
        found = solves.read(lambda values: self.accelerator.reduce(values, reduction="sum"))
        solves.reset()
        return {name: round(value, 5) for name, value in found.items() if name != "share_completed"}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.check_folder()
        super().save_model(output_dir, _internal_call)

    def check_folder(self) -> None:
        """Raise ``FileNotFoundError`` if the folder of the run no longer exists.

        transformers would make a new folder, which has no settings and cannot be resumed.
        """
        if self.args.should_save and not Path(str(self.args.output_dir)).is_dir():
            raise FileNotFoundError(
                f"{self.args.output_dir} was moved or removed during training: move it back, and repeat the "
                "command to resume"
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # First sync and seal the new checkpoint, then remove old checkpoints. transformers itself does not
        # sync files, and removes old checkpoints before the new checkpoint is complete.
        run = Path(str(self.args.output_dir))
        folder = run / f"checkpoint-{self.state.global_step}"
        # Add entries that are missing after resuming from a checkpoint of an older version.
        saved: Any = self.state.stateful_callbacks
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                saved.setdefault(type(callback).__name__, callback.state())
        running = self.accelerator.gather(self._tr_loss).mean().item()
        self.totals.sum_of_losses = self.totals.losses + self._total_loss_scalar + running
        unseal(folder)
        with writing(folder):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            self.complete(folder)

    def complete(self, checkpoint: Path) -> None:
        """Seal a checkpoint after all its files are written, and remove old checkpoints."""
        if self.args.should_save:
            copy_settings(checkpoint)
            seal(checkpoint)
            rotate(checkpoint.parent, self.keep)


class AlignedTrainer(CurriculumTrainer):
    """Trainer for tasks with one label per input token. Logit t predicts label t, without a shift.

    Trains on one device, on a stream of whole batches. Raises ``FloatingPointError`` if a logged loss is not
    finite, or if a weight is not finite when a checkpoint is due.

    Attributes:
        parts: objects that checkpoints save in addition to model, optimiser and progress.

    Args:
        label_smoothing: share of the target probability that is spread over the whole vocabulary.
        options: other arguments of transformers' ``Trainer``.
    """

    def __init__(
        self, args: TrainingArguments, stream: Stream, label_smoothing: float = 0.0, **options: Any
    ) -> None:
        if args.n_gpu > 1 or args.world_size > 1:
            raise ValueError(
                f"this task trains on one device, found {max(args.n_gpu, args.world_size)}: "
                "set CUDA_VISIBLE_DEVICES=0 and start one process"
            )
        args.ignore_data_skip = True  # skip no batches: the stream starts at the right batch
        super().__init__(args=args, train_dataset=stream, **options)
        self.stream = stream
        self.label_smoothing = label_smoothing
        self.parts: list[Part] = []
        self._resumed: Path | None = None  # the checkpoint to resume from; ``None`` after the first step

    def get_train_dataloader(self) -> DataLoader[Any]:
        # If the run resumes after its last step, return no batches. Otherwise, Trainer would take one more
        # step.
        data: Any = self.stream if self.stream.start < self.args.max_steps else []
        return DataLoader(data, batch_size=None)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        if outputs.solution is not None:
            self.solved(outputs.solution)
        loss = self.cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten())
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        # After resuming, restore the random states before the first step. transformers does not restore them,
        # because ``ignore_data_skip`` is set.
        if self._resumed is not None:
            self._load_rng_state(str(self._resumed))
            self._resumed = None
        return super().training_step(*args, **options)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over all tokens whose label is not -100.

        Shapes: ``logits`` (N, V) and ``labels`` (N,), with N tokens and vocabulary size V.
        """
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not math.isfinite(loss := logs.get("loss", 0.0)):
            raise self._diverged(f"the loss is {loss}")
        # Log the completed share of the whole run as epoch. transformers counts only from the last start.
        self.state.epoch = self.state.global_step / self.args.max_steps
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Do not write weights that are not finite. Such a checkpoint is useless and would replace a good one.
        if not all(bool(torch.isfinite(weight).all()) for weight in model.parameters()):
            raise self._diverged("the weights are not finite")
        super()._save_checkpoint(model, trial)

    def _diverged(self, what: str) -> FloatingPointError:
        return FloatingPointError(
            f"step {self.state.global_step}: {what}: train with a lower learning rate in another folder"
        )

    def complete(self, checkpoint: Path) -> None:
        for part in self.parts:
            part.save(checkpoint)
        super().complete(checkpoint)

    def train_in(self, folder: RunFolder) -> None:
        """Train to the last step, and write the model and the record of the run to ``folder``.

        If ``folder`` has complete checkpoints, training resumes from the last one.
        """
        checkpoint = folder.last_checkpoint()
        if checkpoint is not None:
            logger.info("resuming from %s", checkpoint)
            self.stream.start, self._resumed = step_of(checkpoint), checkpoint
            for part in self.parts:
                part.load(checkpoint, self.args.device)
        record = self.train_from(checkpoint)
        with writing(folder.path):
            self.save_model(str(folder.path))
        files = [folder.path / "config.json", *folder.path.glob("*.safetensors")]
        folder.finish({"threads": torch.get_num_threads(), **record}, files)


def check_one_process() -> None:
    """Raise ``ValueError`` if the run has several processes.

    Call this before the processes wait for each other.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise ValueError(f"this task trains on one device, found {count} processes: start one")


def short_run_arguments(settings: Any, output: Path, save_steps: int) -> TrainingArguments:
    """Arguments of transformers' ``Trainer`` for a run on one device.

    The learning rate rises over the first 5 % of the steps, and falls to zero over the last 30 %.

    Args:
        settings: a :class:`~deqseq.tasks.common.two_stages.TwoStageSettings`.
        save_steps: number of steps between checkpoints. The last two checkpoints are kept.
    """
    return TrainingArguments(
        output_dir=str(output),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.bf16,
        use_cpu=not torch.cuda.is_available(),  # Trainer refuses bf16 on CPUs without this
        seed=settings.seed,
        adam_beta2=0.95,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": round(0.3 * settings.steps), "decay_type": "linear"},
        warmup_steps=round(0.05 * settings.steps),
        logging_steps=min(50, settings.steps),
        logging_nan_inf_filter=False,  # do not hide NaN losses: the trainer must detect them
        save_steps=save_steps,
        save_total_limit=2,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
