"""Functions that act on all tensors in a nested structure.

A structure consists of tuples, lists, dicts, and the dataclasses registered below. PyTorch finds tensors in
them too. DDP with ``static_graph=True`` needs this: it synchronises gradients only if it finds the outputs.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from deqseq.backbone import Context, State
from deqseq.outputs import LayerOutput
from deqseq.solution import Solution

for _record in (Context, State, Solution):
    pytree.register_dataclass(_record)
# The solution is not taken apart: DDP would replace it by a copy, and the backward pass sets its adjoint.
pytree.register_pytree_node(
    LayerOutput,
    lambda out: ([out.z, out.state], out.solution),
    lambda parts, solution: LayerOutput(*cast(tuple[Any, Any], parts), solution),
)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A copy of the structure ``value`` with ``function`` applied to every tensor."""
    return pytree.tree_map_only(Tensor, function, value)


def tensors(value: Any) -> list[Tensor]:
    """All tensors in the structure ``value``, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def take(value: Any, rows: Tensor) -> Any:
    """Select the sequences ``rows`` (int64 indices) from every tensor (B, ...) in ``value``."""
    return map_tensors(lambda t: t[rows], value)


def overwrite(buffers: Any, value: Any) -> None:
    """Copy every tensor of ``value`` into the tensor at the same place in ``buffers``."""
    both = zip(tensors(buffers), tensors(value), strict=True)
    pairs = [(into, source) for into, source in both if into.data_ptr() != source.data_ptr()]
    written = {into.data_ptr() for into, _ in pairs}
    sources = [source.clone() if source.data_ptr() in written else source for _, source in pairs]
    Copier([into for into, _ in pairs]).overwrite(sources)


def copied(value: Any) -> Any:
    """A copy of the structure ``value`` with contiguous copies of its tensors."""
    copies = iter(Copier(tensors(value)).copy())
    return map_tensors(lambda _: next(copies), value)


class Copier:
    """Copies a fixed list of tensors repeatedly, with few kernel launches and allocations."""

    def __init__(self, originals: list[Tensor]) -> None:
        self.originals = originals
        self._groups = []  # for each dtype: indices of its tensors, their shapes and strides, their offsets
        for dtype in {t.dtype for t in originals}:
            group = [i for i, t in enumerate(originals) if t.dtype == dtype]
            # Offsets in the buffer are multiples of 64 elements, because kernels need aligned tensors.
            starts = accumulate((-(-originals[i].numel() // 64) * 64 for i in group), initial=0)
            shapes = [originals[i].shape for i in group]
            layouts = [(shape, torch.empty(shape, device="meta").stride()) for shape in shapes]
            self._groups.append((group, layouts, list(starts)))

    def copy(self) -> list[Tensor]:
        """Contiguous copies, in the order of the originals. Copies of the same dtype share one buffer."""
        copies = list(self.originals)
        for group, layouts, starts in self._groups:
            flat = copies[group[0]].new_empty(starts[-1])
            for i, (shape, strides), start in zip(group, layouts, starts, strict=False):
                copies[i] = flat.as_strided(shape, strides, start)
        self._copy(copies, self.originals)
        return copies

    def overwrite(self, sources: list[Tensor]) -> None:
        """Copy ``sources`` into the originals. Sources and originals must not share memory."""
        self._copy(self.originals, sources)

    def _copy(self, into: list[Tensor], sources: list[Tensor]) -> None:
        for group, *_ in self._groups:
            torch._foreach_copy_([into[i] for i in group], [sources[i] for i in group])
