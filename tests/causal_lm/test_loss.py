"""Tests that the fused Triton loss equals transformers' loss. Without a GPU, Triton's interpreter runs it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from deqseq import kernels
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM, head, modeling
from deqseq.ops.cross_entropy import next_token_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V = 40
fused = pytest.mark.usefixtures("needs_triton")


def batch(vocab_size: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits (2, 7, columns) and labels (2, 7), some of which are -100 (ignored)."""
    logits = 5 * torch.randn(2, 7, columns, device=DEVICE)
    labels = torch.randint(0, vocab_size, (2, 7), device=DEVICE)
    labels[0, 2:4] = -100
    labels[1, 5] = vocab_size - 1
    return logits.to(dtype), labels


def both(logits: Tensor, labels: Tensor, vocab_size: int, items: Any = None, scale: float = 1.0) -> None:
    """Assert that the fused loss and its gradient equal transformers' loss and its gradient."""
    values, gradients = [], []
    for name in ("torch", "triton"):
        at = logits.clone().requires_grad_()
        with kernels.use(name):
            if name == "torch":
                loss = ForCausalLMLoss(at[..., :vocab_size], labels, vocab_size, num_items_in_batch=items)
            else:
                loss = next_token_loss(at, labels, vocab_size, items)
            (scale * loss).backward()
        values.append(loss)
        gradients.append(at.grad)
    torch.testing.assert_close(values[1], values[0], equal_nan=True, rtol=1e-5, atol=1e-6)
    # Allow a difference of one rounding step. Both gradients are computed in float32 and then rounded to the
    # dtype of the logits, possibly in different directions.
    rounding = max(1e-5, torch.finfo(logits.dtype).eps)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=rounding, atol=1e-7 * max(1, abs(scale)))
    assert not gradients[1][..., vocab_size:].any()


@fused
@pytest.mark.parametrize(
    ("vocab_size", "columns"),
    [(1, 1), (40, 40), (37, 64), (50, 50), (4096, 4096), (4097, 4160), (5003, 5056), (5003, 5003)],
)
def test_value_and_gradient(vocab_size: int, columns: int) -> None:
    both(*batch(vocab_size, columns), vocab_size)


@fused
@pytest.mark.parametrize("items", [5, torch.tensor(5), torch.tensor([3.0]), 0])
def test_number_of_items(items: Any) -> None:
    logits, labels = batch(37, 64)
    if isinstance(items, int) and items == 0:  # the trainer passes 0 for a batch that is all padding
        labels.fill_(-100)
    both(logits, labels, 37, items)


@fused
def test_the_gradient_of_a_scaled_loss() -> None:
    both(*batch(37, 64), 37, scale=-12.5)


@fused
@pytest.mark.parametrize("items", [None, 3])
def test_all_ignored(items: int | None) -> None:
    logits, labels = batch(37, 64)
    labels.fill_(-100)
    both(logits, labels, 37, items)


@fused
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    logits, labels = batch(37, 64, dtype)
    both(logits, labels, 37)
    with kernels.use("triton"):
        assert next_token_loss(logits, labels, 37).dtype == torch.float32


@fused
def test_one_token_has_no_target() -> None:
    logits, labels = batch(37, 64)
    both(logits[:, :1], labels[:, :1], 37)


@fused
def test_logits_that_are_not_contiguous() -> None:
    logits, labels = batch(37, 80)
    both(logits[..., :64], labels, 37)


@fused
def test_infinite_logits() -> None:
    """The fused loss is right although 4,500 logits of every token are -inf, and padding columns are NaN."""
    logits, labels = batch(5003, 5056)
    logits[..., :4500] = -torch.inf
    labels.clamp_min_(4500)
    logits[..., 5003:] = torch.nan
    both(logits, labels, 5003)


@fused
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_first_label_and_the_last_logits_do_not_matter(name: str) -> None:
    logits, labels = batch(37, 64)
    with kernels.use(name):
        loss = next_token_loss(logits, labels, 37)
        labels[:, 0] = 36
        logits[:, -1] = torch.nan
        logits[..., 37:] = torch.nan
        assert torch.equal(next_token_loss(logits, labels, 37), loss)


@fused
@pytest.mark.parametrize("wrong", [-1, 37, 63, 10**12])
def test_labels_outside_the_vocabulary(wrong: int) -> None:
    """A label outside the vocabulary gives a NaN loss, and NaN gradients of the logits that predict it."""
    logits, labels = batch(37, 64)
    labels[0, 1] = wrong
    logits.requires_grad_()
    with kernels.use("triton"):
        loss = next_token_loss(logits, labels, 37)
        loss.backward()
    bad = logits.grad.isnan()  # type: ignore[union-attr]
    assert loss.isnan() and bad[0, 0, :37].all() and bad.sum() == 37


def test_too_few_columns() -> None:
    with pytest.raises(ValueError, match="vocab_size = 65"):
        next_token_loss(*batch(37, 64), 65)


@pytest.fixture
def model() -> ImplicitForCausalLM:
    body = {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2}
    config = ImplicitConfig(vocab_size=V, backbone=body, implicit=False, initializer_range=0.5)
    return ImplicitForCausalLM(config).to(DEVICE).eval()


def pad_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make models pad their logits with extra columns, which they normally do only on a GPU."""

    def logits_of(hidden: Tensor, layer: torch.nn.Linear) -> tuple[Tensor, Tensor]:
        padded = head.aligned_linear(hidden, layer.weight)
        return padded[..., :V], padded

    monkeypatch.setattr(head, "logits_of", logits_of)


@fused
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}])
def test_the_models_loss(
    model: ImplicitForCausalLM, monkeypatch: pytest.MonkeyPatch, padded: bool, options: dict[str, Any]
) -> None:
    ids = torch.randint(0, V, (2, 9), device=DEVICE)
    labels = ids.masked_fill(ids < 5, -100)
    if padded:
        pad_logits(monkeypatch)
    found = []
    for name in ("torch", "triton"):
        with kernels.use(name):
            out = model(ids, labels=labels, **options)
            # Add a penalty on the logits, so that their gradient does not come from the loss alone.
            total = out.loss + 1e-3 * out.logits.square().mean()
            found.append([out.loss, out.logits, *torch.autograd.grad(total, list(model.parameters()))])
        assert out.logits.shape == (2, 9, V)
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5 * plain.abs().max().item() + 1e-6)


def test_a_loss_of_the_users_own(model: ImplicitForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, V, (2, 9), device=DEVICE)
    monkeypatch.setattr(modeling, "next_token_loss", lambda *_: "ours")
    assert model(ids, labels=ids).loss == "ours"
    model.loss_function = lambda logits, labels, vocab_size: "the user's"
    assert model(ids, labels=ids).loss == "the user's"


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 3\)"):
        next_token_loss(torch.randn(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64), 5)
