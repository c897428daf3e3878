"""All processes of a group stop iterating together, and those of DDP have the same gradients."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

# Every case runs on two ranks: forks of this process, which has imported everything.
SCRIPT = """
import datetime, faulthandler, json, os, sys, traceback
import torch
import torch._dynamo  # the ranks would import it
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from deqseq import ImplicitDifferentiation, ImplicitSequenceLayer, Residual
from deqseq.backbones import LlamaBackbone, ModuleBackbone

torch.set_num_threads(1)

class Collective(torch.nn.Module):
    '''A map that converges more slowly on rank 1 than on rank 0.

    ``shared``: every rank must evaluate it equally often, like a map with sharded weights.
    '''
    def __init__(self, rank, shared):
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor([0.3, 0.9][rank]))
        self.shared = shared
        self.calls = 0
    def forward(self, u):
        self.calls += 1
        if self.shared:
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == 2
        return self.rate * torch.tanh(u)

def search(rank, window=None, shared=True):
    torch.manual_seed(0)
    module = Collective(rank, shared)
    layer = ImplicitSequenceLayer(
        ModuleBackbone(module), gradient=ImplicitDifferentiation(),
        convergence=Residual(rtol=1e-3, max_iter=200, check_every=3), window=window,
        group=dist.group.WORLD if shared else None,
    )
    out = layer(torch.randn(2, 6, 4))
    out.z.square().sum().backward()
    adjoint = out.solution.adjoint
    return {
        "nfe": out.solution.nfe, "calls": module.calls, "adjoint": adjoint.nfe,
        "iterations": out.solution.iterations.max().item(),
        "converged": bool((out.solution.status == 1).all() and (adjoint.status == 1).all()),
    }

def ddp(rank, option):
    '''The ranks train one layer on different inputs.'''
    torch.manual_seed(0)
    layer = ImplicitSequenceLayer(LlamaBackbone(16, n_layer=1, n_head=2), gradient="implicit")
    model = DistributedDataParallel(layer, **{option: True})
    found = []
    for step in range(2):
        out = model(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(10 * step + rank)))
        model.zero_grad()
        out.z.square().sum().backward()
        found.append([out.solution.adjoint is not None, *(p.grad.sum().item() for p in model.parameters())])
    return found

folder, found = sys.argv[1], {}
for name, case in {
    "together": search,
    "together, window 2": lambda rank: search(rank, window=2),
    "alone": lambda rank: search(rank, shared=False),
    "static_graph": lambda rank: ddp(rank, "static_graph"),
    "find_unused_parameters": lambda rank: ddp(rank, "find_unused_parameters"),
}.items():
    place = os.path.join(folder, name)
    ranks = []
    for rank in range(2):
        if child := os.fork():
            ranks.append(child)
            continue
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            dist.init_process_group(
                "gloo", init_method="file://" + place, rank=rank, world_size=2,
                timeout=datetime.timedelta(seconds=60),
            )
            with open(place + str(rank), "w") as file:
                json.dump(case(rank), file)
            dist.barrier()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0], name
    found[name] = [json.load(open(place + str(rank))) for rank in range(2)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks found in every case of SCRIPT."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("ranks"))],
        capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["together", "together, window 2"])
def test_ranks_stop_together(found: Any, case: str) -> None:
    fast, slow = found[case]
    assert fast["nfe"] == slow["nfe"] and fast["adjoint"] == slow["adjoint"]
    assert fast["calls"] == slow["calls"] == slow["nfe"]
    assert fast["iterations"] < slow["iterations"]
    assert fast["converged"] and slow["converged"]


def test_without_a_group_each_rank_stops_on_its_own(found: Any) -> None:
    """Ranks without a group call f different numbers of times. A layer needs a group if f communicates."""
    fast, slow = found["alone"]
    assert fast["nfe"] < slow["nfe"] and fast["adjoint"] < slow["adjoint"]


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_ranks_of_ddp_have_the_same_gradients(found: Any, option: str) -> None:
    """DDP finds z in the output, and the output keeps the solution whose adjoint the backward pass sets."""
    first, second = found[option]
    assert first == second and all(step[0] for step in first)
