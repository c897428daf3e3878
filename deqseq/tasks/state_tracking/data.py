"""Word problems: random tokens with all their running products, on the fly and in files.

Targets are aligned with their inputs: ``target[t] = input[0] · … · input[t]``, so training uses
plain cross-entropy and shifts nothing.

Shapes: B batch, L tokens, S sequences, N elements.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from os import PathLike, fspath
from pathlib import Path

import torch
from torch import Tensor

from deqseq.tasks.state_tracking.algebra import (
    Algebra,
    algebra,
    prefix_products,
    unchecked_prefix_products,
)

Batch = dict[str, Tensor]
"""``{"input_ids": (B, L) int64, "labels": (B, L) int64}``, labels aligned with the inputs."""


def _check_sampling(identity_probability: float, *sizes: int) -> None:
    if not 0.0 <= identity_probability <= 1.0:
        raise ValueError(f"identity_probability is {identity_probability}, must lie in [0, 1]")
    for size in sizes:
        if size < 1:
            raise ValueError(f"batch size or length is {size}, must be at least 1")


@cache
def _parts(algebra: Algebra, device: torch.device) -> tuple[Tensor, Tensor]:
    """The group part with its identity moved to the front, and the monoid part."""
    group, monoid = algebra.parts
    is_identity = group == algebra.identity
    group = torch.cat((group[is_identity], group[~is_identity]))
    return group.to(device), monoid.to(device)


def sample(
    algebra: Algebra,
    batch_size: int,
    length: int,
    *,
    identity_probability: float,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Random tokens and their running products.

    The group part of a token (all factors that are groups, taken together) is the identity with
    probability ``identity_probability`` and otherwise uniform over the other elements. So the share of hard
    tokens, which move the group's state, is ``1 - identity_probability``. Factors that are not groups are
    uniform; without any group the probability has no effect.

    Args:
        batch_size, length: B and L, at least 1.
        identity_probability: in [0, 1].
        generator: source of randomness; by default the device's global one.
        device: of the result; by default the generator's, or else the CPU.

    Returns:
        Tokens and targets, both (B, L) int64.

    Raises:
        ValueError: a number out of range.
    """
    _check_sampling(identity_probability, batch_size, length)
    if device is None:
        device = "cpu" if generator is None else generator.device
    group, monoid = _parts(algebra, torch.device(device))

    # Both parts of a token come from one uniform number, whose 53 bits suffice.
    uniform = torch.rand(batch_size, length, dtype=torch.float64, generator=generator, device=device)
    token: Tensor | None = None
    if len(monoid) > 1:
        uniform *= len(monoid)
        choice = uniform.to(torch.int32)
        uniform -= choice
        token = monoid.index_select(0, choice.flatten())
    if len(group) > 1:
        # Map [p, 1) to [1, n), the other elements; all below p becomes 0, the identity. For p = 1 there is
        # no number above p, so the scale does not matter.
        others = len(group) - 1
        uniform -= identity_probability
        uniform *= others / max(1.0 - identity_probability, 1e-300)
        choice = uniform.add_(1.0).clamp_(0.0, others).to(torch.int32)
        moves = group.index_select(0, choice.flatten())
        token = moves if token is None else token.add_(moves).sub_(algebra.identity)
    assert token is not None, "an algebra has at least two elements"
    tokens = token.view(batch_size, length)
    return tokens, unchecked_prefix_products(algebra, tokens)


_MASK = 0xFFFFFFFF


def _scramble(x: int) -> int:
    """A bijection of 32-bit integers that spreads every bit (the finaliser of MurmurHash3)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def batch_seed(seed: int, index: int) -> int:
    """The seed of batch ``index`` in the stream ``seed``, the same on every machine.

    PyTorch's CPU generator uses only the low 32 bits of a seed. This is a bijection in ``index``, so the
    first 2³² batches of a stream have different seeds, which hashes such as numpy's do not guarantee.
    """
    low, high = seed & _MASK, (seed >> 32) & _MASK
    return _scramble(_scramble(_scramble(high) ^ low) ^ (index & _MASK))


class WordProblemStream:
    """Batches of fresh word problems. Batch ``i`` depends on the arguments and ``i`` alone.

    Args:
        algebra: where to multiply.
        length: L, or a range (min, max), both included, from which each batch draws its length
            uniformly.
        identity_probability: in [0, 1]; see :func:`sample`.
        seed: in [0, 2⁶³); different seeds give different streams.
        batch_size: B.
        device: where batches are made. Different kinds of devices make different batches.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        algebra: Algebra,
        length: int | tuple[int, int],
        *,
        identity_probability: float,
        seed: int,
        batch_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        shortest, longest = (length, length) if isinstance(length, int) else length
        _check_sampling(identity_probability, batch_size, shortest)
        if longest < shortest:
            raise ValueError(f"length is {length}, must be a number or a range (min, max)")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed is {seed}, must lie in [0, 2**63)")
        self.algebra = algebra
        self.lengths = (shortest, longest)
        self.identity_probability = identity_probability
        self.seed = seed
        self.batch_size = batch_size
        self.device = torch.device(device)

    def batch(self, index: int) -> Batch:
        """Batch number ``index``: ``input_ids`` and ``labels``, both (B, L) int64."""
        seed = batch_seed(self.seed, index)
        generator = torch.Generator().manual_seed(seed)
        shortest, longest = self.lengths
        length = shortest
        if longest > shortest:
            length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        if self.device.type != "cpu":
            generator = torch.Generator(self.device).manual_seed(seed)
        p = self.identity_probability
        tokens, targets = sample(
            self.algebra, self.batch_size, length, identity_probability=p, generator=generator
        )
        return {"input_ids": tokens, "labels": targets}


@dataclass(frozen=True, eq=False)
class WordProblemDataset:
    """A fixed set of word problems, for evaluation: tokens (S, L) int64 and their targets (S, L) int64."""

    tokens: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def generate(
        cls, algebra: Algebra, *, sequences: int, length: int, identity_probability: float, seed: int
    ) -> WordProblemDataset:
        """Sample a set of ``sequences`` × ``length`` tokens, determined by the arguments.

        Raises:
            ValueError: a number out of range.
        """
        stream = WordProblemStream(
            algebra, length, identity_probability=identity_probability, seed=seed, batch_size=sequences
        )
        batch = stream.batch(_MASK)  # the last index, which no training run of the same seed reaches
        return cls(batch["input_ids"], batch["labels"])


_CSV_HEADER = ["seed", "input", "target"]


def algebra_of_csv(path: str | PathLike[str]) -> Algebra:
    """The algebra that a benchmark file is named after: ``A4_x_Z5=20.csv`` is of A4xZ5.

    Raises:
        ValueError: if the name is not of the form ``<algebra>=<length>.csv``.
    """
    match = re.fullmatch(r"(.+)=[0-9]+\.csv", Path(path).name)
    if match is None:
        raise ValueError(f"file name is {Path(path).name!r}, must be <algebra>=<length>.csv")
    return algebra(match[1])


def read_csv(path: str | PathLike[str], algebra: Algebra) -> tuple[Tensor, Tensor, int]:
    """Read a file of the word-problem benchmark: ``seed,input,target`` with spaced indices.

    Args:
        path: of the file.
        algebra: that its targets must agree with; see :func:`algebra_of_csv`.

    Returns:
        Tokens (S, L) int64, targets (S, L) int64 and the seed.

    Raises:
        ValueError: naming the first wrong line: malformed, of another length or seed than the
            first, or with targets that are not the running products.
    """
    seeds: list[int] = []
    rows: list[Tensor] = []

    def wrong(index: int, reason: str) -> ValueError:
        return ValueError(f"{fspath(path)}, line {index + 2}: {reason}")  # line 1 is the header

    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = next(reader, None)
        if header != _CSV_HEADER:
            raise wrong(-1, f"header is {header}, must be {_CSV_HEADER}")
        for index, fields in enumerate(reader):
            try:
                seed, tokens, targets = fields
                seeds.append(int(seed))
                rows.append(torch.tensor([[int(i) for i in f.split()] for f in (tokens, targets)]))
            except ValueError as error:
                raise wrong(index, f"{fields} is not seed, input, target: {error}") from error
            if rows[-1].shape != rows[0].shape or rows[-1].numel() == 0:
                raise wrong(index, f"length is {rows[-1].shape[1]}, must be as above, at least 1")
            if seeds[-1] != seeds[0]:
                raise wrong(index, f"seed is {seeds[-1]}, must be {seeds[0]} as above")
    if not rows:
        raise wrong(0, "missing, must hold a first word problem")

    inputs, targets_read = torch.stack(rows, dim=1)
    outside = (inputs < 0) | (inputs >= len(algebra))
    products = prefix_products(algebra, inputs.masked_fill(outside, algebra.identity))
    bad = (outside | (products != targets_read)).any(dim=1).nonzero()
    if len(bad):
        index = int(bad[0])
        if bool(outside[index].any()):
            raise wrong(index, f"inputs must lie in [0, {len(algebra)}) for {algebra.name}")
        raise wrong(index, f"targets are not the running products in {algebra.name}")
    return inputs, targets_read, seeds[0]


def write_csv(path: str | PathLike[str], tokens: Tensor, targets: Tensor, seed: int) -> None:
    """Write a file that :func:`read_csv` reads, byte for byte as the benchmark's own program.

    Args:
        path: of the file; one already there is replaced.
        tokens: (S, L) integers.
        targets: (S, L) integers.
        seed: put at the head of every line.

    Raises:
        ValueError: if the shapes differ.
    """
    if tokens.ndim != 2 or tokens.shape != targets.shape:
        raise ValueError(
            f"tokens are {tuple(tokens.shape)} and targets {tuple(targets.shape)}, must both be (S, L)"
        )
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.write(",".join(_CSV_HEADER) + "\n")
        for row in zip(tokens.tolist(), targets.tolist(), strict=True):
            file.write(",".join([str(seed), *(" ".join(map(str, part)) for part in row)]) + "\n")
