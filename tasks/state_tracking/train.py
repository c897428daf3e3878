"""Training on a word problem: transformers' Trainer, an endless stream, a curriculum of two stages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path

from torch.utils.data import IterableDataset
from transformers import set_seed

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.tasks.runs import RunFolder
from deqseq.tasks.state_tracking.data import Batch, WordProblemStream
from deqseq.tasks.state_tracking.evaluate import load
from deqseq.tasks.state_tracking.settings import TrainSettings
from deqseq.tasks.trainer import AlignedTrainer, short_run_arguments

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
    arguments = short_run_arguments(
        folder.path,
        settings.steps,
        save_steps,
        progress,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
    )
    trainer = AlignedTrainer(
        model=model,
        args=arguments,
        stream=_Batches(settings),
        curriculum=settings.curriculum(),
        label_smoothing=settings.label_smoothing,
    )
    trainer.train_in(folder)
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
