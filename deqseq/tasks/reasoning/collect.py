"""Collects the puzzles that several threads generate, in a fixed order and without duplicates."""

import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import import_module
from itertools import count as numbers
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm.auto import tqdm

from deqseq.checks import check_count
from deqseq.tasks.reasoning.puzzles import Puzzles

T = TypeVar("T")

CHUNK = 64
"""Number of puzzles that a thread makes at a time."""

_PATIENCE = 2000  # number of chunks without a new puzzle after which :func:`collect` gives up


def compiled(name: str) -> Any:
    """Import a module of this package that is compiled by numba.

    Raises:
        ValueError: numba is not installed.
    """
    try:
        return import_module(f"deqseq.tasks.reasoning.{name}")
    except ImportError as error:
        raise ValueError(f"generating puzzles needs numba: pip install 'deqseq[reason]' ({error})") from error


def collect(
    make: Callable[[int], tuple[Any, Any, Any]],
    count: int,
    *,
    seed: int,
    workers: int | None,
    progress: bool,
    advice: str,
) -> Puzzles:
    """The first ``count`` different puzzles of ``make(0)``, ``make(1)``, and so on.

    Args:
        make: makes a chunk of P <= ``CHUNK`` puzzles with C cells each. Returns three arrays: questions
            (P, C) uint8, answers (P, C) uint8 and ratings (P,) int64. Several threads call ``make``, so it
            should release the GIL.
        seed: the seed that ``make`` uses. This function only checks that it is in range.
        workers: number of threads, by default and at most the number of CPU cores. It does not affect the
            result.
        progress: show a progress bar.
        advice: what the user should change if no new puzzles are found; the end of the error message.

    Raises:
        ValueError: a wrong ``count``, ``seed`` or ``workers``; or 2,000 chunks without a new puzzle.
    """
    check_count("count", count)
    cores = os.cpu_count() or 1
    if workers is None:
        workers = cores
    check_count("workers", workers)
    workers = min(workers, cores)  # more threads only make chunks that nobody needs
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be a whole number in [0, 2**32), got {seed!r}")
    seen: set[bytes] = set()
    kept: list[tuple[Any, Any, Any]] = []
    last = 0  # the last chunk with a new puzzle
    with (
        tqdm(desc="puzzles", total=count, disable=None if progress else True) as bar,
        closing(_in_order(make, workers)) as chunks,
    ):
        for chunk, found in enumerate(chunks):
            for puzzle in zip(*found, strict=True):
                key = puzzle[0].tobytes()
                if key not in seen and len(kept) < count:
                    seen.add(key)
                    kept.append(puzzle)
                    last = chunk
                    bar.update()
            if len(kept) == count:
                break
            if chunk - last >= _PATIENCE:
                raise ValueError(
                    f"found {len(kept)} of {count} puzzles, and no other among {_PATIENCE * CHUNK}: {advice}"
                )
    return Puzzles(*(torch.from_numpy(np.stack(column)) for column in zip(*kept, strict=True)))


def _in_order(make: Callable[[int], T], workers: int) -> Generator[T, None, None]:
    """Yield ``make(0)``, ``make(1)``, ... without end. Threads compute the next few results in advance."""
    with ThreadPoolExecutor(workers) as pool:
        pending = deque(pool.submit(make, chunk) for chunk in range(2 * workers))
        try:
            for chunk in numbers(2 * workers):
                yield pending.popleft().result()
                pending.append(pool.submit(make, chunk))
        finally:
            for future in pending:
                future.cancel()
