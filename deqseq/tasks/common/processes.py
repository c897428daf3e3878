"""Helpers for runs with several processes: one process works for all, and an error in one stops all."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_CORRECTABLE = (ValueError, OSError, FloatingPointError)  # errors that the user can correct


class ElsewhereError(ValueError):
    """Raised when another process has failed. The message contains the other process's error."""


def everywhere(function: Callable[[], T]) -> T:
    """Call a function on every process of the run. If it fails on any process, all processes raise.

    The function has failed if it raises ``ValueError``, ``OSError`` or ``FloatingPointError``. The failed
    process with the lowest rank raises its own error. All other processes raise :class:`ElsewhereError`. All
    processes must call ``everywhere``, and each waits for the slowest.
    """
    if not _several():
        return function()
    import torch.distributed as dist

    failed: Exception | None = None
    try:
        result = function()
    except _CORRECTABLE as error:
        failed = error
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if failed is None else str(failed))
    first = next((rank for rank, text in enumerate(said) if text is not None), None)
    if first is None:
        return result
    if failed is not None and first == dist.get_rank():
        raise failed
    raise ElsewhereError(f"process {first} has failed: {said[first]}")


def on_first(function: Callable[[], T]) -> T:
    """Call a function on the first process. All processes return its result. If it fails, all raise."""
    if not _several():
        return function()
    import torch.distributed as dist

    found = [everywhere(function if dist.get_rank() == 0 else lambda: None)]
    dist.broadcast_object_list(found)
    return found[0]  # type: ignore[return-value]


def on_every_node(function: Callable[[], None]) -> None:
    """Call a function on the first process of every node. If it fails on any node, all processes raise."""
    everywhere(function if os.environ.get("LOCAL_RANK", "0") == "0" else lambda: None)


def speaks() -> bool:
    """Whether this process should print its error: true for the first process that calls this function.

    The key-value store of torch.distributed counts the calls. If the process that hosts the store has ended,
    the result is false, and the errors appear only in torchrun's report.
    """
    if not _several():
        return os.environ.get("RANK", "0") == "0"
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        return int(_get_default_store().add("deqseq/failed", 1)) == 1
    except RuntimeError:  # rank 0, which hosted the store, has ended
        return False


def name() -> str:
    """A prefix for messages: rank and host of this process. Empty if there is only one process."""
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return ""
    return f"process {os.environ['RANK']} on {socket.gethostname()}: "


def record(text: str) -> None:
    """Write the error of this process to torchrun's report on failed processes."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(file, "w") as report:
            json.dump({"message": message}, report)


def lost(error: Exception) -> bool:
    """Whether an error means that another process of the run has ended."""
    if not _several():
        return False
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "NCCL" in str(error)


def _several() -> bool:
    dist = sys.modules.get("torch.distributed")  # do not import torch: some commands do not need it
    return dist is not None and dist.is_initialized() and dist.get_world_size() > 1
