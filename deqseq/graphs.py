"""CUDA graphs of steps that work on the same memory every time.

Where little is computed, launching kernels one by one takes far longer than running them; a graph launches
all of them at once. What is captured reads and writes the very tensors that it was captured with, so
whatever goes from one replay to the next lives in buffers: :func:`overwrite` brings it back there.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor


def capture(device: torch.device, *steps: Callable[[], None]) -> list[Callable[[], None]]:
    """``steps`` as graphs to be replayed, one after the other; a later one may read what an earlier one left.

    They must read nothing on the host. Each is run once, here, which compiles and loads the kernels it
    launches. On a CPU, which has no graphs, what is returned are the steps themselves: the plain twin.
    """
    if device.type != "cuda":
        for step in steps:
            step()
        return list(steps)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    # Weights that autocast casts would be kept in the graphs' memory beyond them.
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with torch.autocast("cuda", dtype, enabled, cache_enabled=False), _no_collection():
        with torch.cuda.stream(side):
            for step in steps:
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        for step in steps:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=pool, capture_error_mode="thread_local"):
                step()
    return [graph.replay for graph in graphs]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing that holds memory of the device is to be collected during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``function`` of every tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = _names(type(value))
        return replace(value, **{name: map_tensors(function, getattr(value, name)) for name in names})
    return value


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.init)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses, in order."""
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(find, value)
    return found


def overwrite(buffers: Any, value: Any) -> None:
    """Copy ``value``'s tensors into those of ``buffers``, which is of its form, in few launches."""
    pairs = [
        (to, source)
        for to, source in zip(tensors(buffers), tensors(value), strict=True)
        if to.data_ptr() != source.data_ptr()
    ]
    written = {to.data_ptr() for to, _ in pairs}
    pairs = [(to, source.clone() if source.data_ptr() in written else source) for to, source in pairs]
    for dtype in {to.dtype for to, _ in pairs}:
        some = [pair for pair in pairs if pair[0].dtype == dtype]
        torch._foreach_copy_([to for to, _ in some], [source for _, source in some])


def copied(value: Any) -> Any:
    """``value`` with its tensors copied, in few launches and allocations."""
    return Copier(value).copied()


class Copier:
    """Copies from and to the tensors of ``value``, which is looked through once."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.tensors = tensors(value)
        self._groups = [
            [i for i, t in enumerate(self.tensors) if t.dtype == dtype]
            for dtype in {t.dtype for t in self.tensors}
        ]

    def overwrite(self, sources: list[Tensor]) -> None:
        """Copy ``sources``, none of which shares memory with them, into the tensors, in few launches."""
        self._copy(self.tensors, sources)

    def copied(self) -> Any:
        """The value with its tensors copied; those of one type side by side in memory."""
        new = list(self.tensors)
        for group in self._groups:
            # At offsets of 64 elements, as kernels want their tensors aligned.
            starts = [0, *accumulate(-(-new[i].numel() // 64) * 64 for i in group)]
            flat = new[group[0]].new_empty(starts[-1])
            for i, start in zip(group, starts, strict=False):
                shape = new[i].shape
                new[i] = flat.as_strided(shape, _strides(shape), start)
        self._copy(new, self.tensors)
        copies = iter(new)
        return map_tensors(lambda _: next(copies), self.value)

    def _copy(self, into: list[Tensor], sources: list[Tensor]) -> None:
        for group in self._groups:
            torch._foreach_copy_([into[i] for i in group], [sources[i] for i in group])


@functools.cache
def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    sizes = [max(1, size) for size in reversed(shape[1:])]
    return tuple(accumulate(sizes, mul, initial=1))[::-1] if shape else ()
