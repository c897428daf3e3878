"""The future leak of a solver: how far earlier outputs move when only the last token changes.

One random Mamba2 layer in evaluation mode at a loose tolerance. In token scope nothing moves, to the
bit: that is checked. Solvers that mix whole sequences leak, which is why training refuses them.

    python benchmarks/leak.py
"""

from __future__ import annotations

import argparse
import sys

import torch
from common import describe_machine, finish, print_table

from deqseq import ImplicitSequenceLayer, Residual, Solver
from deqseq.backbones import Mamba2Backbone
from deqseq.solvers import Anderson, Broyden, Picard, TorchDEQ


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--output", default="runs/benchmarks/leak.json")
    options = parser.parse_args()

    torch.manual_seed(0)
    backbone = Mamba2Backbone(64, n_layer=1, d_state=16, headdim=32)
    x = torch.randn(4, options.length, 64)
    changed = x.clone()
    changed[:, -1] = torch.randn(4, 64)
    solvers: list[Solver] = [Picard(), Anderson(), Broyden()]
    solvers += [Anderson(scope="sequence"), Broyden(scope="sequence")]
    try:
        solvers += [TorchDEQ("anderson"), TorchDEQ("broyden")]
    except ImportError:
        print("torchdeq is not installed: its rows are left out")
    rows = []
    policy = Residual(rtol=options.tolerance, max_iter=64)
    for solver in solvers:
        layer = ImplicitSequenceLayer(backbone, solver, convergence=policy).eval()
        with torch.no_grad():
            before, after = layer(x), layer(changed)
        moved = (after.z - before.z)[:, :-1].abs().max().item()
        rows.append({"solver": str(solver), "causal": solver.causal, "leak": moved})
    print_table(f"largest change of an earlier output, tolerance {options.tolerance}", rows)
    finish(options.output, {"settings": vars(options), "machine": describe_machine("cpu"), "rows": rows})
    return 0 if all(row["leak"] == 0 for row in rows if row["causal"]) else 1


if __name__ == "__main__":
    sys.exit(main())
