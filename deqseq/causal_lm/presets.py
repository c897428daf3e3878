"""The paper's configurations by name.

``{mamba2, llama}-{130m, 370m, 760m, 1.3b}-{explicit, bounded, free}``, the language models trained on the
Pile, and ``mamba2-state-tracking``, the model of the word problems (Implicit Language Models are RNNs,
arXiv 2502.07827). ``python -m deqseq.causal_lm.presets`` prints the table of their parameters.

- *explicit*: the stack applied once.
- *bounded*: four iterations and one phantom step in training, (4+1); five iterations in evaluation. Five
  iterations from zero are no equilibrium: tokens solved one by one, or in a window, see other iterates of the
  tokens before them than tokens solved together, so generation and windows only come near the full forward
  pass. ``eval_convergence={"name": "residual", "rtol": 1e-3, "max_iter": 128}`` makes them agree.
- *free*: a search to 5 % within 24 (Mamba2) or 32 (Llama) iterations and four phantom steps.
"""

from __future__ import annotations

from typing import Any

import torch

from deqseq.causal_lm.configuration import ImplicitConfig
from deqseq.causal_lm.modeling import ImplicitForCausalLM

_MAMBA2 = {"130m": (24, 768), "370m": (48, 1024), "760m": (48, 1536), "1.3b": (48, 2048)}
_LLAMA = {"130m": (12, 768, 12), "370m": (24, 1024, 16), "760m": (24, 1536, 16), "1.3b": (24, 2048, 32)}
_FORMS = ("explicit", "bounded", "free")
_BUDGET = {"mamba2": 24, "llama": 32}
_DAMPING = 0.8
_END_OF_TEXT = 0  # of the GPT-NeoX tokenizer


def names() -> list[str]:
    """All presets."""
    models = [f"{body}-{size}" for body, sizes in (("mamba2", _MAMBA2), ("llama", _LLAMA)) for size in sizes]
    return [f"{model}-{form}" for model in models for form in _FORMS] + ["mamba2-state-tracking"]


def options(name: str) -> dict[str, Any]:
    """The options of :class:`ImplicitConfig` behind a preset.

    Raises:
        ValueError: no preset of that name; the message lists them.
    """
    if name not in names():
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(names())}")
    if name == "mamba2-state-tracking":
        backbone = {"name": "mamba2", "d_model": 256, "n_layer": 1, "d_state": 128, "expand": 4}
        found = {"vocab_size": 240, "backbone": backbone, **_solved(32)}
        return {**found, "eval_convergence": {"name": "residual", "rtol": 0.05, "max_iter": 2048}}
    body, size, form = name.split("-")
    common = {"backbone": _backbone(body, size), "bos_token_id": _END_OF_TEXT, "eos_token_id": _END_OF_TEXT}
    if form == "explicit":
        return {**common, "implicit": False}
    if form == "free":
        return {**common, **_solved(_BUDGET[body])}
    return {
        **common,
        "gradient": {"name": "phantom", "steps": 1, "damping": _DAMPING},
        "convergence": {"name": "fixed", "iterations": 4},
        "eval_convergence": {"name": "fixed", "iterations": 5},
    }


def _backbone(body: str, size: str) -> dict[str, Any]:
    if body == "mamba2":
        n_layer, d_model = _MAMBA2[size]
        return {"name": "mamba2", "d_model": d_model, "n_layer": n_layer}
    n_layer, d_model, n_head = _LLAMA[size]
    return {"name": "llama", "d_model": d_model, "n_layer": n_layer, "n_head": n_head}


def _solved(max_iter: int) -> dict[str, Any]:
    return {
        "gradient": {"name": "phantom", "steps": 4, "damping": _DAMPING},
        "convergence": {"name": "residual", "rtol": 0.05, "max_iter": max_iter},
    }


def parameters(name: str) -> tuple[int, int]:
    """Number of parameters of a preset, in all and in the embeddings; nothing is allocated."""
    with torch.device("meta"):
        model = ImplicitForCausalLM(ImplicitConfig.from_preset(name))
    return sum(p.numel() for p in model.parameters()), model.model.embed_tokens.weight.numel()


def table() -> str:
    """A Markdown table of all presets and their parameters."""
    lines = ["| Preset | Layers | Width | Parameters | Embeddings among them |", "|---|---|---|---|---|"]
    for name in names():
        total, embeddings = parameters(name)
        backbone = options(name)["backbone"]
        sizes = f"{backbone['n_layer']} | {backbone['d_model']} | {total:,} | {embeddings:,}"
        lines.append(f"| `{name}` | {sizes} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
