"""Tensors in nested tuples, lists, dicts and the records of this package."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from deqseq.backbone import Context, State
from deqseq.solution import Solution

for _record in (Context, State, Solution):
    pytree.register_dataclass(_record)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` applied to every tensor in it."""
    return pytree.tree_map_only(Tensor, function, value)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in ``value``, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def take(value: Any, rows: Tensor) -> Any:
    """The sequences ``rows`` (int64 indices) of every tensor (B, ...)."""
    return map_tensors(lambda t: t[rows], value)


def overwrite(buffers: Any, value: Any) -> None:
    """Copy the tensors of ``value`` into those of ``buffers``, which has the same structure."""
    both = zip(tensors(buffers), tensors(value), strict=True)
    pairs = [(into, source) for into, source in both if into.data_ptr() != source.data_ptr()]
    written = {into.data_ptr() for into, _ in pairs}
    sources = [source.clone() if source.data_ptr() in written else source for _, source in pairs]
    copy_tensors([into for into, _ in pairs], sources)


def copied(value: Any) -> Any:
    """``value`` with its tensors copied."""
    leaves, structure = pytree.tree_flatten(value)
    copies = iter(copies_of([leaf for leaf in leaves if isinstance(leaf, Tensor)]))
    leaves = [next(copies) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(leaves, structure)


def copies_of(found: list[Tensor]) -> list[Tensor]:
    """Contiguous copies. Tensors of one type share an allocation and a launch."""
    copies = list(found)
    for dtype in {t.dtype for t in found}:
        group = [i for i, t in enumerate(found) if t.dtype == dtype]
        # At multiples of 64 elements, because kernels expect aligned tensors.
        starts = list(accumulate((-(-found[i].numel() // 64) * 64 for i in group), initial=0))
        flat = found[group[0]].new_empty(starts[-1])
        for i, start in zip(group, starts, strict=False):
            copies[i] = flat[start : start + found[i].numel()].view(found[i].shape)
    copy_tensors(copies, found)
    return copies


def copy_tensors(into: list[Tensor], sources: list[Tensor]) -> None:
    """Copy every source into its tensor, with one launch per type. The tensors must not share memory."""
    for dtype in {t.dtype for t in into}:
        group = [i for i, t in enumerate(into) if t.dtype == dtype]
        torch._foreach_copy_([into[i] for i in group], [sources[i] for i in group])
