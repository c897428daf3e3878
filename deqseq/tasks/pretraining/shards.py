"""Sharded checkpoints. Each process writes its own part, and any number of processes can read the checkpoint.

``torch.distributed.checkpoint`` writes the files to the folder ``shards`` of a checkpoint. Its loader
unpickles parts of the files, and a pickle can run any code. So this module checks these parts before the
loader reads them. It refuses everything except tensors, plain values and metadata of tensors.
"""

import pickle
import shutil
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

_FOLDER = "shards"
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {  # for each module, the classes and functions that the metadata of tensors may use
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    f"{_DCP}.filesystem": {"_StorageInfo"},
    f"{_DCP}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


def is_sharded(checkpoint: str | Path) -> bool:
    """Whether a checkpoint has its weights and optimiser state in shards."""
    return (Path(checkpoint) / _FOLDER).is_dir()


def save_shards(
    model: nn.Module, optimizer: Any, checkpoint: str | Path, group: dist.ProcessGroup
) -> Future[Any]:
    """Copy weights and optimiser to the CPU, and start a thread that writes the copy.

    All processes must call this. The shards are complete when :func:`wait_for` returns.

    Args:
        group: process group of all processes, with backend gloo. Only the writing threads may use this group.
    """
    folder = Path(checkpoint) / _FOLDER
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # remove shards that an interrupted save has left
    dist.barrier()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    return async_save(state, checkpoint_id=folder, process_group=group)  # type: ignore[return-value]


def wait_for(saving: Future[Any], checkpoint: str | Path) -> None:
    """Wait until all processes have written and synced their shards.

    Raises:
        OSError: a process could not write its shards.
    """
    _call(saving.result, OSError, f"{Path(checkpoint) / _FOLDER} cannot be written")


def load_weights(model: nn.Module, checkpoint: str | Path, skip: Collection[str] = ()) -> None:
    """Read all weights into a model that is not sharded. Each process reads all weights by itself.

    Args:
        skip: names of weights that the checkpoint does not have. They keep their values.

    Raises:
        ValueError: the weights are damaged, or belong to another model.
    """
    folder = Path(checkpoint) / _FOLDER
    weights = {name: weight for name, weight in model.state_dict().items() if name not in skip}
    state = {"model": weights}  # ``load`` copies into these tensors
    _load(state, folder, no_dist=True)


def load_optimizer(model: nn.Module, optimizer: Any, checkpoint: str | Path) -> None:
    """Read the state of ``optimizer`` from a checkpoint. All processes must call this.

    The state's tensors may be sharded.

    Raises:
        ValueError: the state is damaged, or belongs to another model.
    """
    folder = Path(checkpoint) / _FOLDER
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    _load(state, folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


class _Metadata(pickle.Unpickler):
    """An unpickler that accepts only the metadata of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


class _Planner(DefaultLoadPlanner):
    """A load planner that refuses all pickled objects in a shard except plain values and tensors."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def _load(state: dict[str, Any], folder: Path, no_dist: bool = False) -> None:
    what = f"{folder} cannot be read"
    try:
        with (folder / ".metadata").open("rb") as file:
            _Metadata(file).load()
    except Exception as error:  # damaged bytes can raise any error, even MemoryError
        raise ValueError(f"{what}: {error}") from error
    with warnings.catch_warnings():
        # Ignore a warning that comes when a process reads alone.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        _call(
            lambda: load(state, checkpoint_id=folder, planner=_Planner(), no_dist=no_dist), ValueError, what
        )


def _call(function: Callable[[], object], error: type[Exception], what: str) -> None:
    try:
        function()
    except CheckpointException as failed:  # it holds the errors of all processes
        rank, (reason, _) = next(iter(failed.failures.items()))
        raise error(f"{what}: process {rank}: {str(reason).splitlines()[0]}") from failed
