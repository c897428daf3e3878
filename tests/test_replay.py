"""Tests that replaying a recorded solve gives the same result as the plain solve loop.

Without a GPU there are no CUDA graphs. A replay then calls the recorded Python functions again. The tests
check what these functions read, write and return.
"""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq import (
    Backbone,
    FixedIterations,
    ImplicitSequenceLayer,
    LayerOutput,
    Progress,
    Residual,
    SolveOptions,
    Solver,
    State,
    graphs,
    replay,
    trees,
)
from deqseq.policies import Quantile
from deqseq.problem import Problem
from deqseq.solvers import Anderson, Broyden, Picard, TorchDEQ

MakeLayer = Callable[..., ImplicitSequenceLayer]
BODIES = ("mamba2", "llama")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Allow recording on every device. Returns a list to which every new recording is added."""

    def recordable(problem: Problem) -> bool:
        return not problem.fixed and not torch.is_grad_enabled()

    made: list[Any] = []

    class Counted(replay.Recording):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(graphs, "can_record_passes", recordable)
    monkeypatch.setattr(replay, "Recording", Counted)
    return made


def plain(monkeypatch: pytest.MonkeyPatch, function: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "can_record_passes", lambda problem: False)
        return function()


def tight(**changes: Any) -> Residual:
    return Residual(**{"rtol": 1e-5, "max_iter": 100, **changes})


def equal(found: LayerOutput, expected: LayerOutput) -> None:
    def compare(a: Any, b: Any) -> None:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)

    for name in ("z", "residual", "iterations", "status"):
        compare(getattr(found.solution, name), getattr(expected.solution, name))
    if expected.state is not None:
        compare(found.state.seen, expected.state.seen)
        compare(found.state.layers, expected.state.layers)


@torch.no_grad()
def tokens(layer: ImplicitSequenceLayer, x: Tensor, state: State, **options: Any) -> list[LayerOutput]:
    outputs = []
    for t in range(x.shape[1]):
        outputs.append(layer(x[:, t : t + 1], state=state, **options))
        state = outputs[-1].state
    return outputs


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_token_by_token(
    name: str, batch: int, make_layer: MakeLayer, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(name, convergence=tight()).eval()
    x = torch.randn(batch, 9, 16)
    with torch.no_grad():
        start = layer(x[:, :3], state=layer.backbone.initial_state(batch)).state
    expected = plain(monkeypatch, lambda: tokens(layer, x[:, 3:], start))
    found = tokens(layer, x[:, 3:], start)
    assert len(recorded) == 1
    for a, b in zip(found, expected, strict=True):  # later calls must not overwrite earlier results
        equal(a, b)


def test_the_host_checks_only_near_the_end(
    make_layer: MakeLayer, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a few calls, it first checks after as many passes as an earlier call needed.

    Calls that need fewer or more passes than the calls before give the same results as the plain loop.
    """
    layer = make_layer("mamba2", convergence=tight(), guess="previous").eval()
    x, far = torch.randn(1, 1, 16), torch.randn(1, 16)
    start = layer.backbone.initial_state(1)

    @torch.no_grad()
    def call(previous: Tensor) -> LayerOutput:
        return layer(x, state=start, previous=previous)

    easy, hard = plain(monkeypatch, lambda: (call(call(far).z[:, 0]), call(far)))
    counts = [int(out.solution.iterations) for out in (easy, hard)]
    assert counts[0] + 4 < counts[1]
    checks: list[int] = []
    has_ended = replay.RecordedSolve.has_ended

    def counted(run: Any) -> bool:
        checks[-1] += 1
        return has_ended(run)

    monkeypatch.setattr(replay.RecordedSolve, "has_ended", counted)
    for previous, expected in [*[(far, hard)] * 7, (hard.z[:, 0], easy), *[(far, hard)] * 5]:
        checks.append(0)
        equal(call(previous), expected)
    assert len(recorded) == 1
    each = -(-counts[1] // replay.PASSES_OF_A_GRAPH)
    assert checks[:5] == [0, *[each] * 4]  # the first call is not recorded; then four calls are compared
    assert max(checks[5:8]) <= 2  # also the easy call
    assert min(checks[8:12]) > 2 and checks[12] <= 2  # the easy call is one of the last four


@pytest.mark.parametrize("guess", ["noise", "previous"])
def test_guesses(
    guess: str, make_layer: MakeLayer, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer("mamba2", convergence=tight(max_iter=3), guess=guess).eval()
    x, previous = torch.randn(2, 6, 16), torch.randn(2, 16)
    start = layer.backbone.initial_state(2)
    expected = plain(monkeypatch, lambda: tokens(layer, x, start, previous=previous))
    found = tokens(layer, x, start, previous=previous)
    assert len(recorded) == 1
    for a, b in zip(found, expected, strict=True):
        equal(a, b)
    cold = tokens(layer, x[:, :1], start, solve=replace(layer.eval_solve, guess="zero"))[0]
    assert not torch.allclose(cold.z, found[0].z)


@pytest.mark.parametrize("name", BODIES)
def test_shapes_and_settings_alternate(
    name: str, make_layer: MakeLayer, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(name, convergence=tight()).eval()
    x = torch.randn(4, 8, 16)
    mask = torch.ones(4, 2)
    mask[1, 0] = 0

    @torch.no_grad()
    def run() -> list[LayerOutput]:
        outputs = []
        for _ in range(3):
            for rows in (slice(0, 1), slice(0, 4)):
                state = layer.backbone.initial_state(x[rows].shape[0])
                first = layer(x[rows, :2], state=state, attention_mask=mask[rows])
                outputs += [first, layer(x[rows, 2:3], state=first.state, z0=x[rows, 3:4])]
        return outputs

    for a, b in zip(run(), plain(monkeypatch, run), strict=True):
        equal(a, b)
    assert recorded


def test_weights_that_change_are_seen(
    make_layer: MakeLayer, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer("mamba2", convergence=tight()).eval()
    x, start = torch.randn(2, 3, 16), layer.backbone.initial_state(2)

    def changed(change: Callable[[nn.Module], None]) -> None:
        tokens(layer, x, start)
        with torch.no_grad():
            change(layer)
        for a, b in zip(
            tokens(layer, x, start), plain(monkeypatch, lambda: tokens(layer, x, start)), strict=True
        ):
            equal(a, b)

    def in_place(layer: nn.Module) -> None:
        for parameter in layer.parameters():
            parameter.data.mul_(0.9)

    def replaced(layer: nn.Module) -> None:
        layer.load_state_dict({k: 0.9 * v for k, v in layer.state_dict().items()}, assign=True)

    def tolerance(layer: nn.Module) -> None:
        layer.train_solve = layer.eval_solve = replace(layer.solve, convergence=tight(rtol=1e-3))

    for change in (in_place, replaced, tolerance):
        changed(change)
    assert len(recorded) >= 3


class Scaled(Solver):
    """A solver whose ``repr`` does not show its damping."""

    def __init__(self, damping: float) -> None:
        self.damping = damping

    def __repr__(self) -> str:
        return "Scaled()"

    def init(self, z: Tensor) -> Any:
        return ()

    def step(self, z: Tensor, fz: Tensor, state: Any, progress: Progress) -> tuple[Tensor, Any]:
        return torch.lerp(z, fz, self.damping), state


def test_recordings_are_told_apart_by_their_parts_not_by_how_they_print(
    make_layer: MakeLayer, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer("mamba2").eval()
    x, start = torch.randn(2, 4, 16), layer.backbone.initial_state(2)
    iterations = []
    for damping in (1.0, 0.5):
        layer.eval_solve = SolveOptions(Scaled(damping), tight())
        found = tokens(layer, x, start)
        expected = plain(monkeypatch, lambda: tokens(layer, x, start))
        for a, b in zip(found, expected, strict=True):
            equal(a, b)
        iterations.append(sum(int(out.solution.iterations.sum()) for out in found))
    assert len(recorded) == 2 and iterations[0] < iterations[1]


def test_options_of_a_call_are_recorded_by_their_parts(make_layer: MakeLayer, recorded: list[Any]) -> None:
    """Calls with the same solver and policy share a recording, even with new ``SolveOptions`` objects."""
    layer = make_layer("mamba2").eval()
    solver, policy = Picard(), tight()
    state, x = layer.backbone.initial_state(1), torch.randn(1, 5, 16)
    with torch.no_grad():
        for t in range(5):
            state = layer(x[:, t : t + 1], state=state, solve=SolveOptions(solver, policy)).state
    assert len(recorded) == 1


def test_broken_tokens_are_marked(make_layer: MakeLayer, recorded: list[Any]) -> None:
    layer = make_layer("mamba2", convergence=tight()).eval()
    x, start = torch.randn(2, 4, 16), layer.backbone.initial_state(2)
    tokens(layer, x[:, :3], start)
    with torch.no_grad():
        x[1, 3] = torch.nan
        out = layer(x[:, 3:], state=start)
    assert recorded
    assert out.z[0].isfinite().all() and out.z[1].isnan().all()
    ssm = out.state.layers[0][1]
    assert ssm[0].isfinite().all() and ssm[1].isnan().all()


def test_hooks_are_called(make_layer: MakeLayer, recorded: list[Any]) -> None:
    layer = make_layer("mamba2", convergence=tight()).eval()
    calls: list[int] = []
    layer.backbone.layers[0].register_forward_hook(lambda *args: calls.append(1))
    out = tokens(layer, torch.randn(1, 4, 16), layer.backbone.initial_state(1))
    assert not recorded
    assert len(calls) == sum(o.solution.nfe for o in out)


def test_what_a_layer_recorded_goes_with_it(make_layer: MakeLayer, recorded: list[Any]) -> None:
    layer = make_layer("mamba2", convergence=tight()).eval()
    tokens(layer, torch.randn(1, 4, 16), layer.backbone.initial_state(1))
    known = weakref.ref(recorded.pop())
    copy = deepcopy(layer)
    assert layer._recordings.known and not copy._recordings.known
    del layer
    gc.collect()
    assert known() is None


def test_threads_share_a_recording(
    make_layer: MakeLayer, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer("mamba2", convergence=tight()).eval()
    x, start = torch.randn(3, 1, 10, 16), layer.backbone.initial_state(1)
    expected = plain(monkeypatch, lambda: [tokens(layer, sequence, start) for sequence in x])
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda sequence: tokens(layer, sequence, start), x))
    assert recorded
    for outputs, wanted in zip(found, expected, strict=True):
        for a, b in zip(outputs, wanted, strict=True):
            equal(a, b)


def test_inference_mode_has_recordings_of_its_own(make_layer: MakeLayer, recorded: list[Any]) -> None:
    layer = make_layer("mamba2", convergence=tight()).eval()
    x, start = torch.randn(1, 4, 16), layer.backbone.initial_state(1)
    with torch.inference_mode():
        first = tokens(layer, x, start)
    for a, b in zip(tokens(layer, x, start), first, strict=True):
        equal(a, b)
    assert len(recorded) == 2


def test_what_is_overwritten_is_read_first() -> None:
    """``overwrite`` reads all new values before it writes the first.

    Here the new value of a buffer is the old value of the buffer before it.
    """
    buffers = [torch.full((3,), float(i)) for i in range(4)]
    trees.overwrite(buffers, [torch.full((3,), 9.0), *buffers[:-1]])
    assert [t[0].item() for t in buffers] == [9, 0, 1, 2]


def test_copies_are_contiguous_aligned_and_elsewhere() -> None:
    value = (torch.randn(3, 5).t(), [torch.tensor(2.0), torch.arange(7)], {"empty": torch.empty(2, 0)})
    copy = trees.copied(value)
    for new, old in zip(trees.tensors(copy), trees.tensors(value), strict=True):
        assert torch.equal(new, old) and new.dtype == old.dtype
        assert new.is_contiguous() and new.storage_offset() % 64 == 0
    trees.overwrite(value, trees.map_tensors(lambda t: t + 1, value))
    assert torch.equal(value[1][1], torch.arange(1, 8)) and torch.equal(copy[1][1], torch.arange(7))


def test_few_shapes_are_kept(make_layer: MakeLayer, recorded: list[Any]) -> None:
    layer = make_layer("mamba2", convergence=tight()).eval()
    for _ in range(2):
        for batch in range(1, 5 + replay.MAX_RECORDINGS):
            tokens(layer, torch.randn(batch, 2, 16), layer.backbone.initial_state(batch))
    assert len(layer._recordings.known) == replay.MAX_RECORDINGS


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("solver", [Picard(1.0), Picard(0.7), Anderson(), Anderson(1), Broyden()], ids=str)
@pytest.mark.parametrize("window", [1, 2])
def test_windows(
    name: str, solver: Solver, window: int, make_layer: MakeLayer, recorded: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    layer = make_layer(name, solver=solver, window=window, convergence=tight()).eval()
    x, start = torch.randn(2, 4, 16), layer.backbone.initial_state(2)
    mask = torch.ones(2, 4)
    mask[1, 3:] = 0

    @torch.no_grad()
    def run() -> list[LayerOutput]:
        first = layer(x, attention_mask=mask, state=start)
        return [first, layer(x, state=first.state), layer(x)]

    captured: list[Any] = []
    original = graphs.capture
    monkeypatch.setattr(graphs, "capture", lambda *args: captured.append(args) or original(*args))
    expected = plain(monkeypatch, run)
    assert not captured
    for a, b in zip(run(), expected, strict=True):
        equal(a, b)
    assert len(captured) == 3


def test_only_what_says_that_it_may_be_is_recorded(rates: Backbone) -> None:
    parts = Picard(), Anderson(), Broyden(), tight(), tight() & FixedIterations(2)
    others = TorchDEQ("anderson"), Quantile(tight()), rates
    assert all(part.capturable for part in parts)
    assert not any(part.capturable for part in others)
