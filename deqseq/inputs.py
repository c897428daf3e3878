"""Packing of a layer's inputs: one sequence per row, real tokens first, then padding.

A row with several sequences becomes several rows. Padding moves to the end of its row. With a causal
backbone, padding then cannot influence the real tokens before it. Backbones and solvers need no masks.

Shapes: B rows of L tokens in the caller's batch, R sequences of up to C tokens in the packed batch, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.backbone import Backbone, State
from deqseq.checks import check_floating, check_integers, check_tensor, shown
from deqseq.guess import Guess, propose


class Inputs(NamedTuple):
    """The input tensors of a solve, made by :func:`take_inputs`."""

    x: Tensor
    z0: Tensor | None
    position_ids: Tensor
    lengths: Tensor  # (R,) number of tokens to solve in each sequence
    unsolvable: Tensor  # (R, C) bool, non-finite tokens, and the tokens that depend on them
    state: State | None


@dataclass(frozen=True)
class Packing:
    """Maps tokens between the caller's batch and the packed batch, where every row is one sequence.

    Attributes:
        source: (R, C) int64; for each packed token, its index in the caller's flattened batch.
        target: (B, L) int64; for each of the caller's tokens, its index in the flattened packed batch.
        real: (B, L) bool, tokens that are not padding.
        lengths: (R,) int64, number of tokens of each sequence.
    """

    source: Tensor
    target: Tensor
    real: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, real: Tensor) -> Packing:
        """The packing of a batch with one sequence per row. ``real`` (B, L): 1 at tokens, 0 at padding."""
        real = real.bool()
        order = torch.argsort(~real, dim=1, stable=True)
        first = torch.arange(real.shape[0], device=real.device)[:, None] * real.shape[1]
        return cls(order + first, torch.argsort(order, dim=1) + first, real, real.sum(1))

    @classmethod
    def of_packed(cls, real: Tensor, starts: Tensor) -> Packing:
        """The packing of a batch with several sequences per row.

        Args:
            real: (B, L) bool, true for tokens and false for padding.
            starts: (B, L) bool, true at the first token of every sequence.
        """
        flat = real.flatten().nonzero()[:, 0]  # flat indices of the real tokens
        begins = starts.flatten()[flat]
        sequence = begins.cumsum(0) - 1
        place = torch.arange(flat.numel(), device=real.device)
        column = place - place[begins][sequence]
        lengths = torch.bincount(sequence)
        longest = int(lengths.max())
        source = torch.zeros(lengths.numel(), longest, dtype=torch.int64, device=real.device)
        source[sequence, column] = flat
        target = torch.zeros(real.numel(), dtype=torch.int64, device=real.device)
        target[flat] = sequence * longest + column
        return cls(source, target.view(real.shape), real, lengths)

    def pack(self, values: Tensor) -> Tensor:
        """Move values (B, L, ...) to (R, C, ...). Values after the end of a sequence are arbitrary."""
        return values.flatten(0, 1)[self.source]

    def unpack(self, values: Tensor, padding: float = 0) -> Tensor:
        """Move values (R, C, ...) back to (B, L, ...). Padding tokens get the value ``padding``."""
        real = self.real.view(*self.real.shape, *[1] * (values.dim() - 2))
        return values.flatten(0, 1)[self.target].where(real, values.new_full((), padding))


def real_tokens(attention_mask: Tensor) -> Tensor:
    """(B, L) bool, the tokens that are not padding.

    If the mask does not have the type bool, the host waits for the device.

    Raises:
        ValueError: the mask has other values than 0 and 1. Additive masks, and masks that number the
            sequences, have other values.
    """
    real = attention_mask.bool()
    if attention_mask.dtype != torch.bool and not bool((attention_mask == real).all()):
        wrong = attention_mask[attention_mask != real][0].item()
        raise ValueError(
            f"attention_mask must be 1 for tokens and 0 for padding, got {wrong}; an additive mask, or one "
            "with the numbers of sequences, is not accepted"
        )
    return real


def packs_rows(position_ids: Tensor, attention_mask: Tensor | None = None) -> bool:
    """Whether any row holds several sequences. Positions (B, L) restart at 0 inside such a row.

    The host waits for the device.
    """
    if position_ids.shape[1] == 1:
        return False
    real = torch.ones_like(position_ids, dtype=torch.bool)
    real = real if attention_mask is None else real_tokens(attention_mask)
    return sequence_starts(position_ids, real) is not None


def sequence_starts(position_ids: Tensor, real: Tensor) -> Tensor | None:
    """(B, L) bool, true at each sequence's first token; ``None`` if every row is one sequence.

    A sequence begins at a row's first token and wherever ``position_ids`` restart at 0. The host waits for
    the device.

    Raises:
        ValueError: a position is below 0, or a position above 0 is not greater than the position before it.
    """
    check_integers("position_ids", position_ids)
    # ``before`` is the position of the previous real token; -1 if there is no such token.
    rank = real.cumsum(1)
    line = position_ids.new_full((real.shape[0], real.shape[1] + 1), -1)
    line.scatter_(1, rank * real, position_ids.where(real, line.new_full((), -1)))
    line[:, 0] = -1
    before = line.gather(1, (rank - 1).clamp_min(0))
    first = rank == 1
    anew = real & (position_ids <= before)  # true at a first token only if its position is below 0
    found, wrong = torch.stack([anew.any(), (anew & (position_ids != 0)).any()]).tolist()
    if wrong:
        place = anew & (position_ids != 0)
        got, previous = int(position_ids[place][0]), int(before[place][0])
        raise ValueError(
            "position_ids must increase within a sequence, be at least 0, and restart at 0 in the next "
            f"sequence, got {got}" + (f" after {previous}" if previous >= 0 else "")
        )
    return (first & real) | anew if found else None


def check_causal(backbone: Backbone, what: str) -> None:
    """Raise ``ValueError`` if the backbone is not causal.

    ``what``: the feature that needs a causal backbone, for the message.
    """
    if not backbone.causal:
        raise ValueError(
            f"{what} needs a causal backbone, but this {type(backbone).__name__} uses later tokens too"
        )


def take_inputs(
    backbone: Backbone,
    x: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    state: State | None = None,
    z0: Tensor | None = None,
    guess: Guess | None = None,
    number: int | None = None,
    previous: Tensor | None = None,
) -> tuple[Inputs, Packing | None]:
    """Check the arguments of a layer's call, pack the tokens, compute their positions and the initial guess.

    Args:
        guess: proposes the initial iterates from the packed x. Not used if ``z0`` is given.
        number, previous: arguments of :meth:`~deqseq.Guess.propose`.

    Returns:
        The inputs of the solve, and the packing. :meth:`Packing.unpack` moves results back to the caller's
        batch. The packing is ``None`` if there is no mask and every row is one sequence.

    Raises:
        ValueError: wrong shapes, types or positions; a state with a backbone that is not causal; ``previous``
            or a state for rows with several sequences; a guess of a wrong shape or type.
    """
    if state is not None:
        check_causal(backbone, "a state")
    check_tokens(x, backbone.d_model, attention_mask=attention_mask, position_ids=position_ids)
    if position_ids is not None:
        check_integers("position_ids", position_ids)
    if z0 is not None:
        check_tensor("z0", z0, x.shape, "x's shape ")
        check_floating("z0", z0)
    if previous is not None:
        check_tensor("previous", previous, x[:, 0].shape, "shape (B, D) = ")
        check_floating("previous", previous)
    if state is not None:
        check_state(backbone, state, x.shape[0])
    packing = _packing(x, attention_mask, position_ids, state, previous)
    lengths = torch.full((x.shape[0],), x.shape[1], device=x.device)
    if packing is not None:
        x, lengths = packing.pack(x), packing.lengths
        z0 = None if z0 is None else packing.pack(z0)
        position_ids = None if position_ids is None else packing.pack(position_ids)
    # Solve only the tokens before a sequence's first non-finite token, because later tokens depend on it.
    # Set all other tokens of x to zero: in matrix products a NaN would reach earlier tokens (0 * NaN is NaN).
    place = torch.arange(x.shape[1], device=x.device)
    finite = torch.isfinite(x).all(-1)
    end = torch.where(finite | (place >= lengths[:, None]), x.shape[1], place).amin(1)
    if not backbone.causal:  # solve no token: every token of the sequence depends on the non-finite token
        end = torch.where(end < lengths, 0, end)
    unsolvable = (place >= end[:, None]) & (place < lengths[:, None])
    lengths = torch.minimum(lengths, end)
    solvable = (place < lengths[:, None])[..., None]
    x = x.where(solvable, x.new_zeros(()))
    if z0 is None and guess is not None:
        z0 = propose(guess, x, number, previous)
    if z0 is not None:
        z0 = finite_guess(z0, x)
        z0 = z0.where(solvable, z0.new_zeros(()))
    if position_ids is None:
        position_ids = place.expand(x.shape[:2])
        if state is not None:
            position_ids = position_ids + state.seen[:, None]
    return Inputs(x, z0, position_ids, lengths, unsolvable, state), packing


def finite_guess(z0: Tensor, x: Tensor) -> Tensor:
    """The guess ``z0`` (B, L, D) in the type of ``x``. A token whose values are not all finite is zero."""
    z0 = z0.to(x.dtype)
    return z0.where(torch.isfinite(z0).all(-1, keepdim=True), z0.new_zeros(()))


def check_tokens(x: Tensor, d_model: int | None, **per_token: Tensor | None) -> None:
    """Check that x is a floating-point tensor (B, L, D), and that the ``per_token`` tensors are (B, L).

    Raises ``ValueError`` if a check fails. ``d_model``: the width that x must have; ``None``: any width.
    """
    check_tensor("x", x)
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"x must have shape (B, L, D) with no size of 0, got {tuple(x.shape)}")
    if d_model is not None and x.shape[-1] != d_model:
        raise ValueError(f"x has width {x.shape[-1]}, but the backbone's d_model is {d_model}")
    check_floating("x", x)
    for name, value in per_token.items():
        if value is not None:
            check_tensor(name, value, x.shape[:2], "x's shape (B, L) = ")


def check_state(backbone: Backbone, state: State, batch: int) -> None:
    """Check that ``state`` is a state of this backbone for ``batch`` sequences.

    Raises ``ValueError`` if a check fails. The values in ``state.seen`` are checked only on the CPU: to read
    them from another device, the host would have to wait.
    """
    if not isinstance(state, State):
        raise ValueError(f"state must be a State, got {shown(state)}")
    check_tensor("state.seen", state.seen)
    if state.seen.dim() != 1:
        raise ValueError(f"state.seen must have shape (B,), got {tuple(state.seen.shape)}")
    check_integers("state.seen", state.seen)
    if state.batch_size != batch:
        raise ValueError(f"state holds {state.batch_size} sequences, but x has {batch}")
    if state.seen.device.type == "cpu" and (least := int(state.seen.min())) < 0:
        raise ValueError(f"state.seen must be at least 0, got {least}")
    # Compare only the first layer, to save time: this check runs for every generated token.
    count, sizes = backbone.state_form
    shapes = [t.shape for layer in state.layers[:1] for t in layer]
    fits = (len(state.layers), len(shapes)) == (count, len(sizes)) and all(
        len(shape) == len(size) + 1
        and all(wanted in (0, n) for wanted, n in zip((batch, *size), shape, strict=True))
        for shape, size in zip(shapes, sizes, strict=True)
    )
    if not fits:
        raise ValueError(
            f"state is of another backbone: this {type(backbone).__name__} has {count} layers with tensors "
            f"(B, ...) of the sizes {sizes}, 0 being any size, got {len(state.layers)} layers with tensors "
            f"of the shapes {[tuple(shape) for shape in shapes]}"
        )


def _packing(
    x: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    state: State | None,
    previous: Tensor | None,
) -> Packing | None:
    """The packing of a call's tokens; ``None`` if there is no mask and every row is one sequence."""
    real = None if attention_mask is None else real_tokens(attention_mask)
    if position_ids is not None and (x.shape[1] > 1 or state is not None or x.device.type == "cpu"):
        tokens = torch.ones_like(position_ids, dtype=torch.bool) if real is None else real
        starts = sequence_starts(position_ids, tokens)
        if starts is not None:
            if state is not None or previous is not None:
                shared = "a state" if state is not None else "previous"
                raise ValueError(
                    "position_ids restart inside a row, so the row holds several sequences, which cannot "
                    f"share {shared}: pass no state and no previous, or one sequence per row"
                )
            return Packing.of_packed(tokens, starts)
        if state is not None and bool((tokens & (position_ids < state.seen[:, None])).any()):
            raise ValueError(
                f"position_ids must continue after the state, which has seen {state.seen.tolist()} tokens"
            )
    return None if real is None else Packing.of(real)
