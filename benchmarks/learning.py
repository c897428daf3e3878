"""Does a model learn as well with the fused kernels as with plain PyTorch?

The script trains the paper's state-tracking model to predict running products of permutations in the group
A5. It trains once with each of ``--kernels`` and once with plain PyTorch. All these runs start from the same
weights and use the same batches. In the first half of the steps, training unrolls four iterations. In the
second half, it searches for the fixed point and does four phantom steps.

Rounding makes the loss curves drift apart, even if all kernels are correct. The script therefore prints the
mean distance of each curve from the curve of plain PyTorch. For comparison, it also prints the distance
between two runs of plain PyTorch with different seeds.

    python benchmarks/learning.py
    python benchmarks/learning.py --kernels triton mamba_ssm torch --steps 2000
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import common
import torch
import torch.nn.functional as F

from deqseq import GradientStrategy, Unrolled, kernels
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.tasks.common.figures import save_figure
from deqseq.tasks.state_tracking.data import WordProblemStream
from deqseq.tasks.state_tracking.settings import TrainSettings


def stream(task: TrainSettings, *lengths: int) -> WordProblemStream:
    """Make a stream of training batches. ``lengths``: length of the shortest and of the longest sequence."""
    sampling = {"identity_probability": task.identity_probability, "seed": task.seed}
    return WordProblemStream(task.algebra, lengths, **sampling, batch_size=task.batch_size)


def descend(
    model: ImplicitForCausalLM,
    stream: WordProblemStream,
    steps: int,
    gradient: Callable[[int], GradientStrategy],
) -> list[float]:
    """Train on the stream. Step s uses the gradient strategy ``gradient(s)``. Returns all losses."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, 10 * (i + 1) / steps))
    losses = []
    device = model.device
    for step in range(steps):
        model.model.layer.gradient = gradient(step)
        batch = {key: value.to(device) for key, value in stream.batch(step).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            logits = model(batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def curve(options: argparse.Namespace, name: str, seed: int) -> list[float]:
    """Train a new model with the kernels ``name``. Returns the loss of every step."""
    task = TrainSettings(group="A5", seed=seed, batch_size=options.batch)
    torch.manual_seed(seed)
    config = ImplicitConfig.from_preset("mamba2-state-tracking", vocab_size=len(task.algebra))
    model = ImplicitForCausalLM(config).to(options.device).train()
    fixed_point, half = model.model.layer.gradient, options.steps // 2
    batches = stream(task, 2, options.length)
    with kernels.use(name):
        return descend(model, batches, options.steps, lambda s: Unrolled(4) if s < half else fixed_point)


def draw(curves: Mapping[str, list[float]], axes: Sequence[Any]) -> None:
    (ax,) = axes
    for name, losses in curves.items():
        ax.plot(torch.tensor(losses).unfold(0, min(20, len(losses)), 1).mean(1), label=name)
    ax.set(xlabel="step", ylabel="loss, mean of 20 steps")
    ax.legend()


def main() -> None:
    made = common.parser(__doc__, "learning.json")
    add = made.add_argument
    add("--kernels", nargs="+", default=["triton"], choices=kernels.NAMES, help="to compare with torch")
    add("--steps", type=int, default=500)
    add("--batch", type=int, default=128)
    add("--length", type=int, default=32, help="longest sequence")
    options = made.parse_args()

    plain = "torch, seed 1"
    runs = dict.fromkeys([*((name, 1) for name in options.kernels), ("torch", 1), ("torch", 2)])
    curves = {f"{name}, seed {seed}": curve(options, name, seed) for name, seed in runs}
    parts = 10 if options.steps >= 10 else 1
    losses = torch.tensor(list(curves.values()), dtype=torch.float64)  # (curves, steps)
    means = torch.stack([part.mean(1) for part in losses.tensor_split(parts, dim=1)])
    ends = [round((i + 1) * options.steps / parts) for i in range(parts)]
    rows = [
        {"steps up to": end, **dict(zip(curves, row, strict=True))}
        for end, row in zip(ends, means.tolist(), strict=True)
    ]
    away = (means - means[:, [list(curves).index(plain)]]).abs().mean(0).tolist()
    distances = {name: mean for name, mean in zip(curves, away, strict=True) if name != plain}
    common.print_table(f"loss, {common.machine_name(options.device)}", rows)
    common.print_table(f"distance from {plain}", [{"curve": n, "mean": d} for n, d in distances.items()])
    common.write_results(options.output, options, curves=curves, distances=distances)
    save_figure(options.output.with_suffix(".png"), partial(draw, curves), size=(7, 4))


if __name__ == "__main__":
    common.run(main)
