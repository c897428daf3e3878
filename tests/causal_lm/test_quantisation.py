"""Quantised weights: torchao and bitsandbytes quantise folded models, and refuse weight-normalised ones."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq.backbones import fold_weight_norm
from deqseq.backbones.weights import effective_weight
from deqseq.causal_lm import ImplicitForCausalLM

V = 32
BODIES: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 64, "n_layer": 2, "d_state": 16, "headdim": 16, "d_inner": 128},
    "llama": {"name": "llama", "d_model": 64, "n_layer": 2, "n_head": 4, "n_kv_head": 2},
}
MODELS = [(body, implicit) for body in BODIES for implicit in (True, False)]
KINDS = ["torchao-int8", "torchao-int4", "bitsandbytes-int8", "bitsandbytes-nf4"]
LOGITS = {"int8": 0.01, "int4": 0.25, "nf4": 0.25}  # largest relative error
BYTES = {"int8": 0.5, "int4": 0.5, "nf4": 0.35}  # largest share of the plain model's bytes
Make = Callable[..., ImplicitForCausalLM]


@pytest.fixture
def make(make_model: Make) -> Make:
    """``make(body, implicit, fold=True, rtol=1e-6)`` makes a small model."""

    def build(body: str, implicit: bool, fold: bool = True, rtol: float = 1e-6) -> ImplicitForCausalLM:
        policy = {"name": "residual", "rtol": rtol, "max_iter": 100}
        model: ImplicitForCausalLM = make_model(
            BODIES[body], vocab_size=V, implicit=implicit, convergence=policy
        )
        return fold_weight_norm(model) if fold else model

    return build


def configuration(kind: str) -> Any:
    """The ``quantization_config`` of ``kind``. Skips the test if its package is not installed."""
    package, _, weights = kind.partition("-")
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'deqseq[dev]'")
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if package == "bitsandbytes":
        eight = weights == "int8"
        return BitsAndBytesConfig(load_in_8bit=eight, load_in_4bit=not eight, bnb_4bit_quant_type="nf4")
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig

    return TorchAoConfig(
        Int8WeightOnlyConfig() if weights == "int8" else IntxWeightOnlyConfig(weight_dtype=torch.int4)
    )


def load(folder: Path, kind: str) -> ImplicitForCausalLM:
    model: ImplicitForCausalLM = ImplicitForCausalLM.from_pretrained(
        folder, quantization_config=configuration(kind)
    )
    return model


def ids() -> Tensor:
    torch.manual_seed(5)
    return torch.randint(1, V, (2, 9))


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_models_are_quantised_saved_and_loaded(
    make: Make, tmp_path: Path, body: str, implicit: bool, kind: str
) -> None:
    configuration(kind)
    plain, bits = make(body, implicit), kind.partition("-")[2]
    plain.save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", kind).eval()
    expected, logits = plain(ids()).logits, model(ids()).logits
    error = (logits - expected).norm() / expected.norm()
    assert 0 < error < LOGITS[bits]
    tokens = model.generate(ids(), max_new_tokens=4, do_sample=False)
    whole = model(tokens).logits
    assert torch.equal(whole[:, 8:-1].argmax(-1), tokens[:, 9:])
    model.save_pretrained(tmp_path / kind)
    assert weight_bytes(tmp_path / kind) < BYTES[bits] * weight_bytes(tmp_path / "plain")
    assert torch.equal(ImplicitForCausalLM.from_pretrained(tmp_path / kind).eval()(ids()).logits, logits)


@torch.no_grad()
@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_quantize(make: Make, body: str, implicit: bool) -> None:
    configuration("torchao-int8")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    plain = make(body, implicit)
    model, other = deepcopy(plain), deepcopy(plain)
    quantize_(model, Int8WeightOnlyConfig())
    expected, logits = plain(ids()).logits, model(ids()).logits
    assert 0 < (logits - expected).norm() < 0.01 * expected.norm()
    quantize_(other, Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(ValueError, match="quantises inputs of linear maps too"):
        other(ids())
    with pytest.raises(ValueError, match=r"weight-normalised.* call deqseq\.backbones\.fold_weight_norm"):
        quantize_(make(body, implicit, fold=False), Int8WeightOnlyConfig())


@pytest.mark.parametrize("kind", ["torchao-int8", "bitsandbytes-int8", "bitsandbytes-nf4"])
@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_weight_normalised_models_are_refused(
    make: Make, tmp_path: Path, body: str, implicit: bool, kind: str
) -> None:
    configuration(kind)
    make(body, implicit, fold=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"quantises no map .*fold_weight_norm=True"):
        load(tmp_path, kind)


def test_settings_that_quantise_nothing_are_refused(make: Make, tmp_path: Path) -> None:
    configuration("torchao-int8")
    from torchao.quantization import Int4WeightOnlyConfig
    from transformers import TorchAoConfig

    make("llama", True).save_pretrained(tmp_path)
    groups = TorchAoConfig(Int4WeightOnlyConfig(group_size=256))  # wider than the model
    with pytest.raises(ValueError, match="skip maps that are too small"):
        ImplicitForCausalLM.from_pretrained(tmp_path, quantization_config=groups)


@pytest.mark.parametrize("kind", ["torchao-int8", "bitsandbytes-int8", "bitsandbytes-nf4"])
@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_lora_trains_on_quantised_weights(
    make: Make, tmp_path: Path, body: str, implicit: bool, kind: str
) -> None:
    peft: Any = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'deqseq[dev]'")
    configuration(kind)
    make(body, implicit, rtol=0.03).to(torch.bfloat16).save_pretrained(tmp_path)
    model: Any = peft.prepare_model_for_kbit_training(load(tmp_path, kind))
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    ).train()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    maps = [m for m in model.modules() if isinstance(m, nn.Module) and hasattr(m, "lora_A")]
    assert len(maps) == (8 if body == "mamba2" else 14) + implicit and len(weights) == 2 * len(maps)
    optimiser = torch.optim.Adam(weights.values(), 3e-2)
    losses = []
    for _ in range(5):
        losses.append(model(input_ids=ids(), labels=ids()).loss)
        losses[-1].backward()
        assert all(p.grad is not None for p in weights.values())
        assert all(p.grad.abs().max() > 0 for name, p in weights.items() if "lora_B" in name)
        optimiser.step()
        optimiser.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(  # PEFT's DoRA fails in the forward pass of bitsandbytes' int8 maps on CPUs
    ("kind", "dora"),
    [("torchao-int8", False), ("torchao-int8", True), ("bitsandbytes-int8", False),
     ("bitsandbytes-nf4", False), ("bitsandbytes-nf4", True)],
)  # fmt: skip
def test_effective_weights_compute_what_forward_computes(
    make: Make, tmp_path: Path, assert_close: Callable[..., None], kind: str, dora: bool
) -> None:
    peft: Any = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'deqseq[dev]'")
    configuration(kind)
    make("llama", False).save_pretrained(tmp_path)
    model = load(tmp_path, kind)
    options = {"use_dora": dora, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    linear = model.model.layer.backbone.layers[0].mixer.wq
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["wq"], **options)).train()
    x = torch.eye(64)  # bitsandbytes rounds the inputs of int8 maps, but 0 and 1 stay exact
    adapter = adapted.base_model.model.model.layer.backbone.layers[0].mixer.wq
    assert adapter.base_layer is linear
    for map_ in (adapter, linear):
        expected = effective_weight(map_)
        assert_close(map_(x).T, expected, 2e-3 if kind == "bitsandbytes-int8" else 1e-5)


def test_weights_that_are_not_quantised_yet_are_refused(make: Make) -> None:
    bnb: Any = pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not installed: pip install 'deqseq[dev]'"
    )
    for linear in (bnb.nn.Linear4bit(64, 64), bnb.nn.Linear8bitLt(64, 64), bnb.nn.Linear8bitLt(64, 64).cpu()):
        with pytest.raises(ValueError, match="is not quantised yet"):
            effective_weight(linear)
