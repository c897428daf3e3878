"""The paper's configurations by name.

``{mamba2, llama}-{130m, 370m, 760m, 1.3b}-{explicit, bounded, free}`` are the language models trained on the
Pile. ``mamba2-state-tracking`` is the model of the word problems (Implicit Language Models are RNNs,
arXiv 2502.07827). ``python -m deqseq.causal_lm.presets`` prints their sizes and parameter counts.

- *explicit*: the stack is applied once.
- *bounded*: four iterations and one phantom step in training (4+1); five iterations in evaluation. Five
  iterations do not reach the equilibrium, so the results of generation and of windows differ from those of
  a full forward pass. With ``eval_convergence={"name": "residual", "rtol": 1e-3, "max_iter": 128}`` they
  agree.
- *free*: a search to a relative residual of 5 % in at most 24 (Mamba2) or 32 (Llama) iterations. In training,
  four phantom steps follow.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# n_layer, d_model and, for Llama, n_head.
_SIZES: dict[str, tuple[int, ...]] = {
    "mamba2-130m": (24, 768), "mamba2-370m": (48, 1024), "mamba2-760m": (48, 1536), "mamba2-1.3b": (48, 2048),
    "llama-130m": (12, 768, 12), "llama-370m": (24, 1024, 16), "llama-760m": (24, 1536, 16),
    "llama-1.3b": (24, 2048, 32),
}  # fmt: skip
_FORMS = ("explicit", "bounded", "free")
_BUDGET = {"mamba2": 24, "llama": 32}
_END_OF_TEXT = 0  # token id in the GPT-NeoX tokenizer


def names() -> list[str]:
    """The names of all presets."""
    return [f"{model}-{form}" for model in _SIZES for form in _FORMS] + ["mamba2-state-tracking"]


def options(name: str) -> dict[str, Any]:
    """The arguments of :class:`ImplicitConfig` for the preset ``name``.

    Raises:
        ValueError: no preset has this name; the message lists all.
    """
    if name not in names():
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(names())}")
    if name == "mamba2-state-tracking":
        backbone = {"name": "mamba2", "d_model": 256, "n_layer": 1, "d_state": 128, "expand": 4}
        policies = {"convergence": _residual(32), "eval_convergence": _residual(2048)}
        return {"vocab_size": 240, "backbone": backbone, "gradient": _phantom(4), **policies}
    model, form = name.rsplit("-", 1)
    kind = model.partition("-")[0]
    sizes = dict(zip(("n_layer", "d_model", "n_head"), _SIZES[model], strict=False))
    ends = {"bos_token_id": _END_OF_TEXT, "eos_token_id": _END_OF_TEXT}
    found = {"backbone": {"name": kind, **sizes}, **ends}
    if form == "explicit":
        return {**found, "implicit": False}
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
    """A Markdown table of all presets, their sizes and parameter counts. No weights are allocated."""
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
