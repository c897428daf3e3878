"""The baseline models gated DeltaProduct and RWKV-7."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deqseq.tasks.state_tracking.evaluate import load
from deqseq.tasks.state_tracking.linear_rnn import LinearRNN, delta_product, rwkv7
from deqseq.tasks.state_tracking.settings import TrainSettings
from deqseq.tasks.state_tracking.train import train

BACKBONES = ["rwkv7", {"name": "deltaproduct", "reflections": 2}]


def settings(backbone: Any, **changes: Any) -> TrainSettings:
    sizes: dict[str, Any] = {"group": "S3", "d_model": 16, "headdim": 8, "steps": 2, "batch_size": 4}
    return TrainSettings(backbone=backbone, **{"explicit": True, **sizes, **changes})


@pytest.mark.parametrize("backbone", BACKBONES)
def test_later_tokens_do_not_change_earlier_outputs(backbone: Any) -> None:
    torch.manual_seed(0)
    model = settings(backbone, n_layer=2).model()
    tokens = torch.randint(6, (3, 9))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 6
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :5], after[:, :5])
    assert ((before - after)[:, 5:] != 0).any(-1).all()


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_trained_model_is_loaded_again(backbone: Any, tmp_path: Path) -> None:
    model = train(settings(backbone), tmp_path / "run")
    again, _ = load(tmp_path / "run")
    assert isinstance(again, LinearRNN)
    tokens = torch.randint(6, (2, 5))
    assert torch.equal(model(tokens).logits, again(tokens).logits)


def test_two_equal_reflections_cancel() -> None:
    """If a token reflects the state twice with the same key, the state does not change.

    Token 0 writes a value. Token 1 has two equal keys, with beta = 2 and v = 0, and each key reflects the
    state. Both tokens have the same query, so they must have the same output.
    """
    torch.manual_seed(0)
    q, write, mirror = (F.normalize(torch.randn(1, 1, 2, 4), dim=-1) for _ in range(3))
    v, none = torch.randn(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)
    k = torch.cat([write, write, mirror, mirror], 1)  # two keys per token
    values, beta = torch.cat([v, none, none, none], 1), torch.tensor([1.0, 0.0, 2.0, 2.0])
    out = delta_product(
        q.expand(1, 2, 2, 4), k, values, torch.zeros(1, 2, 2), beta.view(1, 4, 1).expand(1, 4, 2), 2
    )
    torch.testing.assert_close(out[:, 1], out[:, 0])
    torch.testing.assert_close(out[:, :1], v * (q * write).sum(-1, keepdim=True) / 2)


def test_rwkv7_replaces_the_value_of_a_key() -> None:
    """With a = -k, b = k, keys of norm 1 and no decay, a token replaces the value stored for its key.

    Both tokens have the same key, so each output must equal the value of its own token.
    """
    torch.manual_seed(0)
    k = F.normalize(torch.randn(1, 1, 2, 4), dim=-1).expand(1, 2, 2, 4)
    v = torch.randn(1, 2, 2, 4)
    torch.testing.assert_close(rwkv7(k, torch.zeros_like(k), k, v, -k, k), v)


def test_the_state_is_float32_under_autocast() -> None:
    torch.manual_seed(0)
    q, k, v = (F.normalize(torch.randn(1, 6, 2, 4), dim=-1) for _ in range(3))
    g, beta = torch.zeros(1, 6, 2), torch.ones(1, 6, 2)
    exact = delta_product(q, k, v, g, beta, 1)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert torch.equal(delta_product(q, k, v, g, beta, 1), exact)


@pytest.mark.parametrize(
    ("backbone", "changes", "message"),
    [
        ("rwkv7", {"explicit": False}, "rwkv7 has no implicit form"),
        ({"name": "deltaproduct", "refections": 2}, {}, "deltaproduct has no option refections"),
        ({"name": "rwkv7", "reflections": 2}, {}, "rwkv7 has no option reflections"),
        ({"name": "lstm", "reflections": 2}, {}, "lstm has no option reflections"),
        ({"reflections": 2}, {}, "name"),
        ("deltaproduct", {"headdim": 5}, "headdim must divide d_model = 16, got 5"),
        ({"name": "deltaproduct", "reflections": 0}, {}, "reflections must be"),
    ],
)
def test_wrong_settings_are_refused(backbone: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(backbone, **changes)
