"""Evaluation on CatbAbI: a whole split once, in streams whose state is carried.

Shapes: B streams, L tokens of a cut, V vocabulary.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.causal_lm.cache import EquilibriumCache
from deqseq.checks import check_count
from deqseq.solution import Solution, Status
from deqseq.tasks.catbabi.data import IGNORE_INDEX, CatBabi, Stories, counted, once
from deqseq.tasks.catbabi.settings import TrainedOn, TrainSettings, load_settings
from deqseq.tasks.catbabi.stories import TASKS
from deqseq.tasks.common.models import load_model


@dataclass
class Evaluation:
    """One model on one split. Shares are in [0, 1].

    Attributes:
        split: train, valid or test.
        data: fingerprint of the data.
        tokens, questions: how many were read and asked.
        accuracy: share of the questions that were answered right.
        accuracy_by_task: the same by number of the task, of those that were asked.
        perplexity: of all tokens; ``None`` for a model that was trained on answers only.
        iterations, residual, converged: of the search, means over tokens; ``None`` for an explicit model.
        seconds: of the whole evaluation.
    """

    split: str
    data: str
    tokens: int
    questions: int
    accuracy: float
    accuracy_by_task: dict[int, float]
    perplexity: float | None
    iterations: float | None
    residual: float | None
    converged: float | None
    seconds: float


class Run(NamedTuple):
    """A trained model, how it was trained, and on what."""

    model: ImplicitForCausalLM
    settings: TrainSettings
    trained_on: TrainedOn


def load_run(path: str | Path) -> Run:
    """The finished run in folder ``path``.

    Raises:
        ValueError: no run there, one of another kind or not finished, or a checkpoint that cannot be read.
    """
    settings, trained_on = load_settings(path)
    if not (Path(path) / "training.json").exists():
        raise ValueError(f"the run in {path} is not finished: repeat its command to finish it")
    model: Any = load_model(str(path))
    return Run(model, settings, trained_on)


@torch.no_grad()
def evaluate(
    run: Run,
    data: CatBabi,
    split: str = "test",
    batch_size: int = 256,
    progress: bool = False,
) -> Evaluation:
    """Read the split's stories of the run's tasks once, and compare answers.

    Args:
        run: its model, which is solved by its evaluation policy; its mode, tasks, cut and type.
        data: with the vocabulary that the model was trained on.
        batch_size: streams.

    Raises:
        ValueError: another vocabulary; no such split, or one without questions of the run's tasks; a batch
            size below 1.
    """
    model, settings, trained_on = run
    if trained_on.fingerprint != data.fingerprint and trained_on.vocabulary != data.vocabulary_sum:
        raise ValueError(
            "the data must have the vocabulary that the run was trained on, of "
            f"{model.config.vocab_size} words, checksum {trained_on.vocabulary or 'not recorded'}; "
            f"got {len(data.vocabulary)} words, checksum {data.vocabulary_sum}"
        )
    check_count("batch_size", batch_size)
    if split not in data.splits:
        raise ValueError(f"split must be {', '.join(data.splits)}, got {split!r}")
    stories = data.splits[split]
    stories = stories if settings.tasks is None else stories.of_tasks(settings.tasks)
    if not (stories.tokens == data.question).any():
        raise ValueError(f"split {split} must have questions of the run's tasks: {settings.tasks or 'all'}")
    model.eval()
    backbone = model.model.layer.backbone
    score = _Score(data.question, model.device)
    cuts = once(stories, batch_size, settings.cut)
    number = _cuts(stories, batch_size, settings.cut)
    start = time.perf_counter()
    state = None
    for inputs, targets, tasks in tqdm(cuts, split, number, leave=False, disable=not progress):
        inputs, targets, tasks = (values.to(model.device) for values in (inputs, targets, tasks))
        cache = EquilibriumCache(backbone.rewinds, state)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bf16):
            out = model(inputs, past_key_values=cache)
        assert cache.state is not None
        state = backbone.keep_last(cache.state, settings.cut)
        score.add(out.logits, inputs, targets, tasks, out.solution)
    return score.read(split, data.fingerprint, settings.mode == "lm", time.perf_counter() - start)


def _cuts(stories: Stories, batch_size: int, cut: int) -> int:
    """About as many as there will be."""
    return math.ceil(len(stories.tokens) / (min(batch_size, len(stories)) * cut))


class _Score:
    """Counts of answers and sums over tokens; on the device until they are read."""

    def __init__(self, question: int, device: torch.device) -> None:
        self.question = question
        self.answers = torch.zeros(2, len(TASKS) + 1, dtype=torch.int64, device=device)  # right, asked
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self.solved = False

    def add(
        self, logits: Tensor, inputs: Tensor, targets: Tensor, tasks: Tensor, solution: Solution | None
    ) -> None:
        """Count one cut; logits (B, L, V), the others (B, L)."""
        answers = counted(inputs, targets, self.question)
        asked = answers != IGNORE_INDEX
        right = asked & (logits.argmax(-1) == answers)
        for row, of in enumerate((right, asked)):
            self.answers[row] += torch.bincount((tasks * of).flatten(), minlength=len(TASKS) + 1)
        real = targets != IGNORE_INDEX
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        of_tokens = [real.sum(), loss]
        if solution is not None:
            self.solved = True
            found = (solution.iterations, solution.residual, solution.status == Status.CONVERGED)
            of_tokens += [(values * real).sum() for values in found]
        self.sums[: len(of_tokens)] += torch.stack([total.double() for total in of_tokens])

    def read(self, split: str, data: str, every_token: bool, seconds: float) -> Evaluation:
        """The shares of what was counted."""
        tokens, loss, *search = self.sums.tolist()
        right, asked = self.answers[:, 1:].tolist()
        iterations, residual, converged = [s / tokens for s in search] if self.solved else [None] * 3
        return Evaluation(
            split=split,
            data=data,
            tokens=int(tokens),
            questions=sum(asked),
            accuracy=sum(right) / sum(asked),
            accuracy_by_task={t: r / n for t, r, n in zip(TASKS, right, asked, strict=True) if n},
            perplexity=math.exp(loss / tokens) if every_token else None,
            iterations=iterations,
            residual=residual,
            converged=converged,
            seconds=seconds,
        )
