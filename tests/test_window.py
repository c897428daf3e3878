"""The size of the window changes the number of evaluations, but not the fixed point.

This also holds if several calls solve one sequence and pass the state on.
"""

from collections.abc import Callable

import pytest
import torch

from deqseq import ExplicitSequenceLayer, FixedIterations, ImplicitSequenceLayer, Residual, Status
from deqseq.backbone import Backbone

MakeLayer = Callable[..., ImplicitSequenceLayer]
MakeBackbone = Callable[..., Backbone]
Close = Callable[..., None]

BACKBONES = ["mamba2", "llama", "module"]
SOLVERS = ["picard", "anderson", "broyden"]
TIGHT = Residual(rtol=1e-6, max_iter=500)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_window_has_the_same_fixed_point(
    make_layer: MakeLayer, assert_close: Close, backbone: str, solver: str
) -> None:
    layer = make_layer(backbone, solver=solver, convergence=TIGHT).eval()
    x = torch.randn(2, 10, 16)
    with torch.no_grad():
        whole = layer(x)
        assert (whole.solution.status == Status.CONVERGED).all()
        for window in (4, 1):
            out = layer(x, window=window)
            assert (out.solution.status == Status.CONVERGED).all()
            assert (out.solution.residual <= 1e-6).all()
            assert_close(out.z, whole.z, 1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_state_carries_on_where_the_last_call_ended(
    make_layer: MakeLayer, assert_close: Close, backbone: str, solver: str
) -> None:
    layer = make_layer(backbone, solver=solver, convergence=TIGHT).eval()
    x = torch.randn(2, 16, 16)
    with torch.no_grad():
        whole = layer(x, state=layer.backbone.initial_state(2))
        assert_close(layer(x).z, whole.z, 1e-5)
        for windows in ((None, None, None), (3, 1, 1)):
            state, parts = layer.backbone.initial_state(2), []
            for part, window in zip(x.split([7, 1, 8], 1), windows, strict=True):
                out = layer(part, state=state, window=window)
                state = out.state
                parts.append(out.z)
            assert_close(torch.cat(parts, 1), whole.z, 1e-4)
            assert torch.equal(state.seen, torch.tensor([16, 16]))
            for old, new in zip(whole.state.layers, state.layers, strict=True):
                for expected, actual in zip(old, new, strict=True):
                    assert_close(actual, expected, 1e-4)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_callers_state_is_not_changed(make_layer: MakeLayer, backbone: str) -> None:
    layer = make_layer(backbone).eval()
    x = torch.randn(2, 12, 16)
    with torch.no_grad():
        first = layer(x, state=layer.backbone.initial_state(2)).state
        kept = first.map(torch.clone)
        once = layer(x, state=first, window=4)
        again = layer(x, state=first, window=4)
    assert torch.equal(once.z, again.z)
    for old, new in zip(kept.layers, first.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_selected_states_continue_the_selected_sequences(
    make_layer: MakeLayer, assert_close: Close, backbone: str
) -> None:
    """``select`` reorders and repeats the sequences of a state, as beam search needs.

    Each selected state must continue its own sequence.
    """
    layer = make_layer(backbone, convergence=TIGHT).eval()
    x, y = torch.randn(3, 6, 16), torch.randn(3, 5, 16)
    rows = torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        state = layer(x, state=layer.backbone.initial_state(3)).state
        expected = layer(torch.cat([x, y], 1)[rows]).z[:, 6:]
        out = layer(y[rows], state=state.select(rows), window=2)
    assert_close(out.z, expected, 1e-4)


def test_state_is_returned_only_if_one_was_given(make_layer: MakeLayer) -> None:
    layer = make_layer("mamba2").eval()
    x = torch.randn(2, 6, 16)
    for window in (None, 2):
        assert layer(x, window=window).state is None
        state = layer(x, state=layer.backbone.initial_state(2), window=window).state
        assert not any(t.requires_grad for part in state.layers for t in part)


@pytest.mark.parametrize("gradient", ["phantom", "implicit"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_gradients_are_the_same_in_every_window(
    make_layer: MakeLayer,
    assert_close: Close,
    gradients_of: Callable[..., list[torch.Tensor]],
    backbone: str,
    gradient: str,
) -> None:
    layer = make_layer(backbone, gradient=gradient, convergence=TIGHT)
    x, weight = torch.randn(2, 7, 16), torch.randn(2, 7, 16)
    with torch.no_grad():
        past = layer(torch.randn(2, 3, 16), state=layer.backbone.initial_state(2)).state
    for state in (None, past):
        expected = gradients_of(layer, x, weight, state=state)
        for window in (3, 1):
            actual = gradients_of(layer, x, weight, state=state, window=window)
            for a, b in zip(actual, expected, strict=True):
                assert_close(a, b, 2e-3)


@pytest.mark.parametrize("window", [12, 13, 1000])
def test_a_window_over_everything_is_no_window(make_layer: MakeLayer, window: int) -> None:
    layer = make_layer("mamba2").eval()
    x = torch.randn(2, 12, 16)
    with torch.no_grad():
        a, b = layer(x), layer(x, window=window)
    assert torch.equal(a.z, b.z) and a.solution.nfe == b.solution.nfe


def test_window_of_the_call_overrides_the_layers(
    make_layer: MakeLayer, count_calls: Callable[..., list[tuple[int, ...]]]
) -> None:
    layer = make_layer("mamba2", window=3).eval()
    calls = count_calls(layer.backbone)
    x = torch.randn(2, 12, 16)
    with torch.no_grad():
        for window, width in (("layer", 3), (5, 5), (None, 12)):
            calls.clear()
            layer(x, window=window)
            assert {shape[1] for shape in calls} == {width}


@pytest.mark.passes_of_a_cpu
@pytest.mark.parametrize("window", [5, 1])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_fixed_iterations_leave_together_in_a_window(
    make_layer: MakeLayer, backbone: str, window: int
) -> None:
    layer = make_layer(backbone, convergence=FixedIterations(3), window=window).eval()
    x = torch.randn(2, 11, 16)
    with torch.no_grad():
        out = layer(x)
    assert (out.solution.iterations == 3).all()
    assert (out.solution.status == Status.COMPLETED).all()
    assert out.solution.nfe == 3 * -(-11 // window)


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_explicit_layer_carries_state(make_backbone: MakeBackbone, assert_close: Close, name: str) -> None:
    layer = ExplicitSequenceLayer(make_backbone(name, injection=False))
    x = torch.randn(2, 20, 16)
    with torch.no_grad():
        whole, state, parts = layer(x).z, layer.backbone.initial_state(2), []
        for part in x.split([9, 1, 10], 1):
            out = layer(part, state=state)
            state = out.state
            parts.append(out.z)
    assert_close(torch.cat(parts, 1), whole, 1e-5)
