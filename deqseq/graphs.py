"""CUDA graphs of steps that work on the same memory every time.

Where little is computed, launching kernels one by one takes far longer than running them; a graph launches
all of them at once. What is captured reads and writes the very tensors that it was captured with, so
whatever goes from one replay to the next lives in buffers: :func:`overwrite` brings it back there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
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
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: map_tensors(function, getattr(value, name)) for name in names})
    return value


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
    new = iter(_like(tensors(value)))
    copy = map_tensors(lambda _: next(new), value)
    overwrite(copy, value)
    return copy


def _like(originals: list[Tensor]) -> list[Tensor]:
    """Empty tensors of the same shapes, those of one type side by side in memory."""
    new: dict[int, Tensor] = {}
    for dtype in {t.dtype for t in originals}:
        some = [i for i, t in enumerate(originals) if t.dtype == dtype]
        # At offsets of 64 elements, as kernels want their tensors aligned.
        sizes = [-(-originals[i].numel() // 64) * 64 for i in some]
        flat = torch.empty(sum(sizes), dtype=dtype, device=originals[some[0]].device)
        for i, part in zip(some, flat.split(sizes), strict=True):
            new[i] = part[: originals[i].numel()].view(originals[i].shape)
    return [new[i] for i in range(len(originals))]
