"""Measure the overhead of the loop that solves z = f(z).

The overhead is the time of a solve with n iterations, divided by the time of n bare evaluations of f. Here f
is one Mamba2 layer, without autograd. Every solver runs exactly n iterations. The solve in the row "picard,
tolerance never met" also computes residuals and compares them with a tolerance. If torchdeq is installed, the
script also measures its solvers.

The script first checks that Picard iteration returns the same result as n applications of f. Then solves and
bare evaluations alternate, so that both run under the same load. The table has the median ratio of their
times, and the residual of every solver's result.

    python benchmarks/loop_overhead.py
    python benchmarks/loop_overhead.py --device cuda --dtype bfloat16 --batch 512
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import common
import torch
from torch import Tensor

from deqseq import ConvergencePolicy, FixedIterations, Problem, Residual, SolveOptions, Solver, search
from deqseq.backbones import Mamba2Backbone
from deqseq.solvers import Anderson, Broyden, Picard


@torch.no_grad()
def main() -> None:
    made = common.parser(__doc__, "loop_overhead.json", device="cpu")
    add = made.add_argument
    add("--d-model", type=int, default=256)
    add("--length", type=int, default=256)
    add("--batch", type=int, default=8)
    add("--iterations", type=int, default=16, help="iterations n of a solve")
    add("--rounds", type=int, default=9)
    add("--dtype", default="float32")
    options = made.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    backbone = Mamba2Backbone(options.d_model, n_layer=1).to(options.device, dtype)
    shape, n = (options.batch, options.length, options.d_model), options.iterations
    x = torch.randn(shape, device=options.device, dtype=dtype)

    context = backbone.prepare(x)
    f = partial(backbone, context=context)

    def bare() -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(n):
            z = f(z)
        return z

    def ours(solver: Solver, policy: ConvergencePolicy | None = None) -> Tensor:
        how = SolveOptions(solver, policy or FixedIterations(n))
        return search(Problem(backbone, context, torch.zeros_like(x), how)).z

    def theirs(name: str, **settings: int) -> Tensor:
        from torchdeq.solver import get_solver

        return get_solver(name)(f, torch.zeros_like(x), max_iter=n, tol=0.0, **settings)[0]

    solves: dict[str, Callable[[], Tensor]] = {
        "picard": partial(ours, Picard()),
        "picard, tolerance never met": partial(ours, Picard(), Residual(rtol=1e-30, max_iter=n)),
        "picard, damping 0.8": partial(ours, Picard(0.8)),
        "anderson, memory 5": partial(ours, Anderson(5)),
        "anderson, memory 5, sequence": partial(ours, Anderson(5, scope="sequence")),
        "broyden, memory 8": partial(ours, Broyden(8)),
    }
    if find_spec("torchdeq"):
        solves["torchdeq fixed_point_iter"] = partial(theirs, "fixed_point_iter")
        solves["torchdeq anderson, m 6"] = partial(theirs, "anderson", m=6)
    else:
        print("torchdeq is not installed: its rows are left out")
    torch.testing.assert_close(solves["picard"](), bare(), rtol=0, atol=0)
    rows = []
    for name, solve in solves.items():
        z = solve()
        residual = common.relative_distance(z, f(z)).mean().item()
        seconds, ratio = common.time_over(bare, solve, options.device, options.rounds)
        times = {"evaluations": n, "seconds": seconds, "over bare evaluations": ratio}
        rows.append({"solver": name, **times, "residual after": residual})
    common.report(f"n = {n} evaluations at {shape}, {options.dtype}", options, rows)


if __name__ == "__main__":
    common.run(main)
