"""Backbones must support PEFT's adapters, which replace linear maps and norms.

The tests do not need PEFT: they use small modules with the same attributes as PEFT's adapters.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from deqseq import Backbone, ImplicitSequenceLayer, Residual
from deqseq.backbones import fold_weight_norm

MakeBackbone = Callable[..., Backbone]
BODIES = ["mamba2", "llama"]


class Wrapper(nn.Module):
    """Imitates the attributes and properties that all of PEFT's adapters have."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.active_adapters = ["a"]
        self.disable_adapters = False
        self.merged_adapters: list[str] = []

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("backbones do not call linear maps")


class LoRA(Wrapper):
    """Imitates PEFT's LoRA module with two adapters, "a" and "b"."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__(base)
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, 2, bias=False) for name in "ab"})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, base.out_features, bias=False) for name in "ab"})
        self.lora_dropout = nn.ModuleDict({"a": nn.Dropout(dropout), "b": nn.Identity()})
        self.lora_bias: dict[str, bool] = {}
        self.lora_variant: dict[str, object] = {}

    def get_delta_weight(self, name: str) -> Tensor:
        return 3 * self.lora_B[name].weight @ self.lora_A[name].weight

    def merge(self) -> None:
        for name in self.active_adapters:
            self.base_layer.weight.data += self.get_delta_weight(name)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        for name in self.merged_adapters:
            self.base_layer.weight.data -= self.get_delta_weight(name)
        self.merged_adapters = []


class Plus(nn.Module):
    """Adds the deltas of the adapters ``names`` to a weight, to compute the expected result of a test."""

    def __init__(self, adapter: LoRA, names: str) -> None:
        super().__init__()
        self.adapter, self.names = [adapter], names

    def forward(self, weight: Tensor) -> Tensor:
        return weight + sum(self.adapter[0].get_delta_weight(name) for name in self.names)


def adapt(backbone: Backbone, kind: Any = LoRA, **options: Any) -> list[Any]:
    """Replace all linear maps of the blocks by adapters. Returns the adapters."""
    made = []
    for parent in list(backbone.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(parent, Wrapper):
                made.append(kind(child, **options))
                setattr(parent, name, made[-1])
    assert len(made) >= 2
    return made


def value(backbone: Backbone) -> Tensor:
    torch.manual_seed(5)
    x, z = torch.randn(2, 1, 5, 16)
    return backbone(z, backbone.prepare(x))


@pytest.mark.parametrize("names", ["a", "b", "ab"])
@pytest.mark.parametrize("body", BODIES)
def test_active_adapters_count_with_their_gradients(
    make_backbone: MakeBackbone, assert_close: Callable[..., None], body: str, names: str
) -> None:
    backbone = make_backbone(body).requires_grad_(False)
    plain = value(backbone)
    adapters = adapt(backbone)
    for adapter in adapters:
        adapter.active_adapters = list(names)
    weights = [half[name].weight for a in adapters for half in (a.lora_A, a.lora_B) for name in names]
    found = value(backbone)
    assert (found - plain).abs().max() > 0.01
    weighting = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weighting).sum(), weights)
    # Compute the expected result: switch the adapters off, and later add their deltas to the weights.
    for adapter in adapters:
        adapter.active_adapters = []
    assert torch.equal(value(backbone), plain)
    for adapter in adapters:
        parametrize.register_parametrization(adapter.base_layer, "weight", Plus(adapter, names))
    expected = value(backbone)
    assert_close(found, expected, 1e-6)
    for a, b in zip(gradients, torch.autograd.grad((expected * weighting).sum(), weights), strict=True):
        assert_close(a, b, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("body", BODIES)
def test_disabled_and_merged_adapters(
    make_backbone: MakeBackbone, assert_close: Callable[..., None], body: str
) -> None:
    backbone = fold_weight_norm(make_backbone(body))
    plain = value(backbone)
    adapters = adapt(backbone)
    adapted = value(backbone)
    assert (adapted - plain).abs().max() > 0.01
    for adapter in adapters:
        adapter.merge()
    assert torch.equal(value(backbone), adapted)
    for adapter in adapters:  # disable them while merged: the next evaluation must unmerge
        adapter.disable_adapters = True
    assert_close(value(backbone), plain, 1e-6)
    assert not any(adapter.merged for adapter in adapters)


@torch.no_grad()
@pytest.mark.parametrize("body", BODIES)
def test_a_merge_without_effect_is_noticed(
    make_backbone: MakeBackbone, assert_close: Callable[..., None], body: str
) -> None:
    backbone = make_backbone(body)
    adapters = adapt(backbone)
    expected = value(backbone)
    for adapter in adapters:
        adapter.merge()
    with pytest.raises(ValueError, match=r"merging .*LoRA .* had no effect: call .*fold_weight_norm"):
        value(backbone)
    mixer = backbone.layers[0].mixer
    with pytest.raises(ValueError, match="had no effect"):  # PEFT's ``unload`` makes the same assignment
        mixer.out_proj = mixer.out_proj.base_layer
    fold_weight_norm(backbone)
    assert_close(value(backbone), expected, 1e-6)
    for adapter in adapters:
        adapter.merge()
    mixer.out_proj = mixer.out_proj.base_layer
    assert_close(value(backbone), expected, 1e-6)


@torch.no_grad()
def test_weights_are_read_once_in_a_forward_pass(make_backbone: MakeBackbone) -> None:
    backbone = make_backbone("llama")
    calls = []
    for adapter in adapt(backbone):
        read = adapter.get_delta_weight
        adapter.get_delta_weight = lambda name, read=read: calls.append(name) or read(name)
    ImplicitSequenceLayer(backbone, convergence=Residual(rtol=1e-6, max_iter=9)).eval()(torch.randn(1, 4, 16))
    assert len(calls) == 7


@torch.no_grad()
def test_under_autocast_the_delta_is_not_rounded(make_backbone: MakeBackbone) -> None:
    backbone = fold_weight_norm(make_backbone("llama"))
    adapters = adapt(backbone)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        found = value(backbone)
    for adapter in adapters:
        adapter.merge()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert torch.equal(value(backbone), found)


def test_dropout_is_refused_in_training(make_backbone: MakeBackbone) -> None:
    backbone = make_backbone("llama")
    adapt(backbone, dropout=0.1)
    value(backbone.eval())
    with pytest.raises(ValueError, match=r"set lora_dropout=0, got 0.1"):
        value(backbone.train())


class PackedLinear(nn.Linear):
    """Imitates a quantised linear map of an unknown package, whose weight is packed."""


def quantised(adapter: LoRA) -> None:
    adapter.base_layer = PackedLinear(16, 16, bias=False)


def other_kind(adapter: LoRA) -> None:
    del adapter.lora_A


def hooked(adapter: LoRA) -> None:
    adapter.register_forward_pre_hook(lambda *_: None)


def biased(adapter: LoRA) -> None:
    adapter.lora_bias = {"a": True}


def variant(adapter: LoRA) -> None:
    adapter.lora_variant = {"a": nn.ReLU()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (quantised, "PackedLinear cannot replace a linear map, .* torchao or bitsandbytes"),
        (other_kind, "LoRA would have no effect: use LoRA, DoRA or IA3"),
        (hooked, "a hook changes what .*LoRA computes"),
        (biased, "adapter 'a' adds a bias .*lora_bias=False"),
        (variant, "must be LoRA, rsLoRA or DoRA, got a ReLU"),
    ],
)
def test_refused(make_backbone: MakeBackbone, change: Callable[[LoRA], None], said: str) -> None:
    backbone = make_backbone("llama")
    change(adapt(backbone)[-1])
    with pytest.raises(ValueError, match=said):
        value(backbone)


class LNTuning(Wrapper):
    def __init__(self, base: nn.RMSNorm) -> None:
        super().__init__(base)
        self.ln_tuning_layers = nn.ModuleDict({name: nn.RMSNorm(16, base.eps) for name in "ab"})
        with torch.no_grad():
            for norm in self.ln_tuning_layers.values():
                norm.weight.uniform_(0.5, 1.5)


@pytest.mark.parametrize("body", BODIES)
def test_tuned_norms(make_backbone: MakeBackbone, assert_close: Callable[..., None], body: str) -> None:
    backbone: Any = make_backbone(body)
    plain = value(backbone)
    block = backbone.layers[0]
    holders = [(block, "norm"), (backbone, "norm_f")]
    if body == "llama":
        holders.append((block, "norm2"))
    wrappers = []
    for parent, name in holders:
        wrappers.append(LNTuning(getattr(parent, name)))
        setattr(parent, name, wrappers[-1])
    found = value(backbone)
    assert (found - plain).abs().max() > 0.01
    found.sum().backward()
    assert all(wrapper.ln_tuning_layers["a"].weight.grad.abs().sum() > 0 for wrapper in wrappers)
    wrappers[0].active_adapters = ["a", "b"]
    with pytest.raises(ValueError, match="one active adapter"):
        value(backbone)
    wrappers[0].active_adapters = ["a"]
    for wrapper in wrappers:
        wrapper.disable_adapters = True
    assert torch.equal(value(backbone), plain)
    for (parent, name), wrapper in zip(holders, wrappers, strict=True):
        setattr(parent, name, wrapper.ln_tuning_layers["a"])
    assert_close(value(backbone), found, 1e-6)


def test_other_adapters_of_norms_are_refused(make_backbone: MakeBackbone) -> None:
    backbone: Any = make_backbone("llama")
    backbone.norm_f = Wrapper(backbone.norm_f)
    with pytest.raises(ValueError, match="Wrapper cannot adapt a norm"):
        value(backbone)


def test_with_adapters_no_cuda_graph_is_recorded(make_backbone: MakeBackbone) -> None:
    """A backbone with adapters must not be recorded as a CUDA graph.

    Switching to another adapter changes no module or tensor. So a recorded graph would still use the old
    adapter.
    """
    backbone: Any = make_backbone("llama")
    assert backbone.capturable
    mixer, linear = backbone.layers[0].mixer, backbone.layers[0].mixer.wq
    mixer.wq = LoRA(linear)
    assert not backbone.capturable
    mixer.wq = linear
    assert backbone.capturable
    backbone.layers[0].norm = LNTuning(backbone.layers[0].norm)
    assert not backbone.capturable
