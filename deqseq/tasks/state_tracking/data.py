"""Word problems: random tokens and their running products, sampled on the fly or stored in files.

Targets are aligned with their inputs: ``target[t] = input[0] · … · input[t]``. Training therefore uses
plain cross-entropy without a shift.

Shapes: B sequences in a batch, L tokens, S sequences in a file or fixed set.
"""

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.checks import check_count, shown
from deqseq.tasks.common.files import PART, rename, writing
from deqseq.tasks.common.seeds import batch_seed
from deqseq.tasks.state_tracking.algebra import Algebra, algebra, prefix_products

Batch = dict[str, Tensor]
"""``{"input_ids": (B, L) int64, "labels": (B, L) int64}``, labels aligned with the inputs."""

MAX_TOKENS = 2**30
"""The largest number of tokens that :func:`sample` makes. More tokens would fill the machine's memory."""


@cache
def _parts(algebra: Algebra, device: torch.device) -> tuple[Tensor, Tensor]:
    group, monoid = algebra.parts
    return group.to(device), monoid.to(device)


def sample(
    algebra: Algebra, batch_size: int, length: int, *, identity_probability: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random tokens and their running products, both (B, L) int64 on the generator's device.

    A token of ``A5xM`` has a component in the group A5 and a component in the monoid M. With probability
    ``identity_probability`` the group component is the identity. Otherwise it is drawn uniformly from the
    other elements of the group. Tokens with such a component are called hard: they change the running product
    in the group. The monoid component is drawn uniformly.

    If the algebra has several groups, ``identity_probability`` is the probability that the components of all
    groups are the identity. If the algebra has no group, ``identity_probability`` has no effect.

    Raises:
        ValueError: ``batch_size`` or ``length`` is below 1, their product is above :data:`MAX_TOKENS`, or the
            probability is outside [0, 1].
    """
    check_count("batch_size", batch_size)
    check_count("length", length)
    if batch_size * length > MAX_TOKENS:
        raise ValueError(f"{batch_size} sequences of {length} tokens are more than {MAX_TOKENS} tokens")
    if not 0.0 <= identity_probability <= 1.0:
        raise ValueError(f"identity_probability must be in [0, 1], got {identity_probability}")
    device = generator.device
    group, monoid = _parts(algebra, device)

    # Draw one uniform number per token. It has enough bits (53) to choose both components of the token.
    uniform = torch.rand(batch_size, length, dtype=torch.float64, generator=generator, device=device)
    token = torch.zeros(batch_size * length, dtype=torch.int64, device=device)
    if len(monoid) > 1:
        uniform *= len(monoid)
        choice = uniform.to(torch.int32)
        uniform -= choice
        token = monoid.index_select(0, choice.flatten())
    if len(group) > 1:
        # Numbers below identity_probability give index 0, the identity. Larger numbers give the other
        # indices, all with the same probability. 1e-300 avoids a division by zero.
        others = len(group) - 1
        uniform -= identity_probability
        uniform *= others / max(1.0 - identity_probability, 1e-300)
        choice = uniform.add_(1.0).clamp_(0.0, others).to(torch.int32)
        # The index of a token is the sum of the indices of its two components (see Algebra.parts).
        token += group.index_select(0, choice.flatten())
    tokens = token.view(batch_size, length)
    return tokens, prefix_products(algebra, tokens)


@dataclass(frozen=True)
class WordProblemStream:
    """Batches of random word problems. Batch ``i`` depends only on ``i`` and the attributes.

    Attributes:
        lengths: shortest and longest length. Each batch draws its length uniformly from this range.
        identity_probability: in [0, 1]; see :func:`sample`.
        seed: seed of the stream. Different seeds below 2³² give different streams.
        batch_size: number B of sequences in a batch.
        device: device that makes the batches. The CPU and a GPU make different batches from the same seed.
    """

    algebra: Algebra
    lengths: tuple[int, int]
    _: KW_ONLY
    identity_probability: float
    seed: int
    batch_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def batch(self, index: int) -> Batch:
        """Batch number ``index``."""
        seed = batch_seed(self.seed, index)
        generator = torch.Generator().manual_seed(seed)
        length, longest = self.lengths
        if longest > length:
            length = int(torch.randint(length, longest + 1, (), generator=generator))
        if self.device.type != "cpu":
            generator = torch.Generator(self.device).manual_seed(seed)
        p = self.identity_probability
        tokens, targets = sample(
            self.algebra, self.batch_size, length, identity_probability=p, generator=generator
        )
        return {"input_ids": tokens, "labels": targets}


class WordProblems(NamedTuple):
    """A fixed set of word problems for evaluation. Both fields: (S, L) int64."""

    tokens: Tensor
    targets: Tensor


def generate(
    algebra: Algebra, *, sequences: int, length: int, identity_probability: float, seed: int
) -> WordProblems:
    """Sample ``sequences`` word problems of ``length`` tokens. The same arguments give the same result.

    Raises:
        ValueError: see :func:`sample`.
    """
    p = identity_probability
    stream = WordProblemStream(
        algebra, (length, length), identity_probability=p, seed=seed, batch_size=sequences
    )
    # Use batch 2³² - 1 of the stream. Training with the same seed never reaches this batch.
    return WordProblems(*stream.batch(2**32 - 1).values())


_CSV_HEADER = ["seed", "input", "target"]


def algebra_of_csv(path: str | Path) -> Algebra:
    """The algebra in the name of a benchmark file: A4xZ5 for ``A4_x_Z5=20.csv``.

    Raises:
        ValueError: the name does not have this form, or the algebra is unknown.
    """
    match = re.fullmatch(r"(.+)=[0-9]+\.csv", Path(path).name)
    if match is None:
        raise ValueError(f"file name must be <algebra>=<length>.csv, got {Path(path).name!r}")
    return algebra(match[1])


def read_csv(path: str | Path, algebra: Algebra) -> tuple[Tensor, Tensor, int]:
    """Tokens (S, L) int64, targets (S, L) int64 and the seed in a file of the word-problem benchmark.

    A line is ``seed,input,target``. Input and target are lists of element indices, separated by spaces.

    Raises:
        ValueError: a line is malformed, its length or seed differs from that of the first line, or its
            targets are not the running products in ``algebra``. The message names the line.
    """
    seeds: list[int] = []
    rows: list[Tensor] = []

    def wrong(index: int, reason: str) -> ValueError:
        return ValueError(f"{path}, line {index + 2}: {reason}")  # line 1 is the header

    lines = _lines(path)
    header = next(lines, None)
    if header != _CSV_HEADER:
        raise wrong(-1, f"header is {shown(header)}, must be {_CSV_HEADER}")
    for index, fields in enumerate(lines):
        try:
            seed, tokens, targets = fields
            seeds.append(int(seed))
            rows.append(torch.tensor([[int(i) for i in f.split()] for f in (tokens, targets)]))
        except ValueError as error:
            raise wrong(index, f"{shown(fields)} is not seed, input, target: {error}") from error
        if rows[-1].shape != rows[0].shape or rows[-1].numel() == 0:
            raise wrong(index, f"length is {rows[-1].shape[1]}, must be the first line's and at least 1")
        if seeds[-1] != seeds[0]:
            raise wrong(index, f"seed is {seeds[-1]}, must be {seeds[0]} as above")
    if not rows:
        raise wrong(0, "missing, the file must hold at least one word problem")

    inputs, expected = torch.stack(rows, dim=1)
    outside = (inputs < 0) | (inputs >= len(algebra))
    products = prefix_products(algebra, inputs.masked_fill(outside, algebra.identity))
    for index in (outside | (products != expected)).any(dim=1).nonzero().flatten().tolist():
        if outside[index].any():
            raise wrong(index, f"inputs must lie in [0, {len(algebra)}) for {algebra.name}")
        raise wrong(index, f"targets are not the running products in {algebra.name}")
    return inputs, expected, seeds[0]


def _lines(path: str | Path) -> Iterator[list[str]]:
    """Yield the lines of a CSV file, split into fields."""
    with open(path, newline="", encoding="latin-1") as file:  # Latin-1 has a character for every byte
        reader = csv.reader(file)
        try:
            yield from reader
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def write_csv(path: str | Path, tokens: Tensor, targets: Tensor, seed: int) -> None:
    """Write ``tokens`` and ``targets``, both (S, L), and ``seed`` in the format of :func:`read_csv`.

    Writes atomically, and overwrites an existing file. Writes the same bytes as the benchmark's own program
    would.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}{PART}")
    with writing(path), part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_CSV_HEADER)
        for row in zip(tokens.tolist(), targets.tolist(), strict=True):
            writer.writerow([seed, *(" ".join(map(str, indices)) for indices in row)])
        file.flush()
        os.fsync(file.fileno())
    rename(part, path)
