"""Downstream tasks through EleutherAI's lm-eval, with data from the hub or from JSONL files.

Prompts, choices and metrics are those of lm-eval's own tasks; a local file replaces the data only.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from deqseq.convergence import check_count

if TYPE_CHECKING:  # the command line lists the tasks without waiting for transformers
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Doc = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task of lm-eval.

    Attributes:
        folder: of lm-eval's task files.
        pattern: that its local file matches.
        metric: that enters the average; for ``acc_norm``, log-likelihoods are per character of the choice.
        chance: what guessing gets, with the four choices that nearly all questions of ARC have.
        fields: that a document needs.
        convert: from the schema of the original release to that of the hub.
    """

    folder: str
    pattern: str
    metric: str
    chance: float
    fields: tuple[str, ...]
    convert: Callable[[Doc], Doc] = lambda doc: doc


@dataclass
class TaskScore:
    """One task. Standard errors are lm-eval's.

    Attributes:
        documents: how many were asked.
        source: the local file, or the name on the hub.
        metric, main, main_stderr: what enters the average.
        chance: of that metric.
        acc, acc_norm, perplexity: all that the task reports.
    """

    task: str
    documents: int
    source: str
    metric: str
    main: float
    main_stderr: float | None
    chance: float
    acc: float | None
    acc_stderr: float | None
    acc_norm: float | None
    acc_norm_stderr: float | None
    perplexity: float | None
    perplexity_stderr: float | None


def _question(name: str) -> Callable[[Doc], Doc]:
    """From ``question: {stem, choices: [{text, label}]}`` to ``{name: stem, choices: {text, label}}``."""

    def convert(doc: Doc) -> Doc:
        question = doc.get("question")
        if not isinstance(question, dict):
            return doc
        choices = {key: [choice[key] for choice in question["choices"]] for key in ("text", "label")}
        return {name: question["stem"], "choices": choices, "answerKey": doc["answerKey"]}

    return convert


TASKS = {
    "lambada_openai": Task("lambada", "lambada*.jsonl", "acc", 0.0, ("text",)),
    "hellaswag": Task("hellaswag", "hellaswag*.jsonl", "acc_norm", 0.25, ("ctx", "endings", "label")),
    "piqa": Task("piqa", "piqa*.jsonl", "acc", 0.5, ("goal", "sol1", "sol2", "label")),
    "arc_easy": Task("arc", "arc_easy*.jsonl", "acc", 0.25, ("question", "choices", "answerKey"),
                     _question("question")),
    "arc_challenge": Task("arc", "arc_challenge*.jsonl", "acc_norm", 0.25,
                          ("question", "choices", "answerKey"), _question("question")),
    "winogrande": Task("winogrande", "winogrande*.jsonl", "acc", 0.5,
                       ("sentence", "option1", "option2", "answer")),
    "openbookqa": Task("openbookqa", "openbookqa*.jsonl", "acc_norm", 0.25,
                       ("question_stem", "choices", "answerKey"), _question("question_stem")),
}  # fmt: skip


def check_tasks(names: Sequence[str]) -> None:
    """Raise ``ValueError`` unless all names are of :data:`TASKS`, and there is one."""
    if unknown := [name for name in names if name not in TASKS] or not names:
        raise ValueError(f"unknown tasks {unknown}; known: {', '.join(TASKS)}")


def local_files(names: Sequence[str], folder: str | Path) -> dict[str, Path]:
    """The tasks' files in a folder; of several for one task, that with most lines.

    Raises:
        ValueError: there is none.
    """
    chosen = {}
    for name in names:
        found = sorted(Path(folder).glob(TASKS[name].pattern))
        if not found:
            raise ValueError(f"no file for {name} in {folder}: it must match {TASKS[name].pattern}")
        chosen[name] = max(found, key=lambda path: path.read_bytes().count(b"\n"))
        if len(found) > 1:
            every = ", ".join(path.name for path in found)
            logger.warning("%s: of %s, the longest is taken, %s", name, every, chosen[name].name)
    return chosen


def read_docs(name: str, path: Path) -> list[Doc]:
    """The documents of a JSONL file, in the schema of the hub.

    Raises:
        ValueError: a line that is no JSON object or lacks a field; no documents at all.
    """
    task = TASKS[name]
    docs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            doc = task.convert(dict(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: no document of {name} ({error!r})") from error
        if missing := [field for field in task.fields if field not in doc]:
            raise ValueError(f"{path}, line {number}: {name} needs the fields {missing}")
        docs.append(doc)
    if not docs:
        raise ValueError(f"{path} holds no documents")
    return docs


def _over_file(name: str, path: Path, definition: Path) -> dict[str, Any]:
    """lm-eval's task, as its ``definition`` has it, over the documents of a file."""
    import datasets
    from lm_eval.tasks._yaml_loader import load_yaml

    docs = read_docs(name, path)
    fields = list(TASKS[name].fields)
    changes: dict[str, Any] = {}
    if name == "hellaswag":
        whole = ("activity_label", "ctx_a", "ctx_b")
        if all(field in doc for doc in docs for field in whole):
            fields += whole
        else:  # selections drop what lm-eval builds the prompt from; the context alone is left
            changes["process_docs"] = _hellaswag_without_activity
    kept = [{field: doc[field] for field in fields} for doc in docs]

    def load(**_: Any) -> Any:
        return datasets.DatasetDict({"test": datasets.Dataset.from_list(kept)})

    # lm-eval merges no changes into tasks that it knows by name, so its definition is read here.
    return {
        **load_yaml(definition),
        "dataset_path": str(path),
        "custom_dataset": load,
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        **changes,
    }


def _hellaswag_without_activity(dataset: Any) -> Any:
    from lm_eval.tasks.hellaswag.utils import preprocess

    def prompt(doc: Doc) -> Doc:
        choices = [preprocess(ending) for ending in doc["endings"]]
        return {"query": preprocess(doc["ctx"]), "choices": choices, "gold": int(doc["label"])}

    return dataset.map(prompt)


def evaluate_tasks(
    model: PreTrainedModel, tokenizer: Any, names: Sequence[str] = tuple(TASKS),
    files: Mapping[str, Path] | None = None, limit: int | None = None, batch_size: int = 8,
    progress: bool = False,
) -> list[TaskScore]:  # fmt: skip
    """Zero-shot scores of the model, as it is set to be solved.

    Args:
        names: of :data:`TASKS`.
        files: of the tasks, as :func:`local_files` finds them; from the hub by default.
        limit: documents of each task; all by default.

    Raises:
        ValueError: unknown tasks; files of another schema; data that the hub does
            not give; lm-eval is not installed.
    """
    check_tasks(names)
    check_count("batch_size", batch_size)
    if limit is not None:
        check_count("limit", limit)
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"downstream tasks need lm-eval: pip install 'deqseq[eval]' ({error})") from error
    # Indexing only what is asked for saves reading some thousand task files.
    own = Path(lm_eval.__file__).parent / "tasks"
    manager = TaskManager(
        include_path=[own / part for part in sorted({TASKS[name].folder for name in names})],
        include_defaults=False,
    )
    tasks: list[Any] = list(names)
    if files is not None:
        index = manager.task_index
        tasks = [_over_file(name, files[name], index[name].yaml_path) for name in names]
    # Resampling in processes forked from one that runs torch can hang, and one is quick enough.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    model.eval()
    screen = sys.stderr if progress else None
    try:
        with _quiet():
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            # Not simple_evaluate, which would look for git and list the machine's packages afterwards.
            found: Any = lm_eval.evaluate(
                lm=_watched(lm, screen),
                task_dict=manager.load(tasks),
                limit=limit,
                bootstrap_iters=1000,
                log_samples=False,
            )
    except OSError as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"data cannot be had from the hub: {first}; or give --data-dir") from error
    return [_read(name, found, "" if files is None else str(files[name])) for name in names]


def _read(name: str, found: dict[str, Any], source: str) -> TaskScore:
    result, config = found["results"][name], found["configs"][name]

    def value(metric: str) -> float | None:
        number = result.get(f"{metric},none")
        return float(number) if isinstance(number, (int, float)) else None

    metric = TASKS[name].metric
    main = value(metric)
    assert main is not None, f"lm-eval reports no {metric} for {name}"
    every = {key: value(key) for m in ("acc", "acc_norm", "perplexity") for key in (m, f"{m}_stderr")}
    return TaskScore(
        task=name,
        documents=found["n-samples"][name]["effective"],
        source=source or config["dataset_path"],
        metric=metric,
        main=main,
        main_stderr=value(f"{metric}_stderr"),
        chance=TASKS[name].chance,
        **every,
    )


def average(scores: Sequence[TaskScore]) -> float:
    """Mean over tasks of the metric that enters it."""
    return sum(s.main for s in scores) / len(scores)


def _watched(lm: Any, screen: TextIO | None) -> Any:
    """lm-eval's model, refusing tokens that it does not know before it scores any.

    It tells ``screen`` how far it is: of lm-eval's many bars, the one that matters.
    """
    from deqseq.tasks.evaluate.models import check_tokens

    compute = lm._loglikelihood_tokens

    def compute_watched(requests: Any, disable_tqdm: bool = False, **options: Any) -> Any:
        tokens = [token for _, context, choice in requests for token in context + choice]
        check_tokens(lm.model, torch.tensor(tokens))
        with contextlib.redirect_stderr(screen or sys.stderr):
            return compute(requests, disable_tqdm=screen is None, **options)

    lm._loglikelihood_tokens = compute_watched
    return lm


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing of what lm-eval and datasets print and log below errors, for a while."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    nowhere = io.StringIO()
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        log.setLevel(before)
