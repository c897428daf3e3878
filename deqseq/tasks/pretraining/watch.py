"""Measures speed, FLOPs and the spectral radius in training, and warns about solves that get worse.

Shapes: L tokens, D width.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.gradient import GradientStrategy
from deqseq.regularisation import spectral_radius
from deqseq.tasks.common.models import needed_layer

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Peak FLOP/s in dense bfloat16. A key is a part of the device's name, such as H100 in "NVIDIA H100 PCIe"."""


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of a device in dense bfloat16; ``None`` if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for known, peak in PEAK.items() if known in name), None)


class Flops:
    """FLOPs of a model in a forward pass on one row of ``length`` tokens.

    PyTorch's FLOP counter runs the plain PyTorch implementation on fake tensors. It counts matrix products
    and convolutions, but no element-wise operations. Attention counts all pairs of tokens, also masked pairs.

    Attributes:
        evaluation: FLOPs of one evaluation of f.
        rest: FLOPs of the injection and the output layer, which run once per forward pass.
    """

    def __init__(self, config: ImplicitConfig, length: int) -> None:
        # Use plain attention, because the FLOP counter does not know every fused kernel.
        with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):
            # The counter fails if arguments of a block are weights that require gradients.
            model = ImplicitForCausalLM(config).requires_grad_(False)
            x = torch.empty(1, length, config.hidden_size)
            backbone = model.model.layer.backbone
            z = backbone.zero(x) if backbone.injects and not config.implicit else x
            with torch.no_grad(), FlopCounterMode(display=False) as once:
                context = backbone.prepare(x)
            with torch.no_grad(), FlopCounterMode(display=False) as each:
                backbone.evaluate(z, context)
        self.evaluation = each.get_total_flops()
        self.rest = once.get_total_flops() + 2 * length * config.hidden_size * config.vocab_size

    def step(self, evaluations: float, with_graph: float) -> float:
        """FLOPs of a training step on one row.

        The forward pass evaluates f ``evaluations`` times. The backward pass goes through ``with_graph`` of
        these evaluations. Per evaluation, the backward pass costs twice as much as the forward pass.
        Evaluations that gradient checkpointing repeats do not count.
        """
        return self.evaluation * (evaluations + 2 * with_graph) + 3 * self.rest


def graph_evaluations(gradient: GradientStrategy | None) -> int:
    """Number of evaluations of f that the backward pass goes through; 1 for an explicit model."""
    return int(getattr(gradient, "steps", getattr(gradient, "iterations", 1)))


class Speed(TrainerCallback):
    """Measures tokens per second and model FLOPs utilisation over the time spent training.

    The time for validation and for writing checkpoints does not count.

    Attributes:
        elapsed: seconds of training so far, including the time before a run was resumed.

    Args:
        flops: FLOPs of the model; ``None`` if ``peak`` is unknown.
        rows: rows per process in one optimiser step; a row has ``length`` tokens.
        peak: peak FLOP/s of a device; ``None`` if unknown.
    """

    def __init__(
        self, flops: Flops | None, rows: int, length: int, processes: int, peak: float | None
    ) -> None:
        self.flops, self.rows, self.length, self.processes, self.peak = flops, rows, length, processes, peak
        self.elapsed = 0.0
        self._seconds = 0.0
        self._steps = 0
        self.skip()

    def skip(self) -> None:
        """Restart the clock. The time since the last ``count`` or ``skip`` is left out."""
        self._since = time.perf_counter()

    def count(self) -> None:
        """Add the time since the last ``count`` or ``skip`` to the training time, and restart the clock."""
        passed = time.perf_counter() - self._since
        self._seconds += passed
        self.elapsed += passed
        self.skip()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.elapsed = max((entry.get("train_seconds", 0.0) for entry in state.log_history), default=0.0)
        self.skip()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._steps += 1
        self.count()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.skip()

    on_save = on_evaluate

    def read(self, evaluations: float, with_graph: float) -> dict[str, float]:
        """Tokens per second since the last call and, if ``peak`` is known, the model FLOPs utilisation.

        ``evaluations`` and ``with_graph`` are as in :meth:`Flops.step`.
        """
        self.count()
        seconds, steps = self._seconds, self._steps
        self._seconds, self._steps = 0.0, 0
        if not steps:
            return {}
        found = {"tokens_per_second": round(steps * self.rows * self.length * self.processes / seconds, 1)}
        if self.flops is not None and self.peak is not None:
            done = steps * self.rows * self.flops.step(evaluations, with_graph)
            found["mfu"] = round(done / seconds / self.peak, 4)
        return found


_WINDOW = 10


class Advice:
    """Warns if solves get worse, and suggests what to try. Each object gives each warning once.

    Compares the mean of the last five log entries with the mean of the five entries before them.
    """

    def __init__(self) -> None:
        self._lines: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._given: set[str] = set()

    def read(self, logs: Mapping[str, float], tolerance: float | None) -> list[str]:
        """Add a log entry. Returns new warnings.

        Args:
            tolerance: tolerance of the convergence policy; ``None`` for a fixed number of iterations.
        """
        if "residual" not in logs:
            return []
        self._lines.append((logs["residual"], logs["share_budget_exhausted"]))
        if len(self._lines) < _WINDOW:
            return []
        before, now = torch.tensor(self._lines, dtype=torch.float64).view(2, -1, 2).mean(1).tolist()
        found = {}
        # A small, fixed number of iterations need not converge: allow a larger residual.
        large = 0.3 if tolerance is None else max(0.1, 2 * tolerance)
        if now[0] > large and now[0] > 0.98 * before[0]:
            found["residual"] = (
                f"the residual does not fall: {before[0]:.3f}, then {now[0]:.3f}. f hardly contracts: damp "
                "the solver (--model.solver '{name: picard, damping: 0.7}'), lower the learning rate, or "
                "allow more iterations (stages.N.convergence)"
            )
        if now[1] > 0.1 and now[1] > before[1] + 0.02:
            found["not converged"] = (
                f"fewer tokens converge: {before[1]:.0%} did not, now {now[1]:.0%}. Raise max_iter, "
                "loosen rtol, damp the solver, or lower the learning rate, and start_from a checkpoint "
                "before the increase"
            )
        new = [text for name, text in found.items() if name not in self._given]
        self._given |= set(found)
        return new


def model_radius(model: nn.Module, input_ids: Tensor, z: Tensor) -> float:
    """Estimate of the spectral radius of df/dz at ``z`` (1, L, D) for ``input_ids`` (1, L)."""
    layer = needed_layer(model, "the spectral radius")
    with torch.no_grad():
        embed: Any = model.get_input_embeddings()  # type: ignore[operator]
        context = layer.backbone.prepare(embed(input_ids))
    # Use a new generator, so that the random state of the run does not change.
    generator = torch.Generator(z.device).manual_seed(0)
    radius = spectral_radius(lambda u: layer.backbone(u, context), z.float(), 8, generator)
    return radius.mean().item()
