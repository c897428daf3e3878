"""Small models for the benchmarks. The first use of a model trains it and saves it; later uses load it.

Shapes: B sequences, L tokens, D width.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import checksum
from torch import Tensor

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.tasks import prepare
from deqseq.tasks.common.corpus import TokenFolder
from deqseq.tasks.common.models import load_model, quiet_transformers, read_tokens
from deqseq.tasks.common.tokenizer import load_tokenizer
from deqseq.tasks.pretraining.demo import help_pages, train_tokenizer
from deqseq.tasks.pretraining.run_files import load_run
from deqseq.tasks.pretraining.train import pretrain
from deqseq.tasks.state_tracking.evaluate import held_out, load
from deqseq.tasks.state_tracking.settings import TrainSettings
from deqseq.tasks.state_tracking.train import train

quiet_transformers()


@dataclass
class Subject:
    """A trained implicit model in evaluation mode, with held-out sequences.

    Attributes:
        name: the group of the word problem, such as A5, or the name of the model's folder.
        ids: (B, L) int64 tokens.
        targets: (B, L) int64 labels of a word problem; ``None`` for language models.
    """

    name: str
    model: ImplicitForCausalLM
    ids: Tensor
    targets: Tensor | None = None

    def score(self, z: Tensor) -> dict[str, float]:
        """Accuracy (word problem) or perplexity (language model), from the last hidden states z (B, L, D)."""
        if self.targets is not None:
            right = self.model.lm_head(z).argmax(-1) == self.targets
            return {"accuracy": right.float().mean().item()}
        logits = self.model.lm_head(z[:, :-1].float())
        loss = F.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())
        return {"perplexity": loss.exp().item()}

    def checksum(self) -> str:
        return checksum(self.model, *(t for t in (self.ids, self.targets) if t is not None))


def find(name: str, options: argparse.Namespace) -> Subject:
    """Load a trained model and sequences to test it with.

    Args:
        name: the folder of a trained model; or "A5" (a word problem), "mamba2" or "llama" (language models),
            which this function trains if no saved model exists.
        options: parsed arguments with the fields ``batch`` (sequences), ``length`` (tokens per sequence; for
            a word problem, ``None`` means the longest length in training), ``device``, ``models`` (folder for
            trained models), ``quick`` (train smaller models) and ``text`` (files for language models).

    Raises:
        ValueError: the folder has no model; the model is explicit; the text is too short.
    """
    folder = Path(name)
    if name == "A5":
        folder = options.models / ("A5-quick" if options.quick else "A5")
        # Train with the settings of the demo. With ``quick``, use a smaller width and fewer steps.
        train(TrainSettings(d_model=64, steps=1200) if options.quick else TrainSettings(), folder)
    if (folder / "training.json").exists():
        return load_word_problem(folder, options.batch, options.length, options.device)
    texts = getattr(options, "text", None) or [str(default_text(options.models))]
    rows, length = options.batch, options.length
    if name in ("mamba2", "llama"):
        folder, data = train_language_model(options.models, name, texts, options.quick)
        held_out = TokenFolder(data).rows("validation", length)
        chosen = [held_out[i]["input_ids"] for i in range(min(rows, len(held_out)))]
        tokens = torch.tensor(np.concatenate(chosen)).long()
    else:
        tokens = read_tokens(texts[:1], load_tokenizer(str(folder)), rows * length)[: rows * length]
    if len(tokens) < rows * length:
        raise ValueError(f"{name} has {len(tokens)} held-out tokens, {rows} rows of {length} are needed")
    model = load_model(str(folder), options.device)
    return Subject(folder.name, _implicit(model, folder), tokens.view(rows, length).to(options.device))


def load_word_problem(folder: Path | str, rows: int, length: int | None, device: str) -> Subject:
    """Load the model of a state-tracking run, and make ``rows`` new sequences of ``length`` tokens.

    If ``length`` is ``None``, the sequences are as long as the longest sequences in training.
    """
    model, settings = load(folder)
    fresh = held_out(settings, length or settings.length, rows, seed=0)
    ids, targets = fresh.tokens.to(device), fresh.targets.to(device)
    return Subject(settings.group, _implicit(model, folder).to(device).eval(), ids, targets)


def train_language_model(models: Path, body: str, texts: list[str], quick: bool) -> tuple[Path, Path]:
    """Train a two-layer model with the backbone ``body``.

    Returns the folder of the model and the folder of its training data.
    """
    tokenizer, data = train_tokenizer(texts, models / "tokenizer.json"), str(models / "data")
    made = ["--output", data, "--tokenizer", str(tokenizer), "--validation-share", "0.05"]
    if prepare.main([*texts, *made]):
        raise ValueError(f"{', '.join(texts)} could not be prepared")
    changes = {"data": data, **({"steps": 200, "eval_steps": 200} if quick else {})}
    folder = models / (f"{body}-quick" if quick else body)
    return pretrain(load_run(f"{body}-tiny", changes), folder), Path(data)


def default_text(models: Path) -> Path:
    """Return the path of a text file with Python's help pages. Write the file if it does not exist.

    An existing file stays unchanged, because prepared data cannot be reused after their text file changes.
    """
    models.mkdir(parents=True, exist_ok=True)
    file = models / "help.txt"
    return file if file.exists() else help_pages(file)


def _implicit(model: torch.nn.Module, folder: Path | str) -> ImplicitForCausalLM:
    if not isinstance(model, ImplicitForCausalLM) or not model.config.implicit:
        raise ValueError(f"the model in {folder} is not implicit: there is nothing to solve")
    return model
