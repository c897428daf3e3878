"""Training on a word problem: transformers' Trainer, an endless stream, a curriculum of two stages."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import torch
from transformers import TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.tasks.state_tracking.data import WordProblemStream
from deqseq.tasks.state_tracking.settings import RunFolder, TrainSettings
from deqseq.tasks.trainer import AlignedTrainer

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
    folder = RunFolder(output, settings)
    if folder.finished:
        logger.info("%s is trained already", folder.path)
        return ImplicitForCausalLM.from_pretrained(folder.path)
    set_seed(settings.seed)
    model = ImplicitForCausalLM(settings.config())
    shortest = settings.length if settings.min_length is None else settings.min_length
    trainer = AlignedTrainer(
        model=model,
        args=_arguments(settings, folder.path, save_steps, progress),
        stream=WordProblemStream(
            settings.algebra,
            (shortest, settings.length),
            identity_probability=settings.identity_probability,
            seed=settings.seed,
            batch_size=settings.batch_size,
        ),
        curriculum=settings.curriculum(),
    )
    checkpoint = get_last_checkpoint(str(folder.path))
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
    # Written last: this file is what says that the run is finished.
    (folder.path / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    return model


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
