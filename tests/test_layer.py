"""Tests of the layers' arguments: accepted values, and the errors for other values."""

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deqseq import (
    Backbone,
    ConvergencePolicy,
    ExplicitSequenceLayer,
    FixedIterations,
    ImplicitDifferentiation,
    ImplicitSequenceLayer,
    Phantom,
    Residual,
    State,
    Status,
    Unrolled,
)
from deqseq.backbones import Mamba2Backbone, ModuleBackbone
from deqseq.policy import Judgement
from deqseq.solvers import Anderson, BestIterate

MakeLayer = Callable[..., ImplicitSequenceLayer]
MakeBackbone = Callable[..., Backbone]
MAMBA2 = {"name": "mamba2", "d_model": 16, "n_layer": 1, "d_state": 8, "headdim": 8}


def test_parts_by_name_and_by_object_are_the_same() -> None:
    layer = ImplicitSequenceLayer(
        MAMBA2, solver="anderson", gradient="phantom", convergence={"name": "fixed", "iterations": 3}
    )
    assert isinstance(layer.backbone, Mamba2Backbone)
    assert layer.solve.solver == Anderson() and layer.gradient == Phantom()
    assert layer.solve.convergence == FixedIterations(3)


def test_defaults_are_the_documented_ones(make_backbone: MakeBackbone) -> None:
    layer = ImplicitSequenceLayer(make_backbone("mamba2"))
    assert layer.solve.convergence == Residual(rtol=0.05, max_iter=32)
    assert layer.solve.window is None and layer.causal and layer.gradient == Phantom()


def test_parts_of_a_finished_layer_are_not_replaced_without_effect(make_layer: MakeLayer) -> None:
    layer: Any = make_layer("mamba2")
    layer.gradient = "implicit"
    assert isinstance(layer.gradient, ImplicitDifferentiation)
    with pytest.raises(ValueError, match="nobody"):
        layer.gradient = "nobody"
    wrong = {"solver": "broyden", "convergence": Residual(rtol=0.1), "window": 4, "guess": "zero"}
    for name, value in wrong.items():
        with pytest.raises(
            AttributeError, match=rf"no attribute {name}.*replace\(layer.eval_solve, {name}=...\)"
        ):
            setattr(layer, name, value)


class Endless(ConvergencePolicy):
    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        raise AssertionError("no evaluation is made")


@pytest.mark.parametrize("kind", [ImplicitSequenceLayer, ExplicitSequenceLayer])
def test_a_replaced_backbone_is_checked_as_in_the_constructor(
    make_backbone: MakeBackbone, kind: type[nn.Module]
) -> None:
    """A backbone made by ``torch.compile`` would run, but its evaluations would not be compiled."""
    layer: Any = kind(make_backbone("llama"))
    before, wrapped = layer.backbone, nn.Sequential(layer.backbone)
    compiled: Any = torch.compile(before, backend="eager")
    for value, said in (
        (compiled, r"use layer\.backbone\.compile\(\)"),
        (nn.Linear(16, 16), "ModuleBackbone"),
        (wrapped, "must be a Backbone"),
        (None, "must be a Backbone"),
    ):
        for make in (kind, lambda value: setattr(layer, "backbone", value)):
            with pytest.raises(ValueError, match=said):
                make(value)
    assert layer.backbone is before
    layer.backbone = other = make_backbone("module")
    assert layer.backbone is other


def test_a_policy_without_a_budget_is_refused_at_once(make_backbone: MakeBackbone) -> None:
    with pytest.raises(ValueError, match=r"max_iter of .*Endless.* must be a whole number"):
        ImplicitSequenceLayer(make_backbone("mamba2"), convergence=(Endless(), Residual(rtol=0.1)))


def test_training_and_evaluation_have_their_own_policy(make_layer: MakeLayer) -> None:
    layer = make_layer(
        "mamba2", convergence=(FixedIterations(2), FixedIterations(5)), gradient=Phantom(steps=3)
    )
    x = torch.randn(2, 6, 16)
    assert layer(x).solution.nfe == 5
    layer.eval()
    with torch.no_grad():
        assert layer(x).solution.nfe == 5
        assert (layer(x).solution.iterations == 5).all()
    layer.train_solve = layer.eval_solve = replace(layer.solve, convergence=FixedIterations(4))
    assert layer.train_solve.convergence == layer.eval_solve.convergence == FixedIterations(4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.randn(6, 16)}, r"\(6, 16\)"),
        ({"x": torch.randn(2, 6, 16, 1)}, r"\(2, 6, 16, 1\)"),
        ({"x": torch.randn(2, 0, 16)}, r"\(2, 0, 16\)"),
        ({"x": torch.randn(0, 6, 16)}, r"\(0, 6, 16\)"),
        ({"x": torch.randn(2, 6, 15)}, "15"),
        ({"x": torch.ones(2, 6, 16, dtype=torch.int64)}, "int64"),
        ({"x": torch.ones(2, 6, 16, dtype=torch.bool)}, "bool"),
        ({"attention_mask": torch.ones(2, 5)}, r"\(2, 5\)"),
        ({"attention_mask": torch.ones(6)}, r"\(6,\)"),
        ({"position_ids": torch.ones(3, 6)}, r"\(3, 6\)"),
        ({"z0": torch.randn(2, 6, 15)}, r"\(2, 6, 15\)"),
        ({"z0": torch.randn(2, 5, 16)}, r"\(2, 5, 16\)"),
        ({"window": 0}, "0"),
        ({"window": -1}, "-1"),
        ({"window": 2.0}, r"2\.0"),
        ({"window": "all"}, "all"),
    ],
)
def test_wrong_arguments_of_a_call(make_layer: MakeLayer, change: dict[str, Any], said: str) -> None:
    arguments = {"x": torch.randn(2, 6, 16), **change}
    for name in ("mamba2", "llama"):
        with pytest.raises(ValueError, match=said):
            make_layer(name)(**arguments)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("name", ["mamba2", "llama", "module"])
def test_a_guess_may_be_anything(make_layer: MakeLayer, name: str, window: int | None) -> None:
    layer = make_layer(name, window=window, convergence=Residual(rtol=1e-5, max_iter=100)).eval()
    x, guess = torch.randn(2, 6, 16), torch.zeros(2, 6, 16)
    guess[0, 4, 1], guess[1, 2] = torch.nan, torch.inf
    with torch.no_grad():
        expected = layer(x)
        for given in (guess, guess.double(), guess.bfloat16()):
            found = layer(x, z0=given)
            assert torch.equal(found.z, expected.z) and (found.solution.status == Status.CONVERGED).all()


def test_copies_share_the_process_group(make_layer: MakeLayer) -> None:
    layer = make_layer("mamba2", gradient="implicit")
    layer.group = group = threading.Lock()  # like a process group, a lock cannot be copied
    model = nn.Sequential(layer)
    copy = deepcopy(model)[0]
    assert copy.group is group and copy is not layer and copy.backbone is not layer.backbone
    layer.group = copy.group = None
    x = torch.randn(2, 6, 16)
    assert torch.equal(copy(x).z, layer(x).z)


@pytest.mark.parametrize("module", [nn.GRU(16, 16, batch_first=True), nn.Linear(16, 8)])
def test_modules_return_the_shape_of_their_input(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"{type(module).__name__} returned"):
        ImplicitSequenceLayer(ModuleBackbone(module))(torch.randn(2, 6, 16))


def test_an_injection_is_a_module() -> None:
    with pytest.raises(ValueError, match="injection must be a module, or None"):
        ModuleBackbone(nn.Identity(), injection=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("gradient", ["phantom", "implicit"])
@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_autocast_leaves_float64(make_layer: MakeLayer, name: str, gradient: str) -> None:
    layer = make_layer(name, gradient=gradient).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    expected = layer(x).z
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        found = layer(x).z
    found.sum().backward()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["mamba2", "llama", "module"])
def test_wrong_states(make_layer: MakeLayer, name: str) -> None:
    layer = make_layer(name)
    with pytest.raises(ValueError, match="3 sequences"):
        layer(torch.randn(2, 6, 16), state=layer.backbone.initial_state(3))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"window": 0}, "0"),
        ({"window": -4}, "-4"),
        ({"window": 1.5}, r"1\.5"),
        ({"window": True}, "True"),
        ({"solver": "newton"}, "newton"),
        ({"gradient": "none"}, "none"),
        ({"convergence": "never"}, "never"),
        ({"convergence": (FixedIterations(1),) * 3}, "3"),
        ({"backbone": {"name": "transformer"}}, "transformer"),
        ({"backbone": {**MAMBA2, "heads": 2}}, "heads"),
    ],
)
def test_wrong_arguments_of_a_layer(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ImplicitSequenceLayer(**{"backbone": MAMBA2, **change})


def test_an_implicit_layer_needs_an_injection(make_backbone: MakeBackbone) -> None:
    """Without an injection, the layer's output would not depend on x at all."""
    for name in ("mamba2", "llama"):
        layer = ImplicitSequenceLayer(make_backbone(name))
        with pytest.raises(ValueError, match="injection"):
            ImplicitSequenceLayer(make_backbone(name, injection=False))
        with pytest.raises(ValueError, match="injection"):
            layer.backbone = make_backbone(name, injection=False)


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_an_explicit_layer_with_an_injection_is_the_first_iteration(
    make_backbone: MakeBackbone, name: str
) -> None:
    """The layer returns f(0, x), in one call and token by token."""
    backbone = make_backbone(name, n_layer=2)
    once = ExplicitSequenceLayer(backbone).eval()
    x = torch.randn(2, 6, 16)
    first = ImplicitSequenceLayer(backbone, gradient=Unrolled(1), convergence=FixedIterations(1))(x)
    assert torch.equal(once(x).z, first.z)
    state, found = backbone.initial_state(2), []
    for t in range(6):
        out = once(x[:, t : t + 1], state=state)
        state = out.state
        found.append(out.z)
    torch.testing.assert_close(torch.cat(found, 1), first.z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_an_explicit_layer_is_the_stack_applied_once(make_backbone: MakeBackbone, name: str) -> None:
    backbone = make_backbone(name, injection=False, n_layer=2)
    x = torch.randn(2, 6, 16)
    out = ExplicitSequenceLayer(backbone)(x)
    assert torch.equal(out.z, backbone(x, backbone.prepare(x)))
    assert out.solution is None and out.state is None


def test_an_explicit_layer_over_a_module_applies_it_to_x(make_backbone: MakeBackbone) -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 6, 4)
    torch.testing.assert_close(ExplicitSequenceLayer(ModuleBackbone(module))(x).z, module(x))


def test_inputs_are_left_alone(make_layer: MakeLayer) -> None:
    for window in (None, 2):
        layer = make_layer("mamba2", solver="anderson", window=window)
        given = {
            "x": torch.randn(2, 6, 16),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
            "z0": torch.randn(2, 6, 16),
        }
        kept = {name: value.clone() for name, value in given.items()}
        layer(**given).z.sum().backward()
        assert all(torch.equal(given[name], kept[name]) for name in given)


def test_position_ids(make_layer: MakeLayer) -> None:
    """By default, positions count the real tokens from 0. ``position_ids`` replaces these positions."""
    layer = make_layer("llama", convergence=Residual(rtol=1e-6, max_iter=200)).eval()
    x, mask = torch.randn(2, 6, 16), torch.ones(2, 6)
    mask[0, :2] = 0
    counted = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        expected = layer(x, mask)
        torch.testing.assert_close(layer(x, mask, position_ids=counted).z, expected.z)
        other = layer(x, mask, position_ids=2 * counted).z
    assert not torch.allclose(other, expected.z, atol=1e-3)


def test_state_dict_round_trip(make_layer: MakeLayer) -> None:
    x = torch.randn(2, 6, 16)
    for name in ("mamba2", "llama"):
        first, second = make_layer(name), make_layer(name)
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.add_(1)
        second.load_state_dict(first.state_dict())
        with torch.no_grad():
            assert torch.equal(first(x).z, second(x).z)


def test_repr_names_the_parts(make_layer: MakeLayer) -> None:
    text = repr(make_layer("mamba2", solver="anderson", window=3))
    assert all(part in text for part in ("Anderson", "Phantom", "Residual", "window=3"))


def test_outputs_are_found_and_described(make_layer: MakeLayer) -> None:
    """PyTorch finds z in the output: DDP with static_graph=True needs this. Padding is not described."""
    out = make_layer("module")(torch.randn(2, 6, 16), torch.ones(2, 6).tril(3))
    assert any(leaf is out.z for leaf in tree_leaves(out))
    least = int(out.solution.iterations[0, :4].min())
    assert f"2 x 6 tokens: 9 converged, 3 padding; {least} to" in repr(out.solution)


@pytest.mark.parametrize("window", [None, 3])
def test_a_broken_token_spoils_what_is_carried_on(make_layer: MakeLayer, window: int | None) -> None:
    """After a NaN, all later tokens of the sequence are ``NON_FINITE``, in later calls too."""
    for backbone in ("mamba2", "llama", "module"):
        layer = make_layer(backbone, window=window).eval()
        x = torch.randn(2, 9, 16)
        x[1, 0] = torch.nan
        with torch.no_grad():
            first = layer(x[:, :4], state=layer.backbone.initial_state(2, dtype=x.dtype))
            second = layer(x[:, 4:], state=first.state)
        assert second.solution.status[1].eq(Status.NON_FINITE).all(), backbone
        assert second.solution.status[0].eq(Status.CONVERGED).all(), backbone
        assert second.state.seen.tolist() == [9, 9]


def test_parts_of_a_wrong_kind_are_named() -> None:
    with pytest.raises(ValueError, match="ModuleBackbone"):
        ImplicitSequenceLayer(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="solver must be a Solver"):
        ImplicitSequenceLayer(ModuleBackbone(torch.nn.Identity()), solver=Residual(rtol=0.1))  # type: ignore[arg-type]


def test_best_iterate_slides_as_its_solver_does() -> None:
    assert BestIterate("anderson").windowed and not BestIterate("torchdeq:anderson").windowed


class Counting(ModuleBackbone):
    """A backbone whose state includes an integer tensor: the number of tokens."""

    def initial_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> State:
        state = super().initial_state(batch_size, device, dtype)
        return State(state.seen, (*state.layers, (torch.zeros(batch_size, dtype=torch.int64),)))

    def reserve(self, state: State, z: Tensor) -> State:
        return State(state.seen, (*super().reserve(state, z).layers, state.layers[1]))

    def advance(self, trace: Any, state: State, count: Tensor) -> State:
        moved = super().advance(trace, state, count)
        return State(moved.seen, (*moved.layers, (state.layers[1][0] + count,)))


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 2])
def test_states_may_hold_whole_numbers(window: int | None) -> None:
    layer = ImplicitSequenceLayer(Counting(nn.Tanh()), convergence=FixedIterations(2), window=window).eval()
    x = torch.randn(2, 5, 16)
    x[1, 3] = torch.nan  # the NaN must reach only the floating-point tensors of the state
    state = layer(x, state=layer.backbone.initial_state(2)).state
    assert state.layers[1][0][0] == 5 and state.seen.tolist() == [5, 5]
    assert state.layers[0][0][1].isnan().all()


@pytest.mark.parametrize("backbone", ["mamba2", "llama", "module"])
@pytest.mark.parametrize("window", [None, 2])
def test_a_state_may_have_another_dtype_than_the_layer(
    make_layer: MakeLayer, backbone: str, window: int | None
) -> None:
    """For example, the layer was converted after the call that made the state."""
    layer = make_layer(backbone, convergence=Residual(rtol=1e-5, max_iter=100), window=window).eval()
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        whole = layer(x).z
        for kept in (torch.float64, torch.float32):
            first = layer(x[:, :4], state=layer.backbone.initial_state(2, dtype=kept))
            for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
                second = deepcopy(layer).to(dtype)(x[:, 4:].to(dtype), state=first.state).z
                torch.testing.assert_close(second.float(), whole[:, 4:], rtol=0, atol=tolerance)
