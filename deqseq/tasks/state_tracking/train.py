"""Training on a word problem (running products in a group or monoid), with transformers' Trainer.

The data are endless streams of random sequences. A curriculum switches from the unrolled stage to the
fixed-point stage.
"""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn
from transformers import set_seed

from deqseq.tasks.common.runs import RunFolder
from deqseq.tasks.common.settings import defaults
from deqseq.tasks.common.trainer import AlignedTrainer, check_one_process, short_run_arguments
from deqseq.tasks.state_tracking.evaluate import load
from deqseq.tasks.state_tracking.phases import Batches, PhaseCurriculum, Progress
from deqseq.tasks.state_tracking.settings import Model, TrainSettings

logger = logging.getLogger(__name__)


def train(settings: TrainSettings, output: str | Path, save_steps: int = 500) -> Model:
    """Train in folder ``output``, or resume from the last checkpoint there. Returns the trained model.

    Writes ``settings.json``, and a checkpoint every ``save_steps`` steps. At the end, writes the model
    (``config.json``, ``model.safetensors``) and ``training.json``: the duration in seconds, and a log of
    loss, iterations and residual every 50 steps. A finished run is loaded, not trained again.

    The returned model is loaded from the folder, because the trainer's own model still uses autocast.

    Raises:
        ValueError: ``output`` holds another run.
    """
    check_one_process()
    folder = RunFolder(output, asdict(settings), defaults=defaults(type(settings)))
    with folder.locked():
        if folder.finished():
            logger.info("%s is trained already", folder.path)
            return load(folder.path)[0]
        folder.start()
        set_seed(settings.seed)
        model = settings.model()
        arguments = short_run_arguments(settings, folder.path, save_steps)
        progress = Progress(settings)
        batches = Batches(settings, arguments.device, progress)
        stages = settings.curriculum()
        curriculum = None if stages is None else PhaseCurriculum(stages.stages, progress)
        trainer = _Trainer(
            progress, arguments, batches, settings.label_smoothing, model=model, curriculum=curriculum
        )
        trainer.train_in(folder)
    return load(folder.path)[0]


class _Trainer(AlignedTrainer):
    """A trainer that also passes the predictions of every batch to ``progress``, to measure the accuracy."""

    def __init__(self, progress: Progress, *args: Any, **options: Any) -> None:
        super().__init__(*args, callbacks=[progress], **options)
        self.progress = progress

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *rest: Any, **options: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        self.progress.add(self.state.global_step, outputs.logits, inputs["labels"])
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **self.progress.log(self.state.global_step)}
        super().log(logs, start_time)
