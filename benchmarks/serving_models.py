"""The models that ``serving.py`` serves, each in three forms: implicit, explicit and injected."""

import math
from pathlib import Path
from typing import Any

import torch

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.tasks.common.models import load_model

BACKBONES = {
    "llama": {"name": "llama", "d_model": 256, "n_layer": 2, "n_head": 4},
    "mamba2": {"name": "mamba2", "d_model": 256, "n_layer": 2, "d_state": 32, "headdim": 32},
}


@torch.no_grad()
def make_model(backbone: str, seed: int) -> ImplicitForCausalLM:
    """A small random model. Its tokens need different numbers of evaluations, and its answers vary.

    The scaled weights make f contract. The injection normalises the embeddings. A fifth of the embeddings is
    so small that the norm's constant eps outweighs them. They stay small, so their injection is weak.
    """
    torch.manual_seed(seed)
    policy = {"name": "residual", "rtol": 1e-3, "max_iter": 256}
    model = ImplicitForCausalLM(
        ImplicitConfig(
            vocab_size=1024, backbone=BACKBONES[backbone], eval_convergence=policy, tie_word_embeddings=False
        )
    )
    body, embeddings = model.model.layer.backbone, model.model.embed_tokens.weight
    for name, weight in body.named_parameters():
        if name.startswith("injection.linear") and name.endswith("original0"):
            weight.mul_(3)
        elif name.endswith(("norm.weight", "norm2.weight")) and "mixer" not in name and "inj" not in name:
            weight.mul_(0.3)
    embeddings.mul_(25)
    model.lm_head.weight.mul_(25)
    weak = torch.rand(len(embeddings)) < 0.2
    embeddings[weak] *= 0.1 * math.sqrt(body.injection.norm.eps) / embeddings[weak].square().mean().sqrt()
    return model


def evaluated_once(model: ImplicitForCausalLM, injection: bool) -> ImplicitForCausalLM:
    """The injected form of an implicit model, or its explicit twin, with the same weights."""
    fields = {**model.config.backbone, "injection": injection}
    if not injection:
        fields.pop("input_skip", None)
    tied = model.config.tie_word_embeddings
    size = model.config.vocab_size
    config = ImplicitConfig(vocab_size=size, backbone=fields, implicit=False, tie_word_embeddings=tied)
    made = ImplicitForCausalLM(config)
    made.load_state_dict(model.state_dict(), strict=False)
    return made


def save(model: ImplicitForCausalLM, folder: Path) -> None:
    """Save the model and the two forms that evaluate the map once."""
    model.save_pretrained(folder / "implicit")
    for form in ("explicit", "injected"):
        evaluated_once(model, form == "injected").save_pretrained(folder / form)


def load(folder: Path) -> ImplicitForCausalLM:
    """Load an implicit model.

    Raises:
        ValueError: the folder holds no implicit model, or cannot be loaded.
    """
    model: Any = load_model(str(folder), "cpu", "float32")
    if getattr(model.config, "form", None) != "implicit":
        raise ValueError(f"{folder} holds no implicit model of deqseq")
    return model
