"""bAbI stories and their words, read from bAbI's files or from a Hugging Face dataset.

A story is one list of words. A statement becomes its words and ``.``; a question becomes its words, ``?`` and
its answer. An answer is one word, even if it has several parts (``n,w``, ``apple,milk``). All words are lower
case. Supporting facts are dropped.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPLITS = ("train", "valid", "test")
TASKS = tuple(range(1, 21))
QUESTION = "?"

Story = list[str]


def read_folder(folder: str | Path, split: str, task: int) -> list[Story]:
    """The stories of one task in a folder of bAbI's files.

    Files are named like ``qa1_train.txt`` or ``qa1_single-supporting-fact_train.txt``. Each line has a number
    and a statement or question. The number is 1 in the first line of a story. Tabs separate a question, its
    answer and its supporting facts.

    Raises:
        ValueError: the folder or file does not exist, the task has several files, or a line does not have
            this form.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"no folder {folder}: it should hold bAbI's files, qa1_train.txt to qa20_test.txt")
    found = sorted(Path(folder).glob(f"qa{task}_*{split}.txt"))
    if len(found) != 1:
        raise ValueError(
            f"{folder} must hold one file qa{task}_{split}.txt, found {len(found)}: use bAbI's en-valid-10k"
        )
    stories: list[Story] = []
    for place, line in enumerate(found[0].read_text(encoding="utf-8").splitlines(), 1):
        number, _, text = line.strip().partition(" ")
        if not number.isdigit() or not text or (number != "1" and not stories):
            raise ValueError(
                f"{found[0]}, line {place}: must be a number, from 1 on, and a sentence, got {line!r}"
            )
        if number == "1":
            stories.append([])
        sentence, *rest = text.split("\t")
        stories[-1] += _words(sentence, rest[0] if rest else "")
    return stories


def read_dataset(name: str, config: str, split: str, task: int, revision: str | None = None) -> list[Story]:
    """The stories of one task in a dataset on the Hugging Face Hub, or in a local folder of the same layout.

    The layout is that of the dataset ``facebook/babi_qa``. Each task is a configuration, ``CONFIG-qa1`` to
    ``CONFIG-qa20``, where CONFIG is the argument ``config``. A configuration has the splits train, validation
    and test. A row has a ``story``: a list of lines with ``text`` and ``answer``. The answer of a statement
    is empty.

    Raises:
        ValueError: ``datasets`` cannot load the dataset, or its rows do not have this form.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError("reading a dataset needs: pip install 'deqseq[lm]'") from error
    try:
        rows: Any = load_dataset(
            name, f"{config}-qa{task}", split={"valid": "validation"}.get(split, split), revision=revision
        )
    except Exception as error:  # datasets and the hub raise many classes of errors
        raise ValueError(f"{name}: cannot load {config}-qa{task}, split {split}: {error}") from error
    try:
        return [[word for line in _lines(row["story"]) for word in _words(*line)] for row in rows]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"a row of {name} must have a story of lines with text and answer, got the columns "
            f"{', '.join(rows.column_names)}"
        ) from error


def _lines(story: Any) -> Iterable[tuple[str, str]]:
    """Pairs (text, answer) of a story. ``story`` may be a list of mappings or a mapping of lists."""
    if isinstance(story, dict):
        return zip(story["text"], story["answer"], strict=True)
    return ((line["text"], line["answer"]) for line in story)


def _words(sentence: str, answer: str) -> Story:
    words = sentence.strip().lower().rstrip(".?").split()
    answer = answer.strip().lower()
    return [*words, QUESTION, answer] if answer else [*words, "."]
