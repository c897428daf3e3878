"""Our models reproduce the logits, losses and gradients of the reference implementation on its checkpoints.

The checkpoints and numbers are optional data: the folder ``golden`` of ``DEQSEQ_TEST_DATA``.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deqseq.causal_lm import ImplicitForCausalLM, reference

# Tolerances on relative errors. They are looser for mamba2: the reference's own search stopped at a residual
# of 6e-5, and its sequential and simultaneous logits differ by 3e-5.
PHANTOM = {"llama": 1e-4, "mamba2": 1e-3}
EVALUATION = {"llama": 2e-5, "mamba2": 2e-4}

Golden = tuple[ImplicitForCausalLM, dict[str, torch.Tensor]]


@pytest.fixture(params=["llama", "mamba2"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def golden(name: str, optional_data: Callable[[str], Path]) -> Golden:
    folder = optional_data("golden") / name
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, load_file(folder / "expected.safetensors")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach() - expected).norm() / expected.norm())


def ours(name: str) -> str:
    """Our name for the parameter that the reference calls ``name``."""
    for pattern, replacement in reference.KEYS.items():
        name = re.sub(pattern, replacement, name)
    return name


def check(model: ImplicitForCausalLM, logits: Any, e: Any, what: str, tolerance: float, grads: float) -> None:
    """Compare the logits, the loss and every gradient with the reference's numbers ``e``."""
    loss = F.cross_entropy(logits.flatten(0, 1), e["targets"].flatten())
    loss.backward()
    assert relative(logits, e[f"{what}_logits"]) < tolerance
    assert relative(loss, e[f"{what}_loss"]) < tolerance
    expected = {k.removeprefix(f"{what}_grad."): v for k, v in e.items() if k.startswith(f"{what}_grad.")}
    expected = {ours(k): v for k, v in expected.items()}
    parameters = dict(model.named_parameters())
    assert set(expected) == set(parameters)
    errors = {k: relative(parameters[k].grad, v) for k, v in expected.items()}
    assert max(errors.values()) < grads, sorted(errors.items(), key=lambda item: -item[1])[:3]


def test_unrolled(golden: Golden) -> None:
    model, e = golden
    x = model.model.embed_tokens(e["input_ids"])
    backbone = model.model.layer.backbone
    context = backbone.prepare(x)
    z = backbone(torch.zeros_like(x), context)
    for _ in range(3):
        z = torch.lerp(z, backbone(z, context), model.config.gradient["damping"])
    check(model, model.lm_head(z), e, "unroll4", 1e-5, 1e-4)


def test_phantom(golden: Golden, name: str) -> None:
    model, e = golden
    logits = model.train()(e["input_ids"]).logits
    check(model, logits, e, "phantom", PHANTOM[name], PHANTOM[name])


@pytest.mark.parametrize("window", [None, 8, 1])
def test_sequential_and_simultaneous(golden: Golden, name: str, window: int | None) -> None:
    model, e = golden
    # Small windows are slow, so use few tokens: their logits do not depend on later tokens.
    length = None if window is None else 16 if window == 8 else 4
    with torch.no_grad():
        logits = model(e["input_ids"][:, :length], window=window).logits
    for what in ("sequential_logits", "simultaneous_eval_logits"):
        assert relative(logits, e[what][:, :length]) < EVALUATION[name]
