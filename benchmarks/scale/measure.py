"""Pretrains a model on all processes, and records the seconds and evaluations of every step.

benchmarks/scaling.py writes the plan, a JSON file, and starts this program with torchrun. Every process
writes its record to ``rank-N.json`` beside the plan."""

import json
import logging
import os
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from deqseq.outputs import LayerOutput
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.models import implicit_layer, quiet_transformers
from deqseq.tasks.pretraining.run_files import load_run
from deqseq.tasks.pretraining.train import pretrain
from deqseq.tasks.pretraining.watch import graph_evaluations

Interval = tuple[float, float]


class Recorder(TrainerCallback):
    """Records every training step of this process.

    Attributes:
        steps: for each step: its number, its ``seconds``, the ``evaluations`` of f in each forward pass, and
            the number of evaluations that the backward pass goes through (``with_graph``). On a GPU, also the
            peak memory in GiB. If a checkpoint follows, the ``seconds_of_saving``, for which training waits.
            Profiled steps also have the result of :func:`parts`.
        seconds_to_start: from the creation of the recorder to the first step.

    Args:
        profiled: steps to profile. Profiling makes a step slower.
    """

    def __init__(self, profiled: Collection[int]) -> None:
        self.profiled, self.steps, self.evaluations = set(profiled), list[dict[str, Any]](), list[int]()
        self._profile: profile | None = None
        self._group: Any = None  # connects the CPUs of all processes, because profilers record GPUs
        self.since = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.layer = implicit_layer(model)
        assert self.layer is not None
        self.layer.register_forward_hook(self._solved)
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        now = time.perf_counter()
        self.seconds_to_start, self.since = now - self.since, now

    def _solved(self, layer: torch.nn.Module, inputs: Any, output: LayerOutput) -> None:
        if layer.training:
            self.evaluations.append(output.solution.nfe)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 in self.profiled and args.device.type == "cuda":
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
            if self._group is not None:
                dist.barrier(self._group)  # some profilers start later than others
            torch.cuda.synchronize()
            self.since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._profile is not None:
            torch.cuda.synchronize()
        step = {
            "step": state.global_step, "seconds": time.perf_counter() - self.since,
            "evaluations": self.evaluations, "with_graph": graph_evaluations(self.layer.gradient),
        }  # fmt: skip
        if args.device.type == "cuda":
            step["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        if self._profile is not None:
            self._profile.stop()
            step["parts"] = parts(self._profile.events(), step["seconds"])
            self._profile = None
        self.steps.append(step)
        self.evaluations = []
        self.since = time.perf_counter()

    def on_save(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.steps[-1]["seconds_of_saving"], self.since = now - self.since, now

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.since = time.perf_counter()


def parts(events: Iterable[Any], seconds: float) -> dict[str, float]:
    """Split the seconds of a profiled step into three kinds.

    ``computing``: the GPU computes. ``communicating``: it only communicates, or waits for other GPUs to do
    so. ``idle``: it does neither, because it waits for the host.
    """
    kernels: list[tuple[bool, Interval]] = [
        ("nccl" in event.name.lower(), (event.time_range.start, event.time_range.end))
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    computing = covered(interval for nccl, interval in kernels if not nccl) / 1e6
    busy = covered(interval for _, interval in kernels) / 1e6
    return {"computing": computing, "communicating": busy - computing, "idle": max(0.0, seconds - busy)}


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def main(plan: Path) -> None:
    """Carry out a plan: the ``run``, its changed ``fields``, the ``output`` folder and steps to profile."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    quiet_transformers()
    content = json.loads(plan.read_text())
    recorder = Recorder(content["profiled"])
    settings = load_run(content["run"], content["fields"])
    pretrain(settings, content["output"], progress=False, callbacks=[recorder])
    rank = os.environ.get("RANK", "0")
    record = {"seconds_to_start": recorder.seconds_to_start, "steps": recorder.steps}
    write_json(plan.with_name(f"rank-{rank}.json"), record)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
