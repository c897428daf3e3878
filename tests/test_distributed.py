"""All processes of a group stop iterating together, and those of DDP have the same gradients."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Each rank runs this script in its own process. Rank 1's map converges more slowly than rank 0's.
SCRIPT = """
import datetime, json, sys
import torch
import torch.distributed as dist
from deqseq import ImplicitDifferentiation, ImplicitSequenceLayer, Residual
from deqseq.backbones import ModuleBackbone

rank, file, window, shared = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method="file://" + file, rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=60),
)

class Collective(torch.nn.Module):
    '''A map that every rank must evaluate equally often, like a map with sharded weights.'''
    def __init__(self):
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor([0.3, 0.9][rank]))
        self.calls = 0
    def forward(self, u):
        self.calls += 1
        if shared == "collective":
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == 2
        return self.rate * torch.tanh(u)

torch.manual_seed(0)
module = Collective()
layer = ImplicitSequenceLayer(
    ModuleBackbone(module), gradient=ImplicitDifferentiation(),
    convergence=Residual(rtol=1e-3, max_iter=200, check_every=3), window=window,
    group=dist.group.WORLD if shared == "collective" else None,
)
out = layer(torch.randn(2, 6, 4))
out.z.square().sum().backward()
adjoint = out.solution.adjoint
print(json.dumps({
    "nfe": out.solution.nfe, "calls": module.calls, "adjoint": adjoint.nfe,
    "iterations": out.solution.iterations.max().item(),
    "converged": bool((out.solution.status == 1).all() and (adjoint.status == 1).all()),
}))
dist.barrier()
# Delete the layer: it holds the group, and gloo's threads live as long as the group. A thread that frees a
# tensor while Python ends aborts the process (pytorch/pytorch#179291).
del layer, out, adjoint
dist.destroy_process_group()
"""


def run_two_ranks(folder: Path, window: int | None, shared: str) -> list[dict[str, int]]:
    return run_ranks(SCRIPT, [str(folder / "store"), json.dumps(window), shared])


def run_ranks(script: str, arguments: list[str]) -> list[Any]:
    """Run ``script`` in two processes. Returns what each of them prints last, read as JSON."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        results = []
        for process in ranks:
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            results.append(json.loads(output.splitlines()[-1]))
        return results
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize("window", [None, 2])
def test_ranks_stop_together(tmp_path: Path, window: int | None) -> None:
    fast, slow = run_two_ranks(tmp_path, window, "collective")
    assert fast["nfe"] == slow["nfe"] and fast["adjoint"] == slow["adjoint"]
    assert fast["calls"] == slow["calls"] == slow["nfe"]
    assert fast["iterations"] < slow["iterations"]
    assert fast["converged"] and slow["converged"]


def test_without_a_group_each_rank_stops_on_its_own(tmp_path: Path) -> None:
    """Ranks without a group call f different numbers of times. A layer needs a group if f communicates."""
    fast, slow = run_two_ranks(tmp_path, None, "alone")
    assert fast["nfe"] < slow["nfe"] and fast["adjoint"] < slow["adjoint"]


# Two ranks train one layer on different inputs.
DDP = """
import datetime, json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from deqseq import ImplicitSequenceLayer
from deqseq.backbones import LlamaBackbone

rank, file, option = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method="file://" + file, rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=60),
)
torch.manual_seed(0)
layer = ImplicitSequenceLayer(LlamaBackbone(16, n_layer=1, n_head=2), gradient="implicit")
model = DistributedDataParallel(layer, **{option: True})
found = []
for step in range(2):
    out = model(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(10 * step + rank)))
    model.zero_grad()
    out.z.square().sum().backward()
    found.append([out.solution.adjoint is not None, *(p.grad.sum().item() for p in model.parameters())])
print(json.dumps(found))
dist.barrier()
del layer, model, out
dist.destroy_process_group()
"""


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_ranks_of_ddp_have_the_same_gradients(tmp_path: Path, option: str) -> None:
    """DDP finds z in the output, and the output keeps the solution whose adjoint the backward pass sets."""
    first, second = run_ranks(DDP, [str(tmp_path / "store"), option])
    assert first == second and all(step[0] for step in first)
