"""Measure the cost and the error of solves with different solvers, tolerances and windows.

Every solver solves the same sequences with several models: a model trained on A5 (state tracking), small
language models, and a model with random weights. The script first trains the models, which takes minutes, and
saves them in --models. The columns:

    evaluations     mean number of evaluations of f per token
    passes          number of calls of f; one call evaluates all tokens of a window
    seconds, MiB    time and peak memory (CUDA) of a solve
    converged       share of the tokens that converged
    residual        mean relative residual of the result
    distance        mean relative distance to the equilibrium (found in float64 at a tolerance of 1e-8)
    accuracy        share of correct predictions; language models have a column "perplexity" instead
    leak            largest change of a token's result when the input of a later token changes
    problem         the checks that failed; the heat maps show rows with a failed check in red

The result must be finite. The leak of a causal solver must be exactly 0. The residual must be at most three
times the tolerance. The distance must be below the same limit, or below a higher limit if f contracts slowly.
In each sequence, residual and distance are checked only before the first token that did not converge.

Every row is written as soon as it is measured, so the same command resumes an interrupted run.

    python benchmarks/solvers.py --quick                       # minutes on two cores
    python benchmarks/solvers.py --device cuda --output runs/benchmarks/solvers-h100
    python benchmarks/solvers.py --model runs/a5 --solvers picard-0.7 anderson:3 --windows all 8 1
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import common
import torch
from common import Row
from torch import Tensor

from deqseq import ConvergencePolicy, Residual, SolveOptions, Status, kernels
from deqseq.backbones import Mamba2Backbone
from deqseq.layer import ImplicitSequenceLayer, LayerOutput
from deqseq.policy import policies
from deqseq.solver import solvers
from deqseq.solvers import Anderson, Picard
from deqseq.tasks.common.figures import log_scale, save_figure
from deqseq.tasks.common.runs import RunFolder

if TYPE_CHECKING:
    import trained

SOLVERS: dict[str, str | dict[str, Any]] = {
    **{f"picard-{damping}": f"picard:{damping}" for damping in (1.0, 0.8, 0.7, 0.5)},
    **{f"anderson-{memory}": f"anderson:{memory}" for memory in (1, 2, 5)},
    "anderson-5-damped": {"name": "anderson", "memory": 5, "damping": 0.7},
    **{f"broyden-{memory}": f"broyden:{memory}" for memory in (4, 8)},
    "anderson-5-sequence": {"name": "anderson", "memory": 5, "scope": "sequence"},
    "broyden-8-sequence": {"name": "broyden", "memory": 8, "scope": "sequence"},
    **{f"torchdeq-{name}": f"torchdeq:{name}" for name in ("fixed_point_iter", "anderson", "broyden")},
}
CASES = ("A5", "mamba2", "llama", "random")


class Case(NamedTuple):
    """A layer, its input (B sequences, L tokens, width D), and the reference solution."""

    layer: ImplicitSequenceLayer  # in evaluation mode
    x: Tensor  # (B, L, D) the input of the layer
    subject: trained.Subject | None  # the trained model with this layer; ``None`` for random weights
    checksum: str  # checksum of the weights and the input; every row stores it
    reference: Tensor  # (B, L, D) float64, the equilibrium
    known: Tensor  # (B, L) bool, true if the reference converged at the token and at all earlier tokens
    # Picard iteration with a tolerance of 1e-3 (float64) stops at some distance from the equilibrium. The
    # gain is the largest relative distance of a token, divided by 1e-3. It is large if f contracts slowly.
    gain: float


def windowed(name: str) -> bool:
    """Whether the solver ``name`` can solve in windows."""
    spec = SOLVERS.get(name, name)
    return solvers.lookup(spec["name"] if isinstance(spec, dict) else spec.partition(":")[0]).windowed


def make_policy(name: str, tolerance: float, max_iter: int) -> ConvergencePolicy:
    """Make the policy ``name``. Set its options ``rtol`` and ``max_iter``, if it has them."""
    settings = {"rtol": tolerance, "max_iter": max_iter}
    return policies.create({"name": name, **{k: v for k, v in settings.items() if policies.takes(name, k)}})


@torch.no_grad()
def make_case(name: str, options: argparse.Namespace) -> Case:
    """Make a case. ``name`` is one of :data:`CASES`, or a folder with a model."""
    if name == "random":
        torch.manual_seed(0)
        backbone = Mamba2Backbone(64, n_layer=2, d_state=16, headdim=32)
        layer = ImplicitSequenceLayer(backbone).eval().to(options.device)
        x = torch.randn(options.batch, options.length, 64).to(options.device)
        return Case(layer, x, None, common.checksum(layer, x), *solve_exactly(layer, x))
    import trained

    subject = trained.find(name, options)
    layer, x = subject.model.model.layer, subject.model.model.embed_tokens(subject.ids)
    return Case(layer, x, subject, subject.checksum(), *solve_exactly(layer, x))


def solve_exactly(layer: ImplicitSequenceLayer, x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Compute the fields ``reference``, ``known`` and ``gain`` of a :class:`Case`, in float64."""
    exact = copy.deepcopy(layer).double()
    x, window = x.double(), min(8, x.shape[1])
    with kernels.use("torch"):
        fine, coarse = Residual(rtol=1e-8, max_iter=512), Residual(rtol=1e-3, max_iter=512)
        out = exact(x, solve=SolveOptions(Anderson(5, damping=0.7), fine, window))
        rough = exact(x, solve=SolveOptions(Picard(0.5), coarse, window))
    known = converged_so_far(out)
    far = common.relative_distance(rough.z, out.z)[known & converged_so_far(rough)]
    return out.z, known, far.max().item() / 1e-3 if len(far) else float("nan")


def converged_so_far(out: LayerOutput) -> Tensor:
    """(B, L) bool, true if the token and all earlier tokens converged."""
    assert out.solution is not None
    return (out.solution.status != Status.CONVERGED).cumsum(1) == 0


def change_token(x: Tensor, t: int) -> Tensor:
    """A copy of x (B, L, D) with token t replaced by noise. The noise has the root mean square of x."""
    noise = torch.randn(x[:, t].shape, generator=torch.Generator().manual_seed(0)).to(x)
    changed = x.clone()
    changed[:, t] = noise * x.square().mean().sqrt().clamp_min(1e-6)
    return changed


@torch.no_grad()
def measure(cases: Mapping[str, Case], options: argparse.Namespace, key: Mapping[str, Any]) -> Row:
    """Measure a row with two solves.

    The first solve gives the result and the peak memory. The second solve gets an input with one changed
    token, and gives the time and the leak.
    """
    case, tolerance, device = cases[key["case"]], key["tolerance"], options.device
    dtype, solver = getattr(torch, key["dtype"]), SOLVERS.get(key["solver"], key["solver"])
    window = None if key["window"] == "all" else int(key["window"])
    how = SolveOptions(solver, make_policy(options.policy, tolerance, options.max_iter), window)
    t = case.x.shape[1] * 3 // 4
    outs: list[LayerOutput] = []

    def solve(x: Tensor) -> None:
        outs.append(case.layer(x, solve=how))

    with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
        memory = common.peak_mib(partial(solve, case.x), device)
        seconds = common.stopwatch(partial(solve, change_token(case.x, t)), device)
        z = outs[0].z
        fz = case.layer.backbone(z, case.layer.backbone.prepare(case.x))
    solution = outs[0].solution
    assert solution is not None
    residual, distance = (common.relative_distance(z, exact) for exact in (fz, case.reference))
    leak = (outs[1].z - z)[:, :t].abs().max().item()
    sure = converged_so_far(outs[0]) & case.known
    slack = tolerance + 4 * torch.finfo(dtype).eps
    problems = {
        "not finite": not bool(torch.isfinite(z).all()),
        "residual": bool((residual > 3 * slack)[sure].any()),
        "far": bool((distance > 3 * max(1.0, case.gain) * slack)[sure].any()),
        "leak": how.solver.causal and leak != 0,
    }
    return {
        "problem": ", ".join(name for name, found in problems.items() if found) or None,
        "evaluations": solution.iterations.double().mean().item(),
        "passes": solution.nfe,
        "seconds": seconds,
        "MiB": memory,
        "converged": (solution.status == Status.CONVERGED).double().mean().item(),
        "residual": residual.double().mean().item(),
        "distance": distance.mean().item(),
        **(case.subject.score(z) if case.subject else {"score": None}),
        "leak": leak,
    }


def grid(options: argparse.Namespace, cases: Mapping[str, Case]) -> list[Row]:
    """The keys of the rows to measure: every combination of case, type, solver, window and tolerance.

    bfloat16 is measured with the largest tolerance only, because rounding errors exceed smaller tolerances.
    Solvers that cannot solve in windows are measured without a window only.
    """
    names = ("case", "checksum", "dtype", "solver", "window", "tolerance")
    axes = options.dtypes, options.solvers, options.windows, options.tolerances
    return [
        dict(zip(names, (case, cases[case].checksum, dtype, solver, window, tolerance), strict=True))
        for case, dtype, solver, window, tolerance in product(cases, *axes)
        if (window == "all" or windowed(solver))
        and (dtype == "float32" or tolerance == max(options.tolerances))
    ]


def unique(values: Iterable[Any]) -> list[Any]:
    """``values`` without repetitions, in the order of their first occurrence."""
    return list(dict.fromkeys(values))


def draw_heat(rows: Sequence[Row], title: str, axes: Sequence[Any]) -> None:
    """Draw a table of evaluations per token.

    A red number: the row has a problem. A number in brackets: not all tokens converged.
    """
    (ax,) = axes
    names = unique(row["solver"] for row in rows)
    columns = unique((row["window"], row["tolerance"]) for row in rows)
    ax.figure.set_size_inches(2.4 + 0.8 * len(columns), 0.9 + 0.26 * len(names))
    table = torch.full((len(names), len(columns)), torch.nan)
    for row in rows:
        i, j = names.index(row["solver"]), columns.index((row["window"], row["tolerance"]))
        text = "×"
        if "evaluations" in row:
            table[i, j] = row["evaluations"]
            text = f"{row['evaluations']:.1f}" if row["converged"] == 1 else f"({row['evaluations']:.1f})"
        ax.text(j, i, text, ha="center", va="center", color="red" if row["problem"] else "black")
    ax.imshow(table.log().tolist(), aspect="auto", cmap="YlGnBu", alpha=0.6)
    ax.set_xticks(range(len(columns)), [f"{window}\n{tolerance:g}" for window, tolerance in columns])
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="window, tolerance", title=title)
    ax.grid(False)


def draw_pareto(rows: Sequence[Row], axes: Sequence[Any]) -> None:
    """Plot distance to the equilibrium over cost. Hollow markers: not all tokens converged."""
    from matplotlib.lines import Line2D

    kinds = [common.family(row["solver"]) + ", sequence" * ("sequence" in row["solver"]) for row in rows]
    cases, windows = (unique(row[name] for row in rows) for name in ("case", "window"))
    colours = {kind: f"C{i}" for i, kind in enumerate(unique(kinds))}
    markers = dict(zip(windows, cycle("osD^v<>P")))
    costs = {"evaluations": "evaluations a token", "seconds": "seconds"}
    for ax, (cost, case) in zip(axes, product(costs, cases), strict=True):
        for row, kind in zip(rows, kinds, strict=True):
            if row["case"] == case:
                style = {"color": colours[kind], "fillstyle": "full" if row["converged"] == 1 else "none"}
                ax.plot(row[cost], row["distance"], markers[row["window"]], **style)
        log_scale(ax.xaxis)
        label = "distance to the equilibrium" if case == cases[0] else ""
        ax.set(xlabel=costs[cost], ylabel=label, yscale="log", title=case if cost == "evaluations" else "")
    mark = partial(Line2D, [], [], ls="", color="grey", marker="o")
    marks = [mark(color=colour, label=kind) for kind, colour in colours.items()]
    marks += [mark(marker=marker, label=f"window {window}") for window, marker in markers.items()]
    marks += [mark(fillstyle="none", label="not all converged")]
    axes[0].figure.legend(handles=marks, loc="outside lower center", ncols=len(marks) // 2 + 1)


def window_size(text: str) -> str:
    """Check that ``text`` is a window size: a positive number, or ``all``."""
    if text != "all" and int(text) < 1:
        raise ValueError
    return text


def main() -> int:
    made = common.comparison_parser(__doc__, "solvers")
    add = made.add_argument
    add("--cases", nargs="+", choices=CASES, help="default: all; with --quick all but llama")
    add("--model", nargs="+", metavar="FOLDER", help="state-tracking runs or language models to use instead")
    add("--text", nargs="+", metavar="FILE", help="text for language models (default: Python's help pages)")
    add("--solvers", nargs="+", default=list(SOLVERS), metavar="NAME",
        help=f"{', '.join(SOLVERS)} (default: all), or the name of any registered solver")  # fmt: skip
    add("--policy", default="residual", metavar="NAME", help="convergence policy (default: residual)")
    add("--tolerances", nargs="+", type=float, default=[0.05, 1e-3], help="default: 0.05 1e-3")
    add("--windows", nargs="+", type=window_size, metavar="N",
        help="tokens solved at a time, or all (default: all 16 4; quick: all 8)")  # fmt: skip
    add("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    add("--max-iter", type=int, default=96, help="maximum number of evaluations per token (default: 96)")
    options = common.parse(
        made, batch=(32, 4), length=(64, 32), windows=(["all", "16", "4"], ["all", "8"]),
        cases=(list(CASES), [name for name in CASES if name != "llama"]),
    )  # fmt: skip
    names = options.model or options.cases
    for name in options.solvers:  # raise for unknown names before the long training
        windowed(name)
    make_policy(options.policy, max(options.tolerances), options.max_iter)
    labels = {name: Path(name).resolve().name for name in names}
    if len(set(labels.values())) < len(names):
        raise ValueError(f"models must be in folders of different names, got {', '.join(names)}")
    output, machine = options.output, common.machine_name(options.device)
    same = {name: getattr(options, name) for name in ("batch", "length", "max_iter", "quick", "policy")}
    folder = RunFolder(output, {**same, "machine": machine})
    cases = {name: make_case(name, options) for name in names}
    folder.start()
    rows = common.measure_grid(output / "rows.jsonl", grid(options, cases), partial(measure, cases, options))

    for name, dtype in product(names, options.dtypes):
        mine = [row for row in rows if (row["case"], row["dtype"]) == (name, dtype)]
        shown = [{k: v for k, v in row.items() if k not in ("case", "checksum", "dtype")} for row in mine]
        common.print_table(f"\n{name}, {dtype}, {options.batch} x {options.length} tokens, {machine}", shown)
        draw = partial(draw_heat, mine, f"{labels[name]}, {dtype}: evaluations a token")
        save_figure(output / f"heat-{labels[name]}-{dtype}.png", draw)
    if done := [row for row in rows if "evaluations" in row and row["dtype"] == "float32"]:
        count = len(unique(row["case"] for row in done))
        size = (3.2 * count, 5)
        save_figure(output / "pareto.png", partial(draw_pareto, done), 2, count, size, sharey="col")
    known = {n: {"share converged": c.known.float().mean().item(), "gain": c.gain} for n, c in cases.items()}
    common.write_results(output / "results.json", options, references=known, rows=rows)
    if failed := sum(bool(row["problem"]) for row in rows):
        print(f"{failed} of {len(rows)} rows failed a check: see the column problem", file=sys.stderr)
    return 0


if __name__ == "__main__":
    common.run(main)
