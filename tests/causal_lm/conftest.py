"""Small language models."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from deqseq import Backbone
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM


@pytest.fixture
def make_model(contractive: Callable[[Backbone], Backbone]) -> Callable[..., Any]:
    """``make_model(backbone, kind=ImplicitForCausalLM, **options)``: a small model in evaluation mode.

    Its map is a contraction. ``options`` are those of :class:`ImplicitConfig`.
    """

    def make(backbone: Mapping[str, Any], kind: Any = ImplicitForCausalLM, **options: Any) -> Any:
        torch.manual_seed(3)
        config = ImplicitConfig(backbone=dict(backbone), initializer_range=0.5, pad_token_id=0, **options)
        model = kind(config).eval()
        contractive(model.model.layer.backbone)
        return model

    return make
