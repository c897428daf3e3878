"""Calls of an implicit layer for one token a sequence, recorded: generation.

The second call of a shape records everything from the layer's inputs to its outputs (effective weights,
passes of the loop, what moves the state on) over buffers of its own; from then on a call copies its inputs
there and replays. Settled tokens are frozen, so passes after the last one needed change nothing, and results
are those of the plain loop. Weights are read where they lie: training between two calls is seen, and so is
what replaces a module, a hook, a solver or a policy. Plain attributes of theirs that change in place are not.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from deqseq import kernels
from deqseq.gradients import search
from deqseq.graphs import Copier, capture, copied, overwrite, tensors
from deqseq.loop import Problem, Together, recordable
from deqseq.solution import Solution

logger = logging.getLogger(__name__)

MOST_SEQUENCES = 64
"""Sequences, of one token each, up to which launches outweigh the work."""
BLOCK = 2
"""Passes that a replay runs, and the host's looks are apart."""
KEPT = 4
"""Recorded shapes that a layer keeps; the one not used for longest goes first. Each holds the effective
weights, its inputs and its outputs."""

Make = Callable[[Any], Problem]
Finish = Callable[[Solution, Any], Solution]


class Recordings:
    """What a layer has recorded. Copies of the layer, and what is saved of it, start anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # recordings have one memory, whatever the number of threads
        self.known: OrderedDict[Hashable, Recording | None] = OrderedDict()
        self._fingerprint = Fingerprint()

    def __deepcopy__(self, memo: Any) -> Recordings:
        return Recordings()

    def __reduce__(self) -> tuple[type[Recordings], tuple[()]]:
        return Recordings, ()

    def solve(
        self, layer: nn.Module, inputs: Any, make: Make, finish: Finish, window: int | None
    ) -> Solution:
        """``finish(solution of make(inputs), inputs)``, replayed if the like of it has been recorded.

        Args:
            layer: on whose parameters and settings the solution depends.
            inputs: tensors, in nested tuples and dataclasses.
            make: the problem; it must not look at values of ``inputs``, no more than ``finish``.
            window: of the problem.
        """
        flat = tensors(inputs)
        with self._lock:
            key = window, _key(layer, flat), self._fingerprint.of(layer)
            if (recording := self.known.get(key)) is not None:
                self.known.move_to_end(key)
                return recording.run(flat)
        problem = make(inputs)
        if _pays(problem):
            with self._lock:
                if key in self.known:
                    recording = self.known[key] = Recording(inputs, make, finish)
                    logger.debug("recorded solves of %s sequences", problem.z0.shape[0])
                    return recording.run(flat)
                self.known[key] = None  # once is no habit
                if len(self.known) > KEPT:
                    self.known.popitem(last=False)
        return finish(search(problem), inputs)


def _pays(problem: Problem) -> bool:
    batch, length, _ = problem.z0.shape
    return recordable(problem) and problem.room and length == 1 and batch <= MOST_SEQUENCES


def _key(layer: nn.Module, inputs: list[Tensor]) -> Hashable:
    """All that a recording depends on but the values of its inputs: shapes, settings, where weights lie."""
    shapes = tuple((t.shape, t.dtype, t.device) for t in inputs)
    mode = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), kernels.chosen()
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    kind = torch.is_inference_mode_enabled(), capturing
    return shapes, mode, kind, id(getattr(layer, "group", None)), layer.extra_repr()


class Fingerprint:
    """What changes if a part of a layer, or the memory of a weight, is replaced.

    It is asked for before every token, so the tree of modules is walked only where it is another one, and
    dictionaries are gone through by loops in C.
    """

    def __init__(self) -> None:
        self._layer: Callable[[], nn.Module | None] = lambda: None  # weak: it holds this
        self._modules: list[nn.Module] = []  # below the layer
        self._subtrees: list[dict[str, Any]] = []
        self._tensors: list[dict[str, Any]] = []
        self._hooks: list[dict[Any, Any]] = []
        self._children: list[int] = []
        self._walked: object = None

    def of(self, layer: nn.Module) -> Hashable:
        """Equal as long as nothing of ``layer`` is replaced."""
        if self._layer() is not layer or self._ids() != self._children:
            self._walked = object()
            self._layer = weakref.ref(layer)
            every = list(layer.modules())
            self._modules = every[1:]
            self._subtrees = [m._modules for m in every]
            self._tensors = [d for m in every for d in (m._parameters, m._buffers)]
            self._hooks = [d for m in every for d in (m._forward_hooks, m._forward_pre_hooks)]
            self._children = self._ids()
        memory = [0 if t is None else t.data_ptr() for t in _values(self._tensors)]
        hooked = object() if any(self._hooks) else None  # they want to be called: never the same again
        training = (layer.training, *[m.training for m in self._modules])
        return self._walked, training, tuple(memory), hooked

    def _ids(self) -> list[int]:
        return list(map(id, _values(self._subtrees)))


def _values(dictionaries: list[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dictionaries))


class Recording:
    """Solves of one shape."""

    def __init__(self, inputs: Any, make: Make, finish: Finish) -> None:
        self._inputs = Copier(copied(inputs))
        self._make, self._finish = make, finish
        device = self._inputs.tensors[0].device
        self._begin, self._block, self._end = capture(device, self._begins, self._blocks, self._ends)
        self._read = torch.cuda.Event() if device.type == "cuda" else None  # the last call's results

    def _begins(self) -> None:
        self._loop = Together(self._make(self._inputs.value))
        self._loop.variables = self._buffers = copied(self._loop.variables)

    def _blocks(self) -> None:
        for _ in range(BLOCK):
            self._loop.evaluate()
            self._loop.fz = (value := self._loop.fz).clone()  # the step may take its memory
            self._loop.step()
            self._loop.fz = value
        overwrite(self._buffers, self._loop.variables)
        self._loop.variables = self._buffers
        self._settled = self._loop.settled.all()

    def _ends(self) -> None:
        self._solution = Copier(self._finish(self._loop.solution(0), self._inputs.value))

    def run(self, inputs: list[Tensor]) -> Solution:
        """Solve for other inputs of the shape, in order."""
        if self._read is not None:  # by another stream perhaps
            torch.cuda.current_stream().wait_event(self._read)
        self._inputs.overwrite(inputs)
        self._begin()
        passes, settled = 0, False
        while not settled:
            self._block()
            passes += BLOCK
            settled = bool(self._settled)
        self._end()
        solution: Solution = self._solution.copied()
        if self._read is not None:
            self._read.record()
        return replace(solution, nfe=passes)
