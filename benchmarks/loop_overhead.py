"""What the loop costs: the time of a solve of n iterations over that of n bare evaluations of f.

Every solver runs the same f, one Mamba2 layer, for the same fixed number of iterations without a graph.
torchdeq's own loops run it too. Bare evaluations are timed in turn with every solve, so both run under the
same load; the ratio is the median over rounds. Correctness comes first: Picard's result must equal n
applications of f, and the table has every solver's residual.

    python benchmarks/loop_overhead.py
    python benchmarks/loop_overhead.py --device cuda --dtype bfloat16 --batch 512
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import common
import torch

from deqseq import FixedIterations, Problem, SolveOptions, Solver, search
from deqseq.backbones import Mamba2Backbone
from deqseq.solvers import Anderson, Broyden, Picard

Solve = Callable[[], torch.Tensor]


@torch.no_grad()
def main() -> None:
    made = common.parser(__doc__, "loop_overhead.json", device="cpu")
    made.add_argument("--d-model", type=int, default=256)
    made.add_argument("--length", type=int, default=256)
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--iterations", type=int, default=16, help="n of a solve")
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--dtype", default="float32")
    options = made.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    backbone = Mamba2Backbone(options.d_model, n_layer=1).to(options.device, dtype)
    shape = (options.batch, options.length, options.d_model)
    x = torch.randn(shape, device=options.device, dtype=dtype)
    n = options.iterations
    context = backbone.prepare(x)

    def f(z: torch.Tensor) -> torch.Tensor:
        return backbone(z, context)

    def bare() -> torch.Tensor:
        z = torch.zeros_like(x)
        for _ in range(n):
            z = f(z)
        return z

    def ours(solver: Solver) -> torch.Tensor:
        options = SolveOptions(solver, FixedIterations(n))
        return search(Problem(backbone, context, torch.zeros_like(x), options)).z

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
        residual = common.relative_distance(z, f(z)).mean().item()
        seconds, ratio = common.time_over(bare, solve, options.device, options.rounds)
        times = {"evaluations": n, "seconds": seconds, "over bare evaluations": ratio}
        rows.append({"solver": name, **times, "residual after": residual})
    machine = common.machine_name(options.device)
    common.print_table(f"n = {n} evaluations at {shape}, {options.dtype}, {machine}", rows)
    common.write_results(options.output, options, rows=rows)


def torchdeq_solves(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, n: int) -> dict[str, Solve]:
    """torchdeq's own solvers on the same f; none if torchdeq is not installed."""
    try:
        from torchdeq.solver import get_solver
    except ImportError:
        print("torchdeq is not installed: its rows are left out")
        return {}

    def solve(name: str, **settings: int) -> torch.Tensor:
        return get_solver(name)(f, torch.zeros_like(x), max_iter=n, tol=0.0, **settings)[0]

    return {
        "torchdeq fixed_point_iter": partial(solve, "fixed_point_iter"),
        "torchdeq anderson, m 6": partial(solve, "anderson", m=6),
    }


if __name__ == "__main__":
    common.run(main)
