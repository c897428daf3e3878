"""Scores models on downstream tasks with EleutherAI's lm-eval. Data come from the hub or from JSONL files.

Prompts, choices and metrics are lm-eval's, with one exception. Some HellaSwag files lack fields that
lm-eval's prompt needs. For these files, the prompt is the context alone, and :attr:`TaskScore.own_prompt`
says so.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

if TYPE_CHECKING:  # the command line needs only TASKS, and importing transformers is slow
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Doc = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task of lm-eval.

    Attributes:
        folder: the folder in ``lm_eval/tasks`` that defines the task.
        pattern: glob pattern of the name of a local data file.
        metric: the metric that enters the average over tasks. ``acc_norm`` divides a choice's log-likelihood
            by the choice's number of characters.
        chance: value of the metric for random guesses. For ARC, this value assumes four choices. Most ARC
            questions have four.
        prompt: name of the document field with the text to continue.
        choices: names of the document fields with the choices.
        answer: name of the document field with the right choice; ``None`` if the prompt contains the answer.
        options: function that returns the choices of a document, as ``{answer: text of the choice}``.
        convert: function that converts a document from the original release's schema to the hub's schema.
    """

    folder: str
    pattern: str
    metric: str
    chance: float
    prompt: str
    choices: tuple[str, ...] = ()
    answer: str | None = None
    options: Callable[[Doc], dict[Any, Any]] = lambda doc: {}
    convert: Callable[[Doc], Doc] = lambda doc: doc

    @property
    def fields(self) -> list[str]:
        """The fields that a document must have."""
        return [self.prompt, *self.choices, *([] if self.answer is None else [self.answer])]


@dataclass
class TaskScore:
    """The score on one task. Standard errors are lm-eval's.

    Attributes:
        source: the local file, or the dataset's name on the hub.
        metric: name of the task's main metric.
        main, main_stderr: value of the main metric, and the standard error of this value.
        chance: value of the main metric for random guesses.
        own_prompt: describes the prompts if they are not lm-eval's, else ``None``.
    """

    task: str
    documents: int
    source: str
    metric: str
    main: float
    main_stderr: float | None
    chance: float
    own_prompt: str | None
    acc: float | None
    acc_stderr: float | None
    acc_norm: float | None
    acc_norm_stderr: float | None
    perplexity: float | None
    perplexity_stderr: float | None


def _question(name: str) -> Callable[[Doc], Doc]:
    """Make a function that converts documents of the form ``{question: {stem, choices: [{text, label}]}}``.

    The field ``name`` of the converted document is the stem. Its field ``choices`` has a list of texts and a
    list of labels.
    """

    def convert(doc: Doc) -> Doc:
        question = doc.get("question")
        if not isinstance(question, dict):
            return doc
        choices = {key: [choice[key] for choice in question["choices"]] for key in ("text", "label")}
        return {name: question["stem"], "choices": choices, "answerKey": doc["answerKey"]}

    return convert


def _lettered(doc: Doc) -> dict[Any, Any]:
    return dict(zip(doc["choices"]["label"], doc["choices"]["text"], strict=True))


def _blank(doc: Doc) -> dict[Any, Any]:
    if "_" not in doc["sentence"]:
        raise ValueError(f"sentence must have a _ to fill in, got {doc['sentence']!r}")
    return {"1": doc["option1"], "2": doc["option2"]}


TASKS = {
    "lambada_openai": Task("lambada", "lambada*.jsonl", "acc", 0.0, "text"),
    "hellaswag": Task("hellaswag", "hellaswag*.jsonl", "acc_norm", 0.25, "ctx", ("endings",), "label",
                      lambda doc: dict(enumerate(doc["endings"]))),
    "piqa": Task("piqa", "piqa*.jsonl", "acc", 0.5, "goal", ("sol1", "sol2"), "label",
                 lambda doc: {0: doc["sol1"], 1: doc["sol2"]}),
    "arc_easy": Task("arc", "arc_easy*.jsonl", "acc", 0.25, "question", ("choices",), "answerKey",
                     _lettered, _question("question")),
    "arc_challenge": Task("arc", "arc_challenge*.jsonl", "acc_norm", 0.25, "question", ("choices",),
                          "answerKey", _lettered, _question("question")),
    "winogrande": Task("winogrande", "winogrande*.jsonl", "acc", 0.5, "sentence", ("option1", "option2"),
                       "answer", _blank),
    "openbookqa": Task("openbookqa", "openbookqa*.jsonl", "acc_norm", 0.25, "question_stem", ("choices",),
                       "answerKey", _lettered, _question("question_stem")),
}  # fmt: skip


# The fields from which lm-eval builds HellaSwag's prompts. Some copies of the data lack these fields.
_ACTIVITY = ("activity_label", "ctx_a", "ctx_b")


def check_tasks(names: Sequence[str]) -> None:
    """Raise ``ValueError`` if a name occurs twice."""
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"each task counts once in the average, but {', '.join(repeated)} is given again")


def local_files(names: Sequence[str], folder: str | Path) -> dict[str, Path]:
    """Find the file of each task in ``folder``.

    If several files match the pattern of a task, the file with the most lines is taken.

    Raises:
        ValueError: a task has no file.
    """
    chosen = {}
    for name in names:
        found = sorted(Path(folder).glob(TASKS[name].pattern))
        if not found:
            raise ValueError(f"no file for {name} in {folder}: it must match {TASKS[name].pattern}")
        chosen[name] = max(found, key=lambda path: path.read_bytes().count(b"\n"))
        if len(found) > 1:
            every = ", ".join(path.name for path in found)
            logger.warning("%s: found %s; using the longest, %s", name, every, chosen[name].name)
    return chosen


def read_docs(name: str, path: Path) -> list[Doc]:
    """Read the documents of a JSONL file and convert them to the hub's schema.

    Raises:
        ValueError: a line is not a document of the task, or the file has no documents.
    """
    docs = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            docs.append(_read_doc(TASKS[name], line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # a malformed document
            said = error if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"{path}, line {number}: no document of {name}: {said}") from error
    if not docs:
        raise ValueError(f"{path} holds no documents")
    return docs


def _read_doc(task: Task, line: bytes) -> Doc:
    """Read a document from JSON. Its answer gets the type that lm-eval expects: ``"1"`` may become 1."""
    doc = json.loads(line.decode())
    if not isinstance(doc, dict):
        raise ValueError(f"it must be a JSON object, got {doc!r}")
    doc = task.convert(doc)
    if missing := [field for field in task.fields if field not in doc]:
        raise ValueError(f"it needs the fields {missing}")
    options = task.options(doc)
    for text in (doc[task.prompt], *options.values()):
        if not isinstance(text, str):
            raise ValueError(f"prompt and choices must be text, got {text!r}")
    if not all(options.values()):
        raise ValueError(f"choices must not be empty, got {list(options.values())}")
    if task.answer is None:
        return doc
    known = {str(answer): answer for answer in options}
    given = str(doc[task.answer]).strip()
    if given not in known:
        raise ValueError(f"{task.answer} must be one of {', '.join(known)}, got {doc[task.answer]!r}")
    return doc | {task.answer: known[given]}


def _own_prompt(name: str, docs: Sequence[Doc]) -> str | None:
    """Describe the prompts for these documents if they are not lm-eval's; otherwise ``None``."""
    if name != "hellaswag" or all(isinstance(doc.get(field), str) for doc in docs for field in _ACTIVITY):
        return None
    return f"the context alone, because documents lack {', '.join(_ACTIVITY)}"


def _over_docs(name: str, docs: Sequence[Doc], path: Path, definition: Path) -> dict[str, Any]:
    """The task defined by lm-eval's YAML file ``definition``, but with ``docs`` as its data."""
    import datasets
    from lm_eval.tasks._yaml_loader import load_yaml

    own_prompt = _own_prompt(name, docs)
    fields = TASKS[name].fields + ([*_ACTIVITY] if name == "hellaswag" and not own_prompt else [])
    kept = [{field: doc[field] for field in fields} for doc in docs]

    # Load the task's definition and replace its data. Given only the task's name, lm-eval would load the data
    # that the definition names.
    return {
        **load_yaml(definition),
        "dataset_path": str(path),
        "custom_dataset": lambda **_: datasets.DatasetDict({"test": datasets.Dataset.from_list(kept)}),
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        **({"process_docs": _hellaswag_without_activity} if own_prompt else {}),
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
) -> list[TaskScore]:  # fmt: skip
    """Score a model on tasks, zero-shot. Implicit models use their own solve options (``layer.eval_solve``).

    Args:
        names: names in :data:`TASKS`.
        files: each task's file, from :func:`local_files`; by default the data come from the hub.
        limit: maximum number of documents per task; all by default.

    Raises:
        ValueError: a task occurs twice; a file is malformed; the hub lacks the data; a token is outside the
            model's vocabulary; lm-eval is not installed.
    """
    from deqseq.tasks.common.tokenizer import first_line

    check_tasks(names)
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"downstream tasks need lm-eval: pip install 'deqseq[eval]' ({error})") from error
    # Index only the folders of the given tasks, because lm-eval has thousands of task files.
    own = Path(lm_eval.__file__).parent / "tasks"
    folders = [own / part for part in sorted({TASKS[name].folder for name in names})]
    manager = TaskManager(include_path=folders, include_defaults=False)
    docs = {} if files is None else {name: read_docs(name, files[name]) for name in names}
    tasks: list[Any] = list(names)
    if files is not None:
        index = manager.task_index
        tasks = [_over_docs(name, docs[name], files[name], index[name].yaml_path) for name in names]
    # Make lm-eval compute standard errors in this process. Forks of a process that runs torch can hang.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    model.eval()
    screen = sys.stderr  # the progress bar is still shown here
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # hides lm-eval's output
            lm = _watched(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size), screen)
            loaded = manager.load(tasks)
            # The usual simple_evaluate would also call git and list the machine's packages.
            found: Any = lm_eval.evaluate(lm, loaded, limit=limit, bootstrap_iters=1000, log_samples=False)
    except OSError as error:
        raise ValueError(f"no data from the hub: {first_line(error)}: try --data-dir") from error
    return [_read(name, found, _own_prompt(name, docs.get(name, ()))) for name in names]


def _read(name: str, found: dict[str, Any], own_prompt: str | None) -> TaskScore:
    result = found["results"][name]

    def value(metric: str) -> float | None:
        number = result.get(f"{metric},none")
        return float(number) if isinstance(number, (int, float)) else None

    metric = TASKS[name].metric
    every = {key: value(key) for m in ("acc", "acc_norm", "perplexity") for key in (m, f"{m}_stderr")}
    return TaskScore(
        task=name, documents=found["n-samples"][name]["effective"], own_prompt=own_prompt,
        source=found["configs"][name]["dataset_path"], metric=metric, main=float(result[f"{metric},none"]),
        main_stderr=value(f"{metric}_stderr"), chance=TASKS[name].chance, **every,
    )  # fmt: skip


def other_prompts(scores: Sequence[TaskScore]) -> list[str]:
    """A warning for each task whose prompts are not lm-eval's."""
    said = "warning: {}: the prompt is not lm-eval's but {}. Do not compare the score with lm-eval's"
    return [said.format(s.task, s.own_prompt) for s in scores if s.own_prompt is not None]


def _watched(lm: Any, screen: TextIO) -> Any:
    """Make ``lm`` check all tokens before it scores them, and show its progress bar on ``screen``."""
    from deqseq.tasks.common.models import check_tokens

    compute = lm._loglikelihood_tokens

    def compute_watched(requests: Any, **options: Any) -> Any:
        tokens = [token for _, context, choice in requests for token in context + choice]
        check_tokens(lm.model, torch.tensor(tokens))
        with redirect_stderr(screen):
            return compute(requests, **options)

    lm._loglikelihood_tokens = compute_watched
    return lm
