"""Folding weight normalisation into plain linear maps keeps the function of models, layers and backbones."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from deqseq import ExplicitSequenceLayer, ImplicitSequenceLayer, Residual
from deqseq.backbone import backbones
from deqseq.backbones import ModuleBackbone, fold_weight_norm
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM, ImplicitModel
from deqseq.tasks.reasoning.model import BoardConfig, BoardModel

BODIES: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8, "d_inner": 24},
    "llama": {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2},
    "mixer": {"name": "mixer", "d_model": 16, "n_layer": 2, "tokens": 9},
    "convolution": {"name": "mixer", "d_model": 16, "n_layer": 2, "tokens": 9, "kernel": 3},
}
BODIES["recursion"] = {"name": "recursion", "map": BODIES["mixer"], "updates": 2}
V = 32


def trained(module: Any) -> Any:
    """Change all parameters of ``module``, so that g of weight normalisation no longer equals ||v||."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def assert_plain(module: nn.Module) -> None:
    assert not any(is_parametrized(part) for part in module.modules())
    assert {type(m) for m in module.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


@pytest.mark.parametrize("body", BODIES)
def test_a_backbone(body: str, assert_close: Callable[..., None]) -> None:
    backbone = trained(backbones.create(BODIES[body]))
    x, z = torch.randn(2, 2, 9, 2 * 16 if body == "recursion" else 16)
    expected = backbone(z, backbone.prepare(x))
    assert fold_weight_norm(backbone) is backbone
    assert_plain(backbone)
    assert_close(backbone(z, backbone.prepare(x)), expected, 1e-6)
    before = list(backbone.parameters())
    fold_weight_norm(backbone)
    assert all(a is b for a, b in zip(backbone.parameters(), before, strict=True))


@pytest.mark.parametrize("body", ["mamba2", "llama"])
def test_the_result_has_the_parameters_of_a_plain_backbone_in_their_order(body: str) -> None:
    folded = fold_weight_norm(backbones.create(BODIES[body]))
    plain = backbones.create({**BODIES[body], "weight_norm": False})
    assert [n for n, _ in folded.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(folded.state_dict()) == list(plain.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize("body", ["mamba2", "llama"])
def test_a_layer(body: str, implicit: bool, assert_close: Callable[..., None]) -> None:
    policy = Residual(rtol=1e-6, max_iter=50)
    layer: Any = (
        ImplicitSequenceLayer(BODIES[body], solver="picard:0.5", convergence=policy)
        if implicit
        else ExplicitSequenceLayer({**BODIES[body], "injection": False})
    )
    trained(layer).eval()
    x = torch.randn(2, 6, 16)
    expected = layer(x).z
    assert_plain(fold_weight_norm(layer))
    assert_close(layer(x).z, expected, 1e-5 if implicit else 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize("body", ["mamba2", "llama"])
def test_a_model_is_folded_saved_and_loaded(
    tmp_path: Path, body: str, implicit: bool, assert_close: Callable[..., None]
) -> None:
    convergence = {"name": "fixed", "iterations": 8}
    config = ImplicitConfig(
        vocab_size=V, backbone=BODIES[body], implicit=implicit, convergence=convergence, pad_token_id=0
    )
    model, other = trained(ImplicitForCausalLM(config)).eval(), ImplicitForCausalLM(config)
    ids = torch.randint(0, V, (2, 9))
    expected = model(ids).logits
    assert fold_weight_norm(model) is model
    assert_plain(model)
    logits = model(ids).logits
    assert_close(logits, expected, 1e-6)
    assert model.config.backbone["weight_norm"] is False and model.model.config is model.config
    assert other.config is config and config.backbone == BODIES[body]  # the other model is unchanged
    fold_weight_norm(model).save_pretrained(tmp_path)
    loaded = ImplicitForCausalLM.from_pretrained(tmp_path).eval()
    assert_plain(loaded)
    assert torch.equal(loaded(ids).logits, logits)
    assert torch.equal(ImplicitModel.from_pretrained(tmp_path).eval()(ids)[0], model.model(ids)[0])
    if not implicit:
        assert_plain(model.to_implicit())


@torch.no_grad()
@pytest.mark.parametrize("body", ["mamba2", "llama"])
def test_a_copy_is_folded_when_saved(tmp_path: Path, body: str, assert_close: Callable[..., None]) -> None:
    convergence = {"name": "fixed", "iterations": 8}
    config = ImplicitConfig(vocab_size=V, backbone=BODIES[body], convergence=convergence)
    model = trained(ImplicitForCausalLM(config)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, fold_weight_norm=True)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert model.config.backbone == BODIES[body]
    loaded = ImplicitForCausalLM.from_pretrained(tmp_path).eval()
    assert_plain(loaded)
    ids = torch.randint(0, V, (2, 9))
    assert_close(loaded(ids).logits, model(ids).logits, 1e-6)
    with pytest.raises(ValueError, match="fold_weight_norm must be"):
        model.save_pretrained(tmp_path, fold_weight_norm="yes")


@torch.no_grad()
@pytest.mark.parametrize("implicit", [True, False])
def test_a_model_of_boards_is_folded_saved_and_loaded(tmp_path: Path, implicit: bool) -> None:
    body = {"name": "recursion", "map": {"name": "mixer", "d_model": 8, "n_layer": 1, "tokens": 16}}
    config = BoardConfig(task="sudoku", size=4, backbone=body, implicit=implicit)
    model = fold_weight_norm(trained(BoardModel(config)).eval())
    assert model.config.backbone["map"]["weight_norm"] is False
    model.save_pretrained(tmp_path)
    question = torch.randint(0, 5, (2, 16))
    loaded = BoardModel.from_pretrained(tmp_path).eval()
    assert_plain(loaded)
    assert torch.equal(loaded(question).logits, model(question).logits)


def test_frozen_weights_stay_frozen_parameters() -> None:
    backbone = backbones.create(BODIES["mamba2"]).requires_grad_(False)
    buffers = [name for name, _ in backbone.named_buffers()]
    fold_weight_norm(backbone)
    assert not any(p.requires_grad for p in backbone.parameters())
    assert [name for name, _ in backbone.named_buffers()] == buffers


def test_folded_weights_train() -> None:
    model = fold_weight_norm(ImplicitForCausalLM(ImplicitConfig(vocab_size=V, backbone=BODIES["llama"])))
    ids = torch.randint(0, V, (2, 9))
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_copies_are_independent() -> None:
    backbone = backbones.create(BODIES["llama"])
    copy, x = deepcopy(backbone), torch.randn(1, 6, 16)
    expected = backbone(x, backbone.prepare(x))
    fold_weight_norm(copy)
    assert torch.equal(backbone(x, backbone.prepare(x)), expected)
    assert is_parametrized(backbone.layers[0].mixer.wq)
    assert_plain(fold_weight_norm(backbone))


@pytest.mark.parametrize("module", [nn.Linear(3, 3), ModuleBackbone(nn.Linear(3, 3))], ids=["map", "module"])
def test_a_module_without_such_a_backbone_is_refused(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"{type(module).__name__} contains no such backbone"):
        fold_weight_norm(module)


@pytest.mark.parametrize("body", BODIES)
def test_a_folded_layer_can_be_pickled(body: str) -> None:
    backbone = fold_weight_norm(backbones.create(BODIES[body]))
    x = torch.randn(1, 9, 16 * (1 + (body == "recursion")))
    copy = pickle.loads(pickle.dumps(backbone))
    assert torch.equal(copy(x, copy.prepare(x)), backbone(x, backbone.prepare(x)))
