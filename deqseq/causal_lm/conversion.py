"""Convert transformers' models into our explicit models, and explicit models into implicit models.

The methods ``from_explicit`` and ``to_implicit`` of :class:`ImplicitForCausalLM` call the functions of this
module.
"""

import os
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import AutoModelForCausalLM, PreTrainedModel

from deqseq.backbones.weights import is_adapter, is_quantised
from deqseq.causal_lm.configuration import ImplicitConfig, check_names
from deqseq.ops.mixer.naive import at_least_float32

Model = TypeVar("Model", bound=PreTrainedModel)

# Translation of weight names. A key is a regular expression for the beginning of transformers' name, and its
# value is the beginning of our name. ``model.`` and ``model.layer.backbone.`` are left out of our names.
_LLAMA = {
    r"model\.embed_tokens\.": "embed_tokens.",
    r"model\.norm\.": "norm_f.",
    r"model\.layers\.(\d+)\.input_layernorm\.": r"layers.\1.norm.",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"layers.\1.norm2.",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.": r"layers.\1.mixer.w\2.",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.": r"layers.\1.mixer.out_proj.",
    r"model\.layers\.(\d+)\.mlp\.gate_proj\.": r"layers.\1.mlp.w1.",
    r"model\.layers\.(\d+)\.mlp\.up_proj\.": r"layers.\1.mlp.w3.",
    r"model\.layers\.(\d+)\.mlp\.down_proj\.": r"layers.\1.mlp.fc2.",
}
_MAMBA2 = {r"backbone\.embeddings\.": "embed_tokens.", r"backbone\.(layers|norm_f)\.": r"\1."}


def from_explicit(
    cls: type[Model], source: str | os.PathLike[str] | PreTrainedModel, weight_norm: bool,
    dtype: torch.dtype | None, overrides: Mapping[str, Any],
) -> Model:  # fmt: skip
    """Convert a model of transformers into an explicit model (:meth:`ImplicitForCausalLM.from_explicit`)."""
    _refuse_overrides(overrides)
    model: Any = source
    if not isinstance(source, PreTrainedModel):
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    config = model.config
    if config.model_type not in _TABLES or not type(model).__name__.endswith("ForCausalLM"):
        raise ValueError(
            f"from_explicit takes a LlamaForCausalLM or a Mamba2ForCausalLM of transformers, got a "
            f"{type(model).__name__} with model_type {config.model_type!r}"
        )
    table, sizes = _TABLES[config.model_type]
    kept = ("vocab_size", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
    settings = {name: deepcopy(getattr(config, name)) for name in (*kept, "tie_word_embeddings")}
    settings["max_position_embeddings"] = getattr(config, "max_position_embeddings", None)
    settings |= {"backbone": {**sizes(model), "weight_norm": weight_norm}, "implicit": False}
    converted: Any = cls(ImplicitConfig(**settings | dict(overrides)))
    weights = {}
    for name, value in model.state_dict().items():
        for pattern, ours in table.items():
            name = re.sub(f"^{pattern}", ours, name)
        weights[name] = value
    with torch.no_grad():
        converted.model.embed_tokens.weight.copy_(weights.pop("embed_tokens.weight"))
        output = weights.pop("lm_head.weight")
        if not config.tie_word_embeddings:
            converted.lm_head.weight.copy_(output)
    _load(converted.model.layer.backbone, weights)
    converted.generation_config = deepcopy(model.generation_config)
    converted.to(device=model.device, dtype=dtype or model.dtype)
    converted.config.dtype = converted.dtype
    return cast(Model, converted.train(model.training))


def _llama(model: Any) -> dict[str, Any]:
    config = model.config
    rope = dict(config.rope_parameters or {})
    supported = {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "head_dim": config.hidden_size // config.num_attention_heads, "sliding_window": None,
        "rope_type": "default", "partial_rotary_factor": 1.0,
    }  # fmt: skip
    rotary = {name: rope.get(name, supported[name]) for name in ("rope_type", "partial_rotary_factor")}
    _check({"sliding_window": None, **config.to_dict(), **rotary}, supported)
    return {
        "name": "llama", "d_model": config.hidden_size, "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads, "n_kv_head": config.num_key_value_heads,
        "d_inner": swiglu_width(config.intermediate_size), "norm_eps": config.rms_norm_eps,
        "rope_theta": float(rope.get("rope_theta", 1e4)),
    }  # fmt: skip


def swiglu_width(hidden: int) -> int:
    """The ``d_inner`` that gives a SwiGLU ``hidden`` hidden units: ``2 * d_inner // 3 == hidden``."""
    return -(-3 * hidden // 2)


def _mamba2(model: Any) -> dict[str, Any]:
    config = model.config
    inner = config.expand * config.hidden_size
    found = {
        **config.to_dict(),
        "time_step_limit": tuple(map(float, config.time_step_limit)),
        "num_heads * head_dim": config.num_heads * config.head_dim,
    }
    supported = {"hidden_act": "silu", "use_bias": False, "time_step_limit": (0.0, float("inf"))}
    _check(found, {**supported, "num_heads * head_dim": inner})
    # Read the group size of the gated norm from the module. The norm has groups only in some versions of
    # transformers.
    norm = model.backbone.layers[0].mixer.norm
    return {
        "name": "mamba2", "d_model": config.hidden_size, "n_layer": config.num_hidden_layers,
        "d_state": config.state_size, "expand": config.expand, "headdim": config.head_dim,
        "d_conv": config.conv_kernel, "n_groups": config.n_groups, "chunk_size": config.chunk_size,
        "norm_groups": inner // getattr(norm, "group_size", inner), "norm_eps": config.layer_norm_epsilon,
    }  # fmt: skip


_TABLES = {"llama": (_LLAMA, _llama), "mamba2": (_MAMBA2, _mamba2)}


def _check(found: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    for name, value in supported.items():
        if found[name] != value:
            raise ValueError(f"{name} must be {value!r} to be converted, got {found[name]!r}")


def _refuse_overrides(overrides: Mapping[str, Any]) -> None:
    if wrong := sorted(set(overrides) & {"backbone", "implicit", "vocab_size", "tie_word_embeddings"}):
        raise ValueError(f"{', '.join(wrong)} come from the converted model and cannot be changed")


def _load(backbone: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load ``weights`` into a backbone. Weights that the backbone normalises are split into g and v."""
    state = {}
    for name, target in backbone.state_dict().items():
        module, _, part = name.partition(".parametrizations.weight.")
        if part:
            g, v = _split(weights[f"{module}.weight"])
            state[name] = g if part == "original0" else v
        elif name in weights:
            state[name] = weights[name]
        elif name.endswith("conv1d.bias"):
            state[name] = torch.zeros_like(target)  # zero, because the source has no convolution bias
    backbone.load_state_dict(state)


def _split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute g and v of weight normalisation, which represents each row w of ``weight`` as g v / ||v||.

    g is ||w||, and v is w. For a row of zeros, g is 0 and v is all ones.
    """
    g = torch.linalg.vector_norm(at_least_float32(weight), dim=tuple(range(1, weight.dim())), keepdim=True)
    return g, torch.where(g > 0, weight, torch.ones_like(weight))


def to_implicit(model: Model, overrides: Mapping[str, Any]) -> Model:
    """Make an implicit model from an explicit or injected model (:meth:`ImplicitForCausalLM.to_implicit`)."""
    _refuse_overrides(overrides)
    if model.config.implicit:
        raise ValueError("to_implicit takes an explicit model (implicit=False); this model is implicit")
    layer = model.model.layer
    if any(is_adapter(part) or is_quantised(part) for part in layer.modules()):
        raise ValueError(
            "to_implicit needs plain weights: convert the model before you quantise it or add adapters"
        )
    check_names(overrides)
    settings = model.config.to_dict() | dict(overrides)
    if "convergence" in overrides:  # use the new policy in evaluation too, if no other is given
        settings["eval_convergence"] = overrides.get("eval_convergence")
    injected = model.config.form == "injected"
    backbone = {k: v for k, v in settings["backbone"].items() if k != "injection"}
    settings |= {"backbone": backbone if injected else {**backbone, "input_skip": True}, "implicit": True}
    converted: Any = type(model)(ImplicitConfig.from_dict(settings))
    converted.to(device=model.device, dtype=model.dtype)
    if not injected:
        inject_nothing(converted.model.layer.backbone)
    converted.load_state_dict({**converted.state_dict(), **model.state_dict()})
    converted.generation_config = deepcopy(model.generation_config)
    return cast(Model, converted.train(model.training))


def inject_nothing(backbone: Any) -> None:
    """Set the injection to 0, so that the map equals the stack without injection.

    The first block then gets gain * z + x, which equals x already, because the gain is initialised to 0.
    """
    # With weight normalisation (w = g v / ||v||), set only g to 0. v stays random, so g gets a non-zero
    # gradient.
    linear = backbone.injection.linear
    weight = linear.parametrizations.weight.original0 if is_parametrized(linear) else linear.weight
    with torch.no_grad():
        weight.zero_()
        linear.bias.zero_()
