"""Tests that convert transformers models to our explicit models, and explicit models to implicit models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
)

from deqseq import Status
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.causal_lm.conversion import swiglu_width

V = 40


def perturbed(model: Any) -> Any:
    """Add noise to all weights, because a bias of zero or a norm weight of one would hide errors."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": V, "hidden_size": 16, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    }  # fmt: skip
    return perturbed(LlamaForCausalLM(LlamaConfig(**sizes | options)))


def mamba2(**options: Any) -> Mamba2ForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": V, "hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1,
        "num_hidden_layers": 2, "chunk_size": 8,
    }  # fmt: skip
    return perturbed(Mamba2ForCausalLM(Mamba2Config(**sizes | options)))


def tokens() -> torch.Tensor:
    return torch.randint(0, V, (2, 19))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def assert_equal_logits(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    ids = tokens()
    wanted = logits(expected, ids)
    torch.testing.assert_close(logits(found, ids), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "intermediate_size": 40, "rms_norm_eps": 0.01},
        {"num_key_value_heads": 1, "intermediate_size": 39},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ],
)
@pytest.mark.parametrize("weight_norm", [True, False])
def test_llama(options: dict[str, Any], weight_norm: bool) -> None:
    model = llama(**options)
    converted = ImplicitForCausalLM.from_explicit(model, weight_norm=weight_norm)
    assert not converted.config.implicit and converted.config.backbone["weight_norm"] == weight_norm
    assert (converted.lm_head.weight is converted.model.embed_tokens.weight) == bool(options.get(
        "tie_word_embeddings"
    ))  # fmt: skip
    assert_equal_logits(converted, model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True, "conv_kernel": 3},
        {"n_groups": 2, "layer_norm_epsilon": 0.01},
        {"use_conv_bias": False, "expand": 1, "num_heads": 2},
    ],
)
@pytest.mark.parametrize("weight_norm", [True, False])
def test_mamba2(options: dict[str, Any], weight_norm: bool) -> None:
    model = mamba2(**options)
    assert_equal_logits(ImplicitForCausalLM.from_explicit(model, weight_norm=weight_norm), model)


@pytest.mark.parametrize("make", [llama, mamba2])
def test_from_a_folder_and_back_to_one(tmp_path: Path, make: Any) -> None:
    model = make(eos_token_id=7)
    model.save_pretrained(tmp_path / "theirs")
    converted = ImplicitForCausalLM.from_explicit(tmp_path / "theirs", solver="anderson")
    assert converted.config.eos_token_id == 7 and converted.config.solver == "anderson"
    assert_equal_logits(converted, model)
    converted.save_pretrained(tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids = tokens()
    assert torch.equal(logits(loaded, ids), logits(converted, ids))


def test_the_longest_length_is_kept() -> None:
    assert (
        ImplicitForCausalLM.from_explicit(llama(max_position_embeddings=77)).config.max_position_embeddings
        == 77
    )
    assert ImplicitForCausalLM.from_explicit(mamba2()).config.max_position_embeddings is None


def test_type_and_mode_are_kept() -> None:
    converted = ImplicitForCausalLM.from_explicit(llama().double().train())
    assert converted.dtype == torch.float64 and converted.training
    halved = ImplicitForCausalLM.from_explicit(llama(), dtype=torch.bfloat16)
    assert halved.dtype == halved.config.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="foo"):
        halved.to_implicit(foo=1)


def test_weights_in_bfloat16_are_taken_as_they_are() -> None:
    source = llama().bfloat16()
    converted = ImplicitForCausalLM.from_explicit(source, dtype=torch.float32)
    weight = converted.model.layer.backbone.layers[0].mixer.wq.weight
    expected = source.model.layers[0].self_attn.q_proj.weight.float()
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)


def test_the_policy_of_evaluation_follows_that_of_training(tmp_path: Path) -> None:
    explicit = ImplicitForCausalLM.from_explicit(llama())
    policy, other = ({"name": "residual", "rtol": r, "max_iter": 99} for r in (1e-4, 1e-2))
    implicit = explicit.to_implicit(convergence=policy)
    assert implicit.model.layer.eval_solve == implicit.model.layer.train_solve
    implicit.save_pretrained(tmp_path)
    loaded = ImplicitForCausalLM.from_pretrained(tmp_path, convergence=other)
    assert loaded.model.layer.eval_solve == loaded.model.layer.train_solve
    assert loaded.config.convergence == other
    both = explicit.to_implicit(convergence=policy, eval_convergence=other)
    assert both.config.convergence == policy and both.config.eval_convergence == other


def test_overrides_are_checked_against_the_model_itself() -> None:
    """This padding token and this width fit the model, but not a configuration of default values."""
    explicit = ImplicitForCausalLM.from_explicit(llama(vocab_size=60_000))
    width = explicit.config.hidden_size
    implicit = explicit.to_implicit(pad_token_id=55_000, hidden_size=width)
    assert (implicit.config.pad_token_id, implicit.config.hidden_size) == (55_000, width)


def test_every_hidden_width_is_met() -> None:
    for hidden in range(1, 3000):
        assert 2 * swiglu_width(hidden) // 3 == hidden


def test_rows_of_zeros() -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[3] = 0
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    converted = ImplicitForCausalLM.from_explicit(model)
    assert_equal_logits(converted, model)
    ids = tokens()
    converted(ids, labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in converted.parameters())


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (llama, {"attention_bias": True}, "attention_bias"),
        (llama, {"mlp_bias": True}, "mlp_bias"),
        (llama, {"hidden_act": "gelu"}, "hidden_act"),
        (llama, {"head_dim": 8}, "head_dim"),
        (llama, {"attention_dropout": 0.1}, "attention_dropout"),
        (llama, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
        (llama, {"hidden_size": 12, "num_key_value_heads": 4}, "head dim"),
        (mamba2, {"use_bias": True}, "use_bias"),
        (mamba2, {"hidden_act": "gelu"}, "hidden_act"),
        (mamba2, {"time_step_limit": (0.0, 0.1)}, "time_step_limit"),
    ],
)
def test_refused_models(make: Any, options: dict[str, Any], said: str) -> None:
    if options.get("hidden_size") == 12:  # transformers cannot build an odd head dim, so change a built model
        options = {"hidden_size": 12}
        model = llama()
        model.config.hidden_size, model.config.head_dim = 12, 3
    else:
        model = make(**options)
    with pytest.raises(ValueError, match=said):
        ImplicitForCausalLM.from_explicit(model)


def test_a_sliding_window_is_refused() -> None:
    model = llama()
    model.config.sliding_window = 4
    with pytest.raises(ValueError, match="sliding_window"):
        ImplicitForCausalLM.from_explicit(model)


def test_other_models_are_refused(tmp_path: Path) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2))
    for model in (gpt2, LlamaModel(llama().config)):
        with pytest.raises(ValueError, match=type(model).__name__):
            ImplicitForCausalLM.from_explicit(model)
    ours = ImplicitForCausalLM.from_explicit(llama())
    with pytest.raises(ValueError, match="implicit_lm"):
        ImplicitForCausalLM.from_explicit(ours)
    for name in ("backbone", "implicit", "vocab_size", "tie_word_embeddings"):
        for convert in (lambda **o: ImplicitForCausalLM.from_explicit(llama(), **o), ours.to_implicit):
            with pytest.raises(ValueError, match=name):
                convert(**{name: 1})
    with pytest.raises(ValueError, match="explicit model"):
        ours.to_implicit().to_implicit()


@pytest.mark.parametrize("make", [llama, mamba2])
@pytest.mark.parametrize("weight_norm", [True, False])
def test_the_implicit_model_starts_as_the_explicit_one(tmp_path: Path, make: Any, weight_norm: bool) -> None:
    explicit = ImplicitForCausalLM.from_explicit(make(), weight_norm=weight_norm)
    implicit = explicit.to_implicit(eval_convergence={"name": "residual", "rtol": 1e-3, "max_iter": 8})
    ids = tokens()
    expected = logits(explicit, ids)
    with torch.no_grad():
        for window in (None, 4):
            out = implicit(ids, window=window)
            torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-4)
            assert (out.solution.status == Status.CONVERGED).all()
        assert implicit(ids).solution.nfe == 2
        x = implicit.model.embed_tokens(ids)
        backbone = implicit.model.layer.backbone
        z = torch.randn_like(x)  # at the start, the output does not depend on z
        assert torch.equal(backbone(z, backbone.prepare(x)), explicit.model(ids).last_hidden_state)
    implicit.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(implicit, ids))
    # The implicit model shares no weights with the explicit model.
    assert not {p.data_ptr() for p in implicit.parameters()} & {p.data_ptr() for p in explicit.parameters()}


@pytest.mark.parametrize("make", [llama, mamba2])
def test_the_implicit_model_learns_from_there(make: Any) -> None:
    explicit = ImplicitForCausalLM.from_explicit(make())
    model = explicit.to_implicit().train()
    assert isinstance(model.config, ImplicitConfig)
    ids = torch.randint(0, V, (4, 4)).repeat(1, 4)
    before = explicit(ids, labels=ids).loss.item()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(15):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            assert loss.item() == pytest.approx(before, rel=1e-4)
            for name in ("input_skip.gain", "injection.linear.parametrizations.weight.original0"):
                assert model.model.layer.backbone.get_parameter(name).grad.any()
    assert loss.item() < before - 0.5
    assert model.model.layer.backbone.input_skip.gain.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_an_injected_model_is_the_first_iteration_of_its_implicit_model(tmp_path: Path, name: str) -> None:
    """The logits equal those of one iteration. Generation with a cache, saving and loading work too."""
    heads = {"n_head": 2} if name == "llama" else {"d_state": 8, "headdim": 8}
    backbone = {"name": name, "d_model": 16, "n_layer": 2, "injection": True, **heads}
    once = {"name": "fixed", "iterations": 1}
    injected = ImplicitForCausalLM(ImplicitConfig(vocab_size=V, backbone=backbone, implicit=False)).eval()
    assert injected.config.form == "injected"
    implicit = injected.to_implicit(eval_convergence=once).eval()
    ids = tokens()
    assert torch.equal(logits(implicit, ids), logits(injected, ids))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = injected.generate(ids, **options)
    assert torch.equal(cached, injected.generate(ids, use_cache=False, **options))
    injected.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.form == "injected" and torch.equal(logits(loaded, ids), logits(injected, ids))


def test_the_flag_of_the_injection_is_checked() -> None:
    backbone = {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2, "injection": "no"}
    with pytest.raises(ValueError, match="injection must be"):
        ImplicitConfig(backbone=backbone, implicit=False)


def test_adapters_are_not_converted() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'deqseq[dev]'")
    model = ImplicitForCausalLM.from_explicit(llama())
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["wq"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="to_implicit needs plain weights"):
        model.to_implicit()
