"""A layer's ``decode`` computes what its ``forward`` computes for one token per sequence."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deqseq import Backbone, ExplicitSequenceLayer, ImplicitSequenceLayer, Residual, State
from deqseq.layer import SequenceLayer

BODIES = ("mamba2", "llama", "module")
FORMS = ("implicit", "injected", "explicit")


@pytest.fixture
def make(make_backbone: Callable[..., Backbone]) -> Callable[[str, str], SequenceLayer]:
    def build(body: str, form: str) -> SequenceLayer:
        if form == "implicit":
            policy = Residual(rtol=1e-4, max_iter=50)
            return ImplicitSequenceLayer(make_backbone(body), convergence=policy, guess="previous").eval()
        plain = form == "explicit" and body != "module"
        return ExplicitSequenceLayer(make_backbone(body, **({"injection": False} if plain else {})))

    return build


def filled(state: State) -> list[Tensor]:
    """The tensors of a state. Tensors with slots for tokens (B, ..., S, D) include only the filled slots."""
    tokens = int(state.seen.max())
    tensors = state.tensors()
    return [t.narrow(-2, 0, tokens) if t.dim() > 1 and t.shape[-2] >= 64 else t for t in tensors]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("body", BODIES)
@torch.no_grad()
def test_decode_equals_forward(make: Callable[[str, str], SequenceLayer], body: str, form: str) -> None:
    """After a token that is not finite, its sequence becomes NaN, and the other sequences do not change."""
    layer, x = make(body, form), torch.randn(3, 9, 16)
    x[1, 6, 0] = torch.nan
    backbone: Any = layer.backbone
    out = layer(x[:, :3], state=backbone.initial_state(3))
    state, previous = out.state.copy(), out.z[:, -1]
    context = backbone.prepare(x[:, :1], torch.zeros(3, 1, dtype=torch.int64))
    state = backbone.reserve(state, x[:, 3:])
    for t in range(3, 9):
        token, place = x[:, t : t + 1], state.seen[:, None]
        options = {"previous": out.z[:, -1]} if form == "implicit" else {}
        out = layer(token, state=out.state, **options)
        found = layer.decode(token, place, state, context, previous=previous)
        torch.testing.assert_close(found.z, out.z, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert found.z[1].isnan().all() == (t >= 6) and not found.z[[0, 2]].isnan().any()
        if form == "implicit":
            assert torch.equal(found.solution.iterations[[0, 2]], out.solution.iterations[[0, 2]])
            assert torch.equal(found.solution.status, out.solution.status)
        state, previous = found.state, found.z[:, 0]
    for one, other in zip(filled(state), filled(out.state), strict=True):
        torch.testing.assert_close(one[[0, 2]], other[[0, 2]], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_options_replace_those_of_the_layer(make: Callable[[str, str], SequenceLayer]) -> None:
    layer: Any = make("mamba2", "implicit")
    x, state = torch.randn(2, 1, 16), layer.backbone.initial_state(2)
    place = state.seen[:, None]
    context = layer.backbone.prepare(x, place)
    few = replace(layer.eval_solve, convergence=Residual(rtol=1e-4, max_iter=2))
    assert layer.decode(x, place, state.copy(), context, few).solution.nfe == 2
    assert layer.decode(x, place, state.copy(), context).solution.nfe > 2
