"""Which solver, at which tolerance, in which window: what a solve costs, and how good its answer is.

Every solver solves the same sequences with a model trained on A5 (state tracking), small language models
and a random model. The models are trained first, minutes, and kept in --models; --model takes others.

A row tells evaluations a token took part in, passes (calls of f over a window), time, peak memory (CUDA),
the share of tokens that converged, the residual recomputed by one more f at the z returned, accuracy or
perplexity, how far earlier outputs move when a later token changes ("leak"), and the distance to the
equilibrium found in float64 at a tolerance of 1e-8.

Every row is checked: z finite; where all tokens so far converged, recomputed residual and distance in
proportion to the tolerance (the distance times what slow contraction makes of it); leak exactly 0 in token
scope. What fails is named in "problem", and drawn in red. Rows are written as they come: the same command
goes on where it was interrupted.

    python benchmarks/solvers.py --quick                       # minutes on two cores
    python benchmarks/solvers.py --device cuda --output runs/benchmarks/solvers-h100
    python benchmarks/solvers.py --model runs/a5 --solvers picard-0.7 anderson-5 --windows all 8 1
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import checksum, describe_machine, finish, measure_grid, peak_mib, print_table, stopwatch
from torch import Tensor
from trained import (
    default_text,
    held_out_rows,
    language_model,
    load_language_model,
    load_word_problem,
    text_rows,
    word_problem,
)

from deqseq import ImplicitSequenceLayer, LayerOutput, Residual, Solver, Status, kernels
from deqseq.backbones import Mamba2Backbone
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.ops.residual import relative, residual_norms
from deqseq.solvers import Anderson, Broyden, Picard, TorchDEQ
from deqseq.tasks.common.figures import log_scale, pyplot
from deqseq.tasks.common.runs import RunFolder
from deqseq.tasks.state_tracking.evaluate import held_out

SOLVERS: dict[str, Callable[[], Solver]] = {
    **{f"picard-{damping}": partial(Picard, damping) for damping in (1.0, 0.8, 0.7, 0.5)},
    **{f"anderson-{memory}": partial(Anderson, memory) for memory in (1, 2, 5)},
    "anderson-5-damped": partial(Anderson, 5, damping=0.7),
    **{f"broyden-{memory}": partial(Broyden, memory) for memory in (4, 8)},
    "anderson-5-sequence": partial(Anderson, 5, scope="sequence"),
    "broyden-8-sequence": partial(Broyden, 8, scope="sequence"),
    **{f"torchdeq-{name}": partial(TorchDEQ, name) for name in ("fixed_point_iter", "anderson", "broyden")},
}
WINDOWLESS = tuple(name for name in SOLVERS if name.startswith("torchdeq"))
CASES = ("A5", "mamba2", "llama", "random")


@dataclass
class Case:
    """What is solved, and what is known of its answer.

    Attributes:
        layer: in evaluation mode.
        x: (B, L, D) its input.
        metric, score: name of what a z (B, L, D) is worth, and its value.
        reference: (B, L, D) float64, the equilibrium.
        known: (B, L) bool, tokens whose reference, and that of all before them, converged.
        checksum: of the model's weights and the inputs: rows of another model are not taken for its own.
        gain: distance over tolerance, the largest of any token, where Picard's iteration in float64 stops at
            1e-3: where contraction is slow, a small residual may be far from the equilibrium.
    """

    layer: ImplicitSequenceLayer
    x: Tensor
    metric: str
    score: Callable[[Tensor], float | None]
    checksum: str
    reference: Tensor
    known: Tensor
    gain: float


@contextmanager
def solving(layer: ImplicitSequenceLayer, solver: Solver, policy: Residual) -> Iterator[None]:
    """The layer with another solver and policy, for a while."""
    before = layer.solver, layer.eval_convergence
    layer.solver, layer.eval_convergence = solver, policy
    try:
        yield
    finally:
        layer.solver, layer.eval_convergence = before


@torch.no_grad()
def solve_reference(layer: ImplicitSequenceLayer, x: Tensor) -> tuple[Tensor, Tensor, float]:
    """The reference of a :class:`Case`, in float64: equilibrium, known, gain."""
    exact = copy.deepcopy(layer).double()
    x, window = x.double(), min(8, x.shape[1])
    with kernels.use("torch"):
        with solving(exact, Anderson(5, damping=0.7), Residual(rtol=1e-8, max_iter=512)):
            out = exact(x, window=window)
        with solving(exact, Picard(0.5), Residual(rtol=1e-3, max_iter=512)):
            rough = exact(x, window=window)
    known = converged_so_far(out)
    far = relative_distance(rough.z, out.z)[known & converged_so_far(rough)]
    return out.z, known, far.max().item() / 1e-3 if len(far) else float("nan")


def relative_distance(z: Tensor, reference: Tensor) -> Tensor:
    """||z - reference|| / ||reference|| of every token, (B, L) float64."""
    reference = reference.double()
    return torch.linalg.vector_norm(z - reference, dim=-1) / torch.linalg.vector_norm(reference, dim=-1)


def converged_so_far(out: LayerOutput) -> Tensor:
    """(B, L) bool: the token and all before it converged. Behind one that did not, the map is another."""
    assert out.solution is not None
    return (out.solution.status != Status.CONVERGED).cumsum(1) == 0


def accuracy(model: ImplicitForCausalLM, targets: Tensor, z: Tensor) -> float:
    return (model.lm_head(z).argmax(-1) == targets).float().mean().item()


def perplexity(model: ImplicitForCausalLM, ids: Tensor, z: Tensor) -> float:
    logits = model.lm_head(z[:, :-1].float())
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).exp().item()


def make_case(name: str, options: argparse.Namespace) -> Case:
    """One of :data:`CASES`, or the model of a folder."""
    rows, length = options.batch, options.length
    model = None
    if name == "random":
        torch.manual_seed(0)
        backbone = Mamba2Backbone(64, n_layer=2, d_state=16, headdim=32)
        layer = ImplicitSequenceLayer(backbone).eval().to(options.device)
        x = torch.randn(rows, length, 64).to(options.device)
        return Case(layer, x, "score", lambda z: None, checksum(layer, x), *solve_reference(layer, x))
    folder = Path(name)
    if name == "A5":
        folder = word_problem(options.models, options.quick)
    elif name in CASES:
        folder, data = language_model(options.models, name, options.text, options.quick)
        model = load_language_model(folder, options.device)
        ids = held_out_rows(data, rows, length)
    elif not (folder / "training.json").exists():
        model = load_language_model(folder, options.device)
        text = Path(options.text[0]) if options.text else default_text(options.models)
        ids = text_rows(folder, text, rows, length)
    if model is None:
        model, settings = load_word_problem(folder)
        fresh = held_out(settings, length, rows, seed=0)
        ids, targets = fresh.tokens, fresh.targets.to(options.device)
    model.to(options.device).eval()
    ids = ids.to(options.device)
    x, layer = model.model.embed_tokens(ids).detach(), model.model.layer
    assert isinstance(layer, ImplicitSequenceLayer)
    if name in ("mamba2", "llama") or not (folder / "training.json").exists():
        score, inputs = partial(perplexity, model, ids), (ids,)
        return Case(layer, x, "perplexity", score, checksum(model, *inputs), *solve_reference(layer, x))
    score, inputs = partial(accuracy, model, targets), (ids, targets)
    return Case(layer, x, "accuracy", score, checksum(model, *inputs), *solve_reference(layer, x))


def change_token(x: Tensor, t: int) -> Tensor:
    """x (B, L, D) with noise as large as x at token t.

    Raises:
        ValueError: nothing changed, as where x is zero: no leak would show.
    """
    noise = torch.randn(x[:, t].shape, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, t] = noise.to(x) * x.square().mean().sqrt()
    if bool((changed[:, t] == x[:, t]).all(-1).any()):
        raise ValueError(f"token {t} must change in every sequence for a leak to show")
    return changed


@torch.no_grad()
def measure(cases: Mapping[str, Case], max_iter: int, device: str, key: Mapping[str, Any]) -> dict[str, Any]:
    """Solve twice, the second time timed and with a token changed; everything that a row tells."""
    case = cases[key["case"]]
    dtype = getattr(torch, key["dtype"])
    tolerance = key["tolerance"]
    window = None if key["window"] == "all" else int(key["window"])
    solver = SOLVERS[key["solver"]]()
    t = case.x.shape[1] * 3 // 4
    changed = change_token(case.x, t)
    outs: list[LayerOutput] = []

    def solve(x: Tensor) -> None:
        outs.append(case.layer(x, window=window))

    autocast = torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16)
    with autocast, solving(case.layer, solver, Residual(rtol=tolerance, max_iter=max_iter)):
        memory = peak_mib(partial(solve, case.x), device)
        seconds = stopwatch(partial(solve, changed), device)
        z = outs[0].z
        fz = case.layer.backbone(z, case.layer.backbone.prepare(case.x))
    solution = outs[0].solution
    assert solution is not None
    residual = relative(*residual_norms(z, fz))
    distance = relative_distance(z, case.reference)
    leak = (outs[1].z - z)[:, :t].abs().max().item()
    sure = converged_so_far(outs[0]) & case.known
    slack = tolerance + 4 * torch.finfo(dtype).eps
    problems = {
        "not finite": not bool(torch.isfinite(z).all()),
        "residual": bool((residual > 3 * slack)[sure].any()),
        "far": bool((distance > 3 * max(1.0, case.gain) * slack)[sure].any()),
        "leak": solver.causal and leak != 0,
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
        case.metric: case.score(z),
        "leak": leak,
    }


def grid(options: argparse.Namespace, cases: Mapping[str, Case]) -> list[dict[str, Any]]:
    """The rows to measure. bfloat16 has the loosest tolerance only: its rounding is above others."""
    loosest = max(options.tolerances)
    return [
        {
            "case": case,
            "checksum": cases[case].checksum,
            "dtype": dtype,
            "solver": solver,
            "window": window,
            "tolerance": tolerance,
        }
        for case, dtype, solver, window, tolerance in product(
            cases, options.dtypes, options.solvers, options.windows, options.tolerances
        )
        if (window == "all" or solver not in WINDOWLESS) and (dtype == "float32" or tolerance == loosest)
    ]


def plot_heat(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Evaluations a token, solver by window and tolerance; red: a problem, brackets: not all converged."""
    plt = pyplot()
    if plt is None:
        return
    solvers = list(dict.fromkeys(row["solver"] for row in rows))
    columns = list(dict.fromkeys((row["window"], row["tolerance"]) for row in rows))
    table = torch.full((len(solvers), len(columns)), torch.nan)
    size = (2.4 + 0.8 * len(columns), 0.9 + 0.26 * len(solvers))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for row in rows:
        i, j = solvers.index(row["solver"]), columns.index((row["window"], row["tolerance"]))
        text, colour = "×", "red"
        if "evaluations" in row:
            table[i, j] = row["evaluations"]
            text = f"{row['evaluations']:.1f}"
            text = text if row["converged"] == 1 else f"({text})"
            colour = "red" if row["problem"] else "black"
        axes.text(j, i, text, ha="center", va="center", fontsize=7, color=colour)
    axes.imshow(table.log().tolist(), aspect="auto", cmap="YlGnBu", alpha=0.6)
    axes.set_xticks(range(len(columns)), [f"{w}\n{t:g}" for w, t in columns], fontsize=7)
    axes.set_yticks(range(len(solvers)), solvers, fontsize=7)
    axes.set_xlabel("window, tolerance", fontsize=8)
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"wrote {path}")


def plot_pareto(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Evaluations and seconds against the distance to the equilibrium; hollow: not all converged."""
    plt = pyplot()
    rows = [row for row in rows if "evaluations" in row and row["dtype"] == "float32"]
    if plt is None or not rows:
        return
    cases = list(dict.fromkeys(row["case"] for row in rows))
    families = list(dict.fromkeys(family(row) for row in rows))
    windows = list(dict.fromkeys(row["window"] for row in rows))
    shape = (2, len(cases))
    figure, grid = plt.subplots(
        *shape, figsize=(3.2 * len(cases), 5), squeeze=False, sharey="col", layout="constrained"
    )
    for (i, cost), (j, case) in product(enumerate(("evaluations", "seconds")), enumerate(cases)):
        axes = grid[i][j]
        for row in (row for row in rows if row["case"] == case):
            colour = f"C{families.index(family(row))}"
            marker = "osD^v<>P"[windows.index(row["window"]) % 8]
            face = colour if row["converged"] == 1 else "none"
            axes.plot(row[cost], row["distance"], marker, color=colour, markerfacecolor=face, markersize=5)
        log_scale(axes.xaxis)
        axes.set_yscale("log")
        axes.set_xlabel("evaluations a token" if cost == "evaluations" else "seconds", fontsize=8)
        axes.tick_params(which="both", labelsize=7)
        axes.grid(alpha=0.3)
        if i == 0:
            axes.set_title(case, fontsize=9)
        if j == 0:
            axes.set_ylabel("distance to the equilibrium", fontsize=8)
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=f"C{i}", marker="o", ls="", label=name) for i, name in enumerate(families)]
    marks += [
        Line2D([], [], color="grey", marker="osD^v<>P"[i % 8], ls="", label=f"window {window}")
        for i, window in enumerate(windows)
    ]
    marks.append(
        Line2D([], [], color="grey", marker="o", ls="", markerfacecolor="none", label="not all converged")
    )
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks) // 2 + 1, fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"wrote {path}")


def family(row: Mapping[str, Any]) -> str:
    """picard, anderson, broyden, torchdeq; with their scope."""
    name = row["solver"].partition("-")[0]
    return f"{name}, sequence" if "sequence" in row["solver"] else name


def window_size(text: str) -> str:
    """A positive number, or all."""
    if text != "all" and not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"a window must be at least 1, or all, got {text!r}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="smaller models, fewer rows")
    add("--cases", nargs="+", choices=CASES, help="default: all; with --quick all but llama")
    add("--model", nargs="+", metavar="FOLDER", help="state-tracking runs or language models, instead")
    add("--text", nargs="+", metavar="FILE", help="for language models (default: Python's help pages)")
    add("--solvers", nargs="+", choices=SOLVERS, default=list(SOLVERS), metavar="NAME",
        help=f"of {', '.join(SOLVERS)} (default: all)")  # fmt: skip
    add("--tolerances", nargs="+", type=float, default=[0.05, 1e-3], help="default: 0.05 1e-3")
    add(
        "--windows",
        nargs="+",
        type=window_size,
        metavar="N",
        help="tokens solved at a time, or all (default: all 16 4; quick: all 8)",
    )
    add("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    add("--batch", type=int, help="sequences (default: 32; quick: 4)")
    add("--length", type=int, help="tokens of each (default: 64; quick: 32)")
    add("--max-iter", type=int, default=96, help="evaluations a token may take part in (default: 96)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--models", type=Path, default=Path("runs/benchmarks/models"), help="where trained models are kept")
    add("--output", type=Path, default=Path("runs/benchmarks/solvers"), help="folder of rows and figures")
    options = parser.parse_args()
    quick = options.quick
    options.batch = options.batch or (4 if quick else 32)
    options.length = options.length or (32 if quick else 64)
    options.windows = options.windows or (["all", "8"] if quick else ["all", "16", "4"])
    names = options.model or options.cases or [name for name in CASES if not (quick and name == "llama")]
    machine = describe_machine(options.device)
    same = {"batch": options.batch, "length": options.length, "max_iter": options.max_iter, "quick": quick}
    labels = [Path(name).resolve().name for name in names]  # of figures
    try:
        if len(set(labels)) < len(labels):
            raise ValueError(f"models must be in folders of different names, got {', '.join(names)}")
        folder = RunFolder(options.output, {**same, "machine": machine["device"]})
        cases = {name: make_case(name, options) for name in names}
        folder.start()
        measured = partial(measure, cases, options.max_iter, options.device)
        rows = measure_grid(options.output / "rows.jsonl", grid(options, cases), measured)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for (name, label), dtype in product(zip(names, labels, strict=True), options.dtypes):
        mine = [row for row in rows if (row["case"], row["dtype"]) == (name, dtype)]
        shown = [{k: v for k, v in row.items() if k not in ("case", "checksum", "dtype")} for row in mine]
        print_table(
            f"\n{name}, {dtype}, {options.batch} x {options.length} tokens, {machine['device']}", shown
        )
        plot_heat(
            mine, f"{label}, {dtype}: evaluations a token", options.output / f"heat-{label}-{dtype}.png"
        )
    plot_pareto(rows, options.output / "pareto.png")
    settings = {**vars(options), "models": str(options.models), "output": str(options.output)}
    references = {
        name: {"share converged": case.known.float().mean().item(), "gain": case.gain}
        for name, case in cases.items()
    }
    finish(
        str(options.output / "results.json"),
        {"settings": settings, "machine": machine, "references": references, "rows": rows},
    )
    failed = [row for row in rows if row["problem"]]
    if failed:
        print(f"{len(failed)} of {len(rows)} rows failed a check: see their problem", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
