"""Training batches of puzzles, to which random symmetries are applied.

Shapes: B puzzles in a batch, C cells of a board.
"""

from collections.abc import Iterator
from math import isqrt
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from deqseq.tasks.common.seeds import batch_seed
from deqseq.tasks.reasoning.files import read_arrays, read_csv
from deqseq.tasks.reasoning.puzzles import Puzzles, Task
from deqseq.tasks.reasoning.symmetries import random_symmetries

_TENTH = 10


def read(path: str | Path, task: Task) -> Puzzles:
    """Read the puzzles in a CSV file, or in a folder with the published arrays of mazes.

    Raises:
        ValueError: the file is missing or malformed, or a folder is given for Sudokus.
    """
    if not Path(path).exists():
        raise ValueError(f"there is no file {path}")
    if not Path(path).is_dir():
        return read_csv(path, task)
    if task != "maze":
        raise ValueError(f"{path} is a folder, but Sudokus are read from a CSV file")
    return read_arrays(path)


def split(puzzles: Puzzles) -> tuple[Puzzles, Puzzles]:
    """Split puzzles into two sets: the last tenth (at least one puzzle) for tests, the others for training.

    Returns the training puzzles and the test puzzles.
    """
    count = len(puzzles.ratings)
    if count < 2:
        raise ValueError(f"the last tenth is for tests, so at least 2 puzzles are needed, got {count}")
    tests = max(1, count // _TENTH)
    return Puzzles(*(column[:-tests] for column in puzzles)), Puzzles(
        *(column[-tests:] for column in puzzles)
    )


class PuzzleStream(IterableDataset[dict[str, Tensor]]):
    """An endless stream of batches of puzzles. Puzzles are drawn with replacement.

    Batch ``i`` depends only on ``i``, the seed and the other arguments.

    Args:
        augment: apply a random symmetry to every puzzle.
        hints: questions of the first batches also show cells of their answers. For each puzzle, a
            probability is drawn uniformly from 0 to a bound, and each cell is shown with this probability.
            The bound falls linearly from ``hints`` in batch 0 to 0 in batch ``hint_batches``. Later batches
            have no hints.

    Attributes:
        start: number of the first batch to yield.
    """

    def __init__(
        self, task: Task, puzzles: Puzzles, batch_size: int, *, augment: bool, hints: float = 0.0,
        hint_batches: int = 0, seed: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.start = 0
        self._hints, self._hint_batches = hints, hint_batches
        self._task, self._batch_size, self._augment = task, batch_size, augment
        self._boards = [board.long().to(device) for board in puzzles[:2]]
        self._seed = seed
        self._generator = torch.Generator(device)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        number = self.start
        while True:
            yield self.batch(number)
            number += 1

    def batch(self, number: int) -> dict[str, Tensor]:
        """Batch ``number``: ``{"input_ids": (B, C), "labels": (B, C)}``, both int64."""
        generator = self._generator.manual_seed(batch_seed(self._seed, number))
        questions, answers = self._boards
        rows = torch.randint(
            len(questions), (self._batch_size,), generator=generator, device=questions.device
        )
        boards = questions[rows], answers[rows]
        if self._augment:
            size = isqrt(questions.shape[1])
            symmetries = random_symmetries(self._task, size, self._batch_size, generator)
            boards = symmetries.apply(boards[0]), symmetries.apply(boards[1])
        if self._hints and number < self._hint_batches:
            bound = self._hints * (1 - number / self._hint_batches)
            boards = _show(*boards, bound, generator), boards[1]
        return dict(zip(("input_ids", "labels"), boards, strict=True))


def _show(questions: Tensor, answers: Tensor, bound: float, generator: torch.Generator) -> Tensor:
    """Copy random cells of the answers (B, C) to the questions (B, C).

    For each board, a probability is drawn uniformly from 0 to ``bound``. Each cell is copied with this
    probability.
    """
    probability = torch.rand(len(questions), 1, generator=generator, device=questions.device) * bound
    shown = torch.rand(questions.shape, generator=generator, device=questions.device) < probability
    return torch.where(shown, answers, questions)
