"""Training on puzzles with transformers' Trainer. Iterates persist over steps, and weights are averaged."""

import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, set_seed
from xxhash import xxh3_128

from deqseq.tasks.common.averaging import Averaging
from deqseq.tasks.common.best import Best
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.persistent import PersistentTrainer
from deqseq.tasks.common.runs import RunFolder
from deqseq.tasks.common.settings import defaults
from deqseq.tasks.common.trainer import check_one_process, short_run_arguments
from deqseq.tasks.reasoning.data import PuzzleStream, read, split
from deqseq.tasks.reasoning.evaluate import accuracy, load
from deqseq.tasks.reasoning.model import BoardModel
from deqseq.tasks.reasoning.puzzles import Puzzles
from deqseq.tasks.reasoning.settings import TrainSettings

logger = logging.getLogger(__name__)

_CHECKSUM = "puzzles.json"
_TEST_BATCH = 512
"""Puzzles that a test solves together. Raw weights are tested on the first batch of this size."""


def train(settings: TrainSettings, output: str | Path, save_steps: int | None = None) -> BoardModel:
    """Train in folder ``output``, or resume there from the last checkpoint; returns the trained model.

    Writes ``settings.json``, and a checkpoint every ``save_steps`` steps, by default at most four in the run.
    At the end, writes the model (``config.json``, ``model.safetensors``) with the averaged weights of the
    last step, or of the step with the best test (setting ``keep``). Also writes ``training.json`` with the
    duration, a log, and with ``keep: best`` the step of the kept weights. If the run is finished, this
    function only loads its model.

    Raises:
        ValueError: ``output`` holds another run; the puzzles cannot be read, have another size than in the
            settings, or differ from the puzzles of the checkpoint.
        FloatingPointError: a loss or weight is not finite.
    """
    check_one_process()
    folder = RunFolder(output, asdict(settings), defaults=defaults(type(settings)))
    with folder.locked():
        if folder.finished():
            logger.info("%s is trained already", folder.path)
            return load(folder.path)[0]
        puzzles, tests = _puzzles(settings)
        set_seed(settings.seed)
        model = settings.model()
        with torch.random.fork_rng([]):  # wrong parts raise an error here, before the folder is made
            model(puzzles.questions[:1].long())
        folder.start()
        if save_steps is None:
            save_steps = math.ceil(settings.steps / 4)
        arguments = short_run_arguments(settings, folder.path, save_steps)
        if settings.compile:
            model.compile_map(arguments.device, graphs=True)
        stream = PuzzleStream(
            settings.task, puzzles, settings.batch_size, augment=settings.augment, hints=settings.hints,
            hint_batches=round(settings.hint_share * settings.steps), seed=settings.seed,
            device=arguments.device,
        )  # fmt: skip
        trainer = _Trainer(settings, tests, arguments, stream, model=model)
        trainer.parts.append(_Checksum(puzzles, tests))
        trainer.train_in(folder)
    return load(folder.path)[0]


def _puzzles(settings: TrainSettings) -> tuple[Puzzles, Puzzles]:
    """The training puzzles and the test puzzles."""
    found = read(settings.data, settings.task)
    puzzles, tests = split(found) if settings.test is None else (found, read(settings.test, settings.task))
    for file, part in ((settings.data, puzzles), (settings.test or settings.data, tests)):
        cells = part.questions.shape[1]
        if cells != settings.size**2:
            raise ValueError(
                f"the run needs boards of {settings.size} x {settings.size} cells (option size), but {file} "
                f"has boards of {cells} cells"
            )
    return puzzles, Puzzles(*(column[: settings.eval_puzzles] for column in tests))


class _Checksum:
    """Refuses to resume from a checkpoint that was trained or tested on other puzzles."""

    def __init__(self, *sets: Puzzles) -> None:
        hashed = xxh3_128()
        for puzzles in sets:
            for column in puzzles:
                hashed.update(column.numpy().tobytes())
        self.checksum = hashed.hexdigest()

    def save(self, folder: Path) -> None:
        write_json(folder / _CHECKSUM, self.checksum)

    def load(self, folder: Path, device: torch.device) -> None:
        if json.loads((folder / _CHECKSUM).read_text()) != self.checksum:
            raise ValueError(
                f"the puzzles of data or test are not those of {folder}: restore the files, or choose "
                "another folder"
            )


class _Trainer(PersistentTrainer):
    """Averages the weights. Logs the accuracy on ``tests`` with averaged and with raw weights."""

    def __init__(self, settings: TrainSettings, tests: Puzzles, *args: Any, **options: Any) -> None:
        budget = 1 if settings.explicit else settings.budget
        super().__init__(
            *args, budget=budget, solved_steps=settings.solved_steps, damage=settings.damage,
            batches=settings.batches, **options,
        )  # fmt: skip
        self.settings, self.tests = settings, tests
        self.average = Averaging(options["model"], settings.average)
        self.best = Best() if settings.keep == "best" else None
        self.parts.extend([self.average, *([] if self.best is None else [self.best])])
        self.add_callback(self.average)
        self.add_callback(_Tests(self))

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.settings.loss == "softmax":
            return super().cross_entropy(logits, labels)
        return stablemax_cross_entropy(logits, labels)

    def train_from(self, checkpoint: Path | None) -> dict[str, Any]:
        record = super().train_from(checkpoint)
        assert self.model is not None
        if self.best is None:
            self.model.load_state_dict(self.average.model.state_dict())
            return record
        self.model.load_state_dict(self.best.weights)
        return {**record, "kept_step": self.best.step}

    def test(self) -> None:
        """Log the share of ``tests`` that are solved with averaged weights, and with raw weights.

        With ``keep: best``, keep the averaged weights if no earlier test was better. To save time, their
        test ends early in two cases: they can no longer be the best, or they solve nothing in the first
        batch.
        """
        model: Any = self.model
        depth, batch_size, least = self.settings.eval_depth, _TEST_BATCH, None
        if self.best is not None:  # smaller batches, so that a bad test ends sooner
            batch_size, least = self.settings.batch_size, self.best.score
        first = Puzzles(*(column[:_TEST_BATCH] for column in self.tests))
        raw = accuracy(model, first, depth, batch_size)
        with self.average.lend(model):  # on a GPU, only this model is compiled, not the copy with averages
            averaged = accuracy(model, self.tests, depth, batch_size, least)
        if self.best is not None:  # the share of a test that ended early is 0, or below the best
            self.best.offer(averaged.share, self.state.global_step, self.average.model)
        model.train()
        asked = self.control.should_log  # self.log clears this flag, but the loss must still be logged
        self.log({
            "accuracy": round(averaged.share, 4), "tested": averaged.puzzles,
            "raw_accuracy": round(raw.share, 4),
        })  # fmt: skip
        self.control.should_log = asked


class _Tests(TrainerCallback):
    def __init__(self, trainer: _Trainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        every = self._trainer.settings.eval_steps
        if every and (state.global_step % every == 0 or state.global_step == state.max_steps):
            due = control.should_log
            self._trainer.test()
            control.should_log = due  # test() cleared this flag, but the loss must still be logged


def stablemax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy with stablemax in place of softmax (Prieto et al., 2025, arXiv 2501.04697).

    Stablemax divides s(logit) by the sum of s over all V logits. s(x) is x + 1 for x >= 0, and 1 / (1 - x)
    otherwise. ``logits`` is (N, V), and ``labels`` is (N,).
    """
    # Clamp the logits, so that both branches are finite. Otherwise torch.where would pass on a NaN gradient
    # of the branch that it does not use.
    s = torch.where(logits < 0, 1 / (1 - logits.clamp(max=0)), logits.clamp(min=0) + 1)
    share = s.gather(-1, labels[:, None])[:, 0] / s.sum(-1)
    return -share.log().mean()
