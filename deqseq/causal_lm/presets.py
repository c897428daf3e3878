"""Presets: the configurations of *Implicit Language Models are RNNs* (arXiv 2502.07827), by name.

``{mamba2, llama}-{130m, 370m, 760m, 1.3b}-{explicit, bounded, free}`` are the language models that the paper
trains on the Pile. The form *injected* is ours. ``mamba2-state-tracking`` is the paper's model for state
tracking. The command ``python -m deqseq.causal_lm.presets`` prints the size and the parameter count of every
preset.

- *explicit*: the model applies its blocks once.
- *injected*: the model evaluates the map of an implicit model once, at z = 0. It has the same weights as an
  implicit model, and costs about as much as an explicit one. Compare implicit models with this control to
  see what iterating contributes.
- *bounded*: training runs four iterations without gradients, then one with gradients (a phantom step).
  Evaluation runs five iterations. Five iterations do not reach the equilibrium. So generation and windows
  give other results than a full forward pass. To make all results agree, set
  ``eval_convergence={"name": "residual", "rtol": 1e-3, "max_iter": 128}``.
- *free*: the model iterates until the relative residual is 5 %, at most 24 times (Mamba2) or 32 times
  (Llama). In training, four phantom steps follow.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# n_layer and d_model of each model, and n_head for Llama.
_SIZES: dict[str, tuple[int, ...]] = {
    "mamba2-130m": (24, 768), "mamba2-370m": (48, 1024), "mamba2-760m": (48, 1536), "mamba2-1.3b": (48, 2048),
    "llama-130m": (12, 768, 12), "llama-370m": (24, 1024, 16), "llama-760m": (24, 1536, 16),
    "llama-1.3b": (24, 2048, 32),
}  # fmt: skip
_FORMS = ("explicit", "injected", "bounded", "free")
_BUDGET = {"mamba2": 24, "llama": 32}
_END_OF_TEXT = 0  # id of the end-of-text token in the GPT-NeoX tokenizer


def names() -> list[str]:
    """The names of all presets."""
    return [f"{model}-{form}" for model in _SIZES for form in _FORMS] + ["mamba2-state-tracking"]


def options(name: str) -> dict[str, Any]:
    """The arguments of :class:`ImplicitConfig` for the preset ``name``.

    Raises:
        ValueError: no preset has this name. The message lists the forms of the model, or all names.
    """
    if name not in names():
        forms = [f"{name}-{form}" for form in _FORMS if name in _SIZES]
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(forms or names())}")
    if name == "mamba2-state-tracking":
        backbone = {"name": "mamba2", "d_model": 256, "n_layer": 1, "d_state": 128, "expand": 4}
        policies = {"convergence": _residual(32), "eval_convergence": _residual(2048)}
        return {"vocab_size": 240, "backbone": backbone, "gradient": _phantom(4), **policies}
    model, form = name.rsplit("-", 1)
    kind = model.partition("-")[0]
    sizes = dict(zip(("n_layer", "d_model", "n_head"), _SIZES[model], strict=False))
    ends = {"bos_token_id": _END_OF_TEXT, "eos_token_id": _END_OF_TEXT}
    found: dict[str, Any] = {"backbone": {"name": kind, **sizes}, **ends}
    if form == "explicit":
        return {**found, "implicit": False}
    if form == "injected":
        return {**found, "implicit": False, "backbone": {**found["backbone"], "injection": True}}
    if form == "free":
        return {**found, "gradient": _phantom(4), "convergence": _residual(_BUDGET[kind])}
    policies = {"convergence": _fixed(4), "eval_convergence": _fixed(5)}
    return {**found, "gradient": _phantom(1), **policies}


def _phantom(steps: int) -> dict[str, Any]:
    return {"name": "phantom", "steps": steps, "damping": 0.8}


def _residual(max_iter: int) -> dict[str, Any]:
    return {"name": "residual", "rtol": 0.05, "max_iter": max_iter}


def _fixed(iterations: int) -> dict[str, Any]:
    return {"name": "fixed", "iterations": iterations}


def table() -> str:
    """A Markdown table of all presets with their sizes and parameter counts. Allocates no weights."""
    lines = ["| Preset | Layers | Width | Parameters | Embeddings among them |", "|---|---|---|---|---|"]
    for name in names():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("implicit_lm", **options(name)))
        layers, width = model.config.num_hidden_layers, model.config.hidden_size
        total, embeddings = model.num_parameters(), model.model.embed_tokens.weight.numel()
        lines.append(f"| `{name}` | {layers} | {width} | {total:,} | {embeddings:,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
