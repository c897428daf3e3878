"""What the loop costs: the time of a solve of n iterations over that of n bare evaluations of f.

Every solver runs the same f, one Mamba2 layer, for the same fixed number of iterations without a graph;
torchdeq's own loops run it beside ours. Bare evaluations are timed next to every solve, in turn, so that
both see the same machine; the ratio is the median over rounds. Correctness comes first: Picard's answer
must equal n applications of f, and every solver's residual is reported.

    python benchmarks/loop_overhead.py
    python benchmarks/loop_overhead.py --device cuda --dtype bfloat16 --batch 512
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from common import describe_machine, finish, print_table, stopwatch

from deqseq import FixedIterations, Problem, Solver, iterate
from deqseq.backbones import Mamba2Backbone
from deqseq.ops.residual import relative, residual_norms
from deqseq.solvers import Anderson, Broyden, Picard

Solve = Callable[[], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=16, help="n of a solve")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", default="runs/benchmarks/loop_overhead.json")
    options = parser.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    backbone = Mamba2Backbone(options.d_model, n_layer=1).to(options.device, dtype)
    shape = (options.batch, options.length, options.d_model)
    x = torch.randn(shape, device=options.device, dtype=dtype)
    n = options.iterations
    clock = partial(stopwatch, device=options.device)
    with torch.no_grad():
        context = backbone.prepare(x)

        def f(z: torch.Tensor) -> torch.Tensor:
            return backbone(z, context)

        def bare() -> torch.Tensor:
            z = torch.zeros_like(x)
            for _ in range(n):
                z = f(z)
            return z

        def ours(solver: Solver) -> torch.Tensor:
            z0 = torch.zeros_like(x)
            return iterate(Problem(backbone, context, z0, solver, FixedIterations(n))).z

        solves: dict[str, Solve] = {
            "picard": partial(ours, Picard()),
            "picard, damping 0.8": partial(ours, Picard(0.8)),
            "anderson, memory 5": partial(ours, Anderson(5)),
            "anderson, memory 5, sequence": partial(ours, Anderson(5, scope="sequence")),
            "broyden, memory 8": partial(ours, Broyden(8)),
            **torchdeq_solves(f, x, n),
        }
        torch.testing.assert_close(solves["picard"](), bare(), rtol=0, atol=0)
        rows = []
        for name, solve in solves.items():
            z = solve()
            residual = relative(*residual_norms(z, f(z))).mean().item()
            ratios, seconds = [], []
            for _ in range(options.rounds):
                bare_seconds = clock(bare)
                seconds.append(clock(solve))
                ratios.append(seconds[-1] / bare_seconds)
            rows.append(
                {
                    "solver": name,
                    "evaluations": n,
                    "seconds": sorted(seconds)[len(seconds) // 2],
                    "over bare evaluations": sorted(ratios)[len(ratios) // 2],
                    "residual after": residual,
                }
            )
    machine = describe_machine(options.device)
    print_table(f"n = {n} evaluations at {shape}, {options.dtype}, {machine['device']}", rows)
    finish(options.output, {"settings": vars(options), "machine": machine, "rows": rows})


def torchdeq_solves(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, n: int) -> dict[str, Solve]:
    """torchdeq's own solvers on the same f, as it is meant to be called; none if it is not installed."""
    try:
        from torchdeq.solver import get_solver
    except ImportError:
        print("torchdeq is not installed: its rows are left out")
        return {}

    def run(name: str, **settings: int) -> torch.Tensor:
        solve = get_solver(name)
        return solve(f, torch.zeros_like(x), max_iter=n, tol=0.0, **settings)[0]

    return {
        "torchdeq fixed_point_iter": partial(run, "fixed_point_iter"),
        "torchdeq anderson, m 6": partial(run, "anderson", m=6),
    }


if __name__ == "__main__":
    main()
