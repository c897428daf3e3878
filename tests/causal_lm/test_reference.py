"""Checkpoints in the format of the paper's reference implementation must load.

The tests make such checkpoints from our own models.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from deqseq import ImplicitDifferentiation
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM, ImplicitModel

DEQ = {
    "norm": {"norm_type": "weight_norm", "norm_clip": False, "norm_target_norm": 1.0},
    "solver": {
        "f_solver": "fixed_point_iter", "f_stop_mode": "rel", "f_tol": 0.05, "f_max_iter": 20,
        "b_solver": "anderson", "b_stop_mode": "rel", "b_tol": 0.001, "b_max_iter": 12,
        "eval_f_max_iter": 40, "eval_factor": 0.0,
    },
    "training": {"core": "sliced", "grad": 3, "gamma": 0.7, "tau": 0.7, "ift": False, "hook_ift": False},
}  # fmt: skip
SHARED = {
    "backbone_type": "implicit", "d_embed": 16, "deq_params": DEQ, "dropout": 0.0, "emb_init_std": 0.01,
    "head_bias": False, "pad_vocab": False, "pad_vocab_size_multiple": 16, "tie_embeddings": True,
    "torch_dtype": "float32",
}  # fmt: skip
COMMON = {"d_model": 16, "n_layer": 2, "dropout": 0.0, "init_gain": 0.5, "pre_norm": True, "rms_norm": True}
MAMBA2: dict[str, Any] = {
    **SHARED,
    "model_type": "implicit_mamba2",
    "n_tokens": 40,
    "backbone_config": {
        **COMMON, "block_type": "mamba2", "d_inner": 0, "block_cfg": {"d_state": 8, "expand": 2, "headdim": 8}
    },
}  # fmt: skip
LLAMA: dict[str, Any] = {
    **SHARED,
    "model_type": "implicit_llama3",
    "vocab_size": 40,
    "backbone_config": {
        **COMMON, "block_type": "transformer", "mlp_type": "llama_mlp", "d_inner": 44,
        "block_cfg": {"n_head": 4},
    },
}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8},
    "llama": {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 44},
}


def changed(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``settings`` with ``changes``. The keys of ``changes`` are dotted paths like ``"a.b"``."""
    settings = deepcopy(settings)
    for path, value in changes.items():
        *folders, last = path.split(".")
        place = settings
        for folder in folders:
            place = place[folder]
        place[last] = value
    return settings


def theirs(name: str) -> str:
    """The name that the reference implementation gives to our weight ``name``."""
    for ours, reference in (
        ("lm_head.", "criterion.decoder."),
        ("model.embed_tokens.", "word_emb.emb."),
        ("model.layer.backbone.", "backbone."),
        ("injection.norm.", "injection_norm."),
        ("injection.linear.", "injection."),
        ("parametrizations.weight.original0", "weight_g"),
        ("parametrizations.weight.original1", "weight_v"),
    ):
        name = name.replace(ours, reference)
    return name


def write(folder: Path, settings: dict[str, Any], model: ImplicitForCausalLM | None = None) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    if model is not None:
        torch.save({theirs(k): v for k, v in model.state_dict().items()}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("settings", "body", "changes", "options"),
    [
        (MAMBA2, {}, {}, {}),
        (LLAMA, {}, {}, {}),
        (MAMBA2, {"d_inner": 100}, {"backbone_config.d_inner": 100}, {}),
        (MAMBA2, {}, {"n_tokens": 37, "pad_vocab": True}, {"vocab_size": 48}),
        (LLAMA, {}, {"tie_embeddings": False}, {"tie_word_embeddings": False}),
        (LLAMA, {"n_kv_head": 2}, {"backbone_config.block_cfg.n_kv_head": 2}, {}),
        (LLAMA, {"weight_norm": False}, {"deq_params.norm.norm_type": "none"}, {}),
        (MAMBA2, {}, {"backbone_type": "explicit"}, {"implicit": False}),
        (LLAMA, {}, {"backbone_type": "explicit"}, {"implicit": False}),
    ],
)
def test_checkpoints_load_and_save(
    tmp_path: Path,
    settings: dict[str, Any],
    body: dict[str, Any],
    changes: dict[str, Any],
    options: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    name = "llama" if settings is LLAMA else "mamba2"
    policy = {"name": "residual", "rtol": 0.05, "max_iter": 40}
    config = {"vocab_size": 40, "backbone": {**OURS[name], **body}, "eval_convergence": policy, **options}
    model = ImplicitForCausalLM(ImplicitConfig(initializer_range=0.5, **config)).eval()
    tokens = torch.randint(0, 37, (2, 9))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        expected = model(tokens).logits
        write(tmp_path, changed(settings, changes), model)
        for cls in (AutoModelForCausalLM, ImplicitForCausalLM):
            loaded = cls.from_pretrained(tmp_path)
            assert type(loaded) is ImplicitForCausalLM and type(loaded.config) is ImplicitConfig
            assert torch.equal(loaded(tokens).logits, expected)
        hidden = AutoModel.from_pretrained(tmp_path)
        assert type(hidden) is ImplicitModel
        assert torch.equal(hidden(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
        loaded.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved" / "pytorch_model.bin").exists()
        assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "implicit_lm"
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(again(tokens).logits, expected)


@pytest.mark.parametrize("settings", [MAMBA2, LLAMA])
def test_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    write(tmp_path, settings)
    for cls in (AutoConfig, ImplicitConfig):
        config = cls.from_pretrained(tmp_path)
        assert type(config) is ImplicitConfig and config.implicit and config.tie_word_embeddings
        assert config.solver == "picard" and config.initializer_range == 0.01
        assert config.gradient == {"name": "phantom", "steps": 3, "damping": 0.7}
        assert config.convergence == {"name": "residual", "rtol": 0.05, "max_iter": 20}
        assert config.eval_convergence == {"name": "residual", "rtol": 0.05, "max_iter": 40}
        assert config.vocab_size == 40 and config.hidden_size == 16 and config.num_hidden_layers == 2
    damped = {"name": "picard", "damping": 0.7}
    assert AutoConfig.from_pretrained(tmp_path, solver=damped).solver == damped


def test_budget_of_evaluation(tmp_path: Path) -> None:
    for changes, budget in (
        ({"deq_params.solver.eval_f_max_iter": 0, "deq_params.solver.eval_factor": 1.5}, 30),
        ({"deq_params.solver.eval_f_max_iter": 0}, 20),
        ({"deq_params.solver.eval_factor": 1.5}, 40),
    ):
        write(tmp_path, changed(MAMBA2, changes))
        assert AutoConfig.from_pretrained(tmp_path).eval_convergence["max_iter"] == budget


def test_implicit_gradient_and_absolute_tolerance(tmp_path: Path) -> None:
    write(tmp_path, changed(LLAMA, {"deq_params.training.ift": True, "deq_params.solver.f_stop_mode": "abs"}))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.convergence["atol"] == 0.05 and "rtol" not in config.convergence
    assert config.gradient["solver"] == "anderson" and config.gradient["convergence"]["max_iter"] == 12
    layer = ImplicitForCausalLM(config).model.layer
    assert isinstance(layer.gradient, ImplicitDifferentiation)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("backbone_type", "other"),
        ("dropout", 0.1),
        ("head_bias", True),
        ("d_embed", 8),
        ("n_tokens", None),
        ("backbone_config.dropout", 0.1),
        ("deq_params.norm", "weight_norm"),
        ("deq_params.solver", ["picard"]),
        ("backbone_config.pre_norm", False),
        ("backbone_config.rms_norm", False),
        ("backbone_config.block_type", "mamba"),
        ("backbone_config.shape", 3),
        ("backbone_config.block_cfg.n_groups", 2),
        ("deq_params.norm.norm_type", "spectral_norm"),
        ("deq_params.norm.norm_clip", True),
        ("deq_params.norm.norm_no_scale", True),
        ("deq_params.norm.norm_target_norm", 0.5),
        ("deq_params.training.core", "indexing"),
        ("deq_params.training.grad", [1, 2]),
        ("deq_params.solver.f_solver", "newton"),
        ("deq_params.solver.f_stop_mode", "max"),
    ],
)
def test_refused_settings(tmp_path: Path, path: str, value: Any) -> None:
    write(tmp_path, changed(MAMBA2, {path: value}))
    with pytest.raises(ValueError, match=path.split(".")[-1]):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("path", "value"), [("backbone_config.mlp_type", "mlp"), ("backbone_config.d_inner", 0)]
)
def test_refused_settings_of_llama(tmp_path: Path, path: str, value: Any) -> None:
    write(tmp_path, changed(LLAMA, {path: value}))
    with pytest.raises(ValueError, match=path.split(".")[-1]):
        AutoConfig.from_pretrained(tmp_path)


def test_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    model = ImplicitForCausalLM(ImplicitConfig(vocab_size=40, backbone=OURS["llama"]))
    write(tmp_path, changed(LLAMA, {"backbone_config.n_layer": 1}), model)
    with pytest.raises(ValueError, match=r"no weights.*layers\.1"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_weights_that_would_run_code_are_refused(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    torch.save({"word_emb.emb.weight": Path("anything")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
