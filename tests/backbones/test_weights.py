"""Tools of torch.nn.utils that change a map's weight act on backbones, or raise an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from deqseq import Backbone, ImplicitSequenceLayer
from deqseq.backbones import LlamaBackbone, Mamba2Backbone, fold_weight_norm

Tool = Callable[[nn.Module], Any]
TOOLS: dict[str, Tool] = {
    "spectral_norm": spectral_norm,
    "weight_norm": weight_norm,
    "prune": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
}
MAPS = [("llama", "mixer.wq"), ("llama", "mlp.fc2"), ("mamba2", "mixer.in_proj"), ("mamba2", "mixer.conv1d")]


def make(body: str, weight_norm: bool = False) -> Backbone:
    if body == "llama":
        return LlamaBackbone(16, n_layer=1, n_head=2, weight_norm=weight_norm)
    return Mamba2Backbone(16, n_layer=1, d_state=8, headdim=8, weight_norm=weight_norm)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("body", "name"), MAPS)
def test_the_changed_weight_is_used_and_trains(
    body: str, name: str, tool: str, assert_close: Callable[..., None]
) -> None:
    backbone = make(body)
    module: Any = backbone.layers[0].get_submodule(name)
    TOOLS[tool](module)
    x, z = torch.randn(2, 2, 6, 16)
    optimiser = torch.optim.SGD(backbone.parameters(), lr=0.5)
    for _ in range(2):  # the second pass must not use the weight of the first
        backbone(z, backbone.prepare(x)).square().mean().backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in module.parameters())
        optimiser.step()
        optimiser.zero_grad()
    backbone.eval()
    found = backbone(z, backbone.prepare(x))
    module(
        torch.randn(2, module.in_channels, 6) if name == "mixer.conv1d" else x.new_ones(module.in_features)
    )
    plain = make(body)
    plain.layers[0].get_submodule(name).load_state_dict(
        {"weight": module.weight, **({} if module.bias is None else {"bias": module.bias})}
    )
    others = {n: p for n, p in backbone.state_dict().items() if not n.startswith(f"layers.0.{name}.")}
    plain.load_state_dict(others, strict=False)
    assert_close(found, plain(z, plain.prepare(x)), 1e-6)


def test_a_pruned_norm_is_used(assert_close: Callable[..., None]) -> None:
    backbone = make("llama")
    x, z = torch.randn(2, 2, 6, 16)
    prune.l1_unstructured(backbone.layers[0].norm2, "weight", 0.5)
    with torch.no_grad():
        backbone.layers[0].norm2.weight_orig.mul_(3)
    found = backbone(z, backbone.prepare(x))
    prune.remove(backbone.layers[0].norm2, "weight")
    assert_close(found, backbone(z, backbone.prepare(x)), 1e-6)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("tool", TOOLS)
def test_weight_normalised_maps(tool: str) -> None:
    backbone = make("llama", weight_norm=True)
    linear = backbone.layers[0].mixer.wq
    if tool == "parametrizations.spectral_norm":
        TOOLS[tool](linear)
        x = torch.randn(1, 6, 16)
        backbone(x, backbone.prepare(x)).sum().backward()
        assert torch.linalg.matrix_norm(linear.weight, 2) < 1.1
        with pytest.raises(ValueError, match="whose only parametrisation is weight normalisation"):
            fold_weight_norm(backbone)
    elif tool == "prune":
        with pytest.raises(ValueError, match=r"weight-normalised.* call deqseq\.backbones\.fold_weight_norm"):
            TOOLS[tool](linear)
    else:  # torch's own error
        with pytest.raises(KeyError, match="weight"):
            TOOLS[tool](linear)


def test_the_bias_of_a_weight_normalised_map_can_be_replaced() -> None:
    backbone: Any = make("mamba2", weight_norm=True)
    backbone.layers[0].mixer.conv1d.bias = bias = nn.Parameter(torch.ones(32 + 16))
    assert backbone.layers[0].mixer.conv1d.bias is bias
    with pytest.raises(ValueError, match="its weight cannot be set"):
        backbone.layers[0].mixer.out_proj.weight = nn.Parameter(torch.ones(16, 32))


@pytest.mark.parametrize("place", ["layers.0.mixer.norm", "layers.0.norm", "norm_f"])
def test_another_kind_of_norm_is_refused(place: str) -> None:
    backbone = Mamba2Backbone(16, n_layer=1, d_state=4, headdim=8)
    backbone.set_submodule(place, nn.LayerNorm(backbone.get_submodule(place).weight.shape))
    with pytest.raises(ValueError, match="LayerNorm has a forward method of its own"):
        ImplicitSequenceLayer(backbone)(torch.randn(1, 3, 16))


def test_a_patched_norm_is_refused() -> None:
    backbone = make("llama")
    backbone.norm_f.forward = lambda x: 0 * x
    with pytest.raises(ValueError, match="RMSNorm has a forward method of its own"):
        ImplicitSequenceLayer(backbone)(torch.randn(1, 3, 16))
