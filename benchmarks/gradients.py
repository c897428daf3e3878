"""Accuracy and cost of every gradient strategy, and training with each strategy.

The script loads a model that was trained on A5 (state tracking), and computes the exact gradient of its loss
by implicit differentiation in float64, with a tolerance of 1e-9. Finite differences along a random direction
check the exact gradient. Then every strategy computes the gradient in float32. The columns:

    cosine          cosine between the strategy's gradient and the exact gradient, both with respect to the
                    parameters
    norm            norm of the strategy's gradient divided by the norm of the exact gradient
    median          cosine between the two gradients with respect to the embeddings of one sequence, median
                    over the sequences. A few sequences with huge gradients can dominate "cosine", but not
                    "median"
    ... in use      cosine, norm and median if the search starts at zero, as in training. In the columns
                    without "in use", the search starts at the exact fixed point. Unrolling does not search,
                    so its columns without "in use" are empty
    seconds         time of the forward and backward pass
    graph MiB       memory that autograd keeps for the backward pass
    peak MiB        peak of allocated memory (CUDA)
    problem         "not finite": the gradient has infinities or NaN; "not exact": the error 1 - cosine of
                    implicit differentiation is above its tolerance

Afterwards, the script trains a model on S3 for --train-steps steps by unrolling. Every strategy in --trained
trains a copy of this model for another --train-steps steps. All strategies get the same batches. A second
table shows two accuracies: of all tokens at the training length, and of the last ten tokens at twice this
length. With --train-steps 0, the script skips this training.

Every row is written as soon as it is measured, so the same command resumes an interrupted run.

    python benchmarks/gradients.py --quick                     # minutes on two cores
    python benchmarks/gradients.py --device cuda --output runs/benchmarks/gradients-h100
    python benchmarks/gradients.py --model runs/a5 --gradients phantom-4-0.8 implicit-0.0001 --train-steps 0
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple

import common
import torch
import torch.nn.functional as F
import trained
from common import Row
from learning import descend, stream
from torch import Tensor

from deqseq import ImplicitDifferentiation, Residual, SolveOptions, Status, Unrolled, kernels
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.gradient import gradients
from deqseq.solvers import Anderson
from deqseq.tasks.common.figures import log_scale, save_figure
from deqseq.tasks.common.runs import RunFolder
from deqseq.tasks.state_tracking.evaluate import evaluate_fresh
from deqseq.tasks.state_tracking.settings import TrainSettings

GRADIENTS: dict[str, str | dict[str, Any]] = {
    **{
        f"phantom-{steps}-{damping}": {"name": "phantom", "steps": steps, "damping": damping}
        for steps, damping in product((1, 2, 4, 8), (0.5, 0.8, 1.0))
    },
    **{f"unrolled-{n}": f"unrolled:{n}" for n in (4, 8, 16, 32)},
    **{
        "-".join(filter(None, ("implicit", str(rtol), solver))): {
            "name": "implicit",
            "solver": solver,
            "convergence": {"name": "residual", "rtol": rtol, "max_iter": 256},
        }
        for solver, rtol in [*product((None, "anderson"), (0.1, 0.01, 0.0001)), ("broyden", 0.01)]
    },
}
TRAINED_QUICKLY = ["phantom-1-1.0", "phantom-4-0.8", "unrolled-4", "implicit-0.1-anderson"]


class Gradient(NamedTuple):
    """A gradient of the loss in float64. It is zero for parameters that do not affect the loss."""

    parameters: Tensor  # (P,), with respect to all P parameters
    x: Tensor  # (B, L * D), with respect to the embeddings of B sequences (L tokens of width D)

    def errors(self, exact: Gradient, suffix: str = "") -> Row:
        """The columns cosine, norm and median, which compare this gradient with the exact gradient."""
        return {
            f"cosine{suffix}": F.cosine_similarity(self.parameters, exact.parameters, dim=0).item(),
            f"norm{suffix}": (self.parameters.norm() / exact.parameters.norm()).item(),
            f"median{suffix}": F.cosine_similarity(self.x, exact.x, dim=1).median().item(),
        }


class Problem(NamedTuple):
    """A model in training mode, its input ids and targets (B, L), and the equilibrium z (B, L, D)."""

    model: ImplicitForCausalLM
    ids: Tensor
    targets: Tensor
    z: Tensor

    def forward(self, z0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the mean cross-entropy and the embeddings (B, L, D).

        The search for the equilibrium starts at ``z0``, by default at zero.
        """
        x = self.model.model.embed_tokens(self.ids)
        logits = self.model(inputs_embeds=x, z0=z0).logits
        return F.cross_entropy(logits.flatten(0, 1), self.targets.flatten()), x

    def backward(self, loss: Tensor, x: Tensor) -> Gradient:
        inputs = [*self.model.parameters(), x]
        found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        *parameters, at_x = (g.double() for g in found)
        return Gradient(torch.cat([g.flatten() for g in parameters]), at_x.flatten(1))

    def gradient(self, z0: Tensor | None = None) -> Gradient:
        return self.backward(*self.forward(z0))


def exact_gradient(
    model: ImplicitForCausalLM, ids: Tensor, targets: Tensor
) -> tuple[Problem, Gradient, float]:
    """Compute the exact gradient of the loss in float64. Sequences that do not converge are left out.

    Returns the problem with the remaining sequences, the exact gradient, and an error. The error is the
    relative difference between this gradient and central differences along a random direction.

    Raises:
        ValueError: no sequence converges.
    """
    exact = copy.deepcopy(model).double().train()
    layer = exact.model.layer
    convergence = Residual(rtol=1e-10, max_iter=512)
    layer.train_solve = SolveOptions(Anderson(5, damping=0.7), convergence, min(8, ids.shape[1]))
    layer.gradient = ImplicitDifferentiation(convergence=Residual(rtol=1e-9, max_iter=2048))
    with kernels.use("torch"):
        with torch.no_grad():
            out = exact.model(ids)
        keep = (out.solution.status == Status.CONVERGED).all(1)
        if not keep.any():
            raise ValueError("no sequence converges in float64: a model that was trained longer may")
        problem = Problem(exact, ids[keep], targets[keep], out.last_hidden_state[keep])
        gradient = problem.gradient(problem.z)
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(len(gradient.parameters), generator=generator, dtype=torch.float64)
        # Use a step of 1e-5 for the central differences. A smaller step would lose precision, because torch's
        # weight_norm computes partly in float32 on GPUs.
        direction, step = direction.to(ids.device), 1e-5
        here = torch.nn.utils.parameters_to_vector(exact.parameters())
        losses = []
        with torch.no_grad():
            for moved in (here + step * direction, here - step * direction):
                torch.nn.utils.vector_to_parameters(moved, exact.parameters())
                losses.append(problem.forward(problem.z)[0].item())
    slope = (losses[0] - losses[1]) / (2 * step)
    expected = (gradient.parameters @ direction).item()
    return problem._replace(model=model, z=problem.z.float()), gradient, abs(slope / expected - 1)


def graph_mib(function: Callable[[], Any]) -> tuple[Any, float]:
    """Call ``function``. Returns its result, and the MiB that autograd keeps for the backward pass.

    The parameters are not counted.
    """
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = function()
    return value, sum(kept.values()) / 2**20


def measure(problem: Problem, exact: Gradient, device: str, key: Mapping[str, Any]) -> Row:
    """Measure the errors and costs of the strategy ``key["gradient"]``."""
    strategy = problem.model.model.layer.gradient = make_gradient(key["gradient"])
    at_equilibrium = dict.fromkeys(("cosine", "norm", "median"))
    if strategy.searches:
        at_equilibrium = problem.gradient(problem.z).errors(exact)
    (loss, x), graph = graph_mib(problem.forward)
    used = problem.backward(loss, x)
    del loss, x
    memory = common.peak_mib(problem.gradient, device)
    seconds = statistics.median(common.stopwatch(problem.gradient, device) for _ in range(3))
    wrong = None if torch.isfinite(used.parameters).all() else "not finite"
    policy = getattr(strategy, "convergence", None)
    if isinstance(policy, Residual) and not 1 - at_equilibrium["cosine"] <= policy.rtol:
        wrong = "not exact"
    costs = {"seconds": seconds, "graph MiB": graph, "peak MiB": memory}
    return {"problem": wrong, **at_equilibrium, **used.errors(exact, " in use"), **costs}


def make_gradient(name: str) -> Any:
    return gradients.create(GRADIENTS.get(name, name))


def half_trained(task: TrainSettings, steps: int, device: str) -> ImplicitForCausalLM:
    """Train a model by unrolling for ``steps`` steps. Every strategy later trains a copy of this model."""
    torch.manual_seed(task.seed)
    model = task.model().to(device).train()
    descend(model, stream(task, 2, task.unrolled_length), steps, lambda _: Unrolled(4))
    return model


def train_on(
    start: ImplicitForCausalLM, task: TrainSettings, steps: int, sequences: int, key: Mapping[str, Any]
) -> Row:
    """Train a copy of ``start`` with the strategy ``key["gradient"]``. Returns the loss and accuracies."""
    model, strategy = copy.deepcopy(start), make_gradient(key["gradient"])
    train = partial(descend, model, stream(task, task.min_length, task.length), steps, lambda _: strategy)
    losses: list[float] = []
    seconds = common.stopwatch(lambda: losses.extend(train()), model.device.type)
    lengths = task.length, 2 * task.length
    short, long = (evaluate_fresh(model, task, length, sequences, max_iter=96) for length in lengths)
    return {
        "problem": None if all(map(math.isfinite, losses)) else "not finite",
        "loss": statistics.fmean(losses[-20:]),
        f"accuracy at {short.length}": short.accuracy,
        f"last ten at {long.length}": long.accuracy_last10,
        f"converged at {long.length}": long.converged,
        "seconds": seconds,
    }


def draw(rows: Sequence[Row], axes: Sequence[Any]) -> None:
    """Plot the error, 1 - "median in use", over time and memory. Colours show the kinds of strategies."""
    kinds = dict.fromkeys(common.family(row["gradient"]) for row in rows)
    for ax, cost in zip(axes, ("seconds", "graph MiB"), strict=True):
        for colour, kind in enumerate(kinds):
            mine = [row for row in rows if common.family(row["gradient"]) == kind]
            for row, marker in zip(mine, cycle("osD^v<>PX*hp")):
                error = max(1 - row["median in use"], 1e-9)
                ax.plot(row[cost], error, marker, color=f"C{colour}", label=row["gradient"])
        log_scale(ax.xaxis)
        ax.set(xlabel=cost, yscale="log")
    axes[0].set_ylabel("1 - median cosine to the exact gradient, in use")
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")


def main() -> int:
    made = common.comparison_parser(__doc__, "gradients")
    add = made.add_argument
    add("--model", metavar="FOLDER", help="state-tracking run to use instead of the A5 model")
    add("--gradients", nargs="+", default=list(GRADIENTS), metavar="NAME",
        help=f"{', '.join(GRADIENTS)} (default: all), or the name of any registered strategy")  # fmt: skip
    add("--train-steps", type=int, help="training steps per strategy; 0: none (default: 300; quick: 100)")
    add("--trained", nargs="+", metavar="NAME",
        help=f"strategies to train with (default: all; quick: {', '.join(TRAINED_QUICKLY)})")  # fmt: skip
    add("--group", default="S3", help="group of the word problem to train on (default: S3)")
    options = common.parse(made, batch=(64, 16), train_steps=(300, 100))
    options.trained = options.trained or (TRAINED_QUICKLY if options.quick else options.gradients)
    for name in [*options.gradients, *options.trained]:  # raise for unknown names before the long training
        gradients.check(GRADIENTS.get(name, name))
    output, machine = options.output, common.machine_name(options.device)
    same = {name: getattr(options, name) for name in ("quick", "batch", "length", "group", "train_steps")}
    subject = trained.find(options.model or "A5", options)
    model = subject.model.train()
    folder = RunFolder(output, {**same, "machine": machine, "checksum": subject.checksum()})
    problem, exact, error = exact_gradient(model, subject.ids, subject.targets)
    folder.start()
    print(f"exact gradient of {len(problem.ids)} sequences, {error:.1e} from finite differences")
    keys = [{"gradient": name} for name in options.gradients]
    rows = common.measure_grid(output / "rows.jsonl", keys, partial(measure, problem, exact, options.device))
    size = f"{len(problem.ids)} x {subject.ids.shape[1]} tokens"
    common.print_table(f"\n{subject.name}, {size}, {machine}", rows)
    if done := [row for row in rows if "seconds" in row]:
        save_figure(output / "gradients.png", partial(draw, done), 1, 2, (9, 5.5), sharey=True)
    further: list[Row] = []
    if steps := options.train_steps:
        task = TrainSettings(group=options.group, d_model=64, batch_size=32)
        train = partial(train_on, half_trained(task, steps, options.device), task, steps, 4 * options.batch)
        keys = [{"gradient": name} for name in options.trained]
        further = common.measure_grid(output / "trained.jsonl", keys, train)
        common.print_table(f"\n{options.group}, {steps} unrolled steps, then as many by strategy", further)
    results = {"error of the exact gradient": error, "rows": rows, "trained": further}
    common.write_results(output / "results.json", options, **results)
    if error > 1e-3:
        print("the exact gradient disagrees with finite differences", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    common.run(main)
