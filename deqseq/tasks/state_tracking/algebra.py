"""Finite groups and monoids as Cayley tables, and running products in them.

A token is the index of an element. Permutations are 0-based tuples and multiply as functions,
``(a·b)(i) = a[b[i]]``: the right factor acts first. The elements of a direct product are sorted by their
first component, then by the second: in ``A4xZ5`` the element ``(a, z)`` has index ``5·a + z``.

Shapes: B sequences, L tokens, N elements.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from itertools import pairwise, permutations, product
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ELEMENTS = 5040
"""Maximum number of elements of an algebra. S7 has 5040; its table of 25 million entries takes 200 MB."""


@dataclass(frozen=True, eq=False)
class Algebra:
    """A finite monoid, often a group, given by its Cayley table.

    Attributes:
        name: name that :func:`algebra` accepts, for example ``"A5xM"``.
        elements: the N elements in token order: permutations as 0-based tuples, integers for
            Z_n, letters for M, tuples of components for products.
        table: (N, N) int64 on the CPU; ``table[a, b]`` is the index of a·b.
        factors: the factors of a direct product from left to right; empty for other algebras.
        identity: index of the identity; always 0, because the identity is the first element.

    Algebras are compared and hashed by object identity, so ``functools.cache`` can take them as arguments.
    """

    name: str
    elements: tuple[Any, ...]
    table: Tensor
    factors: tuple["Algebra", ...] = ()
    identity: ClassVar[int] = 0

    def __len__(self) -> int:
        return len(self.elements)

    @cached_property
    def is_group(self) -> bool:
        """Whether every element has an inverse."""
        return bool((self.table == self.identity).any(dim=1).all())

    @cached_property
    def parts(self) -> tuple[Tensor, Tensor]:
        """The indices of the elements in the group part and in the monoid part of a direct product.

        The result is two sorted int64 tensors on the CPU. In ``A5xM``, the group part contains the elements
        (a, 1), and the monoid part the elements (1, m), where 1 is the identity. With more factors,
        elements of the group part have the component 1 in all factors except the groups. Elements of the
        monoid part have the component 1 in all groups.

        Every element is the product of one element of each part: (a, m) = (a, 1)·(1, m). The index of
        (a, m) is the sum of the indices of (a, 1) and (1, m).
        """
        group = monoid = torch.zeros(1, dtype=torch.int64)
        for factor in self.factors or (self,):
            every, only = torch.arange(len(factor)), torch.tensor([self.identity])
            group_digit, monoid_digit = (every, only) if factor.is_group else (only, every)
            group = (group[:, None] * len(factor) + group_digit).flatten()
            monoid = (monoid[:, None] * len(factor) + monoid_digit).flatten()
        return group, monoid

    @cached_property
    def chance(self) -> float:
        """Accuracy of a random guess late in a sequence: 1 / (number of elements of the smallest ideal).

        Long random products lie in the smallest ideal. In a group, it contains all elements. In ``A5xM``, it
        contains the 60 elements whose component in M is X, the absorbing element.
        """
        if self.is_group:
            return 1 / len(self)
        # The product of all elements lies in the smallest ideal and generates it.
        inside = reduce(lambda a, b: int(self.table[a, b]), range(len(self)))
        return 1 / len(self.table[self.table[:, inside]].unique())


def _permutation_group(name: str, n: int) -> Algebra:
    from sympy.combinatorics import Permutation  # takes half a second to import

    even_only = name[0] == "A"
    elements = torch.tensor([p for p in permutations(range(n)) if not even_only or Permutation(p).is_even])
    # A key is a permutation read as a number in base n. The elements are sorted by key, so searchsorted turns
    # keys into indices.
    place_values = n ** torch.arange(n - 1, -1, -1)
    keys = (elements * place_values).sum(dim=1)
    table = torch.empty(len(elements), len(elements), dtype=torch.int64)
    for row, left in zip(table, elements, strict=True):  # row by row, to save memory
        row.copy_(torch.searchsorted(keys, (left[elements] * place_values).sum(dim=1)))
    return Algebra(name, tuple(map(tuple, elements.tolist())), table)


def _direct_product(factors: Sequence[Algebra]) -> Algebra:
    def multiply(left: Tensor, right: Tensor) -> Tensor:
        n, m = len(left), len(right)
        return (left[:, None, :, None] * m + right[None, :, None, :]).reshape(n * m, n * m)

    name = "x".join(factor.name for factor in factors)
    elements = tuple(product(*(factor.elements for factor in factors)))
    table = reduce(multiply, (factor.table for factor in factors))
    return Algebra(name, elements, table, tuple(factors))


def _size(name: str) -> int:
    """Number of elements of an algebra that is not a direct product; 0 for an unknown name."""
    if name == "M":
        return 4
    match = re.fullmatch(r"([ZSA])([1-9][0-9]{0,3})", name)
    kind, n = (match[1], int(match[2])) if match else ("", 0)
    if n < (3 if kind == "A" else 2):  # an algebra with one element has no state to track
        return 0
    size = n if kind == "Z" else math.factorial(min(n, 20))  # 20! is already above the limit
    return size // 2 if kind == "A" else size


@cache
def _build(names: tuple[str, ...]) -> Algebra:
    if len(names) > 1:
        return _direct_product([_build((name,)) for name in names])
    (name,) = names
    if name == "M":  # E is the identity; X is absorbing: every product with X is X
        rows = ("EABX", "AXXX", "BABX", "XXXX")
        table = torch.tensor([["EABX".index(entry) for entry in row] for row in rows])
        return Algebra(name, tuple("EABX"), table)
    n = int(name[1:])
    if name[0] == "Z":
        indices = torch.arange(n)
        return Algebra(name, tuple(range(n)), (indices[:, None] + indices) % n)
    return _permutation_group(name, n)


def algebra(name: str) -> Algebra:
    """The algebra called ``name``. All callers share one object, so treat it as read-only.

    Known names:

    - ``Zn``, the cyclic groups, such as ``Z60``;
    - ``Sn``, the symmetric groups, such as ``S5``: all permutations, in lexicographic order;
    - ``An``, the alternating groups, such as ``A5``: the even permutations, in lexicographic order;
    - ``M``, an aperiodic monoid of four elements;
    - direct products, with names joined by ``x`` or ``_x_``, such as ``A5xM`` (240 elements).

    Raises:
        ValueError: any other name, or more than ``MAX_ELEMENTS`` elements.
    """
    names = tuple(re.split(r"_x_|x", name))
    size = math.prod(map(_size, names))
    if not 0 < size <= MAX_ELEMENTS:
        problem = f"algebra {name!r} is too large" if size else f"unknown algebra {name!r}"
        raise ValueError(
            f"{problem}: must be one of Zn (n ≥ 2), Sn (n ≥ 2), An (n ≥ 3), M, and direct products "
            f"such as A5xM or A4_x_Z5, with at most {MAX_ELEMENTS} elements"
        )
    return _build(names)


@cache
def _flat_table(algebra: Algebra, device: torch.device) -> Tensor:
    return algebra.table.flatten().to(device, torch.int32)


def prefix_products(algebra: Algebra, tokens: Tensor) -> Tensor:
    """Running products ``y[:, 0] = tokens[:, 0]``, ``y[:, t] = y[:, t-1] · tokens[:, t]``.

    The scan has two levels:

    1. Compute running products inside chunks of about √L tokens, in parallel over chunks.
    2. Compute running products of the chunks' last products. Multiply each chunk by the product of all
       earlier chunks.

    The scan takes about 2√L sequential steps instead of L, but does twice the work. It never makes the host
    wait for the device.

    ``tokens``: (B, L) integers in [0, N); the range is not checked. B and L are positive. Returns (B, L)
    int64 on the same device.
    """
    n, (batch, length) = len(algebra), tokens.shape
    table = _flat_table(algebra, tokens.device)
    steps = math.isqrt(length - 1) + 1  # tokens in a chunk: √L rounded up
    chunks = -(-length // steps)
    padded = F.pad(tokens.to(torch.int32), (0, steps * chunks - length), value=algebra.identity)
    # Shape (steps, chunks, B), contiguous: each step of the scan reads and writes one block.
    products = padded.view(batch, chunks, steps).permute(2, 1, 0).contiguous()

    def scan(rows: Tensor) -> None:
        """Replace each row of a matrix, in place, by the product of all rows up to this row."""
        for before, row in pairwise(rows):
            torch.index_select(table, 0, torch.add(row, before, alpha=n), out=row)

    scan(products.view(steps, chunks * batch))
    carry = products[-1].clone()
    scan(carry)
    index = torch.add(products[:, 1:], carry[:-1], alpha=n)
    products[:, 1:] = table.index_select(0, index.flatten()).view_as(index)
    flat = products.permute(2, 1, 0).reshape(batch, chunks * steps)
    return flat[:, :length].to(torch.int64, memory_format=torch.contiguous_format)
