"""Scores of a language model on documents with answers: accuracy and loss of the answers, loss of the rest.

Shapes: N documents, B documents in a batch, L tokens of a document with its end-of-text token, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from deqseq.checks import check_count
from deqseq.problem import SolveOptions
from deqseq.statistics import SolveStatistics
from deqseq.tasks.common.models import check_tokens, solve_options
from deqseq.tasks.text_tracking.documents import Document
from deqseq.tasks.text_tracking.worlds import Answer


@dataclass
class Depth:
    """Means over the answers whose ``operations`` are in [first, last]. ``nll`` is ``None`` for a rule."""

    first: int
    last: int
    answers: int
    accuracy: float
    nll: float | None


@dataclass
class Score:
    """The score of one model, or of a simple rule, on documents of one length.

    For a rule, all fields from ``answer_nll`` on are ``None``. For an explicit model, ``iterations`` and
    ``converged`` are ``None``.

    Attributes:
        model: name of the model or rule.
        length: number of tokens in a document.
        documents, answers: numbers of documents, and of answers in them.
        accuracy: share of the answers to which the model gives the highest probability of all tokens.
        stderr: standard error of ``accuracy``, as if answers were independent; ``None`` for a single answer.
        by_kind: accuracy for each kind of document.
        by_operations: means for 1 operation, 2, 3 to 4, 5 to 8 and so on.
        answer_nll: mean negative log-likelihood of an answer.
        other_nll: mean negative log-likelihood of all other tokens, except the first of every document.
        seconds: time that the model took.
        iterations: mean number of evaluations of f per token.
        converged: share of tokens that met the tolerance; ``None`` for policies without a tolerance.
    """

    model: str
    length: int
    documents: int
    answers: int
    accuracy: float
    stderr: float | None
    by_kind: dict[str, float]
    by_operations: list[Depth]
    answer_nll: float | None = None
    other_nll: float | None = None
    seconds: float | None = None
    iterations: float | None = None
    converged: float | None = None


RULES: dict[str, Callable[[Answer], str]] = {
    "rule: last stated for it": lambda answer: answer.last_stated,
    "rule: last mentioned": lambda answer: answer.last_mentioned,
}
"""Simple rules that ignore operations. A model can reach their accuracy without tracking the state."""


def score_rules(documents: Sequence[Document], length: int) -> list[Score]:
    """The scores of :data:`RULES` on ``documents``, which have ``length`` tokens."""
    found = []
    for name, rule in RULES.items():
        right = [
            rule(answer) == document.words[answer.at]
            for document in documents for answer in document.answers
        ]  # fmt: skip
        found.append(_score(name, length, documents, torch.tensor(right)))
    return found


@torch.no_grad()
def score_model(
    name: str, model: PreTrainedModel, tokenizer: Any, documents: Sequence[Document], length: int,
    batch_size: int = 32, solve: SolveOptions | None = None,
) -> Score:  # fmt: skip
    """The score of a causal language model.

    Every document is a sequence of its own. No token comes before it, so its first token is not predicted.
    The end-of-text token comes after it.

    Args:
        tokenizer: makes one token of every word.
        documents: all have ``length`` tokens.
        solve: solve options; the model's by default.

    Raises:
        ValueError: there are no answers; a document has another length; a token is not in the model's
            vocabulary; documents are longer than the model supports.
    """
    check_count("batch_size", batch_size)
    rows = encode(tokenizer, documents, length)
    check_tokens(model, rows)
    model.eval()
    solve = solve_options(model) if solve is None else solve
    options: dict[str, Any] = {} if solve is None else {"solve": solve}
    solves, losses, hits = SolveStatistics(), [], []
    start = time.perf_counter()
    for batch in tqdm(rows.split(batch_size), f"{name}, length {length}", leave=False, disable=None):
        ids = batch.to(model.device)
        try:
            out: Any = model(input_ids=ids, **options)
        except IndexError as error:
            raise ValueError(f"{name} has no positions for documents of {length} tokens") from error
        logits, targets = out.logits[:, :-1].float(), ids[:, 1:]  # (B, L - 1, V), (B, L - 1)
        losses.append(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").cpu().double())
        hits.append((logits.argmax(-1) == targets).cpu())
        if (solution := getattr(out, "solution", None)) is not None:
            solves.add(solution)
    seconds = time.perf_counter() - start
    nll, right = torch.cat(losses), torch.cat(hits)  # (N, L - 1)
    tracked = torch.tensor([[*document.tracked, False] for document in documents])[:, 1:]
    search = solves.read()
    found = _score(name, length, documents, right[tracked], nll[tracked])
    found.other_nll = nll[~tracked].mean().item()
    found.seconds = seconds
    found.iterations = search.get("iterations")
    found.converged = search["share_converged"] if search.get("share_completed", 1) < 1 else None
    return found


def encode(tokenizer: Any, documents: Sequence[Document], length: int) -> Tensor:
    """The tokens of the documents with the end-of-text token: (N, L) int64.

    Raises:
        ValueError: a document of another length; a word that is not one known token.
    """
    texts = [document.text for document in documents]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    for document, own in zip(documents, ids, strict=True):
        if len(document.words) != len(own) or tokenizer.unk_token_id in own:
            raise ValueError("the tokenizer does not make one known token of every word")
        if len(own) != length - 1:
            raise ValueError(f"a document must have {length - 1} words, got {len(own)}")
    return torch.tensor([[*own, tokenizer.eos_token_id] for own in ids])


def _score(
    name: str, length: int, documents: Sequence[Document], right: Tensor, nll: Tensor | None = None
) -> Score:
    """Average over the answers. ``right``, ``nll``: one entry for every answer, in the order of the text."""
    answers = [answer for document in documents for answer in document.answers]
    if not answers:
        raise ValueError("the documents have no answers")
    right = right.double()
    kinds = [document.kind for document in documents for _ in document.answers]
    operations = torch.tensor([answer.operations for answer in answers])
    depths, first, last = [], 1, 1
    while first <= int(operations.max()):
        here = (operations >= first) & (operations <= last)
        if count := int(here.sum()):
            own = None if nll is None else nll[here].mean().item()
            depths.append(Depth(first, last, count, right[here].mean().item(), own))
        first, last = last + 1, 2 * last
    return Score(
        model=name, length=length, documents=len(documents), answers=len(answers),
        accuracy=right.mean().item(),
        stderr=(right.std() / len(answers) ** 0.5).item() if len(answers) > 1 else None,
        by_kind={kind: right[torch.tensor([own == kind for own in kinds])].mean().item()
                 for kind in sorted(set(kinds))},
        by_operations=depths,
        answer_nll=None if nll is None else nll.mean().item(),
    )  # fmt: skip
