"""The Trainer for pretraining: checkpoints for any number of devices, and monitoring."""

import logging
import math
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import ProgressCallback, TrainerCallback, TrainingArguments

from deqseq.curriculum import Curriculum
from deqseq.policies import Residual
from deqseq.policy import ConvergencePolicy
from deqseq.statistics import SolveStatistics
from deqseq.tasks.common.corpus.rows import Row
from deqseq.tasks.common.files import writing
from deqseq.tasks.common.models import implicit_layer
from deqseq.tasks.common.processes import everywhere
from deqseq.tasks.common.seals import seal, unseal
from deqseq.tasks.common.trainer import CurriculumTrainer
from deqseq.tasks.pretraining import shards
from deqseq.tasks.pretraining.faults import Faults
from deqseq.tasks.pretraining.plan import evaluation_budget
from deqseq.tasks.pretraining.watch import Advice, Speed, graph_evaluations, model_radius

logger = logging.getLogger(__name__)


def batch_of(rows: list[Row]) -> Row:
    """Stack rows into a batch. The labels equal the inputs; the model shifts the labels by one token."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "labels": batch["input_ids"]}


class PretrainTrainer(CurriculumTrainer):
    """Next-token training of implicit and explicit models.

    - The model returns the loss and no logits, which saves memory.
    - A checkpoint contains the weights (``model.safetensors``) and the optimiser's state by parameter name
      (``optimizer.pt``). With FSDP, both are sharded. A run can resume from either form on any number of
      processes, with or without FSDP.
    - When a run resumes, the caller loads the weights. The trainer loads only the optimiser's state and the
      schedule.
    - A loss, gradient or solve that is not finite raises ``Diverged`` in this step or the next. The step
      does not change the weights.

    Args:
        args: transformers' arguments. One epoch of ``train_dataset`` must have at least ``max_steps`` steps.
        curriculum: the stages of training; ``None`` for explicit models.
        speed: callback that measures the speed.
        spectral_every: number of lines of the log between two estimates of the spectral radius of df/dz; 0
            means no estimates.
        eval_at: steps after which to evaluate, in addition to every ``args.eval_steps``.
        options: passed to transformers' ``Trainer``.
    """

    model: Any  # Any, because transformers' types allow None for these three
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, model: nn.Module, args: TrainingArguments, curriculum: Curriculum | None, speed: Speed,
        spectral_every: int = 0, eval_at: Collection[int] = (), **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(curriculum, model=model, args=args, data_collator=batch_of, **options)
        self.layer = implicit_layer(model)
        self.speed = speed
        self.advice = Advice()
        self.spectral_every = spectral_every
        self.eval_solves = SolveStatistics(tail=True)
        self._eval_rows = 0  # number of rows in the newest evaluation
        self.add_callback(speed)
        self.add_callback(_Schedule(self, curriculum, eval_at))
        self.faults = Faults(args.device)
        # From the last training batch: ids and z of the first row, and position ids of all rows.
        self._last: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._background = ThreadPoolExecutor(1)  # seals sharded checkpoints
        self._writing: Future[Any] | None = None  # ready when the newest checkpoint's shards are written
        self._sealing: Future[None] | None = None
        if self.is_fsdp_enabled:
            self._prepare_fsdp(self.accelerator.state.fsdp_plugin)

    def _prepare_fsdp(self, plugin: Any) -> None:
        if plugin.fsdp_version != 2:
            raise ValueError("FSDP needs version 2: set fsdp_version: 2 in accelerate's configuration")
        if plugin.auto_wrap_policy is not None:
            raise ValueError(
                "FSDP must wrap the whole model as one (fsdp_auto_wrap_policy: NO_WRAP): a forward pass "
                "reads all weights once, before it iterates"
            )
        # FSDP must gather the weights in float32, because autocast alone sets the types of the computation.
        plugin.mixed_precision_policy = None
        if self.layer is not None:
            self.layer.group = dist.group.WORLD
        self._writers = dist.new_group(backend="gloo")

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        with self.accelerator.autocast():  # an FSDP model does not enter autocast by itself
            outputs = model(**inputs, skip_logits=True, use_cache=False)
        solution, loss = outputs.solution, outputs.loss
        if solution is not None:
            (self.solved if model.training else self.eval_solves.add)(solution)
        if model.training:
            self.faults.add(loss, solution)
            if solution is not None:
                self._last = inputs["input_ids"][:1], solution.z[:1].detach(), inputs.get("position_ids")
        return (loss, {"loss": loss}) if return_outputs else loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer = self._skipping_optimizer()
        self.faults.end_step(self.state.global_step + 1, norm, self.accelerator.gather, optimizer)
        return norm

    def _skipping_optimizer(self) -> Any:
        """The optimiser without accelerate's wrapper, if it skips steps with faults; else ``None``."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        # The fused optimisers of MPS ignore ``found_inf``. With sharded weights, it was not tried.
        skips = self.args.device.type in ("cpu", "cuda") and not self.is_fsdp_enabled
        return optimizer if skips and all(g.get("fused") for g in optimizer.param_groups) else None

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as ``Trainer`` does, but count every row exactly once.

        With several processes, ``Trainer`` repeats rows to fill the last batches, and counts these rows
        twice. To avoid repeats, this method uses the largest batch size with which all batches of all
        processes are full. If there is no such batch size, the method uses 1, because ``Trainer`` then leaves
        out the losses of repeated rows.
        """
        self.faults.check()
        data: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        size, processes = self.args.per_device_eval_batch_size, self.args.world_size
        self._eval_rows = len(data)
        if processes > 1:
            fits = [n for n in range(1, size + 1) if len(data) % (n * processes) == 0]
            self.args.per_device_eval_batch_size = max(fits, default=1)
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self.args.per_device_eval_batch_size = size

    def final_scores(self, held_out: Any) -> dict[str, Any]:
        """The log's entry with the scores on the rows ``held_out`` after the last step.

        Evaluates only if the log has no evaluation of this step on as many rows.
        """

        def last() -> dict[str, Any]:
            return next((entry for entry in reversed(self.state.log_history) if "eval_loss" in entry), {})

        # Compare the rows too: a run that resumes from its last checkpoint may change ``eval_rows``.
        if (last().get("step"), last().get("eval_rows")) != (self.state.global_step, len(held_out)):
            self.evaluate(held_out)
        return last()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self.faults.check()
            logs = {**logs, **self.read(self.solves)}
            gradient = None if self.layer is None else self.layer.gradient
            logs |= self.speed.read(logs.get("nfe", 1), graph_evaluations(gradient))
            if self.budget is not None:
                logs["max_iter"] = self.budget.max_iter
            if self.args.device.type == "cuda":
                logs["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            line = self.state.global_step // self.args.logging_steps  # counts lines from the start of the run
            if line and self.spectral_every and line % self.spectral_every == 0:
                logs |= self._radius()
            if self.layer is not None:
                self._advise(logs, self.layer.train_solve.convergence)
        if "eval_loss" in logs:
            logs = {**logs, "eval_rows": self._eval_rows}
            logs["eval_perplexity"] = round(math.exp(min(logs["eval_loss"], 700)), 4)
            logs |= {f"eval_{name}": value for name, value in self.read(self.eval_solves).items()}
        super().log({**logs, "train_seconds": round(self.speed.elapsed, 2)}, start_time)

    def _advise(self, logs: dict[str, float], policy: ConvergencePolicy) -> None:
        if policy.max_iter == 1:
            return  # one iteration from z = 0 always has the residual 1
        if self.budget is not None:
            logs = {**logs, "share_budget_exhausted": 0.0}  # with the budget, tokens need not converge
        tolerance = policy.rtol if isinstance(policy, Residual) else None
        for text in self.advice.read(logs, tolerance):
            if self.is_world_process_zero():
                logger.warning("step %d: %s", self.state.global_step, text)

    def _radius(self) -> dict[str, float]:
        if self._last is None or self.is_fsdp_enabled:  # FSDP gathers all weights only in a forward pass
            return {}
        self.speed.count()
        ids, z, positions = self._last
        if positions is not None:  # documents were solved separately: keep only the first document
            end = int((positions[0] == 0).cumsum(0).eq(1).sum())
            ids, z = ids[:, :end], z[:, :end]
        with self.accelerator.autocast():
            radius = model_radius(self.model, ids, z)
        self.speed.skip()
        return {"spectral_radius": round(radius, 4)}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        pass  # the caller has loaded the weights

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model.

        For a checkpoint (``_internal_call``) with FSDP, this method saves only the configuration and the
        tokenizer. ``_save_optimizer_and_scheduler`` saves the weights, in shards.
        """
        if not (_internal_call and self.is_fsdp_enabled):
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save and output_dir is not None:
            self.check_folder()
            self.model.config.save_pretrained(output_dir)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled:
            self._writing = shards.save_shards(self.model, self.optimizer, output_dir, self._writers)
        elif self.args.should_save:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_optimizer_state_dict(self.model, self.optimizer, options=options)
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(output_dir) / "optimizer.pt")
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.faults.check()
        self.finish_checkpoint()
        super()._save_checkpoint(model, trial)

    def complete(self, checkpoint: Path) -> None:
        """Seal a checkpoint (list its files and checksums), and remove old checkpoints.

        With FSDP, a background thread waits until the shards are written, and then does both.
        """
        if self._writing is None:
            super().complete(checkpoint)
            return
        saving, seal_it = self._writing, super().complete

        def wait_and_seal() -> None:
            shards.wait_for(saving, checkpoint)
            seal_it(checkpoint)

        self._sealing = self._background.submit(wait_and_seal)

    def train_from(self, checkpoint: Path | None) -> dict[str, Any]:
        try:
            record = super().train_from(checkpoint)
            self.faults.check()
            return record
        finally:
            # Wait for the seal, even after an error or a signal. Sealing starts threads, and Python cannot
            # start threads while it exits.
            if self._sealing is not None:
                wait([self._sealing])

    def finish_checkpoint(self) -> None:
        """Wait until the last sharded checkpoint is sealed. All processes must call this.

        Raises:
            OSError: a process could not write.
        """
        if self._sealing is not None:
            sealing, self._sealing = self._sealing, None
            everywhere(sealing.result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if shards.is_sharded(folder):
            shards.load_optimizer(self.model, self.optimizer, folder)
        else:
            state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(self.model, self.optimizer, state, options=options)
        self.lr_scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))


class _Schedule(TrainerCallback):
    """Trains for the number of steps in this run's settings, and ignores the number of steps in a checkpoint.

    Also evaluates after the steps in ``eval_at``.

    At the end of every stage, logs, evaluates and saves a checkpoint. At the end of every stage except the
    last, also saves the model in the folder ``stage-N`` (N counts from 1).
    """

    def __init__(
        self, trainer: PretrainTrainer, curriculum: Curriculum | None, eval_at: Collection[int]
    ) -> None:
        self.trainer = trainer
        self.eval_at = frozenset(eval_at)
        self.stages = [] if curriculum is None else curriculum.stages
        steps = trainer.args.max_steps
        self.ends = [Curriculum.end(stage, steps) for stage in self.stages] or [steps]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number, (start, stage) in enumerate(zip([0, *self.ends], self.stages, strict=False), 1):
            if start == state.global_step and state.is_world_process_zero:
                searched, with_graph = evaluation_budget(self.trainer.model.config, stage)
                logger.info(
                    "stage %d, steps %d to %d: %d + %d evaluations at most", number, start + 1,
                    self.ends[number - 1], searched, with_graph,
                )  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.eval_at:
            control.should_evaluate = True
        if state.global_step in self.ends:
            control.should_log = control.should_evaluate = control.should_save = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.finish_checkpoint()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.ends[:-1]:
            number = self.ends.index(state.global_step) + 1
            folder = Path(str(args.output_dir)) / f"stage-{number}"
            unseal(folder)
            with writing(folder):
                self.trainer.save_model(str(folder))
            if args.should_save:
                seal(folder)
            self.trainer.advice = Advice()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Training has only one epoch. If the epoch ends before the last step, raise an error. This can happen
        # with a stream, because its length is not known in advance.
        if state.global_step < state.max_steps and not control.should_training_stop:
            raise ValueError(
                f"the data has ended after {state.global_step} of {state.max_steps} steps: ask for fewer "
                "tokens or steps, or allow more --passes; the checkpoints are whole"
            )


class Progress(ProgressCallback):
    """A progress bar that also shows the latest logged loss, residual, speed and other values."""

    training_bar: Any
    prediction_bar: Any
    _SHOWN = ("loss", "eval_perplexity", "iterations", "residual", "tokens_per_second", "mfu")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.current_step = state.global_step
        self.shown: dict[str, str] = {}
        if self.training_bar is not None:
            self.training_bar.n = state.global_step

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        super().on_prediction_step(*args, **kwargs)
        if self.prediction_bar is not None:
            self.prediction_bar.set_description("evaluation", refresh=False)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.shown |= {name: f"{logs[name]:.4g}" for name in self._SHOWN if logs and name in logs}
            self.training_bar.set_postfix(self.shown, refresh=False)
