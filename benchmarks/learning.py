"""Does a model learn as well through the fused kernels as through plain PyTorch?

The paper's state-tracking model on the word problem of A5, from the same weights and batches with every
implementation: half of the steps through four unrolled iterations, half through the fixed point and four
phantom steps. The curves part at once, as rounding differs, so what matters is how far, beside how far
another seed of the plain form is.

    python benchmarks/learning.py
    python benchmarks/learning.py --kernels triton mamba_ssm torch --steps 2000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import describe_machine, finish, print_table

from deqseq import GradientStrategy, Unrolled, kernels
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.tasks.common.figures import pyplot
from deqseq.tasks.state_tracking.algebra import algebra
from deqseq.tasks.state_tracking.data import WordProblemStream


def descend(
    model: ImplicitForCausalLM,
    stream: WordProblemStream,
    steps: int,
    gradient: Callable[[int], GradientStrategy],
) -> list[float]:
    """Train on a word problem, step s by the strategy ``gradient(s)``; the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, 10 * (i + 1) / steps))
    losses = []
    layer = model.model.layer
    device = model.device
    for step in range(steps):
        layer.gradient = gradient(step)
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
    """The loss of every step of a fresh model."""
    group = algebra("A5")
    torch.manual_seed(seed)
    config = ImplicitConfig.from_preset("mamba2-state-tracking", vocab_size=len(group))
    model = ImplicitForCausalLM(config).to(options.device).train()
    stream = WordProblemStream(
        group, (2, options.length), identity_probability=0.5, seed=seed, batch_size=options.batch
    )
    fixed_point = model.model.layer.gradient
    with kernels.use(name):
        return descend(
            model, stream, options.steps, lambda s: Unrolled(4) if s < options.steps // 2 else fixed_point
        )


def plot(curves: dict[str, list[float]], path: Path) -> None:
    figures = pyplot()
    if figures is None:
        return
    figure, axes = figures.subplots(figsize=(7, 4))
    for name, losses in curves.items():
        means = torch.tensor(losses).unfold(0, min(20, len(losses)), 1).mean(1)
        axes.plot(means, label=name)
    axes.set(xlabel="step", ylabel="loss, mean of 20 steps")
    axes.legend()
    figure.savefig(path, bbox_inches="tight", dpi=150)
    print(f"wrote {path}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kernels", nargs="+", default=["triton"], choices=kernels.NAMES, help="beside plain PyTorch")
    add("--steps", type=int, default=500)
    add("--batch", type=int, default=128)
    add("--length", type=int, default=32, help="longest sequence")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", default="runs/benchmarks/learning.json")
    options = parser.parse_args()

    runs = [*((name, 1) for name in options.kernels), ("torch", 1), ("torch", 2)]
    curves = {f"{name}, seed {seed}": curve(options, name, seed) for name, seed in dict.fromkeys(runs)}
    parts = 10 if options.steps >= 10 else 1
    means = {
        name: [part.mean().item() for part in torch.tensor(losses).tensor_split(parts)]
        for name, losses in curves.items()
    }
    ends = [round((i + 1) * options.steps / parts) for i in range(parts)]
    rows: list[dict[str, Any]] = [
        {"steps up to": end, **{name: values[i] for name, values in means.items()}}
        for i, end in enumerate(ends)
    ]
    machine = describe_machine(options.device)
    print_table(f"loss, {machine['device']}", rows)

    def apart(name: str) -> float:
        """Mean distance of the curve from plain PyTorch's, part by part."""
        pairs = zip(means[name], means["torch, seed 1"], strict=True)
        return sum(abs(a - b) for a, b in pairs) / parts

    distances = {name: apart(name) for name in means if name != "torch, seed 1"}
    print_table(
        "distance from plain PyTorch, seed 1", [{"curve": n, "mean": d} for n, d in distances.items()]
    )
    finish(
        options.output,
        {"settings": vars(options), "machine": machine, "curves": curves, "distances": distances},
    )
    plot(curves, Path(options.output).with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
