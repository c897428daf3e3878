"""What a gradient strategy costs, how near it comes to the exact gradient, and what training makes of it.

The exact gradient of the loss of a trained A5 model is found in float64 by implicit differentiation at a
tolerance of 1e-9, and checked by finite differences along a random direction. Every strategy then takes
the gradient of the same loss in float32:

    cosine, norm    at the exact fixed point (its own error alone; unrolling knows no fixed point)
    median          cosine of the gradient at the embeddings, median over sequences: in that of all
                    parameters the few sequences with huge gradients decide
    in use          as training takes it: the search starts at zero and stops at the training tolerance
    seconds         of that: search, gradient steps, backward pass
    graph MiB       what autograd keeps for the backward pass; peak MiB: of memory allocated (CUDA)

With --train-steps, a model on S3 goes on from the same half-trained weights, with the same batches, by
every strategy; accuracies are at the training length, and of the last ten tokens at twice that.

A strategy whose gradient is not finite, or an implicit differentiation that is not exact as far as its
tolerance says, is named in "problem". Rows are written as they come: the same command goes on where it was
interrupted.

    python benchmarks/gradients.py --quick                     # minutes on two cores
    python benchmarks/gradients.py --device cuda --output runs/benchmarks/gradients-h100
    python benchmarks/gradients.py --model runs/a5 --gradients phantom-4-0.8 implicit-0.0001 --train-steps 0
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import checksum, describe_machine, finish, measure_grid, peak_mib, print_table, stopwatch
from learning import descend
from torch import Tensor
from trained import load_word_problem, word_problem

from deqseq import GradientStrategy, ImplicitDifferentiation, Phantom, Residual, Status, Unrolled, kernels
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.solvers import Anderson
from deqseq.tasks.common.figures import log_scale, pyplot
from deqseq.tasks.common.runs import RunFolder
from deqseq.tasks.state_tracking.data import WordProblemStream
from deqseq.tasks.state_tracking.evaluate import evaluate, held_out
from deqseq.tasks.state_tracking.settings import TrainSettings


def implicit(tolerance: float, solver: str | None = None) -> ImplicitDifferentiation:
    return ImplicitDifferentiation(solver, Residual(rtol=tolerance, max_iter=256))


GRADIENTS: dict[str, Callable[[], GradientStrategy]] = {
    **{f"phantom-{k}-{d}": partial(Phantom, k, d) for k in (1, 2, 4, 8) for d in (0.5, 0.8, 1.0)},
    **{f"unrolled-{n}": partial(Unrolled, n) for n in (4, 8, 16, 32)},
    **{f"implicit-{tolerance}": partial(implicit, tolerance) for tolerance in (0.1, 0.01, 0.0001)},
    **{f"implicit-{t}-anderson": partial(implicit, t, "anderson") for t in (0.1, 0.01, 0.0001)},
    "implicit-0.01-broyden": partial(implicit, 0.01, "broyden"),
}
TRAINED_QUICKLY = ("phantom-1-1.0", "phantom-4-0.8", "unrolled-4", "implicit-0.1-anderson")


class Gradient(NamedTuple):
    """A gradient in float64; zero where nothing reaches a parameter."""

    parameters: Tensor  # (P,)
    x: Tensor  # (B, L * D), at the embeddings

    def cosine(self, other: Gradient) -> float:
        return F.cosine_similarity(self.parameters, other.parameters, dim=0).item()

    def norm(self, other: Gradient) -> float:
        """Relative to that of ``other``."""
        return (self.parameters.norm() / other.parameters.norm()).item()

    def median(self, other: Gradient) -> float:
        """The median over sequences of the cosine at their embeddings."""
        return F.cosine_similarity(self.x, other.x, dim=1).median().item()


@dataclass
class Subject:
    """A batch, its equilibrium, and whose it is.

    Attributes:
        model: in training mode.
        ids, targets: (B, L) int64.
        z: (B, L, D) the equilibrium.
    """

    model: ImplicitForCausalLM
    ids: Tensor
    targets: Tensor
    z: Tensor

    def forward(self, z0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy, and the embeddings (B, L, D)."""
        x = self.model.model.embed_tokens(self.ids)
        logits = self.model(inputs_embeds=x, z0=z0).logits
        return F.cross_entropy(logits.flatten(0, 1), self.targets.flatten()), x

    def backward(self, loss: Tensor, x: Tensor) -> Gradient:
        wanted = [*self.model.parameters(), x]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        both = zip(found, wanted, strict=True)
        *flat, at_x = ((torch.zeros_like(p) if g is None else g).double() for g, p in both)
        return Gradient(torch.cat([g.flatten() for g in flat]), at_x.flatten(1))

    def gradient(self, z0: Tensor | None = None) -> Gradient:
        return self.backward(*self.forward(z0))


def exact_gradient(
    model: ImplicitForCausalLM, ids: Tensor, targets: Tensor
) -> tuple[Subject, Gradient, float]:
    """The sequences that have a certain equilibrium, in the model's dtype; their exact gradient; and its
    relative error along a random direction, against central differences.

    Raises:
        ValueError: no sequence converges.
    """
    exact = copy.deepcopy(model).double().train()
    layer = exact.model.layer
    layer.solver, layer.window = Anderson(5, damping=0.7), min(8, ids.shape[1])
    layer.set_convergence(Residual(rtol=1e-10, max_iter=512))
    layer.gradient = ImplicitDifferentiation(convergence=Residual(rtol=1e-9, max_iter=2048))
    with kernels.use("torch"):
        with torch.no_grad():
            out = exact.model(ids)
        keep = (out.solution.status == Status.CONVERGED).all(1)
        if not keep.any():
            raise ValueError("no sequence converges in float64: a model that was trained longer may")
        subject = Subject(exact, ids[keep], targets[keep], out.last_hidden_state[keep])
        gradient = subject.gradient(subject.z)
        generator = torch.Generator().manual_seed(0)
        way = torch.randn(len(gradient.parameters), generator=generator, dtype=torch.float64)
        # No smaller: torch's weight_norm takes its root in float32 on GPUs, whatever the type.
        way, step = way.to(ids.device), 1e-5
        here = torch.nn.utils.parameters_to_vector(exact.parameters())
        with torch.no_grad():
            losses = []
            for sign in (1, -1):
                torch.nn.utils.vector_to_parameters(here + sign * step * way, exact.parameters())
                losses.append(subject.forward(subject.z)[0].item())
    slope, expected = (losses[0] - losses[1]) / (2 * step), (gradient.parameters @ way).item()
    subject = Subject(model, subject.ids, subject.targets, subject.z.float())
    return subject, gradient, abs(slope - expected) / abs(expected)


def graph_mib(function: Callable[[], Any]) -> tuple[Any, float]:
    """What ``function`` returns, and the MiB of other tensors than parameters that its graph keeps."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = function()
    return value, sum(kept.values()) / 2**20


def measure(subject: Subject, exact: Gradient, device: str, key: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a row tells."""
    strategy = subject.model.model.layer.gradient = GRADIENTS[key["gradient"]]()
    at_equilibrium = subject.gradient(subject.z) if strategy.searches else None
    (loss, x), graph = graph_mib(subject.forward)
    used = subject.backward(loss, x)
    del loss, x
    memory = peak_mib(subject.gradient, device)
    seconds = min(stopwatch(subject.gradient, device) for _ in range(3))
    problem = None if torch.isfinite(used.parameters).all() else "not finite"
    if isinstance(strategy, ImplicitDifferentiation) and at_equilibrium is not None:
        assert isinstance(strategy.convergence, Residual)
        if not 1 - at_equilibrium.cosine(exact) <= strategy.convergence.rtol:
            problem = "not exact"
    return {
        "problem": problem,
        "cosine": None if at_equilibrium is None else at_equilibrium.cosine(exact),
        "norm": None if at_equilibrium is None else at_equilibrium.norm(exact),
        "median": None if at_equilibrium is None else at_equilibrium.median(exact),
        "cosine in use": used.cosine(exact),
        "norm in use": used.norm(exact),
        "median in use": used.median(exact),
        "seconds": seconds,
        "graph MiB": graph,
        "peak MiB": memory,
    }


def half_trained(options: argparse.Namespace) -> tuple[ImplicitForCausalLM, TrainSettings]:
    """A model on a small word problem after its unrolled steps, from which every strategy goes on."""
    task = TrainSettings(group=options.group, d_model=64, batch_size=32)
    torch.manual_seed(task.seed)
    model = ImplicitForCausalLM(task.config()).to(options.device).train()
    descend(model, stream(task, (2, task.unrolled_length)), options.train_steps, lambda _: Unrolled(4))
    return model, task


def stream(task: TrainSettings, lengths: tuple[int, int]) -> WordProblemStream:
    p, size = task.identity_probability, task.batch_size
    return WordProblemStream(task.algebra, lengths, identity_probability=p, seed=task.seed, batch_size=size)


def train_on(
    start: ImplicitForCausalLM, task: TrainSettings, steps: int, sequences: int, key: Mapping[str, Any]
) -> dict[str, Any]:
    """Train on by a strategy; the accuracies then."""
    model = copy.deepcopy(start)
    strategy = GRADIENTS[key["gradient"]]()
    batches = stream(task, (task.min_length, task.length))
    losses: list[list[float]] = []
    seconds = stopwatch(
        lambda: losses.append(descend(model, batches, steps, lambda _: strategy)), model.device.type
    )
    found = {}
    for length in (task.length, 2 * task.length):
        fresh = held_out(task, length, sequences, seed=0)
        found[length] = evaluate(model, fresh.tokens, fresh.targets, max_iter=96)
    short, long = found.values()
    last = losses[0][-20:]
    return {
        "problem": None if torch.isfinite(torch.tensor(losses[0])).all() else "not finite",
        "loss": sum(last) / len(last),
        f"accuracy at {short.length}": short.accuracy,
        f"last ten at {long.length}": long.accuracy_last10,
        f"converged at {long.length}": long.converged,
        "seconds": seconds,
    }


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time and memory against the error of the direction, as training takes it."""
    plt = pyplot()
    rows = [row for row in rows if "seconds" in row]
    if plt is None or not rows:
        return
    figure, axes = plt.subplots(1, 2, figsize=(9, 5.5), sharey=True, layout="constrained")
    families = ("phantom", "unrolled", "implicit")
    for axis, cost in zip(axes, ("seconds", "graph MiB"), strict=True):
        for i, family in enumerate(families):
            mine = [row for row in rows if row["gradient"].startswith(family)]
            errors = [max(1 - row["median in use"], 1e-9) for row in mine]
            axis.plot([row[cost] for row in mine], errors, "osD"[i], color=f"C{i}", label=family)
            groups: list[list[tuple[float, float, str]]] = []  # x, y, name of points that lie on each other
            for row, error in zip(mine, errors, strict=True):
                x, point = row[cost], (row[cost], error, row["gradient"].partition("-")[2])
                for group in groups:
                    at, y, _ = group[0]
                    if max(x / at, at / x) < 1.4 and 0.6 < error / y < 1.7:
                        group.append(point)
                        break
                else:
                    groups.append([point])
            for xs, ys, names in (zip(*group, strict=True) for group in groups):
                at, text = (max(xs), statistics.geometric_mean(ys)), "\n".join(names)
                axis.annotate(text, at, (5, 0), textcoords="offset points", fontsize=6, va="center")
        log_scale(axis.xaxis)
        axis.set(xlabel=cost, yscale="log")
        axis.margins(x=0.1)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("1 - median cosine to the exact gradient, in use")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"wrote {path}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a smaller model, fewer trained strategies and steps")
    add("--model", type=Path, metavar="FOLDER", help="a state-tracking run to take gradients of, instead")
    add("--gradients", nargs="+", choices=GRADIENTS, default=list(GRADIENTS), metavar="NAME",
        help=f"of {', '.join(GRADIENTS)} (default: all)")  # fmt: skip
    add("--batch", type=int, help="sequences (default: 64; quick: 16)")
    add("--length", type=int, help="tokens of each (default: the model's longest in training)")
    add("--train-steps", type=int, help="by every strategy; 0: none (default: 300; quick: 100)")
    add("--trained", nargs="+", choices=GRADIENTS, metavar="NAME",
        help=f"strategies to train with (default: all; quick: {', '.join(TRAINED_QUICKLY)})")  # fmt: skip
    add("--group", default="S3", help="what they are trained on (default: S3)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--models", type=Path, default=Path("runs/benchmarks/models"), help="where trained models are kept")
    add("--output", type=Path, default=Path("runs/benchmarks/gradients"), help="folder of rows and figures")
    options = parser.parse_args()
    quick = options.quick
    options.batch = options.batch or (16 if quick else 64)
    if options.train_steps is None:
        options.train_steps = 100 if quick else 300
    options.trained = options.trained or (list(TRAINED_QUICKLY) if quick else options.gradients)
    machine = describe_machine(options.device)
    same = {name: getattr(options, name) for name in ("quick", "batch", "length", "group", "train_steps")}
    same["machine"] = machine["device"]
    try:
        model, settings = load_word_problem(options.model or word_problem(options.models, quick))
        length = options.length or settings.length
        fresh = held_out(settings, length, options.batch, seed=0)
        same["checksum"] = checksum(model, fresh.tokens, fresh.targets)
        folder = RunFolder(options.output, same)
        model.to(options.device).train()
        ids, targets = fresh.tokens.to(options.device), fresh.targets.to(options.device)
        subject, exact, error = exact_gradient(model, ids, targets)
        folder.start()
        print(f"exact gradient of {len(subject.ids)} sequences, {error:.1e} from finite differences")
        rows = measure_grid(
            options.output / "rows.jsonl",
            [{"gradient": name} for name in options.gradients],
            partial(measure, subject, exact, options.device),
        )
        trained = []
        if options.train_steps:
            start, task = half_trained(options)
            trained = measure_grid(
                options.output / "trained.jsonl",
                [{"gradient": name} for name in options.trained],
                partial(train_on, start, task, options.train_steps, 4 * options.batch),
            )
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print_table(f"\n{settings.group}, {len(subject.ids)} x {length} tokens, {machine['device']}", rows)
    plot(rows, options.output / "gradients.png")
    if trained:
        print_table(f"\n{options.group}, {options.train_steps} steps after as many unrolled ones", trained)
    finish(
        str(options.output / "results.json"),
        {
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "machine": machine,
            "error of the exact gradient": error,
            "rows": rows,
            "trained": trained,
        },
    )
    if error > 1e-3:
        print("the exact gradient disagrees with finite differences", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
