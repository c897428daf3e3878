"""Sharded checkpoints: every process writes its own part of weights and optimiser, any number reads them.

Files are those of ``torch.distributed.checkpoint``, in the folder ``shards`` of a checkpoint. Reading them
unpickles their metadata: load only checkpoints that you trust.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_FOLDER = "shards"


def is_sharded(checkpoint: str | Path) -> bool:
    """Whether the weights and the optimiser of a checkpoint are in shards."""
    return (Path(checkpoint) / _FOLDER).is_dir()


def save_shards(model: nn.Module, optimizer: Any, checkpoint: str | Path) -> None:
    """Write weights and optimiser; all processes call this. Returns when all have written and synced.

    Raises:
        OSError: a process cannot write.
    """
    folder = Path(checkpoint) / _FOLDER
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # a save that was cut off had perhaps other shards
    dist.barrier()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    _call(lambda: save(state, checkpoint_id=folder), OSError, f"{folder} cannot be written")


def load_weights(model: nn.Module, checkpoint: str | Path) -> None:
    """Read the weights into a model that is not sharded; every process for itself.

    Raises:
        ValueError: the weights are damaged, or those of another model.
    """
    folder = Path(checkpoint) / _FOLDER
    state = {"model": model.state_dict()}  # read in place
    _call(lambda: load(state, checkpoint_id=folder, no_dist=True), ValueError, f"{folder} cannot be read")


def load_optimizer(model: nn.Module, optimizer: Any, checkpoint: str | Path) -> None:
    """Read the optimiser's state, sharded over any number of processes or not; all call this.

    Raises:
        ValueError: the state is damaged, or that of another model.
    """
    folder = Path(checkpoint) / _FOLDER
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    _call(lambda: load(state, checkpoint_id=folder), ValueError, f"{folder} cannot be read")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _call(function: Callable[[], object], error: type[Exception], what: str) -> None:
    try:
        function()
    except CheckpointException as failed:  # no Exception: one error for each process that failed
        rank, (reason, _) = next(iter(failed.failures.items()))
        raise error(f"{what}: process {rank}: {str(reason).splitlines()[0]}") from failed
