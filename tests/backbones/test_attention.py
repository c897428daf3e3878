"""Llama with attention functions from transformers must give the same values and gradients as with sdpa.

Unknown names and missing packages must give clear errors.
"""

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deqseq import kernels
from deqseq.backbones import LlamaBackbone
from deqseq.backbones.attention import _block_mask

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'deqseq[lm]'")
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM

Close = Callable[[Tensor, Tensor, float], None]

BODY = {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2}
MAMBA2 = {"name": "mamba2", "d_model": 16, "n_layer": 1, "d_state": 8, "headdim": 8}


def by_hand(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    """An attention function that a user could register. The function ``boolean`` makes its mask."""
    key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    scores = (query @ key.mT * kwargs["scaling"]).masked_fill(~attention_mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def boolean(batch_size: int, q_length: int, kv_length: int, device: torch.device, **kwargs: Any) -> Tensor:
    return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device).tril()


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "plain", sdpa_attention_forward)
    monkeypatch.setitem(AttentionInterface._global_mapping, "by_hand", by_hand)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "by_hand", boolean)


def twins(attention: str, d_model: int = 16, **options: Any) -> list[LlamaBackbone]:
    """Two backbones with the same weights: one with the default attention, one with ``attention``."""
    made = []
    for name in ("sdpa", attention):
        torch.manual_seed(3)
        made.append(LlamaBackbone(d_model, 2, n_head=4, attention=name, **options))
    return made


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("attention", ["eager", "plain", "by_hand"])
def test_values_and_gradients(attention: str, n_kv_head: int, assert_close: Close) -> None:
    found = []
    z, x, weight = torch.randn(3, 2, 9, 16)
    for f in twins(attention, n_kv_head=n_kv_head):
        tensors = [z.clone().requires_grad_(), x.clone().requires_grad_(), *f.parameters()]
        y = f(tensors[0], f.prepare(tensors[1]))
        found.append([y, *torch.autograd.grad((y * weight).sum(), tensors)])
    for expected, actual in zip(*found, strict=True):
        assert_close(actual, expected, 1e-4)


@pytest.mark.parametrize("attention", ["eager", "plain", "by_hand"])
def test_with_a_state(attention: str, assert_close: Close) -> None:
    """With a state, values and new states are the same as with the default attention, torch's sdpa.

    If the state is empty, the backbone calls the function ``attention``. If the state has tokens, it calls
    sdpa.
    """
    z, x = torch.randn(2, 2, 9, 16)
    found = []
    with torch.no_grad():
        for f in twins(attention, n_kv_head=2):
            context, state, values = f.prepare(x), f.initial_state(2), []
            for start, stop in ((0, 5), (5, 6), (6, 9)):
                index = torch.arange(start, stop).expand(2, -1)
                y, trace = f.evaluate(z[:, start:stop], context.take(index), state)
                state = f.advance(trace, f.reserve(state, y), torch.full((2,), stop - start))
                values.append(y)
            found.append((f(z, context), torch.cat(values, 1), state))
    (whole, steps, state), (whole_named, steps_named, state_named) = found
    assert_close(whole_named, whole, 1e-4)
    assert_close(steps, whole, 1e-4)
    assert_close(steps_named, whole, 1e-4)
    for before, after in zip(state.layers, state_named.layers, strict=True):
        for a, b in zip(after, before, strict=True):
            assert_close(a, b, 1e-4)


@pytest.mark.parametrize("attention", ["eager", "plain", "by_hand"])
def test_causal(attention: str) -> None:
    f = twins(attention)[1]
    z, x = torch.randn(2, 2, 12, 16)
    with torch.no_grad():
        before = f(z, f.prepare(x))
        z[:, 7], x[:, 7] = torch.randn(2, 2, 16)
        after = f(z, f.prepare(x))
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7], after[:, 7]).all(-1).any()


def test_eager_has_second_derivatives() -> None:
    f = twins("eager")[1]
    z = torch.randn(1, 4, 16, requires_grad=True)
    with kernels.use("torch"):  # not our own kernels, because they have no second derivatives
        value = f(z, f.prepare(torch.randn(1, 4, 16))).square().sum()
    (first,) = torch.autograd.grad(value, z, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), z)
    assert second.abs().max() > 0


@pytest.mark.parametrize("attention", ["eager", "flex_attention", "by_hand"])
def test_models_are_pickled(attention: str) -> None:
    # Use width 64 for 4 heads, because flex attention on a GPU needs a head dimension of 16 or more.
    f = twins(attention, 64, weight_norm=False)[1]
    z = torch.randn(2, 9, 64)
    with torch.no_grad():
        expected = f(z, f.prepare(z))
        for g in (pickle.loads(pickle.dumps(f)), copy.deepcopy(f)):
            assert torch.equal(g(z, g.prepare(z)), expected)


@pytest.mark.parametrize("heads", [{}, {"n_kv_head": 2}])
def test_autocast_and_copies(heads: dict[str, int], assert_close: Close) -> None:
    """Under autocast, eager attention gives nearly the same values as sdpa. A deep copy gives equal values.

    Autocast makes keys and values bfloat16, but the state stays float32.
    """
    z, x = torch.randn(2, 2, 9, 16)
    values = []
    with torch.no_grad(), torch.autocast(z.device.type, dtype=torch.bfloat16):
        for f in twins("eager", **heads):
            for g in (f, copy.deepcopy(f)):
                values.append(g.evaluate(z, g.prepare(x), g.initial_state(2))[0].float())
    assert torch.equal(values[2], values[3])
    assert_close(values[2], values[0], 0.05)


@pytest.mark.parametrize("length", [24, 140])
def test_flex(length: int, assert_close: Close) -> None:
    """The forward pass of flex attention gives the same values as sdpa and is causal.

    Gradients are not tested here, because flex attention has none on the CPU.
    """
    z, x = torch.randn(2, 2, length, 64)
    with torch.no_grad():
        default, f = twins("flex_attention", 64, n_kv_head=2)
        before = f(z, f.prepare(x))
        assert_close(before, default(z, default.prepare(x)), 1e-3)
        z[:, 20] = torch.randn(2, 64)
        assert torch.equal(f(z, f.prepare(x))[:, :20], before[:, :20])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention has gradients on GPUs only")
def test_flex_gradients(assert_close: Close) -> None:
    found = []
    z, x, weight = torch.randn(3, 2, 140, 64, device="cuda")
    for f in twins("flex_attention", 64, n_kv_head=2):
        f = f.cuda()
        y = f(z, f.prepare(x))
        found.append([y, *torch.autograd.grad((y * weight).sum(), [*f.parameters()])])
    for expected, actual in zip(*found, strict=True):
        assert_close(actual, expected, 1e-2)


def test_block_masks_are_made_once_and_for_training_too() -> None:
    device = torch.empty(0).device
    _block_mask.cache_clear()
    with torch.inference_mode():
        mask = _block_mask(200, device)
    assert not mask.kv_num_blocks.is_inference()
    assert _block_mask(200, device) is mask and _block_mask(201, device) is not mask


# --- flash-attn ---


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Install a fake flash-attn 3. Returns a list to which every call adds the shape of its keys."""
    calls: list[tuple[int, ...]] = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
        calls.append(tuple(k.shape))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
        return y.transpose(1, 2)

    module = ModuleType("flash_attn_interface")
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(module, name, flash_attn_func)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    return calls


def test_flash_runs_where_there_are_no_slots(flash_calls: list[tuple[int, ...]], assert_close: Close) -> None:
    default, f = (g.bfloat16() for g in twins("flash_attention_3", n_kv_head=2))
    z, x = torch.randn(2, 2, 9, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        context = f.prepare(x)
        assert_close(f(z, context).float(), default(z, context).float(), 0.05)
        # Each of the 2 layers makes one call. The 2 key/value heads are not repeated for the 4 query heads.
        assert flash_calls == [(2, 9, 2, 4)] * 2
        state = f.initial_state(2)
        _, trace = f.evaluate(z, context, state)
        assert len(flash_calls) == 4
        state = f.advance(trace, f.reserve(state, z), torch.full((2,), 9))
        f.evaluate(z[:, :1], context.take(torch.zeros(2, 1, dtype=torch.int64)), state)
        assert len(flash_calls) == 4


def test_flash_takes_half_precision_only(flash_calls: list[tuple[int, ...]]) -> None:
    f = twins("flash_attention_3")[1]
    z = torch.randn(2, 9, 16)
    with pytest.raises(ValueError, match=r"bfloat16, got torch\.float32"):
        f(z, f.prepare(z))
    with torch.autocast(z.device.type, dtype=torch.bfloat16):
        f.evaluate(z, f.prepare(z), f.initial_state(2))
    assert len(flash_calls) == 2


@pytest.mark.parametrize("version", [2, 3, 4])
def test_without_flash_attn(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("flash_attn", "flash_attn_interface", "kernels"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(flash, f"is_flash_attn_{version}_available", lambda *_, **__: False)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    with pytest.raises(ValueError, match=f"'flash_attention_{version}' needs .* flash-attn"):
        LlamaBackbone(16, 1, n_head=4, attention=f"flash_attention_{version}")


# --- names ---


@pytest.mark.parametrize("name", ["flash", "paged|eager", "", None])
def test_unknown_names(name: Any) -> None:
    with pytest.raises(
        ValueError, match=r"unknown attention .*known: .*by_hand, eager.*flex_attention.*sdpa"
    ):
        LlamaBackbone(16, 1, n_head=4, attention=name)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", None)
    LlamaBackbone(16, 1, n_head=4)
    with pytest.raises(ValueError, match=r"deqseq\[lm\]"):
        LlamaBackbone(16, 1, n_head=4, attention="eager")


def test_the_configuration_keeps_the_name(tmp_path: Path) -> None:
    body = {**BODY, "attention": "by_hand"}
    model = ImplicitForCausalLM(ImplicitConfig(vocab_size=40, backbone=body)).eval()
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).backbone == body
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.model.layer.backbone.attention.name == "by_hand"
    ids = torch.randint(0, 40, (2, 7))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("make", ["pretrained", "config", "settings"])
def test_transformers_argument(make: str, tmp_path: Path, assert_close: Close) -> None:
    """The argument ``attn_implementation`` of transformers sets the backbone's ``attention``.

    It overrides the ``attention`` in a saved configuration.
    """
    config = ImplicitConfig(vocab_size=40, backbone=BODY)
    model = ImplicitForCausalLM(config).eval()
    if make == "pretrained":
        saved = copy.deepcopy(model)
        saved.config.backbone["attention"] = "flash_attention_4"
        saved.save_pretrained(tmp_path)
        made = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="by_hand")
    elif make == "config":
        made = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="by_hand")
    else:
        made = ImplicitForCausalLM(
            ImplicitConfig(vocab_size=40, backbone=BODY, attn_implementation="by_hand")
        )
    assert made.config.backbone == {**BODY, "attention": "by_hand"} and "attention" not in BODY
    made.load_state_dict(model.state_dict())
    ids = torch.randint(0, 40, (2, 7))
    with torch.no_grad():
        assert_close(made.eval()(ids).logits, model(ids).logits, 1e-4)
        new, expected = (m.generate(ids, max_new_tokens=4, do_sample=False) for m in (made, model))
    assert torch.equal(new, expected)
    with pytest.raises(ValueError, match="unknown attention 'fast'"):
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="fast")


def test_the_configuration_reads_what_was_set() -> None:
    config = ImplicitConfig(vocab_size=40, backbone=BODY)
    for name in ("sdpa", "eager", "by_hand"):
        config._attn_implementation = name
        assert config._attn_implementation == config.backbone["attention"] == name
        model = ImplicitForCausalLM(copy.deepcopy(config))
        assert model.config._attn_implementation == name
        # The attention of a model cannot change. transformers warns, and the configuration stays true.
        model.set_attn_implementation("eager")
        assert model.config._attn_implementation == name
    plain = ImplicitForCausalLM(ImplicitConfig(vocab_size=40, backbone=BODY))
    assert plain.config._attn_implementation == "sdpa"


def test_a_body_without_the_option_takes_what_it_took() -> None:
    config = ImplicitConfig(vocab_size=40, backbone=MAMBA2)
    assert AutoModelForCausalLM.from_config(config, attn_implementation="eager").config.backbone == MAMBA2
    with pytest.raises(ValueError, match="does not support"):
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
