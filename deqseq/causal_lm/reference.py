"""Loads checkpoints of the reference implementation, model types ``implicit_mamba2`` and ``implicit_llama3``.

The reference implementation is the code of "Implicit Language Models are RNNs" (Schöne et al., ICML 2025,
arXiv 2502.07827).

``AutoModelForCausalLM.from_pretrained(path)`` and ``ImplicitForCausalLM.from_pretrained(path)`` load such a
checkpoint. They translate the configuration and rename the weights. The result is an ordinary
:class:`ImplicitForCausalLM`. Its ``save_pretrained`` writes this library's format.
"""

from collections.abc import Mapping
from typing import Any

from deqseq.checks import check_count

# Each regular expression matches a weight name of the reference and is mapped to our name. No expression
# matches one of our names, so the table leaves our own checkpoints unchanged. Order matters: general
# expressions come last.
KEYS = {
    r"^criterion\.decoder\.weight$": "lm_head.weight",
    r"^word_emb\.emb\.weight$": "model.embed_tokens.weight",
    r"^backbone\.injection_norm\.weight$": "model.layer.backbone.injection.norm.weight",
    r"^backbone\.injection\.(weight.*|bias)$": r"model.layer.backbone.injection.linear.\1",
    r"^backbone\.(layers|norm_f)\.": r"model.layer.backbone.\1.",
    r"\.weight_g$": ".parametrizations.weight.original0",
    r"\.weight_v$": ".parametrizations.weight.original1",
}

# Maps the names of torchdeq's solvers to the names of ours. Our solvers find the same fixed point, but they
# test every token for convergence separately.
_SOLVERS = {
    "fixed_point_iter": "picard", "simple_fixed_point_iter": "picard", "anderson": "anderson",
    "broyden": "broyden",
}  # fmt: skip
# Backbone settings for which this library supports a single value.
_FIXED = {"dropout": 0, "pre_norm": True, "rms_norm": True}
# Settings of initialisation and training. They are ignored, because they do not change a trained model.
_TRAINING = {"init_gain", "pretrain_iter", "pretrain_steps"}
_BACKBONE = {"block_cfg", "block_type", "d_inner", "d_model", "mlp_type", "n_layer", *_FIXED, *_TRAINING}
_BLOCK = {
    "implicit_mamba2": {"d_state", "expand", "headdim", "d_conv", "chunk_size"},
    "implicit_llama3": {"n_head", "n_kv_head", "rope_theta"},
}


def is_reference(settings: Mapping[str, Any]) -> bool:
    """Whether the settings of a ``config.json`` come from the reference implementation."""
    return settings.get("model_type") in _BLOCK


def translate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a ``config.json`` of the reference implementation into settings of :class:`ImplicitConfig`.

    - Training: ``f_solver`` (undamped Picard iteration by default) searches to tolerance ``f_tol`` in at most
      ``f_max_iter`` iterations. The phantom gradient takes ``grad`` steps with damping ``tau``. With ``ift``
      or ``hook_ift``, implicit differentiation replaces the phantom gradient.
    - Evaluation: the limit is ``eval_f_max_iter`` iterations. If this setting is missing or 0, the limit is
      ``eval_factor * f_max_iter``. If ``eval_factor`` is missing or 0 too, the limit is ``f_max_iter``.
    - Damping: in evaluation, the reference damps its iterations by ``tau``. The translated solver has no
      damping. The fixed point is the same. If the undamped iteration does not converge, use
      ``from_pretrained(path, solver={"name": "picard", "damping": 0.8})``.
    - Stopping: this library tests the tolerance for every token and returns the last iterate. In training,
      the reference tests whole sequences and returns the best iterate, so its tokens depend on later tokens.

    Other training settings (Jacobian regularisation, losses on intermediate iterates, weight decay,
    initialisation of the backbone) are ignored. Unknown settings outside the backbone are ignored too.

    Raises:
        ValueError: this library does not support a setting, or a backbone setting is unknown.
    """
    kind = settings["model_type"]
    body, deq = _section(settings, "backbone_config"), _section(settings, "deq_params")
    implicit = _one_of("backbone_type", settings.get("backbone_type", "implicit"), "implicit", "explicit")
    for name in ("head_bias", "dropout"):
        _one_of(name, settings.get(name) or 0, 0)
    d_model = body.get("d_model", settings.get("d_embed"))
    _one_of("d_embed", settings.get("d_embed") or d_model, d_model)
    weight_norm = _weight_norm(_section(deq, "norm", "deq_params."))
    translated: dict[str, Any] = {
        "model_type": "implicit_lm",
        "architectures": ["ImplicitForCausalLM"],
        "backbone": {**_backbone(kind, body), "weight_norm": weight_norm},
        "vocab_size": _vocabulary(settings),
        "implicit": implicit == "implicit",
        "tie_word_embeddings": settings.get("tie_embeddings", True),
    }
    if implicit == "implicit":
        translated |= _parts(deq)
    if dtype := settings.get("dtype", settings.get("torch_dtype")):
        translated["dtype"] = dtype
    if "emb_init_std" in settings:
        translated["initializer_range"] = settings["emb_init_std"]
    kept = ("pad_token_id", "bos_token_id", "eos_token_id", "transformers_version")
    return translated | {name: settings[name] for name in kept if name in settings}


def _backbone(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    _known("backbone_config", body, _BACKBONE)
    llama = kind == "implicit_llama3"
    of_kind = {"block_type": "transformer", "mlp_type": "llama_mlp"} if llama else {"block_type": "mamba2"}
    _only("backbone_config", {**body, "dropout": body.get("dropout") or 0}, _FIXED | of_kind)
    block = _section(body, "block_cfg", "backbone_config.")
    _known("backbone_config.block_cfg", block, _BLOCK[kind])
    for name in ("d_model", "n_layer"):
        if name not in body:
            raise ValueError(f"backbone_config of the reference's configuration needs {name}")
    sizes = {name: body[name] for name in ("d_model", "n_layer")}
    if body.get("d_inner"):
        sizes["d_inner"] = body["d_inner"]
    elif llama:
        raise ValueError(f"backbone_config.d_inner must be positive, got {body.get('d_inner')}")
    return {"name": "llama" if llama else "mamba2", **sizes, **block}


def _weight_norm(norm: dict[str, Any]) -> bool:
    kind = _one_of("deq_params.norm.norm_type", norm.get("norm_type") or "none", "weight_norm", "none")
    normalised = bool(kind == "weight_norm")
    if normalised:
        _only("deq_params.norm", norm, {"norm_clip": False, "norm_no_scale": False, "norm_target_norm": 1.0})
    return normalised


def _vocabulary(settings: Mapping[str, Any]) -> int:
    names = ("n_tokens", "vocab_size") if settings["model_type"] == "implicit_mamba2" else ("vocab_size",)
    given = [settings[name] for name in names if settings.get(name)]
    if not given:
        raise ValueError(f"the reference's configuration needs {' or '.join(names)}")
    multiple = settings.get("pad_vocab_size_multiple", 1) if settings.get("pad_vocab") else 1
    check_count("the reference's pad_vocab_size_multiple", multiple)
    return -(-int(given[0]) // multiple) * multiple


def _parts(deq: dict[str, Any]) -> dict[str, Any]:
    """Settings of the solver, the gradient strategy and the policies, from ``deq_params``."""
    solver, training = (_section(deq, name, "deq_params.") for name in ("solver", "training"))
    _one_of("deq_params.training.core", training.get("core", "sliced"), "sliced")
    policy = _policy(solver, "f")
    budget = policy["max_iter"]
    longer = solver.get("eval_f_max_iter") or int((solver.get("eval_factor") or 0) * budget) or budget
    gradient: dict[str, Any]
    if training.get("ift") or training.get("hook_ift"):
        gradient = {"name": "implicit", "solver": _solver(solver, "b"), "convergence": _policy(solver, "b")}
    else:
        steps = training.get("grad", 1)
        if not isinstance(steps, int):
            raise ValueError(f"deq_params.training.grad must be a number of steps, got {steps!r}")
        gradient = {"name": "phantom", "steps": steps, "damping": training.get("tau", 1.0)}
    return {
        "solver": _solver(solver, "f"),
        "gradient": gradient,
        "convergence": policy,
        "eval_convergence": {**policy, "max_iter": longer},
    }


def _solver(solver: dict[str, Any], which: str) -> str:
    name = solver.get(f"{which}_solver", "fixed_point_iter")
    return _SOLVERS[_one_of(f"deq_params.solver.{which}_solver", name, *_SOLVERS)]


def _policy(solver: dict[str, Any], which: str) -> dict[str, Any]:
    mode = f"{which}_stop_mode"
    mode = _one_of(f"deq_params.solver.{mode}", solver.get(mode, "rel"), "rel", "abs")
    missing = [name for name in (f"{which}_tol", f"{which}_max_iter") if name not in solver]
    if missing:
        raise ValueError(f"deq_params.solver of the reference's configuration needs {', '.join(missing)}")
    tolerance = {"rel": "rtol", "abs": "atol"}[mode]
    return {"name": "residual", tolerance: solver[f"{which}_tol"], "max_iter": solver[f"{which}_max_iter"]}


def _section(settings: Mapping[str, Any], name: str, where: str = "") -> dict[str, Any]:
    found = settings.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"the reference's {where}{name} must be a mapping, got {found!r}")
    return dict(found)


def _one_of(name: str, value: Any, *supported: Any) -> Any:
    if value not in supported:
        raise ValueError(f"the reference's {name} must be {' or '.join(map(repr, supported))}, got {value!r}")
    return value


def _only(name: str, given: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    for key, value in supported.items():
        _one_of(f"{name}.{key}", given.get(key, value), value)


def _known(name: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(given) - known):
        raise ValueError(f"unknown settings {unknown} in the reference's {name}; known: {sorted(known)}")
