"""The kernels for one token a sequence against the plain form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq import Backbone, State, kernels
from deqseq.backbones import LlamaBackbone, Mamba2Backbone

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D_MODEL = 24

MAMBA2: dict[str, dict[str, Any]] = {
    "plain": {"d_state": 16, "headdim": 8},
    "odd": {"d_state": 12, "headdim": 24, "expand": 3},
    "groups": {"d_state": 8, "headdim": 6, "n_groups": 2, "d_conv": 2},
    "no-conv": {"d_state": 8, "headdim": 16, "d_conv": 1, "weight_norm": False},
    "deep": {"d_state": 8, "headdim": 16, "n_layer": 2, "d_inner": 32, "input_skip": True},
}

pytestmark = pytest.mark.usefixtures("needs_triton")


def backbone(name: str) -> Backbone:
    torch.manual_seed(0)
    made = Mamba2Backbone(**{"d_model": D_MODEL, "n_layer": 1, **MAMBA2[name]})
    for parameter in made.parameters():  # norms and skips start as ones, biases as zeros
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5)
    return made.to(DEVICE)


def random_state(body: Backbone, batch: int, dtype: torch.dtype | None = None) -> State:
    state = body.initial_state(batch, dtype=dtype)
    return state.map(lambda t: torch.randn_like(t) if t.is_floating_point() else t)


def token(batch: int, width: int = D_MODEL) -> Tensor:
    """A slice of more tokens: not contiguous."""
    return torch.randn(batch, 3, width, device=DEVICE)[:, 1:2]


def step(body: Backbone, z: Tensor, x: Tensor, state: State, count: Tensor) -> list[Tensor]:
    context = body.prepare(x)
    context = type(context)(tuple(t[:, -1:] for t in context.tokens), context.shared)
    out, trace = body.evaluate(z, context, state)
    end = body.advance(trace, state, count)
    return [out, *(t for layer in end.layers for t in layer)]


def twins(body: Backbone, z: Tensor, x: Tensor, state: State) -> None:
    for count in (0, 1):
        consumed = torch.full((z.shape[0],), count, device=DEVICE)
        with torch.no_grad(), kernels.use("torch"):
            expected = step(body, z, x, state, consumed)
        with torch.no_grad(), kernels.use("triton"):
            found = step(body, z, x, state, consumed)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            if b.numel():
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item() + 1e-6)


@pytest.mark.parametrize("batch", [1, 3, 17])
@pytest.mark.parametrize("name", MAMBA2)
def test_mamba2(name: str, batch: int) -> None:
    body = backbone(name)
    twins(body, token(batch), torch.randn(batch, 3, D_MODEL, device=DEVICE), random_state(body, batch))
