"""Evaluates models on CatbAbI.

The model reads a split once, in parallel streams. Its state is carried from one batch to the next.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.causal_lm.cache import EquilibriumCache
from deqseq.checks import check_count
from deqseq.problem import SolveOptions
from deqseq.statistics import SolveStatistics
from deqseq.tasks.catbabi.data import IGNORE_INDEX, CatBabi, once
from deqseq.tasks.catbabi.settings import TrainSettings
from deqseq.tasks.catbabi.stories import TASKS
from deqseq.tasks.common.models import load_model
from deqseq.tasks.common.two_stages import load_settings


@dataclass
class Evaluation:
    """The result of one model on one split. Shares are in [0, 1].

    Attributes:
        split: train, valid or test.
        data: checksum that identifies the data.
        tokens, questions: number of tokens and number of questions in the stories.
        accuracy: share of questions that the model answered correctly.
        accuracy_by_task: accuracy of every task that has questions, by task number.
        perplexity: over all tokens; ``None`` for a model that was trained on answers only.
        iterations: mean number of evaluations of f per token.
        residual: mean relative residual of the tokens.
        converged: share of tokens that converged.
        seconds: duration of the whole evaluation.

    For an explicit model, ``iterations``, ``residual`` and ``converged`` are ``None``.
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
    """A trained model, its settings, and checksums of its training data.

    ``trained_on["fingerprint"]`` is the checksum of all data. ``trained_on["vocabulary"]`` is the checksum of
    the vocabulary, or ``None`` if an older version of the program trained the run.
    """

    model: ImplicitForCausalLM
    settings: TrainSettings
    trained_on: dict[str, str | None]


def load_run(path: str | Path) -> Run:
    """Load the finished run in folder ``path``.

    Raises:
        ValueError: ``path`` holds no finished CatbAbI run, or its checkpoint cannot be read.
    """
    settings, trained_on = load_settings(TrainSettings, path, "fingerprint", "vocabulary")
    model: Any = load_model(str(path))
    return Run(model, settings, trained_on)


@torch.no_grad()
def evaluate(
    run: Run, data: CatBabi, split: str = "test", batch_size: int = 256, solve: SolveOptions | None = None,
    progress: bool = False,
) -> Evaluation:  # fmt: skip
    """Evaluate a trained model on one split of ``data``.

    The mode, the tasks, the cut (tokens per stream in a batch) and the dtype are those of the training run.

    Args:
        batch_size: number of streams to read in parallel.
        solve: solve options; by default the model's own options.
        progress: show a progress bar.

    Raises:
        ValueError: ``data`` and the training data have different vocabularies; the split is unknown; the
            split has no questions of the tasks that the model was trained on; ``batch_size`` is below 1.
    """
    model, settings, trained_on = run
    if trained_on["fingerprint"] != data.fingerprint and trained_on["vocabulary"] != data.vocabulary_sum:
        raise ValueError(
            "the data must have the vocabulary that the run was trained on, of "
            f"{model.config.vocab_size} words, checksum {trained_on['vocabulary'] or 'not recorded'}; "
            f"got {len(data.vocabulary)} words, checksum {data.vocabulary_sum}"
        )
    check_count("batch_size", batch_size)
    if split not in data.splits:
        raise ValueError(f"split must be {', '.join(data.splits)}, got {split!r}")
    stories = data.splits[split].of_tasks(settings.tasks)
    if not (stories.tokens == data.question).any():
        raise ValueError(f"split {split} must have questions of the run's tasks: {settings.tasks or 'all'}")
    model.eval()
    backbone = model.model.layer.backbone
    solves = SolveStatistics()
    # Row 0 counts the right answers, and row 1 counts the questions. Each task has one column.
    answers = torch.zeros(2, len(TASKS) + 1, dtype=torch.int64, device=model.device)
    loss = torch.zeros((), dtype=torch.float64, device=model.device)
    about = math.ceil(len(stories.tokens) / (min(batch_size, len(stories)) * settings.cut))
    start = time.perf_counter()
    state = None
    for cut in tqdm(once(stories, batch_size, settings.cut), split, about, leave=False, disable=not progress):
        inputs, targets, tasks = (values.to(model.device) for values in cut)
        cache = EquilibriumCache(backbone.rewinds, state)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bf16):
            out = model(inputs, past_key_values=cache, solve=solve)
        assert cache.state is not None
        state = backbone.keep_last(cache.state, settings.cut)
        asked = inputs == data.question
        right = asked & (out.logits.argmax(-1) == targets)
        for row, chosen in zip(answers, (right, asked), strict=True):
            row += torch.bincount((tasks * chosen).flatten(), minlength=len(TASKS) + 1)
        loss += F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        if out.solution is not None:
            solves.add(out.solution, targets != IGNORE_INDEX)
    rights, questions = answers[:, 1:].tolist()
    search = solves.read()
    return Evaluation(
        split=split, data=data.fingerprint, tokens=len(stories.tokens), questions=sum(questions),
        accuracy=sum(rights) / sum(questions),
        accuracy_by_task={t: r / n for t, r, n in zip(TASKS, rights, questions, strict=True) if n},
        perplexity=math.exp(loss.item() / len(stories.tokens)) if settings.mode == "lm" else None,
        iterations=search.get("iterations"), residual=search.get("residual"),
        converged=search.get("share_converged"), seconds=time.perf_counter() - start,
    )  # fmt: skip
