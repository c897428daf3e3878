"""Presets, which are the paper's configurations of language models."""

from pathlib import Path

import pytest
import torch

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM, presets

DOCS = Path(__file__).parents[2] / "docs" / "presets.md"


def test_all_presets_have_the_documented_parameters() -> None:
    assert len(presets.names()) == 2 * 4 * 4 + 1
    assert presets.table() in DOCS.read_text()


@pytest.mark.parametrize("name", ["mamba2-130m", "llama-370m"])
def test_implicit_models_differ_by_their_injection(name: str) -> None:
    with torch.device("meta"):
        explicit, free = (
            ImplicitForCausalLM(ImplicitConfig.from_preset(f"{name}-{form}")) for form in ("explicit", "free")
        )
    injection = free.model.layer.backbone.injection
    assert free.num_parameters() - explicit.num_parameters() == sum(p.numel() for p in injection.parameters())
    assert free.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("llama-130m", "llama-130m-explicit, llama-130m-injected, llama-130m-bounded, llama-130m-free"),
        ("mamba3", "mamba2-130m-explicit, .*, mamba2-state-tracking"),
    ],
)
def test_unknown_presets_name_the_known_ones(name: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"unknown preset '{name}'; known: {known}$"):
        presets.options(name)


def test_a_preset_with_other_fields() -> None:
    config = ImplicitConfig.from_preset("llama-1.3b-free", vocab_size=100, window=8)
    assert config.vocab_size == 100 and config.eos_token_id == 0 and config.window == 8
    assert config.backbone == {"name": "llama", "d_model": 2048, "n_layer": 24, "n_head": 32}
    assert config.convergence["max_iter"] == 32 and config.gradient["steps"] == 4
    bounded = ImplicitConfig.from_preset("mamba2-760m-bounded")
    assert bounded.convergence == {"name": "fixed", "iterations": 4} and bounded.gradient["steps"] == 1
    assert not ImplicitConfig.from_preset("mamba2-370m-explicit").implicit
    tracking = ImplicitConfig.from_preset("mamba2-state-tracking")
    assert tracking.vocab_size == 240 and tracking.eval_convergence["max_iter"] == 2048
    with pytest.raises(ValueError, match="llama-130m-free"):
        ImplicitConfig.from_preset("llama-7b-free")


@pytest.mark.parametrize("body", ["mamba2", "llama"])
@pytest.mark.parametrize("form", ["explicit", "injected", "bounded"])
@torch.no_grad()
def test_the_small_ones_run(body: str, form: str) -> None:
    """The smallest presets, with only two layers, return finite logits of the right shape."""
    config = ImplicitConfig.from_preset(f"{body}-130m-{form}", vocab_size=500)
    config.backbone["n_layer"] = 2
    logits = ImplicitForCausalLM(config).eval()(torch.randint(0, 500, (1, 8))).logits
    assert logits.shape == (1, 8, 500) and torch.isfinite(logits).all()
