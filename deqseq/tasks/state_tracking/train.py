"""Training on a word problem, with transformers' Trainer, endless streams and a curriculum of stages."""

import logging
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

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


def train(settings: TrainSettings, output: str | Path, save_steps: int = 500) -> ImplicitForCausalLM | LSTM:
    """Train in folder ``output``, or resume there from the last checkpoint; returns the trained model.

    Writes ``settings.json``, and a checkpoint every ``save_steps`` steps. At the end, writes the model
    (``config.json``, ``model.safetensors``) and ``training.json``: the duration in seconds, and a log of
    loss, iterations and residual every 50 steps. A finished run is loaded, not trained again.

    The returned model is loaded from the folder: the trainer's own model still computes under autocast.

    Raises:
        ValueError: ``output`` holds another run.
    """
    folder = RunFolder(output, asdict(settings))
    with folder.locked():
        if folder.finished():
            logger.info("%s is trained already", folder.path)
            return load(folder.path)[0]
        folder.start()
        set_seed(settings.seed)
        model = settings.model()
        arguments = short_run_arguments(settings, folder.path, save_steps)
        batches = _Batches(settings, arguments.device)
        trainer = AlignedTrainer(
            arguments, batches, settings.label_smoothing, model=model, curriculum=settings.curriculum()
        )
        trainer.train_in(folder)
    return load(folder.path)[0]


class _Batches(IterableDataset[Batch]):
    """The training batches, made on the training device.

    They come in the three phases of :class:`TrainSettings`, called stages here. In the last stage, a share
    ``rehearsal`` of the batches comes from the second stage.
    """

    def __init__(self, settings: TrainSettings, device: torch.device) -> None:
        super().__init__()
        self.start = 0
        s, p = settings, settings.identity_probability
        easy = p if s.short_identity_probability is None else s.short_identity_probability
        stages = (  # each: end as a share of the steps, lengths, probability of the identity
            (s.unrolled_share, (2, s.unrolled_length), easy),
            (s.short_share, (s.unrolled_length, s.short_length), easy),
            (1.0, (s.min_length, s.length), p),
        )
        self.ends = [round(end * s.steps) for end, _, _ in stages]
        self.rehearsal = s.rehearsal
        sizes: Any = {"seed": s.seed, "batch_size": s.batch_size, "device": device}
        self.streams = [
            WordProblemStream(s.algebra, lengths, identity_probability=probability, **sizes)
            for _, lengths, probability in stages
        ]

    def __iter__(self) -> Iterator[Batch]:
        for index in count(self.start):
            yield self.streams[self._stage(index)].batch(index)

    def _stage(self, index: int) -> int:
        last = len(self.ends) - 1
        stage = next((i for i, end in enumerate(self.ends) if index < end), last)
        # Spread the rehearsal batches evenly: with 0.25, every fourth batch.
        rehearses = int((index + 1) * self.rehearsal) > int(index * self.rehearsal)
        return last - 1 if stage == last and rehearses else stage
