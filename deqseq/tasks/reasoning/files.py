"""Reads and writes files of puzzles.

Puzzles are in CSV files, in the format of the data set sapientinc/sudoku-extreme. Published mazes are NumPy
arrays: Maze-Hard (from HRM, arXiv 2506.21734) and Maze-Unique (from EqR, arXiv 2605.21488).

A line of a CSV file is ``source,question,answer,rating``. The cells of a board are in reading order. Sudokus
have dots for empty cells. Mazes have ``#`` for walls, spaces for free cells, ``S`` for the start, ``G`` for
the goal, and ``o`` for the path in the answer. A file is compressed if its name ends in .gz.
"""

import csv
import gzip
import os
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, cast

import numpy as np
import torch

from deqseq.tasks.common.files import PART, rename
from deqseq.tasks.reasoning.puzzles import (
    CHARACTERS,
    PATH,
    Puzzles,
    Task,
    broken_rules,
    check_task,
    size_of,
)

_HEADER = ["source", "question", "answer", "rating"]
_LINES = 2**16  # number of lines that are checked at a time
_BOM = "\u00ef\u00bb\u00bf"  # the byte order mark of UTF-8, read as Latin-1
_NONE = 255  # stands for characters that have no token

BROKEN = (csv.Error, EOFError, zlib.error, gzip.BadGzipFile)
"""Errors that reading raises if a file is not valid CSV, or if a .gz file is damaged or not compressed."""

Line = tuple[int, str, str, int]
"""A line of a CSV file: line number, question, answer and rating."""


def read_csv(path: str | Path, task: Task) -> Puzzles:
    """Read the puzzles in a CSV file. The column ``source`` is dropped.

    Raises:
        ValueError: a line is malformed, two boards have different sizes, or a puzzle breaks a rule (see
            :func:`~deqseq.tasks.reasoning.puzzles.broken_rules`). The message names the line and the
            rule. Only :func:`~deqseq.tasks.reasoning.verify.verify` checks that a Sudoku has one solution,
            and that a maze's path connects start and goal.
    """
    check_task(task)
    lines = _lines(Path(path), task)
    parts: list[Puzzles] = []
    while chunk := list(islice(lines, _LINES)):
        parts.append(_tokens(path, task, chunk))
    if not parts:
        raise ValueError(f"{path}, line 2: missing, the file must hold at least one puzzle")
    return Puzzles(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def open_csv(path: Path) -> IO[str]:
    """Open a CSV file for reading. It is compressed if its name ends in .gz.

    Raises:
        ValueError: the file does not exist, or its first line cannot be read.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    file = cast(
        IO[str],
        (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="", encoding="latin-1"),
    )
    try:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
    except BROKEN as error:
        file.close()
        raise ValueError(f"{path}, line 1: {error}") from error
    return file


def _lines(path: Path, task: Task) -> Iterator[Line]:
    """Yield the lines of a file. Checks the format of each line, and that all boards have the same size."""
    cells = None
    number = 1  # the line at which the current record starts
    lines = open_csv(path)
    try:
        with lines as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, None)
            if header != _HEADER:
                raise ValueError(f"the header must be {','.join(_HEADER)}, got {header}")
            number = 2
            for fields in reader:
                if len(fields) != 4:
                    raise ValueError(f"must have 4 fields, got {len(fields)}")
                _, question, answer, rating = fields
                if cells is None:
                    size_of(task, len(question))
                    cells = len(question)
                if not len(question) == len(answer) == cells:
                    raise ValueError(
                        f"question and answer must have {cells} cells, got {len(question)} and {len(answer)}"
                    )
                if not (rating.isascii() and rating.isdigit() and len(rating) < 19):
                    raise ValueError(f"the rating must be a whole number >= 0, got {rating!r}")
                yield number, question, answer, int(rating)
                number = reader.line_num + 1
    except (ValueError, *BROKEN) as error:
        raise ValueError(f"{path}, line {number}: {error}") from error


def _tokens(path: str | Path, task: Task, lines: list[Line]) -> Puzzles:
    """Convert the characters of the lines to tokens, and check the rules that need no search."""
    numbers, questions, answers, ratings = zip(*lines, strict=True)
    table = np.full(256, _NONE, np.uint8)
    for token, character in enumerate(CHARACTERS[task]):
        table[ord(character)] = token
    boards = []
    for texts in (questions, answers):
        codes = np.frombuffer("".join(texts).encode("latin-1"), np.uint8).reshape(len(lines), -1)
        boards.append(torch.from_numpy(table[codes]))
        wrong = (boards[-1] == _NONE).nonzero()
        if len(wrong):
            line, cell = wrong[0].tolist()
            raise ValueError(
                f"{path}, line {numbers[line]}: boards must have the characters "
                f"{CHARACTERS[task].lstrip(chr(0))!r} only, got {texts[line][cell]!r}"
            )
    puzzles = Puzzles(boards[0], boards[1], torch.from_numpy(np.array(ratings, np.int64)))
    for index, rule in broken_rules(task, puzzles)[:1]:
        raise ValueError(f"{path}, line {numbers[index]}: {rule}")
    return puzzles


def write_csv(path: str | Path, task: Task, puzzles: Puzzles, source: str = "deqseq") -> None:
    """Write puzzles in the format of :func:`read_csv`, atomically. Overwrites an existing file.

    Writing the same puzzles again gives the same bytes, also in a compressed file.
    """
    check_task(task)
    path = Path(path)
    characters = np.frombuffer(CHARACTERS[task].encode(), np.uint8)
    boards = [characters[board.cpu().numpy()] for board in puzzles[:2]]
    part = path.with_name(f"{path.name}{PART}")
    with part.open("wb") as raw:
        file: Any = raw
        if path.suffix == ".gz":
            file = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)  # 9 takes 20 times as long
        file.write(f"{','.join(_HEADER)}\n".encode())
        for question, answer, rating in zip(*boards, puzzles.ratings.tolist(), strict=True):
            file.write(b"%s,%s,%s,%d\n" % (source.encode(), question.tobytes(), answer.tobytes(), rating))
        if file is not raw:
            file.close()
        raw.flush()
        os.fsync(raw.fileno())
    rename(part, path)


def read_arrays(folder: str | Path) -> Puzzles:
    """Read published mazes: the files ``all__inputs.npy`` and ``all__labels.npy`` of HRM or EqR.

    Both arrays have shape (P, n²) and the tokens of :class:`~deqseq.tasks.reasoning.puzzles.Puzzles`. The
    ratings are the lengths of the marked paths.

    Raises:
        ValueError: a file is malformed, the shapes differ, or a maze breaks a rule. The message
            counts mazes from 1.
    """
    boards = []
    for name in ("all__inputs.npy", "all__labels.npy"):
        path = Path(folder) / name
        try:
            with path.open("rb") as file:
                found = np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, EOFError, SyntaxError, MemoryError, TokenError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if found.ndim != 2 or found.dtype.kind not in "iu" or not found.size:
            raise ValueError(f"{path} must be whole numbers (P, n²), got {found.dtype} {found.shape}")
        if found.min() < 0 or found.max() > PATH:
            raise ValueError(f"{path} must have tokens 0 to {PATH}, got {found.min()} to {found.max()}")
        boards.append(torch.from_numpy(found.astype(np.uint8)))
    questions, answers = boards
    if questions.shape != answers.shape:
        raise ValueError(
            f"{folder}: inputs and labels must have the same shape, got {tuple(questions.shape)} and "
            f"{tuple(answers.shape)}"
        )
    puzzles = Puzzles(questions, answers, (answers == PATH).sum(1) + 1)
    for index, rule in broken_rules("maze", puzzles)[:1]:
        raise ValueError(f"{folder}, maze {index + 1}: {rule}")
    return puzzles
