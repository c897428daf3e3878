"""Classification of sequences: padding, losses, and checkpoints of causal models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from deqseq.causal_lm import ImplicitForCausalLM, ImplicitForSequenceClassification

V = 16
BODIES: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 16, "n_layer": 1, "d_state": 8, "headdim": 8},
    "llama": {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2},
}
Make = Callable[..., Any]


@pytest.fixture
def make(make_model: Make) -> Make:
    """``make(body="llama", kind=ImplicitForSequenceClassification, **options)`` makes a small model."""

    def build(body: str = "llama", kind: Any = ImplicitForSequenceClassification, **options: Any) -> Any:
        options = {"num_labels": 3, "convergence": {"rtol": 1e-6, "max_iter": 100}, **options}
        options["convergence"] = {"name": "residual", **options["convergence"]}
        return make_model(BODIES[body], kind, vocab_size=V, **options)

    return build


def ids(length: int = 7, batch: int = 2) -> Tensor:
    torch.manual_seed(4)
    return torch.randint(1, V, (batch, length))


@torch.no_grad()
@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize("body", BODIES)
def test_padding_changes_nothing(make: Make, body: str, implicit: bool) -> None:
    model, rows = make(body, implicit=implicit), [ids(n, 1) for n in (7, 4, 2)]
    expected = torch.cat([model(row).logits for row in rows])
    assert expected.shape == (3, 3)
    masks = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 0, 0]])
    # Masked columns get a token that is not the pad token: only the mask counts.
    tokens = torch.full(masks.shape, 5).masked_scatter(masks.bool(), torch.cat(rows, 1)[0])
    for given in ({"input_ids": tokens}, {"inputs_embeds": model.get_input_embeddings()(tokens)}):
        torch.testing.assert_close(model(**given, attention_mask=masks).logits, expected)
    right = torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True)
    torch.testing.assert_close(model(right).logits, expected)


@torch.no_grad()
def test_output(make: Make) -> None:
    model, tokens = make(), ids()
    out = model(tokens, output_hidden_states=True)
    equilibrium = model.model(tokens).last_hidden_state
    torch.testing.assert_close(out.logits, equilibrium[:, -1] @ model.score.weight.T)
    assert torch.equal(out.hidden_states[1], equilibrium)
    assert out.solution.status.shape == tokens.shape and out.loss is None
    first = model(tokens[:, :4], use_cache=True)
    rest = model(tokens[:, 4:], past_key_values=first.past_key_values)
    torch.testing.assert_close(rest.logits, out.logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_losses(make: Make) -> None:
    def found(labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out = make(**options)(ids(), labels=labels)
        return out.loss, out.logits

    classes, numbers = torch.tensor([2, 0]), torch.tensor([0.5, -1.0])
    loss, logits = found(classes)
    torch.testing.assert_close(loss, F.cross_entropy(logits, classes))
    loss, logits = found(numbers, num_labels=1)
    torch.testing.assert_close(loss, F.mse_loss(logits[:, 0], numbers))
    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    loss, logits = found(several)
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits, several))
    again = make(problem_type=None)
    again(ids(), labels=classes)
    torch.testing.assert_close(again(ids(), labels=several).loss, loss)  # the first call decides nothing
    for wrong in (torch.zeros(3), torch.zeros(1), torch.tensor(0.0), torch.zeros(2, 2), classes):
        with pytest.raises(ValueError, match=r"labels of a regression must be floats of shape \(2,\) or"):
            found(wrong, num_labels=1)
    for wrong in (classes[:1], torch.zeros(2, 3).long()):
        with pytest.raises(ValueError, match="labels of a single_label_classification must be integers"):
            found(wrong)
    for wrong in (numbers, torch.zeros(2, 3).bool()):
        with pytest.raises(ValueError, match=r"must be floats of shape \(2, 3\), got"):
            found(wrong)
    with pytest.raises(ValueError, match="labels must be class ids below num_labels = 3"):
        found(torch.tensor([0, 3]))
    for options, rule in (
        ({"num_labels": 0}, "num_labels must be"),
        ({"problem_type": "x"}, "regression, s"),
    ):
        with pytest.raises(ValueError, match=rule):
            make(**options)
    with pytest.raises(ValueError, match="labels"):
        found([0, 1])  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("body", BODIES)
def test_from_a_causal_checkpoint(make: Make, tmp_path: Path, body: str) -> None:
    causal: Any = make(body, ImplicitForCausalLM, tie_word_embeddings=False)
    causal.save_pretrained(tmp_path / "causal")
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "causal", num_labels=5)
    assert isinstance(model, ImplicitForSequenceClassification)
    assert model.score.weight.shape == (5, 16)
    assert 0.3 < model.score.weight.std() < 0.7  # initializer_range
    tokens = ids()
    assert torch.equal(model.model(tokens)[0], causal.model(tokens)[0])
    model.save_pretrained(tmp_path / "saved")
    again: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("body", BODIES)
def test_accumulated_gradients_are_those_of_the_whole_batch(make: Make, tmp_path: Path, body: str) -> None:
    rows: Any = [{"input_ids": row, "labels": i % 3} for i, row in enumerate(ids(batch=4))]
    weights = []
    for accumulation in (1, 2):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, per_device_train_batch_size=4 // accumulation, learning_rate=0.1,
            gradient_accumulation_steps=accumulation, optim="sgd", report_to=[], use_cpu=True,
            save_strategy="no", max_grad_norm=0, lr_scheduler_type="constant", disable_tqdm=True,
        )  # fmt: skip
        model = make(body)
        before = model.score.weight.detach().clone()
        Trainer(model, arguments, train_dataset=rows).train()
        weights.append(model.score.weight.detach())
        assert (weights[-1] - before).abs().max() > 1e-3
    torch.testing.assert_close(weights[1], weights[0])


@torch.no_grad()
def test_the_last_real_token_must_be_known(make: Make) -> None:
    model, rows = make(), ids(5)
    with pytest.raises(ValueError, match="each sequence needs a real token"):
        model(rows, attention_mask=torch.tensor([[1] * 5, [0] * 5]))
    model.config.pad_token_id = None
    assert model(rows[:1]).logits.shape == (1, 3)
    with pytest.raises(ValueError, match="2 sequences need an attention_mask, or a pad_token_id"):
        model(rows)
