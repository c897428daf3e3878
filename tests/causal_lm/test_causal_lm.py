"""Tests of the causal language model: configuration, checkpoints, losses."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

from deqseq import ExplicitSequenceLayer, ImplicitSequenceLayer, Residual, Status
from deqseq.backbones import fold_weight_norm
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM, ImplicitModel
from deqseq.causal_lm.head import aligned_linear, logits_of

V = 40
BODIES: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 16, "n_layer": 1, "d_state": 8, "headdim": 8},
    "llama": {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2},
}
MODELS = [(body, implicit) for body in BODIES for implicit in (True, False)]

Make = Callable[..., ImplicitForCausalLM]


@pytest.fixture
def make() -> Make:
    """A function ``make(body, implicit=True, **options)`` that builds a small model in evaluation mode."""

    def model(body: str = "mamba2", implicit: bool = True, **options: Any) -> ImplicitForCausalLM:
        torch.manual_seed(1)
        config = ImplicitConfig(
            vocab_size=V, backbone=BODIES[body], implicit=implicit, initializer_range=0.5, **options
        )
        return ImplicitForCausalLM(config).eval()

    return model


def ids(batch: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(0, V, (batch, length))


OPTIONS: dict[str, Any] = {
    "solver": {"name": "anderson", "memory": 3},
    "gradient": {"name": "phantom", "steps": 2},
    "convergence": {"name": "residual", "rtol": 0.1, "max_iter": 8},
    "eval_convergence": {"name": "residual", "rtol": 0.01, "max_iter": 50},
    "window": 4,
    "tie_word_embeddings": False,
}


def test_configuration_round_trip(tmp_path: Path) -> None:
    config = ImplicitConfig(vocab_size=V, backbone=BODIES["llama"], **OPTIONS)
    config.save_pretrained(tmp_path)
    for loaded in (ImplicitConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert isinstance(loaded, ImplicitConfig)
        for name, value in {**OPTIONS, "backbone": BODIES["llama"], "vocab_size": V}.items():
            assert getattr(loaded, name) == value
    assert config.hidden_size == 16 and config.num_hidden_layers == 2


def test_sizes_have_the_names_of_transformers(tmp_path: Path) -> None:
    llama = ImplicitConfig(vocab_size=V, backbone=BODIES["llama"], max_position_embeddings=64)
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    llama.save_pretrained(tmp_path)
    for config in (llama, AutoConfig.from_pretrained(tmp_path), ImplicitConfig(**llama.to_dict())):
        assert {name: getattr(config, name) for name in sizes} == sizes
        assert config.to_dict().items() >= sizes.items()
    assert json.loads((tmp_path / "config.json").read_text()).items() >= sizes.items()
    del sizes["max_position_embeddings"]
    wider = {**BODIES["llama"], "d_model": 32, "n_kv_head": None}
    config = AutoConfig.from_pretrained(tmp_path, backbone=wider)
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (32, 4, 8)
    for name, own in sizes.items():
        assert ImplicitConfig(backbone=BODIES["llama"], **{name: own}).to_dict()[name] == own
        with pytest.raises(ValueError, match=rf"{name} .* it is {own}, got {own + 1}"):
            ImplicitConfig(backbone=BODIES["llama"], **{name: own + 1})
        with pytest.raises(ValueError, match=rf"{name} .* it is {own}, got {own + 1}"):
            AutoConfig.from_pretrained(tmp_path, **{name: own + 1})
    mamba2 = ImplicitConfig(backbone=BODIES["mamba2"])
    assert mamba2.to_dict().items() >= {"hidden_size": 16, "num_hidden_layers": 1}.items()
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):  # as Mamba2 in transformers
        assert not hasattr(mamba2, name) and name not in mamba2.to_dict()
        with pytest.raises(ValueError, match=f"{name} .* it is None, got 4"):
            ImplicitConfig(backbone=BODIES["mamba2"], **{name: 4})


def test_the_configuration_reaches_the_layer(make: Make) -> None:
    layer = make("llama", **OPTIONS).model.layer
    assert isinstance(layer, ImplicitSequenceLayer)
    assert layer.solve.solver.memory == 3 and layer.gradient.steps == 2 and layer.solve.window == 4
    assert layer.train_solve.convergence.rtol == 0.1 and layer.eval_solve.convergence.rtol == 0.01


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"solver": "newton"}, "newton"),
        ({"solver": {"name": "anderson", "memroy": 3}}, "memroy"),
        ({"gradient": {"name": "phantom", "steps": 0}}, "0"),
        ({"convergence": {"name": "residual", "rtol": -1.0}}, "-1"),
        ({"eval_convergence": "never"}, "never"),
        ({"convergence": ""}, "unknown convergence policy ''"),
        ({"initializer_range": -1.0}, r"initializer_range .* -1\.0"),
        ({"initializer_range": float("nan")}, "initializer_range .* nan"),
        ({"window": 0}, "0"),
        ({"vocab_size": 0}, "0"),
        ({"backbone": {"name": "transformer", "d_model": 16}}, "transformer"),
        ({"backbone": {"name": "mamba2", "n_layer": 1}}, "d_model"),
        ({"backbone": {"d_model": 16}}, "None|name"),
        ({"backbone": "llama"}, "d_model"),
        ({"solvr": "anderson"}, "solvr"),
        ({"d_model": 64}, "backbone="),
        ({"convergence": Residual(rtol=0.1)}, "mapping"),
        (
            {"convergence": {"name": "both", "first": Residual(rtol=0.1), "second": {"name": "fixed:4"}}},
            r"cannot store convergence .*first.*Residual is not JSON",
        ),
        ({"solver": {"name": "picard", "damping": torch.tensor(0.5)}}, r"solver .*tensor\(0.5.*as numbers"),
    ],
)
def test_wrong_configurations(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ImplicitConfig(**{"vocab_size": V, "backbone": BODIES["mamba2"], **wrong})


def test_a_wrong_backbone_option_raises_when_the_model_is_built() -> None:
    with pytest.raises(ValueError, match="d_stat"):
        ImplicitForCausalLM(ImplicitConfig(backbone={**BODIES["mamba2"], "d_stat": 8}))


@pytest.mark.parametrize("rows", [5, 64, 65])
def test_the_aligned_output_layer(rows: int) -> None:
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(rows, 8, requires_grad=True)
    out, plain = aligned_linear(x, weight)[..., : len(weight)], F.linear(x, weight)
    torch.testing.assert_close(out, plain)
    cotangent = torch.randn_like(plain)
    for a, b in zip(*(torch.autograd.grad(y, [x, weight], cotangent) for y in (out, plain)), strict=True):
        torch.testing.assert_close(a, b)


def test_settings_of_others_are_kept(tmp_path: Path) -> None:
    """Saving and loading a model keeps the settings that transformers or users added to its configuration."""
    model = ImplicitForCausalLM(ImplicitConfig(vocab_size=V, backbone=BODIES["llama"]))
    model.config.tokenizer_class = "PreTrainedTokenizerFast"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, window=3)
    assert loaded.config.tokenizer_class == "PreTrainedTokenizerFast"
    assert loaded.config.window == loaded.model.layer.solve.window == 3
    for wrong, said in (
        ({"window": 0}, "window"),
        ({"guess": "nope"}, "nope"),
        ({"solver": "x"}, "x"),
    ):
        with pytest.raises(ValueError, match=said):
            AutoConfig.from_pretrained(tmp_path, **wrong)


def test_the_configuration_of_another_model(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=V, hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from_explicit"):
        ImplicitForCausalLM.from_pretrained(tmp_path)


def test_two_configurations_share_nothing() -> None:
    first, second = ImplicitConfig(), ImplicitConfig()
    first.backbone["d_model"] = 8
    first.convergence["rtol"] = 0.5
    assert second.backbone["d_model"] == 256 and second.convergence["rtol"] == 0.05
    given = dict(BODIES["mamba2"])
    ImplicitConfig(backbone=given).backbone["d_model"] = 8
    assert given == BODIES["mamba2"]


def test_evaluation_policy_is_independent_of_the_training_policy() -> None:
    config = ImplicitConfig()
    config.eval_convergence["rtol"] = 1e-3
    assert config.convergence["rtol"] == 0.05


@pytest.mark.parametrize(("body", "implicit"), MODELS)
@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(make: Make, tmp_path: Path, body: str, implicit: bool, tied: bool) -> None:
    model = make(body, implicit, tie_word_embeddings=tied, window=4)
    with torch.no_grad():  # make the weights differ from those of a new model
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, ImplicitForCausalLM) and not loaded.training
    tokens = ids()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    for (name, a), (_, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_one_device_holds_the_layer(make: Make, tmp_path: Path, body: str, implicit: bool) -> None:
    """accelerate may offload the embeddings to disk. Offloading a part of the layer raises an error."""
    model = make(body, implicit, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    place = {"offload_folder": tmp_path / "disk"}
    parts = {"model.embed_tokens": "disk", "model.layer": "cpu", "lm_head": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=parts, **place)
    tokens = ids()
    with torch.no_grad():
        model.cpu()  # like the loaded layer: a GPU rounds differently
        expected = model(tokens.cpu()).logits
        assert torch.equal(loaded(tokens).logits.cpu(), expected)
    too_little = {"cpu": sum(p.nbytes for p in model.parameters()) // 2}
    for device_map in ("auto", {**parts, "model.layer": "disk"}):
        with pytest.raises(ValueError, match=r"layer must be on one device.*disk"):
            AutoModelForCausalLM.from_pretrained(
                tmp_path, device_map=device_map, max_memory=too_little, **place
            )
    for folded in [True, False] if body == "llama" else [True]:
        whole = fold_weight_norm(deepcopy(model)) if folded else deepcopy(model)
        with pytest.raises(ValueError, match="layer must be on one device"):
            accelerate.cpu_offload(whole, torch.device("cpu"))(tokens)


@torch.no_grad()
@pytest.mark.parametrize("body", BODIES)
def test_an_explicit_model_compiles_to_one_graph(
    make: Make, unset_default_device: Callable[[], None], monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    model, tokens = make(body, False), ids()
    unset_default_device()
    if tokens.is_cuda:  # by default, the model would import Triton, and torch.compile cannot trace imports
        monkeypatch.setenv("DEQSEQ_KERNELS", "torch")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = {"use_cache": False, "return_dict": False}
    assert torch.equal(compiled(tokens, **plain)[0], model(tokens, **plain)[0])
    torch.compiler.reset()


def test_the_body_alone(make: Make, tmp_path: Path) -> None:
    model = make("mamba2")
    model.model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    assert isinstance(body, ImplicitModel)
    tokens = ids()
    with torch.no_grad():
        assert torch.equal(body(tokens).last_hidden_state, model.model(tokens).last_hidden_state)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def reshape(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layer.backbone.layers.0.mixer.dt_bias"] = torch.zeros(5)


def extend(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layer.backbone.layers.7.mixer.dt_bias"] = torch.zeros(4)


@pytest.mark.parametrize("change", [reshape, extend])
@pytest.mark.parametrize("implicit", [True, False])
def test_a_checkpoint_that_does_not_fit(
    make: Make, tmp_path: Path, change: Callable[..., None], implicit: bool
) -> None:
    make("mamba2", implicit).save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises((ValueError, RuntimeError), match=r"dt_bias|mismatched"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("how", ["missing", "mismatched"])
@pytest.mark.parametrize("body", BODIES)
def test_weights_that_a_checkpoint_lacks_are_new(make: Make, tmp_path: Path, body: str, how: str) -> None:
    """Missing weights get initial values. With ``ignore_mismatched_sizes``, so do weights of another shape.

    The checkpoint lacks every second weight of the layer. All its weights have the value 7.
    """
    model = make(body, tie_word_embeddings=False)
    new = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    model.save_pretrained(tmp_path)
    changed = {*[name for name in new if "layer." in name][::2], "lm_head.weight"}

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in changed:
            weight = weights.pop(name)
            if how == "mismatched":
                weights[name] = torch.cat([weight, weight])

    rewrite(tmp_path, change)
    loaded, found = ImplicitForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, ignore_mismatched_sizes=how == "mismatched"
    )
    assert {n if how == "missing" else n[0] for n in found[f"{how}_keys"]} == changed
    assert not found["unexpected_keys"]
    for name, weight in loaded.state_dict().items():
        if name not in changed:
            assert weight.eq(7).all(), name
        else:  # as in a new model: the same constant, or random numbers of the same spread
            torch.testing.assert_close(weight.std(), new[name].std(), rtol=0.5, atol=0.3, msg=name)
            torch.testing.assert_close(weight.mean(), new[name].mean(), rtol=0.5, atol=0.3, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_the_body_of_a_checkpoint_gets_a_head(make: Make, tmp_path: Path, tied: bool) -> None:
    model = make("llama", tie_word_embeddings=tied)
    model.model.save_pretrained(tmp_path)
    loaded, found = ImplicitForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert found["missing_keys"] == (set() if tied else {"lm_head.weight"})
    for name, weight in model.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight)
    assert loaded.lm_head.weight.std().item() == pytest.approx(0.5, rel=0.2)
    tokens = ids()
    with torch.no_grad():
        assert loaded(tokens).logits.isfinite().all()


def test_heads_of_others_are_left_out(make: Make, tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"score.weight": torch.ones(2, 16)}))
    loaded, found = ImplicitForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert found["unexpected_keys"] == {"score.weight"}
    assert all(torch.equal(loaded.state_dict()[name], w) for name, w in model.state_dict().items())


def test_a_truncated_checkpoint(make: Make, tmp_path: Path) -> None:
    make("mamba2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"(?i)incomplete|buffer|invalid|metadata|header"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_missing_checkpoint(make: Make, tmp_path: Path) -> None:
    make("mamba2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_implicit_weights_do_not_load_as_explicit(make: Make, tmp_path: Path) -> None:
    make("mamba2").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "implicit": False}))
    with pytest.raises(ValueError, match="injection"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("body", BODIES)
def test_the_explicit_model_is_the_plain_stack(make: Make, body: str) -> None:
    model = make(body, implicit=False)
    assert isinstance(model.model.layer, ExplicitSequenceLayer)
    assert not any("injection" in name for name, _ in model.named_parameters())
    tokens = ids()
    with torch.no_grad():
        x = model.model.embed_tokens(tokens)
        backbone = model.model.layer.backbone
        expected = backbone(x, backbone.prepare(x)) @ model.lm_head.weight.T
        out = model(tokens)
    torch.testing.assert_close(out.logits, expected)
    assert out.solution is None


@pytest.mark.parametrize("body", BODIES)
def test_the_implicit_model_solves(make: Make, body: str) -> None:
    model = make(body, eval_convergence={"name": "residual", "rtol": 0.05, "max_iter": 300})
    tokens = ids()
    with torch.no_grad():
        out = model(tokens)
        x = model.model.embed_tokens(tokens)
        solved = model.model.layer(x)
    assert torch.equal(out.logits, model.lm_head(solved.z))
    assert out.solution.status.shape == (2, 11) and (out.solution.status != Status.RUNNING).all()


@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_labels_are_shifted(make: Make, body: str, implicit: bool) -> None:
    model, tokens = make(body, implicit), ids()
    labels = tokens.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        out = model(tokens, labels=labels)
        expected = F.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
    torch.testing.assert_close(out.loss, expected)
    assert model(tokens).loss is None


@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_every_parameter_learns(make: Make, body: str, implicit: bool) -> None:
    model, tokens = make(body, implicit).train(), ids()
    model(tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_left_padding_and_carried_state(make: Make, body: str, implicit: bool) -> None:
    options = {"solver": {"name": "picard", "damping": 0.5}} if implicit else {}
    policy = {"name": "fixed", "iterations": 40}
    model = make(body, implicit, eval_convergence=policy, **options).double()
    tokens, mask = ids(), torch.ones(2, 11, dtype=torch.int64)
    mask[1, :4] = 0
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask).logits
        alone = model(tokens[1:, 4:]).logits
        torch.testing.assert_close(whole[1:, 4:], alone, rtol=1e-4, atol=1e-4)
        first = model(tokens[:, :8], attention_mask=mask[:, :8], use_cache=True)
        second = model(tokens[:, 8:], past_key_values=first.past_key_values)
    if not implicit:  # two calls of an implicit model that has not converged give other logits than one call
        torch.testing.assert_close(second.logits, whole[:, 8:], rtol=1e-4, atol=1e-4)
    assert second.past_key_values.state.seen.tolist() == [11, 7]


def test_an_output_layer_of_ones_own_keeps_its_bias(make: Make) -> None:
    """A head that the user sets keeps its bias on a GPU.

    For the model's own head, the model calls ``aligned_linear`` on a GPU, and ``aligned_linear`` has no bias.
    """

    class OnGPU(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    model = make("llama")
    head = model.lm_head
    model.lm_head = torch.nn.Linear(head.in_features, head.out_features)
    hidden = torch.randn(1, 3, head.in_features)
    logits, _ = logits_of(hidden.as_subclass(OnGPU), model.lm_head)
    torch.testing.assert_close(logits.as_subclass(torch.Tensor), model.lm_head(hidden))


def test_data_parallel_is_refused(make: Make) -> None:
    model = make("llama")
    model.model._is_replica = True  # nn.DataParallel sets this mark on its copies
    with pytest.raises(ValueError, match="one process per GPU"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_embeddings_instead_of_ids(make: Make) -> None:
    model, tokens = make("mamba2"), ids()
    x = model.model.embed_tokens(tokens)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=x).logits, model(tokens).logits)
    for wrong in ({}, {"input_ids": tokens, "inputs_embeds": x}):
        with pytest.raises(ValueError, match="either"):
            model(**wrong)
    with pytest.raises(ValueError, match=r"inputs_embeds must be \(B, L, D\)"):
        model(inputs_embeds=x[0])


def test_initialisation_follows_the_configuration() -> None:
    config = ImplicitConfig(vocab_size=2000, backbone=BODIES["mamba2"], initializer_range=0.3)
    model = ImplicitForCausalLM(config)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.3, rel=0.05)
    # Backbones initialise their own weights. The assertions fail if transformers overwrites these weights.
    mixer = model.model.layer.backbone.layers[0].mixer
    assert mixer.D.eq(1).all() and mixer.A_log.exp().min() >= 0.99
    for module in model.modules():
        if hasattr(module, "parametrizations"):
            g, v = (getattr(module.parametrizations.weight, f"original{i}") for i in (0, 1))
            torch.testing.assert_close(g.flatten(), v.flatten(1).norm(dim=1))
