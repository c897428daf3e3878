"""Trains a model on CatbAbI, which joins the twenty bAbI tasks into streams of stories.

A batch has the next tokens of several parallel streams. Each batch starts with the model's state after the
previous batch.
"""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import set_seed

from deqseq.backbone import State
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.causal_lm.cache import EquilibriumCache
from deqseq.tasks.catbabi.data import IGNORE_INDEX, StoryStreams, load
from deqseq.tasks.catbabi.settings import TrainSettings
from deqseq.tasks.common.models import load_model
from deqseq.tasks.common.runs import RunFolder
from deqseq.tasks.common.settings import defaults
from deqseq.tasks.common.trainer import AlignedTrainer, check_one_process, short_run_arguments

logger = logging.getLogger(__name__)

_STATE = "streams.pt"


def train(settings: TrainSettings, output: str | Path, save_steps: int = 500) -> ImplicitForCausalLM:
    """Train in folder ``output``, or resume there from the last checkpoint; returns the trained model.

    Writes ``settings.json``, and a checkpoint every ``save_steps`` steps. At the end, writes the model
    (``config.json``, ``model.safetensors``) and ``training.json`` with the duration in seconds and a log. If
    the run in ``output`` has already finished, only loads its model.

    Raises:
        ValueError: ``output`` contains another run; the data are missing or too small.
    """
    check_one_process()
    data = load(settings.data)
    identity = {**asdict(settings), "fingerprint": data.fingerprint, "vocabulary": data.vocabulary_sum}
    # Two settings may differ when a run is resumed: the data may have moved to another folder, and older runs
    # have not recorded ``vocabulary``. The fingerprint must not differ, so changed data are still noticed.
    folder = RunFolder(output, identity, ("data", "vocabulary"), defaults(TrainSettings))
    with folder.locked():
        if folder.finished():
            logger.info("%s is trained already", folder.path)
        else:
            stories = data.splits["train"].of_tasks(settings.tasks)
            question = data.question if settings.mode == "qa" else None
            stream = StoryStreams(stories, question, settings.batch_size, settings.cut, settings.seed)
            folder.start()
            set_seed(settings.seed)
            arguments = short_run_arguments(settings, folder.path, save_steps)
            model = ImplicitForCausalLM(settings.config(len(data.vocabulary)))
            trainer = StreamTrainer(
                arguments, stream, settings.label_smoothing, model=model, curriculum=settings.curriculum()
            )
            trainer.train_in(folder)
    found: Any = load_model(str(folder.path))  # the trainer's own model would still use autocast
    return found


class StreamTrainer(AlignedTrainer):
    """A trainer that passes the model's state from batch to batch. No gradient flows through the state.

    The state of an attention backbone has a slot for every token. The trainer keeps only the slots of the
    last batch, as in Transformer-XL. Checkpoints contain the state, so a resumed run gives the same weights
    as an uninterrupted run.
    """

    model: Any

    carried: State | None = None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *rest: Any, **options: Any) -> Any:
        backbone = self.model.model.layer.backbone
        cache = EquilibriumCache(backbone.rewinds, self.carried)
        given: Any = {**inputs, "past_key_values": cache}
        result = super().compute_loss(model, given, *rest, **options)
        assert cache.state is not None
        self.carried = backbone.keep_last(cache.state, inputs["input_ids"].shape[1])
        return result

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss over all labels except ``IGNORE_INDEX``. Zero if every label is ``IGNORE_INDEX``."""
        total = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing, reduction="sum")
        return total / (labels != IGNORE_INDEX).sum().clamp_min(1)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.carried is not None:
            torch.save(vars(self.carried), Path(output_dir) / _STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.carried = State(**torch.load(Path(checkpoint) / _STATE, map_location=self.args.device))
