"""Estimates a run's size, steps, FLOPs and memory without training. Draws its learning rate and stages."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from transformers.optimization import get_wsd_schedule

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.curriculum import Stage
from deqseq.gradient import gradients
from deqseq.policy import policies
from deqseq.tasks.common.figures import save_figure
from deqseq.tasks.pretraining.data import open_data
from deqseq.tasks.pretraining.settings import RunSettings
from deqseq.tasks.pretraining.watch import PEAK, Flops, graph_evaluations

_GIB = 2**30
_FUSED = {"mamba2": 0.15}
"""For each backbone: activation memory with our kernels, divided by activation memory in plain PyTorch.

Measured on the 130M model with four phantom steps on one H100: activations saved for the backward pass take
17 GiB with our kernels and 118 GiB in plain PyTorch.
"""


@dataclass
class StagePlan:
    """The costs of one stage of training. A run without stages counts as one stage."""

    first: int  # first optimiser step of the stage, counted from 1
    last: int  # last optimiser step of the stage
    evaluations: int  # maximum number of evaluations of f in one forward pass
    with_graph: int  # number of evaluations in one forward pass that record an autograd graph
    flops: float  # FLOPs of the stage if every search uses its maximum number of evaluations
    activations: float  # estimated bytes of activations and logits on a device


def plan_stages(settings: RunSettings) -> list[StagePlan]:
    """Compute the costs of every stage of the run."""
    config = settings.config()
    flops = Flops(config, settings.length)
    saved = saved_bytes(config, settings.length) * settings.activation_budget
    if settings.bf16:  # assume that the run uses a GPU, so our kernels run
        saved *= 0.5 * _FUSED.get(config.backbone["name"], 1)
    # Count the logits twice, because their gradient has the same size.
    logits = 2 * settings.length * config.vocab_size * (2 if settings.bf16 else 4)
    curriculum = settings.curriculum()
    stages = [None] if curriculum is None else curriculum.stages
    found = []
    for stage, (before, last) in zip(stages, pairwise([0, *settings.stage_ends]), strict=True):
        searched, with_graph = evaluation_budget(config, stage)
        rows = (last - before) * settings.rows_per_step
        kept = 1 if settings.recompute else with_graph
        found.append(StagePlan(
            before + 1, last, searched + with_graph, with_graph,
            flops=rows * flops.step(searched + with_graph, with_graph),
            activations=settings.per_device_batch_size * (kept * saved + logits),
        ))  # fmt: skip
    return found


def evaluation_budget(config: ImplicitConfig, stage: Stage | None) -> tuple[int, int]:
    """Returns two numbers of evaluations of f in one forward pass of training.

    The first is the maximum in the search. The second is the number of evaluations that record an autograd
    graph.

    Args:
        stage: the stage of training; ``None`` if the run has no stages.
    """
    if not config.implicit:
        return 0, 1
    strategy = gradients.create(config.gradient if stage is None else stage.gradient)
    policy = policies.create((stage and stage.convergence) or config.convergence)
    return (policy.max_iter if strategy.searches else 0), graph_evaluations(strategy)


def saved_bytes(config: ImplicitConfig, length: int) -> float:
    """Bytes that plain PyTorch saves for the backward pass of one evaluation on one row, in float32.

    Runs the evaluation on fake tensors, which need no memory. Does not count weights or values that all
    tokens share (``Context.shared``).
    """
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode():
        model = ImplicitForCausalLM(config)
        backbone = model.model.layer.backbone
        x = torch.empty(1, length, config.hidden_size)
        context = backbone.prepare(x)
        kept: list[Any] = [context]
        tensors = tree_leaves([context.shared, list(model.parameters())])
        weights = {t.untyped_storage()._cdata for t in tensors if isinstance(t, torch.Tensor)}
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            kept.append(backbone.evaluate(x.requires_grad_(), context))
    return float(sum(size for storage, size in sizes.items() if storage not in weights))


def describe(settings: RunSettings, processes: int = 1) -> str:
    """A text table with size, steps, FLOPs and memory of the run."""
    accumulation = settings.accumulation(processes)
    config = settings.config()
    with torch.device("meta"):
        model = ImplicitForCausalLM(config)
    parameters = sum(p.numel() for p in model.parameters())
    body = sum(p.numel() for p in model.model.layer.backbone.parameters())
    stages = plan_stages(settings)
    tokens = settings.total_steps * settings.batch_tokens
    size = settings.per_device_batch_size
    weights = 4 * parameters + (2 if settings.bf16 else 4) * body
    activations = max(stage.activations for stage in stages)
    lines = [
        ("model", f"{config.form} {config.backbone['name']}, "
                  f"{parameters:,} parameters, {parameters - body:,} of them embeddings"),
        ("tokens", f"{tokens:,} in rows of {settings.length}"),
        ("data", _data(settings)),
        ("steps", f"{settings.total_steps:,} of {settings.batch_tokens:,} tokens = {accumulation} x {size} "
                  f"rows x {processes} processes"),
        ("learning rate", f"{settings.learning_rate:g}: rises over {settings.warmup_steps:,} steps, falls "
                          f"over the last {settings.decay_steps:,} to {settings.min_learning_rate:g}"),
    ]  # fmt: skip
    for number, stage in enumerate(stages, 1):
        searched = stage.evaluations - stage.with_graph
        lines.append((
            f"stage {number}", f"steps {stage.first:,} to {stage.last:,}: {searched} + {stage.with_graph} "
            f"evaluations at most, {stage.flops:.3g} FLOPs at most, activations about "
            f"{stage.activations / _GIB:.1f} GiB"
        ))  # fmt: skip
    held_by = {"one copy per GPU": 12.0 * parameters}
    if processes > 1:
        held_by[f"sharded over {processes}"] = 12 * parameters / processes
    total = sum(stage.flops for stage in stages)
    hours = total / (0.4 * PEAK["H100"]) / 3600 / processes
    lines.append(("FLOPs", f"{total:.3g} at most: {hours:,.1f} hours at 40 % of H100s' peak"))
    for name, held in held_by.items():
        peak = weights + held + activations
        lines.append((f"memory, {name}", f"about {peak / _GIB:.1f} GiB: weights {weights / _GIB:.1f}, "
                      f"gradients and AdamW {held / _GIB:.1f}, the rest activations"))  # fmt: skip
    note = (
        "Activations: those of one evaluation in plain PyTorch (our Mamba2 kernels keep 15 %) x evaluations "
        "with a graph x per_device_batch_size, plus the logits and their gradient."
    )
    return f"{tabulate(lines, tablefmt='plain', colalign=('right', 'left'))}\n{note}"


def held_out_rows(settings: RunSettings) -> int:
    """The number of held-out rows in the folder of prepared data that the run names.

    Raises:
        ValueError: the data are missing, unfinished or too few, or do not fit the model's vocabulary.
    """
    data = open_data(settings)
    data.fitted(settings.config())
    return len(data.validation)


def _data(settings: RunSettings) -> str:
    """A text that names the data and its number of held-out rows, or says that the data are not ready."""
    if not isinstance(settings.data, str):
        return "none yet" if settings.data is None else f"streamed from {settings.data.get('dataset')}"
    try:
        return f"{settings.data}, {held_out_rows(settings):,} rows held out"
    except ValueError:
        return f"{settings.data}, NOT READY"


def learning_rates(settings: RunSettings) -> tuple[list[int], list[float]]:
    """Steps at regular intervals, and the scheduler's learning rate at each of these steps."""
    one = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=settings.learning_rate)
    rate = get_wsd_schedule(
        one, settings.warmup_steps, settings.decay_steps, settings.total_steps, decay_type="1-sqrt",
        min_lr_ratio=settings.min_learning_rate / settings.learning_rate,
    ).lr_lambdas[0]  # fmt: skip
    every = max(1, settings.total_steps // 1000)
    steps = list(range(0, settings.total_steps + 1, every))
    return steps, [settings.learning_rate * rate(step) for step in steps]


def plot_schedule(settings: RunSettings, path: Path) -> bool:
    """Draw the learning rate and the stages against tokens. Returns false if matplotlib is not installed."""
    steps, rates = learning_rates(settings)

    def draw(axes: list[Any]) -> None:
        (axis,) = axes
        axis.plot([step * settings.batch_tokens for step in steps], rates, label="learning rate")
        axis.set(xlabel="tokens", ylabel="learning rate", ylim=(0, 1.15 * settings.learning_rate))
        for number, stage in enumerate(plan_stages(settings)):
            span = ((stage.first - 1) * settings.batch_tokens, stage.last * settings.batch_tokens)
            text = f"{stage.evaluations - stage.with_graph} + {stage.with_graph} evaluations"
            axis.axvspan(*span, color=f"C{number + 1}", alpha=0.15, label=text)
        axis.legend(loc="lower left")

    return save_figure(path, draw, size=(8, 3.5))
