"""Common uses of a transformers model must work: resize, save, fine-tune, stop, resume and prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
)

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "the", "dog", "run", "to", "her", "house"]
V = 32
BODIES: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8},
    "llama": {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2},
}

Make = Callable[..., ImplicitForCausalLM]


@pytest.fixture
def make() -> Make:
    """Returns the function ``make(body, **options)``, which builds a small implicit model."""

    def build(body: str, **options: Any) -> ImplicitForCausalLM:
        torch.manual_seed(2)
        return ImplicitForCausalLM(
            ImplicitConfig(
                vocab_size=V, backbone=BODIES[body], initializer_range=0.5, pad_token_id=0, **options
            )
        )

    return build


def ids(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, V, (batch, length))


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_resizing_the_vocabulary(make: Make, tmp_path: Path, tied: bool) -> None:
    model, tokens = make("llama", tie_word_embeddings=tied).eval(), ids()
    before = model(tokens).logits
    model.resize_token_embeddings(V + 5)
    after = model(tokens).logits
    assert torch.equal(after[..., :V], before) and after.shape[-1] == V + 5
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens).logits, after)
    assert [p.name for p in tmp_path.glob("model*.*") if p.suffix != ".py"] == ["model.safetensors"]


@pytest.mark.parametrize(
    "gradient",
    ["phantom", "implicit", {"name": "unrolled", "iterations": 3, "checkpoint": True}],
)
@pytest.mark.parametrize("body", BODIES)
def test_gradient_checkpointing_changes_memory_not_gradients(make: Make, body: str, gradient: Any) -> None:
    tokens, found = ids(), []
    for checkpointing in (False, True):
        model = make(body, gradient=gradient).train()
        evaluations = []
        backbone = model.model.layer.backbone
        backbone.layers[0].register_forward_hook(lambda *_, seen=evaluations: seen.append(1))
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(tokens, labels=tokens).loss.backward()
        found.append(([p.grad for p in model.parameters()], len(evaluations)))
    for plain, recomputed in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(plain, recomputed)
    already = isinstance(gradient, dict)
    assert (found[1][1] == found[0][1]) if already else (found[1][1] > found[0][1])
    assert model.is_gradient_checkpointing and model.model.layer.gradient_checkpointing
    model.gradient_checkpointing_disable()
    assert not model.model.layer.gradient_checkpointing


@torch.no_grad()
def test_outputs(make: Make) -> None:
    model, tokens = make("mamba2").eval(), ids()
    out = model(tokens, output_hidden_states=True)
    embeddings, equilibrium = out.hidden_states
    assert torch.equal(embeddings, model.get_input_embeddings()(tokens))
    assert torch.equal(model.lm_head(equilibrium), out.logits)
    assert out.solution.iterations.shape == out.solution.status.shape == tokens.shape
    for keep, expected in ((1, out.logits[:, -1:]), (torch.tensor([2, 5]), out.logits[:, [2, 5]])):
        torch.testing.assert_close(model(tokens, logits_to_keep=keep).logits, expected)
    assert torch.equal(model(tokens, return_dict=False)[0], out.logits)
    kept, whole = (model(tokens, labels=tokens, logits_to_keep=keep) for keep in (20, 0))
    assert torch.equal(kept.logits, whole.logits) and kept.loss == whole.loss
    with pytest.raises(ValueError, match="labels need the logits of all tokens: logits_to_keep must be 0"):
        model(tokens, labels=tokens[:, -1:], logits_to_keep=1)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(tokens, labels=tokens, logits_to_keep=torch.arange(8, -1, -1))
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(tokens, logits_to_keep=-2)
    assert torch.equal(out.solution[1].iterations, out.solution.iterations[1])
    model.config.output_hidden_states = True
    assert torch.equal(model(tokens).hidden_states[1], equilibrium)
    model.config.output_hidden_states = False
    with pytest.raises(ValueError, match="labels"):
        model(tokens, labels=tokens[:1])
    with pytest.raises(ValueError, match="input_ids"):
        model(tokens[0])
    with pytest.raises(ValueError, match="colour"):
        model(tokens, colour="red")
    with pytest.raises(ValueError, match="attention weights"):
        model(tokens, output_attentions=True)
    for part in (model, model.model):  # arguments that tokenizers and collators add have no effect
        plain, added = (
            part(tokens, **more)[0]
            for more in (
                {},
                {"token_type_ids": tokens, "cu_seq_lens_q": tokens[0], "output_attentions": False},
            )
        )
        assert torch.equal(plain, added)
        with pytest.raises(ValueError, match="colour"):
            part(tokens, colour="red")
    shifted = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)
    expected = model(tokens, labels=tokens).loss
    torch.testing.assert_close(model(tokens, shift_labels=shifted).loss, expected)
    torch.testing.assert_close(model(tokens, labels=tokens * 0, shift_labels=shifted).loss, expected)
    with pytest.raises(ValueError, match="shift_labels"):
        model(tokens, shift_labels=shifted[:1])


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", *dict.fromkeys(WORDS)])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>")


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("body", BODIES)
def test_the_trainer_evaluates(make: Make, tmp_path: Path, body: str, smoothing: float) -> None:
    model, tokens = make(body), ids(4)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, label_smoothing_factor=smoothing,
        per_device_eval_batch_size=2,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, eval_dataset=data)  # type: ignore[arg-type]
    measured = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        logits = model.eval()(tokens).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=smoothing
    )
    assert measured == pytest.approx(expected.item(), rel=1e-5)
    assert trainer.predict(data).predictions.shape == (4, tokens.shape[1], V)  # type: ignore[arg-type]


class StopAt(TrainerCallback):
    """Saves a checkpoint and ends training after step number ``step``, like a time limit."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = True
            control.should_training_stop = True


@pytest.mark.parametrize("body", BODIES)
def test_fine_tuning_stops_resumes_and_answers(
    make: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, body: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(WORDS[i % 5 :] + WORDS[: i % 7]) for i in range(24)))
    examples = [tokenizer(line) for line in text.read_text().splitlines()]
    for example in examples:
        example.pop("token_type_ids", None)

    def trainer(folder: str, stop: int | None = None) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=8, per_device_train_batch_size=4,
            learning_rate=1e-2, logging_steps=1, save_steps=100, report_to=[], use_cpu=True, seed=1,
            disable_tqdm=True,
        )  # fmt: skip
        return Trainer(
            model=make(body), args=arguments, train_dataset=examples,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
            processing_class=tokenizer, callbacks=[StopAt(stop)] if stop else [],
        )  # fmt: skip

    def losses(run: Trainer) -> list[float]:
        return [entry["loss"] for entry in run.state.log_history if "loss" in entry]

    whole = trainer("whole")
    whole.train()
    first = trainer("parts", stop=3)
    first.train()
    assert first.state.global_step == 3
    rest = trainer("parts")
    rest.train(resume_from_checkpoint=True)
    assert losses(rest) == losses(whole) and len(losses(whole)) == 8
    assert losses(whole)[-1] < losses(whole)[0]

    rest.save_model(str(tmp_path / "saved"))
    answer = pipeline("text-generation", model=str(tmp_path / "saved"), device="cpu")
    said = answer(["the cat", "a mat and saw"], max_new_tokens=4, do_sample=False, batch_size=2)
    alone = [answer(p, max_new_tokens=4, do_sample=False) for p in ("the cat", "a mat and saw")]
    assert [s[0]["generated_text"] for s in said] == [s[0]["generated_text"] for s in alone]
    assert said[0][0]["generated_text"].startswith("the cat")
