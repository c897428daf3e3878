"""Records calls of an implicit layer as CUDA graphs, and replays them.

Only calls with one token per sequence are recorded, as in generation. The second call with the same shapes
makes the recording. Later calls copy their inputs into the recording's buffers and replay the graphs.

A replay gives the same results as the plain loop (:mod:`deqseq.loop`). It may run more passes (evaluations of
f), but extra passes change nothing, because settled tokens are frozen.

A replay reads the layer's current weights, so training between two calls takes effect. After a module, solver
or policy has been replaced, the layer makes a new recording. The layer does not notice if an attribute of a
solver, policy or module is changed in place. It then replays the old recording. Hooks prevent replays.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deqseq import graphs, kernels
from deqseq.backbone import State
from deqseq.inputs import Inputs
from deqseq.iteration import search
from deqseq.loop import Carry, Runner, begin, drive, finish, one_pass
from deqseq.problem import Problem, SolveOptions
from deqseq.solution import PER_TOKEN, Solution
from deqseq.trees import Copier, copied, overwrite

logger = logging.getLogger(__name__)

MAX_SEQUENCES = 64
"""Largest batch to record. In larger batches, kernel launches take only a small share of the time."""
PASSES_OF_A_GRAPH = 2
"""Number of passes in one CUDA graph."""
CALLS_TO_COMPARE = 4
"""A call first replays graphs without a check: for the smallest number of passes that any of this many
earlier calls needed, rounded down to whole graphs. Then the host checks after every graph whether all tokens
have settled. The device is idle during a check."""
MAX_RECORDINGS = 4
"""Maximum number of recordings per layer. Recordings take device memory, so a layer with this many recordings
drops the least recently used one before it adds another."""

MakeProblem = Callable[[Inputs], Problem]
MakeResult = Callable[[Solution, Inputs], Solution]


class _Entry(NamedTuple):
    parts: tuple[object, ...]  # solver, policy, process group: kept alive, because the key has their id()
    recording: Recording | None  # ``None`` until the second call makes it


class Recordings:
    """The recordings of a layer. A copied or loaded layer starts without recordings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # threads share the recordings' buffers, so only one may run at a time
        self.known: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._fingerprint = Fingerprint()

    def __deepcopy__(self, memo: Any) -> Recordings:
        return Recordings()

    def __reduce__(self) -> tuple[type[Recordings], tuple[()]]:
        return Recordings, ()

    def solve(
        self,
        layer: nn.Module,
        options: SolveOptions,
        inputs: Inputs,
        make_problem: MakeProblem,
        make_result: MakeResult,
    ) -> Solution:
        """Solve for ``inputs``. If there is a recording for their shapes and these settings, replay it.

        The second call with the same shapes and settings makes the recording, if the solve can be recorded.

        Args:
            layer: the layer whose parameters and modules the solve uses.
            options: solver, policy and window of the solve.
            inputs: the inputs of the call.
            make_problem: makes the problem from the inputs.
            make_result: makes the result from the solution and the inputs. Neither function may make the host
                wait for the device.
        """
        flat = _flat(inputs)
        parts = (options.solver, options.convergence, getattr(layer, "group", None))
        with self._lock:
            key = _key(flat), (*map(id, parts), options.window), self._fingerprint.of(layer)
            if (entry := self.known.get(key)) is not None and entry.recording is not None:
                self.known.move_to_end(key)
                return entry.recording.run(flat)
        problem = make_problem(inputs)
        if _pays(problem):
            with self._lock:
                if key in self.known:
                    recording = Recording(inputs, make_problem, make_result)
                    self.known[key] = _Entry(parts, recording)
                    logger.debug("recorded solves of %s sequences", problem.z0.shape[0])
                    return recording.run(flat)
                self.known[key] = _Entry(parts, None)  # first call: only a repeated call is worth recording
                if len(self.known) > MAX_RECORDINGS:
                    self.known.popitem(last=False)
        return make_result(search(problem), inputs)


def _flat(inputs: Inputs) -> list[Tensor]:
    """The tensors in ``inputs``, in order. Runs for every generated token, so it must be fast."""
    found = [t for t in inputs[:-1] if isinstance(t, Tensor)]
    return found if inputs.state is None else [*found, *inputs.state.tensors()]


def _pays(problem: Problem) -> bool:
    batch, length, _ = problem.z0.shape
    small = length == 1 and batch <= MAX_SEQUENCES
    return graphs.can_record_passes(problem) and problem.state_has_capacity and small


def _key(inputs: list[Tensor]) -> Hashable:
    """A part of a recording's key: the inputs' shapes, types and devices, and modes such as autocast."""
    shapes = tuple((t.shape, t.dtype, t.device) for t in inputs)
    autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return shapes, autocast, kernels.chosen(), torch.is_inference_mode_enabled(), capturing


class Fingerprint:
    """Detects changes of a layer that make its recordings invalid, such as a replaced module or weight.

    The method ``of`` runs for every generated token, so it must be fast. It lists the layer's modules only in
    the first call and after a module was replaced. Loops over dictionaries use ``map`` and ``chain``, which
    run in C.
    """

    def __init__(self) -> None:
        # Returns the layer, or ``None`` before the first call of ``of``. A weak reference avoids a cycle.
        self._layer: Callable[[], nn.Module | None] = lambda: None
        self._modules: list[nn.Module] = []  # all modules inside the layer, without the layer itself
        self._subtrees: list[dict[str, Any]] = []
        self._tensors: list[dict[str, Any]] = []
        self._hooks: list[dict[Any, Any]] = []
        self._children: list[int] = []
        self._walked: object = None

    def of(self, layer: nn.Module) -> Hashable:
        """A value that changes when ``layer`` changes. If the layer has hooks, the value is always new."""
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
        # A replay would skip hooks. A new object equals no earlier value, so no recording is found.
        hooked = object() if any(self._hooks) else None
        training = (layer.training, *[m.training for m in self._modules])
        return self._walked, training, tuple(memory), hooked

    def _ids(self) -> list[int]:
        return list(map(id, _values(self._subtrees)))


def _values(dictionaries: list[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dictionaries))


class RecordedSolve(Runner):
    """A recorded solve. It replays three CUDA graphs: one before the passes, one for some passes, one after.

    Subclasses define :meth:`make_problem` and :meth:`record_end`. Neither may make the host wait.
    """

    def record(self, device: torch.device) -> None:
        self._needed: deque[int] = deque(maxlen=CALLS_TO_COMPARE)  # passes that the last calls needed
        steps = self._record_begin, self._record_passes, self.record_end
        self._begin, self._passes, self._end = graphs.capture(device, *steps)

    def make_problem(self) -> Problem:
        """Make the problem from fixed buffers."""
        raise NotImplementedError

    def record_end(self) -> None:
        """Use the result of the passes: ``finish(self.problem, self.carry, 0)``."""
        raise NotImplementedError

    def begin(self) -> None:
        self.passes = 0
        self._begin()

    def proceed(self) -> None:
        replays = 1
        if not self.passes and len(self._needed) == CALLS_TO_COMPARE:
            replays = max(1, min(self._needed) // PASSES_OF_A_GRAPH)
        for _ in range(replays):
            self._passes()
        self.passes += replays * PASSES_OF_A_GRAPH

    def has_ended(self) -> bool:
        needed = int(self._settled_after)
        if needed >= 0:
            self._needed.append(needed)
        return needed >= 0

    def _record_begin(self) -> None:
        self.problem = self.make_problem()
        self._buffers: Carry = copied(begin(self.problem))

    def _record_passes(self) -> None:
        carry = self._buffers
        for _ in range(PASSES_OF_A_GRAPH):
            carry = one_pass(self.problem, carry)
        self.carry = carry
        overwrite(self._buffers, carry._replace(fz=None, trace=None))
        # Number of passes that the slowest token needed, or -1 if a token has not settled yet.
        tokens = carry.tokens
        self._settled_after = tokens.iterations.max().masked_fill(~tokens.settled.all(), -1)


class Recording(RecordedSolve):
    """A recorded call of a layer, for inputs of fixed shapes."""

    def __init__(self, inputs: Inputs, make_problem: MakeProblem, make_result: MakeResult) -> None:
        self._inputs = copied(inputs)
        self._into = Copier(_flat(self._inputs))
        self._make_problem, self._make_result = make_problem, make_result
        device = inputs.x.device
        self.record(device)
        # This event marks the end of the last call. After the event, the buffers may be overwritten.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def make_problem(self) -> Problem:
        return self._make_problem(self._inputs)

    def record_end(self) -> None:
        result = self._make_result(finish(self.problem, self.carry, 0), self._inputs)
        assert result.state is not None
        per_token = [getattr(result, name) for name in PER_TOKEN]
        self._outputs = Copier([*per_token, *result.state.tensors()])
        self._sizes = [len(layer) for layer in result.state.layers]

    def run(self, inputs: list[Tensor]) -> Solution:
        """Solve for new inputs of the recorded shapes."""
        if self._copied is not None:  # wait for the last call: it may have run on another stream
            torch.cuda.current_stream().wait_event(self._copied)
        self._into.overwrite(inputs)
        solution = drive(self)
        if self._copied is not None:
            self._copied.record()
        return solution

    def finish(self) -> Solution:
        self._end()
        outputs = iter(self._outputs.copy())
        per_token: dict[str, Any] = {name: next(outputs) for name in PER_TOKEN}
        state = State(next(outputs), tuple(tuple(islice(outputs, size)) for size in self._sizes))
        return Solution(**per_token, nfe=self.passes, state=state)
