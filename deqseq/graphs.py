"""Records passes of the solve loop (:mod:`deqseq.loop`) as CUDA graphs.

A pass evaluates f once and computes the next iterates. In small passes, launching the kernels takes longer
than running them. A CUDA graph launches all its kernels at once. Every replay reads and writes the memory
that the recording used. Fixed buffers therefore hold the values that one replay passes to the next.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from deqseq import kernels
from deqseq.loop import Runner, one_pass
from deqseq.problem import Problem
from deqseq.trees import copied, overwrite

PASSES_OF_A_WINDOW = 4
"""Number of passes that one CUDA graph contains, in solves with a window."""


def capture(device: torch.device, *steps: Callable[[], None]) -> list[Callable[[], None]]:
    """Record each of ``steps`` as a CUDA graph, and return one replay function per step.

    A step may read results of earlier steps. No step may make the host wait for the device. Each step first
    runs once without recording, to compile and load its kernels. On the CPU, :func:`capture` only runs each
    step once and returns the steps unchanged.
    """
    if device.type != "cuda":
        for step in steps:
            step()
        return list(steps)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    # Disable autocast's cache: it would keep converted weights that lie in the graphs' memory.
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with torch.autocast("cuda", dtype, enabled, cache_enabled=False), _no_garbage_collection():
        with torch.cuda.stream(side):
            for step in steps:
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        for step in steps:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=pool, capture_error_mode="thread_local"):
                step()
    return [graph.replay for graph in graphs]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block. It may free device memory, and this makes a capture fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def can_record_passes(problem: Problem) -> bool:
    """Whether passes of ``problem`` can be recorded as a CUDA graph."""
    parts = (problem.map, problem.solver, problem.policy)
    return can_record(problem.z0, *parts) and not problem.fixed and problem.group is None


def can_record(x: Tensor, *parts: object) -> bool:
    """Whether work of ``parts`` on ``x`` can be recorded as a CUDA graph now."""
    return (
        kernels.on_tested_gpu(x)
        and all(getattr(part, "capturable", False) for part in parts)
        and not torch.is_grad_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


class WindowRunner(Runner):
    """Runs a solve with a window. Runs the first passes directly, then records passes and replays them."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._replay: Callable[[], None] | None = None

    def proceed(self) -> None:
        # Run the first passes without a graph: recording takes longer than a few passes.
        if self.passes < 2 * PASSES_OF_A_WINDOW:
            super().proceed()
            return
        if self._replay is None:
            wanted = self.problem.policy.check_every or PASSES_OF_A_WINDOW
            self.check_every = max(1, wanted // PASSES_OF_A_WINDOW) * PASSES_OF_A_WINDOW
            self.carry = copied(self.carry)  # copy into buffers that nothing else uses
            (self._replay,) = capture(self.problem.z0.device, self._passes)
        else:
            self._replay()
        self.passes += PASSES_OF_A_WINDOW

    def _passes(self) -> None:
        """Run several passes that start from the fixed buffers, and write the result back to the buffers."""
        carry = self.carry
        for _ in range(PASSES_OF_A_WINDOW):
            carry = one_pass(self.problem, carry)
        overwrite(self.carry, carry)
