"""Several processes of one run: what one does for all, and errors that all learn of."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_CORRECTABLE = (ValueError, OSError, FloatingPointError)  # these say what the user can correct


class ElsewhereError(ValueError):
    """Another process has failed, and says why."""


def everywhere(function: Callable[[], T]) -> T:
    """Call a function on every process of the run. If it fails on any of them, all raise.

    The first process that failed raises its own error, the others :class:`ElsewhereError`. All processes must
    call this together; it also waits for the slowest.
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
    """Call a function on the first process; all get its result, or raise because of its error."""
    if not _several():
        return function()
    import torch.distributed as dist

    found = [everywhere(function if dist.get_rank() == 0 else lambda: None)]
    dist.broadcast_object_list(found)
    return found[0]  # type: ignore[return-value]


def on_every_node(function: Callable[[], None]) -> None:
    """Call a function on the first process of every node; if it fails on any of them, all raise."""
    everywhere(function if os.environ.get("LOCAL_RANK", "0") == "0" else lambda: None)


def speaks() -> bool:
    """Whether this process should print its error: it is the first of the run that asks.

    If the process that keeps the run's store was killed, none is; torchrun's report shows the errors then.
    """
    if not _several():
        return os.environ.get("RANK", "0") == "0"
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        return int(_get_default_store().add("deqseq/failed", 1)) == 1
    except RuntimeError:  # the first process kept the store, and has spoken or was killed
        return False


def name() -> str:
    """Which process this is, to begin a message with; empty if it is the only one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ""
    return f"process {os.environ['RANK']} on {socket.gethostname()}: "


def record(text: str) -> None:
    """Let torchrun's report on the processes that failed say why this one did."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(file, "w") as report:
            json.dump({"message": message}, report)


def lost(error: Exception) -> bool:
    """Whether an error says that another process of the run is gone."""
    if not _several():
        return False
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "NCCL" in str(error)


def _several() -> bool:
    dist = sys.modules.get("torch.distributed")  # command lines that need no torch do not wait for it
    return dist is not None and dist.is_initialized() and dist.get_world_size() > 1
