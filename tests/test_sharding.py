"""FSDP shards a model as one unit. Units inside a backbone raise one clear error."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM

pytestmark = [pytest.mark.passes_of_a_cpu, pytest.mark.filterwarnings("ignore:.*FSDP")]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make(implicit: bool, weight_norm: bool) -> Any:
    body = {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 2, "weight_norm": weight_norm}
    return ImplicitForCausalLM(ImplicitConfig(vocab_size=8, backbone=body, implicit=implicit)).train()


def shard(model: Any, units: list[nn.Module], mesh: Any, version: int) -> Any:
    """Wrap each module in ``units``, and then the whole model, with FSDP."""
    if version == 2:
        for unit in [*units, model]:
            fully_shard(unit, mesh=mesh)
        return model
    policy = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: any(module is u for u in units))
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


UNITS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "blocks": lambda layer: list(layer.backbone.layers),
    "a block": lambda layer: [layer.backbone.layers[1]],
    "mixers": lambda layer: [block.mixer for block in layer.backbone.layers],
    "a norm": lambda layer: [layer.backbone.norm_f],
    "a map": lambda layer: [layer.backbone.layers[0].mlp.fc2],
    "the backbone": lambda layer: [layer.backbone],
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("implicit", "weight_norm"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("units", UNITS)
def test_units_inside_a_backbone_are_refused(
    mesh: Any, units: str, implicit: bool, weight_norm: bool, version: int
) -> None:
    model = make(implicit, weight_norm)
    sharded = shard(model, UNITS[units](model.model.layer), mesh, version)
    with pytest.raises(ValueError, match=r"FSDP shards a part of .*: make the whole model one unit"):
        sharded(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize("implicit", [True, False])
def test_one_unit_trains(mesh: Any, implicit: bool, weight_norm: bool, version: int) -> None:
    model = make(implicit, weight_norm)
    sharded = shard(model, [], mesh, version)
    ids = torch.randint(8, (2, 6))
    sharded(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in sharded.parameters())
