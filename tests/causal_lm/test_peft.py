"""Tests of PEFT adapters in language models: train, switch, save and merge them, and refuse some of them."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import LogitsProcessorList

from deqseq.backbones import fold_weight_norm
from deqseq.causal_lm import ImplicitForCausalLM

peft: Any = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'deqseq[dev]'")

V = 32
BODIES: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8, "d_inner": 24},
    "llama": {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2},
}
MODELS = [(body, implicit) for body in BODIES for implicit in (True, False)]
Make = Callable[..., ImplicitForCausalLM]


@pytest.fixture
def make(make_model: Make) -> Make:
    """``make(body, implicit=True, **options)`` makes a small model with a tight tolerance."""

    def build(body: str, implicit: bool = True, **options: Any) -> ImplicitForCausalLM:
        options = {"convergence": {"name": "residual", "rtol": 1e-6, "max_iter": 100}, **options}
        options |= {"implicit": implicit, "tie_word_embeddings": False}
        return make_model(BODIES[body], vocab_size=V, **options)

    return build


def adapted(model: Any, kind: str = "lora", **options: Any) -> Any:
    """Add adapters of the type ``kind`` to a model, and give them random weights. Returns the adapted model.

    By default, every linear map of the model's body gets an adapter.
    """
    maps = {n.rpartition(".")[2] for n, m in model.model.named_modules() if isinstance(m, nn.Linear)}
    options = {"target_modules": sorted(maps), "task_type": "CAUSAL_LM", **options}
    made: dict[str, Callable[[], Any]] = {
        "lora": lambda: peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **options}),
        "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=9, **options),
        "ia3": lambda: peft.IA3Config(feedforward_modules=["fc2"], **options),
        "loha": lambda: peft.LoHaConfig(r=4, **options),
    }
    model = peft.get_peft_model(model, made[kind]()).eval()
    randomise(model)
    return model


def randomise(model: nn.Module) -> None:
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "ia3_", "hada_")):
                parameter.add_(0.2 * torch.randn_like(parameter))


def ids() -> Tensor:
    torch.manual_seed(5)
    return torch.randint(1, V, (2, 9))


class Delta(nn.Module):
    """A parametrisation that adds scale * b @ a to a weight, as LoRA does."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a.clone()), nn.Parameter(b.clone()), scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_adapters_can_be_switched_in_generate(make: Make, body: str, implicit: bool) -> None:
    """Contrastive decoding compares the model with and without its adapter in a logits processor."""
    model, seen = adapted(make(body, implicit)), list[Tensor]()

    @torch.no_grad()
    def contrast(tokens: Tensor, scores: Tensor) -> Tensor:
        with model.disable_adapter():
            seen.append(model(input_ids=ids()).logits)
        seen.append(model(input_ids=ids()).logits)
        return scores

    contrast(ids(), ids())
    base, tuned = seen
    assert (base - tuned).abs().max() > 1e-2
    model.generate(input_ids=ids(), max_new_tokens=2, min_new_tokens=2, do_sample=False,
                   logits_processor=LogitsProcessorList([contrast]))  # fmt: skip
    assert len(seen) == 6
    assert all(torch.equal(logits, (base, tuned)[i % 2]) for i, logits in enumerate(seen))


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_training_equals_deltas_by_hand(make: Make, body: str, implicit: bool, rslora: bool) -> None:
    plain = make(body, implicit, convergence={"name": "fixed", "iterations": 8})
    by_hand = fold_weight_norm(deepcopy(plain)).requires_grad_(False).train()
    model = adapted(plain, use_rslora=rslora).train()
    layers = {
        n.removeprefix("base_model.model."): m for n, m in model.named_modules() if hasattr(m, "lora_A")
    }
    assert len(layers) == (8 if body == "mamba2" else 14) + implicit
    pairs = []
    for name, layer in layers.items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        delta = Delta(a.detach(), b.detach(), 6 / (2 if rslora else 4))
        parametrize.register_parametrization(by_hand.get_submodule(name), "weight", delta)
        pairs += [(a, delta.a), (b, delta.b)]
    start = [a.detach().clone() for a, _ in pairs]
    optimisers = [torch.optim.SGD(weights, lr=0.05) for weights in zip(*pairs, strict=True)]
    for _ in range(10):
        losses = []
        tokens = torch.randint(1, V, (2, 9))
        for each, optimiser in zip((model, by_hand), optimisers, strict=True):
            losses.append(each(input_ids=tokens, labels=tokens).loss)
            losses[-1].backward()
            optimiser.step()
            optimiser.zero_grad()
        assert abs(losses[0] - losses[1]) < 1e-6 * losses[1]
    for (a, b), before in zip(pairs, start, strict=True):
        assert (a - b).abs().max() < 1e-6
        assert (a - before).abs().max() > 5e-5


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "adalora": {"kind": "adalora"},
    "ia3": {"kind": "ia3"},
}


@torch.no_grad()
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_unmerged_equals_folded_then_merged(
    make: Make, assert_close: Callable[..., None], body: str, implicit: bool, options: dict[str, Any]
) -> None:
    plain = make(body, implicit)
    before = plain(ids()).logits
    model = adapted(plain, **options)
    logits = model(input_ids=ids()).logits
    assert (logits - before).abs().max() > 0.1
    tokens = model.generate(input_ids=ids(), max_new_tokens=3, do_sample=False)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=ids()).logits, before)
    merged = fold_weight_norm(model).merge_and_unload()
    assert type(merged) is ImplicitForCausalLM and merged.config.backbone["weight_norm"] is False
    assert_close(merged(ids()).logits, logits, 1e-5)
    assert torch.equal(merged.generate(ids(), max_new_tokens=3, do_sample=False), tokens)


def test_dora_has_the_gradients_of_pefts_forward(make: Make, assert_close: Callable[..., None]) -> None:
    model = adapted(make("llama"), use_dora=True)
    map_ = model.base_model.model.model.layer.backbone.layers[0].mixer.wq
    x, weighting = torch.randn(3, 16), torch.randn(3, 16)
    weights = [p for p in map_.parameters() if p.requires_grad]
    from deqseq.backbones.weights import effective_weight

    outputs = map_(x), x @ effective_weight(map_).T
    assert len(weights) == 3
    assert_close(outputs[0], outputs[1], 1e-5)
    for a, b in zip(*(torch.autograd.grad((y * weighting).sum(), weights) for y in outputs), strict=True):
        assert_close(a, b, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("body", BODIES)
def test_save_load_switch_and_combine(
    make: Make, tmp_path: Path, assert_close: Callable[..., None], body: str
) -> None:
    model = adapted(make(body))
    first = model(input_ids=ids()).logits
    model.save_pretrained(tmp_path / "first")
    loaded = peft.PeftModel.from_pretrained(make(body), tmp_path / "first").eval()
    assert torch.equal(loaded(input_ids=ids()).logits, first)
    config = model.peft_config["default"]
    loaded.add_adapter("second", deepcopy(config))
    randomise(loaded)
    loaded.load_adapter(tmp_path / "first", "third")
    values = {}
    for name in ("second", "third"):
        loaded.set_adapter(name)
        values[name] = loaded(input_ids=ids()).logits
    assert torch.equal(values["third"], first)
    assert (values["second"] - first).abs().max() > 0.1
    loaded.base_model.set_adapter(["second", "third"])
    both = loaded(input_ids=ids()).logits
    merged = fold_weight_norm(loaded).merge_and_unload()
    assert_close(merged(ids()).logits, both, 1e-5)


@torch.no_grad()
def test_transformers_own_adapters(make: Make, tmp_path: Path) -> None:
    model: Any = make("llama")
    before = model(ids()).logits
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["wq", "fc2"]), "mine")
    randomise(model)
    logits = model.eval()(ids()).logits
    assert not torch.equal(logits, before)
    model.save_pretrained(tmp_path)
    other: Any = make("llama")
    other.load_adapter(tmp_path)
    assert torch.equal(other.eval()(ids()).logits, logits)


@torch.no_grad()
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_merging_into_weight_normalised_maps_is_refused(
    make: Make, assert_close: Callable[..., None], body: str, implicit: bool, safe: bool
) -> None:
    model = adapted(make(body, implicit))
    expected = model(input_ids=ids()).logits
    with pytest.raises(ValueError, match=r"had no effect: call .*fold_weight_norm"):
        model.merge_and_unload(safe_merge=safe)
    with pytest.raises(ValueError, match="had no effect"):
        model(input_ids=ids())
    fold_weight_norm(model)
    assert_close(model(input_ids=ids()).logits, expected, 1e-5)
    assert_close(model.merge_and_unload(safe_merge=safe)(ids()).logits, expected, 1e-5)


@torch.no_grad()
def test_a_merge_into_the_injection_alone_is_noticed(make: Make) -> None:
    model = adapted(make("llama"), target_modules=["linear"])
    model.merge_adapter()
    with pytest.raises(ValueError, match="had no effect"):
        model(input_ids=ids())
    with pytest.raises(ValueError, match="had no effect"):
        model.merge_and_unload()


@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_norms(make: Make, assert_close: Callable[..., None], body: str, implicit: bool) -> None:
    """LN tuning and ``modules_to_save`` train every norm.

    The model reads the weights of some norms without calling the norm's ``forward``. These norms train too.
    """
    norms = ["norm", "norm2", "norm_f"]
    for config in (
        peft.LNTuningConfig(target_modules=norms, task_type="CAUSAL_LM"),
        peft.LoraConfig(r=2, target_modules=["out_proj"], modules_to_save=norms, task_type="CAUSAL_LM"),
    ):
        plain = make(body, implicit)
        with torch.no_grad():
            before = plain(ids()).logits
        model = peft.get_peft_model(plain, config).train()
        model(input_ids=ids(), labels=ids()).loss.backward()
        tuned = [p for n, p in model.named_parameters() if p.requires_grad and "norm" in n]
        assert len(tuned) == (7 if body == "mamba2" else 5) + implicit
        with torch.no_grad():
            for parameter in tuned:
                assert parameter.grad.abs().max() > 0
                parameter.sub_(parameter.grad, alpha=0.3)
            logits = model.eval()(input_ids=ids()).logits
            assert (logits - before).abs().max() > 1e-3
            with model.disable_adapter():
                assert torch.equal(model(input_ids=ids()).logits, before)
            merged = fold_weight_norm(model).merge_and_unload()
            assert_close(merged(ids()).logits, logits, 1e-5)


def test_a_whole_backbone_may_be_trained(make: Make) -> None:
    """PEFT wraps the modules of ``modules_to_save``, so it replaces the layer's backbone by a wrapper."""
    model = adapted(make("llama"), target_modules=["embed_tokens"], modules_to_save=["backbone"]).train()
    model(input_ids=ids(), labels=ids()).loss.backward()
    layer = model.base_model.model.model.layer
    assert all(p.grad is not None for p in layer.backbone.modules_to_save.default.parameters())
    assert all(p.grad is None for p in layer.backbone.original_module.parameters())
    model.unload()
    assert type(layer.backbone).__name__ == "LlamaBackbone"


def test_autocast_trains(make: Make) -> None:
    model = adapted(make("llama")).train()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().max() > 0


def test_gradient_checkpointing(make: Make, assert_close: Callable[..., None]) -> None:
    found = []
    for checkpointing in (False, True):
        model = adapted(make("llama", gradient={"name": "unrolled", "iterations": 3})).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=ids(), labels=ids()).loss.backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for a, b in zip(*found, strict=True):
        assert_close(b, a, 1e-5)


def test_dropout(make: Make) -> None:
    model = adapted(make("llama"), lora_dropout=0.1)
    model(input_ids=ids())
    with pytest.raises(ValueError, match=r"set lora_dropout=0, got 0.1"):
        model.train()(input_ids=ids())


def test_refused(make: Make) -> None:
    convolution = adapted(make("mamba2"), r=48, target_modules=["conv1d"])
    with pytest.raises(ValueError, match=r"leave conv1d out of target_modules"):
        convolution(input_ids=ids())
    with pytest.raises(ValueError, match=r"peft\.Linear.* would have no effect: use LoRA, DoRA or IA3"):
        adapted(make("llama"), "loha")(input_ids=ids())
    mixed = adapted(make("llama"))
    with pytest.raises(ValueError, match=r"a hook changes what peft\.Linear computes"):
        mixed(input_ids=ids(), adapter_names=["default", "__base__"])


@torch.no_grad()
def test_other_adapters_work_once_folded_and_merged(make: Make) -> None:
    plain = fold_weight_norm(make("llama"))
    before = plain(ids()).logits
    merged = adapted(plain, "loha").merge_and_unload()
    assert (merged(ids()).logits - before).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
@pytest.mark.parametrize("body", BODIES)
def test_prompt_tuning(make: Make, body: str, kind: str) -> None:
    """``generate`` gives the tokens of calls of the model without a cache."""
    heads = {"num_attention_heads": 1} if body == "mamba2" else {}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3, **heads)
    model, found = peft.get_peft_model(make(body), config).eval(), ids()
    expected = found
    for _ in range(4):
        logits = model(input_ids=expected, use_cache=False).logits
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(input_ids=found, max_new_tokens=4, do_sample=False), expected)


def test_prefix_tuning_is_refused(make: Make) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(make("llama"), config)
    with pytest.raises(ValueError, match="past_key_values must be the EquilibriumCache"):
        model(input_ids=ids())
