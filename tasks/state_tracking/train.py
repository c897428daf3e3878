"""Training on a word problem: transformers' Trainer, an endless stream, a curriculum of two stages."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import IterableDataset
from transformers import TrainingArguments, set_seed

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.tasks.runs import RunFolder
from deqseq.tasks.state_tracking.data import Batch, WordProblemStream
from deqseq.tasks.state_tracking.evaluate import load
from deqseq.tasks.state_tracking.settings import TrainSettings
from deqseq.tasks.trainer import AlignedTrainer, last_whole_checkpoint

logger = logging.getLogger(__name__)


def train(
    settings: TrainSettings,
    output: str | Path,
    save_steps: int = 500,
    progress: bool = True,
) -> ImplicitForCausalLM:
    """Train in folder ``output``; an interrupted run goes on from its last checkpoint.

    Writes the model (``config.json``, ``model.safetensors``), ``settings.json`` and ``training.json``
    (seconds, and the log: loss, iterations and residual of the search against the step). A finished run
    is loaded, not repeated.

    Args:
        settings: what to train.
        output: folder of the run.
        save_steps: steps between checkpoints.
        progress: show a progress bar.

    Raises:
        ValueError: ``output`` holds another run.
    """
    folder = RunFolder(output, asdict(settings))
    if folder.finished:
        logger.info("%s is trained already", folder.path)
        return load(folder.path)[0]
    folder.start()
    set_seed(settings.seed)
    model = ImplicitForCausalLM(settings.config())
    trainer = AlignedTrainer(
        model=model,
        args=_arguments(settings, folder.path, save_steps, progress),
        stream=_Batches(settings),
        curriculum=settings.curriculum(),
        label_smoothing=settings.label_smoothing,
    )
    checkpoint = last_whole_checkpoint(folder.path)
    if checkpoint is not None:
        logger.info("resuming from %s", checkpoint)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - start
    trainer.save_model(str(folder.path))
    record = {
        "seconds": round(seconds, 1),
        "resumed": checkpoint is not None,
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "log": trainer.state.log_history,
    }
    folder.finish(record)
    return model


class _Batches(IterableDataset[Batch]):
    """The batches of both stages: short sequences in the unrolled one, longer ones after it."""

    def __init__(self, settings: TrainSettings) -> None:
        super().__init__()
        self.switch = round(settings.unrolled_share * settings.steps)
        self.start = 0
        self.streams = [
            WordProblemStream(
                settings.algebra,
                lengths,
                identity_probability=settings.identity_probability,
                seed=settings.seed,
                batch_size=settings.batch_size,
            )
            for lengths in ((2, settings.unrolled_length), (settings.min_length, settings.length))
        ]

    def __iter__(self) -> Iterator[Batch]:
        for index in count(self.start):
            yield self.streams[index >= self.switch].batch(index)


def _arguments(settings: TrainSettings, output: Path, save_steps: int, progress: bool) -> TrainingArguments:
    decay = round(0.3 * settings.steps)
    warmup = round(0.05 * settings.steps)
    return TrainingArguments(
        output_dir=str(output),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=settings.max_grad_norm,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": decay, "decay_type": "linear"},
        warmup_steps=warmup,
        logging_steps=50,
        save_steps=save_steps,
        save_total_limit=2,
        seed=settings.seed,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=not progress,
    )
