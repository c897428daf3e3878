"""TRL's trainers: supervised fine-tuning, preferences, rewards and policy gradients."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deqseq import Backbone
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'deqseq[dev]'")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dog", "run", "to", "her", "house"]
BODIES: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8},
    "llama": {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2},
}
TEXTS = [" ".join(WORDS[i : 4 + (5 * i) % 9]) for i in range(4)]
PAIRS = [{"prompt": text, "chosen": " on a mat", "rejected": " dog run to her"} for text in TEXTS]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


@pytest.fixture(params=BODIES)
def folder(
    request: pytest.FixtureRequest,
    contractive: Callable[[Backbone], Backbone],
    tokenizer: Any,
    tmp_path: Path,
) -> Path:
    """The folder of a small causal model and its tokenizer."""
    torch.manual_seed(2)
    model = ImplicitForCausalLM(
        ImplicitConfig(
            vocab_size=16, backbone=BODIES[request.param], pad_token_id=0, eos_token_id=2,
            initializer_range=0.5, convergence={"name": "residual", "rtol": 1e-6, "max_iter": 100},
        )
    )  # fmt: skip
    contractive(model.model.layer.backbone)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of a run of three steps. A batch contains all of ``TEXTS``."""
    return {
        "output_dir": str(folder.parent / "run"), "max_steps": 3, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "bf16": False, "learning_rate": 1e-2, "disable_tqdm": True,
        "per_device_train_batch_size": len(TEXTS), "trust_remote_code": True, **options,
    }  # fmt: skip


def train(trainer: Any, name: str = "loss") -> list[float]:
    """Train for three steps, and check that every weight has changed. Returns the logged values ``name``."""
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert all(not torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))
    values = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert len(values) == 3 and all(map(math.isfinite, values))
    return values


@pytest.mark.parametrize(
    "options",
    [{}, {"padding_free": True, "max_length": None}, {"packing": True, "max_length": 16}],
    ids=["padded", "padding_free", "packing"],
)
def test_fine_tuning(tokenizer: PreTrainedTokenizerFast, folder: Path, options: dict[str, Any]) -> None:
    """The first loss equals the loss of the texts one by one, whether texts are padded or packed."""
    trainer = trl.SFTTrainer(
        str(folder), args=trl.SFTConfig(**arguments(folder, **options)),
        train_dataset=datasets.Dataset.from_list([{"text": text} for text in TEXTS]),
    )  # fmt: skip
    model = ImplicitForCausalLM.from_pretrained(folder).train()
    expected, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        expected += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    losses = train(trainer)
    assert losses[0] == pytest.approx(expected / count, rel=1e-4)
    assert losses[1] < losses[0]


def test_preferences_with_the_automatic_reference_model(folder: Path) -> None:
    model = ImplicitForCausalLM.from_pretrained(folder)
    trainer = trl.DPOTrainer(
        model, args=trl.DPOConfig(**arguments(folder)), train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )  # fmt: skip
    losses = train(trainer)
    assert losses[0] == pytest.approx(math.log(2), rel=1e-4)  # policy and reference are equal at first
    assert losses[2] < losses[1] < losses[0]
    original = ImplicitForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in trainer.ref_model.state_dict().items():
        assert torch.equal(weight, original[name])


def test_rewards(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The trainer loads a causal model as a reward model. Its first loss equals that of single texts."""
    trainer = trl.RewardTrainer(
        str(folder), args=trl.RewardConfig(**arguments(folder)),
        train_dataset=datasets.Dataset.from_list(PAIRS),
    )  # fmt: skip
    assert type(trainer.model).__name__ == "ImplicitForSequenceClassification"
    with torch.no_grad():
        rewards = [
            trainer.model(
                torch.tensor([[*tokenizer(pair["prompt"] + pair[kind])["input_ids"], tokenizer.eos_token_id]])
            ).logits
            for kind in ("chosen", "rejected") for pair in PAIRS
        ]  # fmt: skip
    chosen, rejected = torch.cat(rewards).squeeze(1).chunk(2)
    losses = train(trainer)
    assert losses[0] == pytest.approx(-F.logsigmoid(chosen - rejected).mean().item(), rel=1e-4)
    assert losses[2] < losses[1] < losses[0]


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def test_policy_gradients(folder: Path) -> None:
    options = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1, "seed": 1}
    trainer = trl.GRPOTrainer(
        str(folder), reward_funcs=distinct_words, args=trl.GRPOConfig(**arguments(folder, **options)),
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in TEXTS]),
    )  # fmt: skip
    divergence = train(trainer, "kl")
    assert abs(divergence[0]) < 1e-6 < divergence[1]  # policy and reference are equal at first
