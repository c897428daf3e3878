"""Word problems: random tokens with all their running products, on the fly and in files.

Targets are aligned with their inputs: ``target[t] = input[0] · … · input[t]``, so training uses
plain cross-entropy and shifts nothing.

Shapes: B batch, L tokens, N elements.
"""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

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
    """Group part, its identity moved to the front, and monoid part."""
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
    probability ``identity_probability`` and otherwise uniform over the elements that are *not*
    the identity. The share of hard tokens, those that move the group's state, is therefore
    exactly ``1 - identity_probability``. Factors that are not groups are uniform; for an algebra
    without any group the probability has no effect.

    Args:
        algebra: where to multiply.
        batch_size: B, at least 1.
        length: L, at least 1.
        identity_probability: in [0, 1].
        generator: source of randomness; the device's global one by default.
        device: of the result; by default the generator's, or else the CPU.

    Returns:
        Tokens and targets, both (B, L) int64.

    Raises:
        ValueError: if a number is out of range.
    """
    _check_sampling(identity_probability, batch_size, length)
    if device is None:
        device = "cpu" if generator is None else generator.device
    group, monoid = _parts(algebra, torch.device(device))

    # Everything comes from one uniform number a token; 53 bits are plenty for both parts.
    uniform = torch.rand(batch_size, length, dtype=torch.float64, generator=generator, device=device)
    token: Tensor | None = None
    if len(monoid) > 1:
        uniform *= len(monoid)
        choice = uniform.to(torch.int32)
        uniform -= choice
        token = monoid.index_select(0, choice.flatten())
    if len(group) > 1:
        # Stretch [p, 1) over [1, n): 1 … n-1 are the others, and all below p falls to 0, the
        # identity. For p = 1 no number reaches p, and any positive stretch does.
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

    PyTorch's CPU generator uses only the low 32 bits of a seed, and among so few a plain hash
    would soon repeat itself. This mix is a bijection in ``index``: the first 2³² batches of a
    stream all have different seeds.
    """
    low, high = seed & _MASK, (seed >> 32) & _MASK
    return _scramble(_scramble(_scramble(high) ^ low) ^ (index & _MASK))


class WordProblemStream(IterableDataset[Batch]):
    """Endless batches of fresh word problems, for training.

    Batch ``i`` depends on the arguments and ``i`` alone, so a resumed run skips to it at no cost.
    Iterating goes on from :attr:`start`, the index of the next batch, which moves along with
    every batch handed out.

    With a DataLoader pass ``batch_size=None``, as batches are made here. Worker w of n makes the
    batches ``start + w``, ``start + w + n``, …, which the loader returns in order. The workers
    have copies of the stream and read ahead, so the original's ``start`` stays; resume by setting
    it to the number of batches consumed.

    Args:
        algebra: where to multiply.
        length: L, or a range (min, max), both included, from which each batch draws its length
            uniformly.
        identity_probability: in [0, 1]; see :func:`sample`.
        seed: in [0, 2⁶³); different seeds give different streams.
        batch_size: B.
        start: index of the first batch.
        device: where batches are made; what they are differs between kinds of devices.

    Raises:
        ValueError: if a number is out of range.
    """

    def __init__(
        self,
        algebra: Algebra,
        length: int | tuple[int, int],
        *,
        identity_probability: float,
        seed: int,
        batch_size: int,
        start: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
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
        self.load_state_dict({"seed": seed, "start": start})

    def batch(self, index: int) -> Batch:
        """Batch number ``index``: ``input_ids`` and ``labels``, both (B, L) int64."""
        generator = torch.Generator().manual_seed(batch_seed(self.seed, index))
        shortest, longest = self.lengths
        length = shortest
        if longest > shortest:
            length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        if self.device.type != "cpu":
            generator = torch.Generator(self.device).manual_seed(batch_seed(self.seed, index))
        tokens, targets = sample(
            self.algebra,
            self.batch_size,
            length,
            identity_probability=self.identity_probability,
            generator=generator,
        )
        return {"input_ids": tokens, "labels": targets}

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is not None:
            index = self.start + worker.id
            while True:
                yield self.batch(index)
                index += worker.num_workers
        while True:
            # Moved before the batch goes out: a state saved while it is in use counts it as done.
            self.start += 1
            yield self.batch(self.start - 1)

    def state_dict(self) -> dict[str, int]:
        """``{"seed": …, "start": index of the next batch}``."""
        return {"seed": self.seed, "start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from ``state``.

        Raises:
            ValueError: if the state is of a stream with another seed, or ``start`` is negative.
        """
        if state["seed"] != self.seed:
            raise ValueError(f"state has seed {state['seed']}, must be this stream's, {self.seed}")
        if state["start"] < 0:
            raise ValueError(f"start is {state['start']}, must not be negative")
        self.start = state["start"]


_FORMAT = "deqseq.word_problem"
_VERSION = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class WordProblemDataset(Dataset[Batch]):
    """A fixed set of word problems, for evaluation; item ``i`` is one, a slice a batch.

    Attributes:
        algebra: where the targets were multiplied.
        identity_probability: see :func:`sample`.
        seed: that it was generated from.
        tokens: (S, L) int64 inputs of S sequences.
        targets: (S, L) int64, aligned with the inputs.
    """

    algebra: Algebra
    identity_probability: float
    seed: int
    tokens: Tensor
    targets: Tensor

    @classmethod
    def generate(
        cls,
        algebra: Algebra,
        *,
        sequences: int,
        length: int,
        identity_probability: float,
        seed: int,
    ) -> "WordProblemDataset":
        """Sample a set of ``sequences`` × ``length`` tokens, determined by the arguments.

        Raises:
            ValueError: if a number is out of range.
        """
        stream = WordProblemStream(
            algebra,
            length,
            identity_probability=identity_probability,
            seed=seed,
            batch_size=sequences,
        )
        # The last index there is, where no training stream of the same seed will ever come.
        batch = stream.batch(_MASK)
        return cls(
            algebra=algebra,
            identity_probability=identity_probability,
            seed=seed,
            tokens=batch["input_ids"],
            targets=batch["labels"],
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | slice) -> Batch:
        """``input_ids`` and ``labels``: (L,) for an integer, (B, L) for a slice."""
        return {"input_ids": self.tokens[index], "labels": self.targets[index]}

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file: both tensors as int16, and the rest as JSON in its header.

        Raises:
            FileExistsError: if there is such a file already; it is left as it is.
        """
        import safetensors.torch  # not everyone who trains saves sets, so it stays optional

        header = {
            "version": _VERSION,
            "algebra": self.algebra.name,
            "identity_probability": self.identity_probability,
            "length": self.tokens.shape[1],
            "seed": self.seed,
        }
        tensors = {
            "tokens": self.tokens.to(torch.int16),  # holds every index below MAX_ELEMENTS
            "targets": self.targets.to(torch.int16),
        }
        content = safetensors.torch.save(tensors, metadata={_FORMAT: json.dumps(header)})
        with open(path, "xb") as file:
            file.write(content)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "WordProblemDataset":
        """Read what :meth:`save` wrote, and check that the targets are right.

        Raises:
            ValueError: if the file is damaged, of another format or version, or inconsistent.
            FileNotFoundError: if there is none.
        """
        import safetensors

        if not Path(path).is_file():
            raise FileNotFoundError(f"no such file: {fspath(path)}")
        try:
            with safetensors.safe_open(fspath(path), framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                if _FORMAT not in metadata:
                    raise ValueError(f"header has no {_FORMAT!r}")
                header: dict[str, Any] = json.loads(metadata[_FORMAT])
                if header["version"] != _VERSION:
                    raise ValueError(f"version is {header['version']}, must be {_VERSION}")
                dataset = cls(
                    algebra=algebra(header["algebra"]),
                    identity_probability=float(header["identity_probability"]),
                    seed=int(header["seed"]),
                    tokens=file.get_tensor("tokens").to(torch.int64),
                    targets=file.get_tensor("targets").to(torch.int64),
                )
            products = prefix_products(dataset.algebra, dataset.tokens)
            if not torch.equal(products, dataset.targets):
                raise ValueError("targets are not the running products of the tokens")
            if header["length"] != products.shape[1]:
                raise ValueError(f"length is {products.shape[1]}, must be {header['length']}")
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{fspath(path)} is not an intact word-problem set: {error}") from error
        return dataset


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
