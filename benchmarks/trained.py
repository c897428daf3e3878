"""The small trained models that benchmarks measure on: trained once in a folder, loaded from then on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.tasks import prepare
from deqseq.tasks.common.corpus import TokenFolder
from deqseq.tasks.common.models import load_model, quiet_transformers
from deqseq.tasks.common.tokenizer import load_tokenizer
from deqseq.tasks.pretraining.demo import help_pages, train_tokenizer
from deqseq.tasks.pretraining.run_files import load_run
from deqseq.tasks.pretraining.train import pretrain
from deqseq.tasks.state_tracking.evaluate import load
from deqseq.tasks.state_tracking.settings import TrainSettings
from deqseq.tasks.state_tracking.train import train

quiet_transformers()


def word_problem(models: Path, quick: bool) -> Path:
    """The folder of a run on A5: the demo's settings, or half the width and two thirds of the steps."""
    folder = models / ("A5-quick" if quick else "A5")
    train(TrainSettings(d_model=64, steps=1200) if quick else TrainSettings(), folder)
    return folder


def language_model(models: Path, body: str, texts: Sequence[str] | None, quick: bool) -> tuple[Path, Path]:
    """The folders of a model of two layers, ``body`` (mamba2, llama), and of the data it was trained on.

    Args:
        texts: plain text files; Python's own help pages by default.
    """
    texts = list(texts or [str(default_text(models))])
    tokenizer = train_tokenizer(texts, models / "tokenizer.json")
    data = str(models / "data")
    made = ["--output", data, "--tokenizer", str(tokenizer), "--validation-share", "0.05"]
    if prepare.main([*texts, *made]):
        raise ValueError(f"{', '.join(texts)} could not be prepared")
    changes = {"data": data, **({"steps": 200, "eval_steps": 200} if quick else {})}
    folder = models / (f"{body}-quick" if quick else body)
    return pretrain(load_run(f"{body}-tiny", changes), folder), Path(data)


def default_text(models: Path) -> Path:
    """Python's help pages, written once, as data is prepared of files that do not change."""
    models.mkdir(parents=True, exist_ok=True)
    file = models / "help.txt"
    return file if file.exists() else help_pages(file)


def load_word_problem(folder: Path | str) -> tuple[ImplicitForCausalLM, TrainSettings]:
    """The implicit model of a state-tracking run, and its settings."""
    model, settings = load(folder)
    if settings.explicit or not isinstance(model, ImplicitForCausalLM):
        raise ValueError(f"the model in {folder} is not implicit: there is nothing to solve")
    return model, settings


def load_language_model(folder: Path, device: str) -> ImplicitForCausalLM:
    """The implicit language model of a folder, in evaluation mode."""
    model = load_model(str(folder), device)
    if not (isinstance(model, ImplicitForCausalLM) and model.config.implicit):
        raise ValueError(f"the model in {folder} is not implicit: there is nothing to solve")
    return model


def held_out_rows(data: Path, rows: int, length: int) -> Tensor:
    """(rows, length) int64 token ids of the held-out text."""
    held = TokenFolder(data).rows("validation", length)
    if len(held) < rows:
        raise ValueError(f"{data} holds {len(held)} held-out rows of {length} tokens, {rows} are needed")
    return torch.stack([torch.as_tensor(held[i]["input_ids"]).long() for i in range(rows)])


def text_rows(model: Path, text: Path, rows: int, length: int) -> Tensor:
    """(rows, length) int64 token ids of a text file, by the model's tokenizer."""
    ids = load_tokenizer(str(model))(text.read_text())["input_ids"]
    if len(ids) < rows * length:
        raise ValueError(f"{text} has {len(ids)} tokens, {rows} rows of {length} are needed")
    return torch.tensor(ids[: rows * length]).view(rows, length)
