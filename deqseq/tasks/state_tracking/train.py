"""Training on a word problem: transformers' Trainer, endless streams, a curriculum of stages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import IterableDataset
from transformers import set_seed

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.tasks.common.runs import RunFolder
from deqseq.tasks.common.trainer import AlignedTrainer, short_run_arguments
from deqseq.tasks.state_tracking.data import Batch, WordProblemStream
from deqseq.tasks.state_tracking.evaluate import load
from deqseq.tasks.state_tracking.lstm import LSTM
from deqseq.tasks.state_tracking.settings import TrainSettings

logger = logging.getLogger(__name__)


def train(
    settings: TrainSettings,
    output: str | Path,
    save_steps: int = 500,
    progress: bool = True,
) -> ImplicitForCausalLM | LSTM:
    """Train in folder ``output``; an interrupted run goes on from its last checkpoint.

    Writes the model (``config.json``, ``model.safetensors``), ``settings.json`` and ``training.json``
    (seconds, and the log: loss, iterations and residual of the search against the step). A finished run
    is not repeated. What is returned is what was saved, in float32: the trainer leaves its autocast on the
    model that it trained.

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
    else:
        _train(settings, folder, save_steps, progress)
    return load(folder.path)[0]


def _train(settings: TrainSettings, folder: RunFolder, save_steps: int, progress: bool) -> None:
    folder.start()
    set_seed(settings.seed)
    model = settings.model()
    arguments = short_run_arguments(
        folder.path,
        settings.steps,
        save_steps,
        progress,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.bf16,
        use_cpu=not torch.cuda.is_available(),
        seed=settings.seed,
    )
    trainer = AlignedTrainer(
        model=model,
        args=arguments,
        stream=_Batches(settings, arguments.device),
        curriculum=settings.curriculum(),
        label_smoothing=settings.label_smoothing,
    )
    trainer.train_in(folder)


class _Batches(IterableDataset[Batch]):
    """The batches of all stages, the shortest sequences first; made on the device that trains on them.

    Of the last stage's a share is like those before it, rehearsal.
    """

    def __init__(self, settings: TrainSettings, device: torch.device) -> None:
        super().__init__()
        self.start = 0
        s, p = settings, settings.identity_probability
        easy = p if s.short_identity_probability is None else s.short_identity_probability
        stages = (  # end, lengths, probability
            (s.unrolled_share, (2, s.unrolled_length), easy),
            (s.short_share, (s.unrolled_length, s.short_length), easy),
            (1.0, (s.min_length, s.length), p),
        )
        self.ends = [round(end * s.steps) for end, _, _ in stages]
        self.rehearsal = s.rehearsal
        self.streams = [
            WordProblemStream(
                s.algebra,
                lengths,
                identity_probability=probability,
                seed=s.seed,
                batch_size=s.batch_size,
                device=device,
            )
            for _, lengths, probability in stages
        ]

    def __iter__(self) -> Iterator[Batch]:
        for index in count(self.start):
            yield self.streams[self._stage(index)].batch(index)

    def _stage(self, index: int) -> int:
        last = len(self.ends) - 1
        stage = next((i for i, end in enumerate(self.ends) if index < end), last)
        rehearses = int((index + 1) * self.rehearsal) > int(index * self.rehearsal)  # evenly spread
        return last - 1 if stage == last and rehearses else stage
