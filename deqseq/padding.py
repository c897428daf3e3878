"""Padding is taken out before a solve, and what was packed into one row is taken apart.

Every sequence gets a row of its own with its tokens at the front, in order. What is left of padding then
stands after all tokens, where causality alone keeps it from mattering; backbones and solvers need no masks.

Shapes: B rows of L columns as the caller has them, R sequences of up to C tokens as they are solved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a batch go.

    Attributes:
        source: (R, C) int64, the token (its number in the B * L of the batch) that goes to each place.
        target: (B, L) int64, the place (its number in R * C) that each token goes to.
        real: (B, L) bool, tokens that are not padding.
        lengths: (R,) int64, number of tokens of each sequence.
    """

    source: Tensor
    target: Tensor
    real: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, real: Tensor) -> Packing:
        """One sequence a row; ``real`` (B, L) is non-zero for tokens, which may stand anywhere."""
        real = real.bool()
        order = torch.argsort(~real, dim=1, stable=True)
        first = torch.arange(real.shape[0], device=real.device)[:, None] * real.shape[1]
        return cls(order + first, torch.argsort(order, dim=1) + first, real, real.sum(1))

    @classmethod
    def of_packed(cls, real: Tensor, starts: Tensor) -> Packing:
        """Several sequences a row: one begins at every token of ``starts`` (B, L) bool."""
        flat = real.flatten().nonzero()[:, 0]  # the tokens, row by row
        begins = starts.flatten()[flat]
        sequence = begins.cumsum(0) - 1
        place = torch.arange(flat.numel(), device=real.device)
        column = place - place[begins][sequence]
        lengths = torch.bincount(sequence)
        width = int(lengths.max())
        source = torch.zeros(lengths.numel(), width, dtype=torch.int64, device=real.device)
        source[sequence, column] = flat
        target = torch.zeros(real.numel(), dtype=torch.int64, device=real.device)
        target[flat] = sequence * width + column
        return cls(source, target.view(real.shape), real, lengths)

    def pack(self, values: Tensor) -> Tensor:
        """(B, L, ...) as the caller has it -> (R, C, ...); what stands behind a sequence is arbitrary."""
        return values.flatten(0, 1)[self.source]

    def unpack(self, values: Tensor, padding: float = 0) -> Tensor:
        """The inverse of :meth:`pack`, with ``padding`` where no token is."""
        real = self.real.view(*self.real.shape, *[1] * (values.dim() - 2))
        return values.flatten(0, 1)[self.target].where(real, values.new_full((), padding))


def real_tokens(attention_mask: Tensor) -> Tensor:
    """(B, L) bool, the tokens that are not padding.

    Raises:
        ValueError: an additive mask (0 for tokens, large negative for padding), or NaN.
    """
    if attention_mask.dtype != torch.bool and not bool((attention_mask >= 0).all()):
        raise ValueError(
            "attention_mask is 1 for tokens and 0 for padding; this one has values below 0 or NaN, as "
            "additive masks do"
        )
    return attention_mask.bool()


def packs_rows(position_ids: Tensor, attention_mask: Tensor | None = None) -> bool:
    """Whether a row holds several sequences, by where ``position_ids`` (B, L) start anew. Reads the host."""
    if position_ids.shape[1] == 1:
        return False
    real = torch.ones_like(position_ids, dtype=torch.bool)
    real = real if attention_mask is None else real_tokens(attention_mask)
    return sequence_starts(position_ids, real) is not None


def sequence_starts(position_ids: Tensor, real: Tensor) -> Tensor | None:
    """(B, L) bool, the tokens at which a sequence begins; ``None`` if every row has one sequence at most.

    A sequence begins at a row's first token and wherever ``position_ids`` start anew at 0. Reads the host.

    Raises:
        ValueError: positions that fall to something else than 0.
    """
    # The position of the token before, skipping padding; -1 before the first.
    rank = real.cumsum(1)
    line = position_ids.new_full((real.shape[0], real.shape[1] + 1), -1)
    line.scatter_(1, rank * real, position_ids.where(real, line.new_full((), -1)))
    line[:, 0] = -1
    before = line.gather(1, (rank - 1).clamp_min(0))
    first = rank == 1
    anew = real & ~first & (position_ids <= before)
    found, wrong = torch.stack([anew.any(), (anew & (position_ids != 0)).any()]).tolist()
    if wrong:
        raise ValueError("position_ids must rise within a sequence, and start anew at 0 with the next one")
    return (first & real) | anew if found else None
