"""The demo: small Llama and Mamba2 models, implicit and explicit, from a text file to a sample.

``python -m deqseq.tasks.pretrain demo --text FILE``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deqseq.tasks.common.results import Column, column, table
from deqseq.tasks.common.runs import read_record

logger = logging.getLogger(__name__)

MODELS = ("llama", "mamba2")
_VOCABULARY = 1024
_PROMPT_TOKENS = 8


@dataclass
class Line:
    """Held-out perplexity of a model after some tokens of training.

    Attributes:
        model: its name.
        stage: what has ended.
        tokens: trained on.
        perplexity: of the held-out text.
        explicit: of the explicit twin after as many tokens.
        iterations: of a token.
    """

    model: str
    stage: str
    tokens: int
    perplexity: float
    explicit: float
    iterations: float


_COLUMNS: tuple[Column, ...] = (
    column("model"), column("stage"), column("tokens", ","), column("perplexity", ".2f"),
    column("explicit", ".2f", "explicit twin"), column("iterations", ".2f"),
)  # fmt: skip


def demo(texts: Sequence[str] | None, output: Path, steps: int | None = None) -> list[Line]:
    """Prepare, train, compare, sample and evaluate in folder ``output``; prints as it goes.

    Raises:
        ValueError: a text that cannot be read; steps that are no multiple of 5; other runs in ``output``.
        Diverged: numbers that are not finite.
    """
    from deqseq.tasks import generate, prepare
    from deqseq.tasks.common.corpus import TokenFolder
    from deqseq.tasks.evaluate.arguments import Perplexity
    from deqseq.tasks.pretraining.card import plot_curves
    from deqseq.tasks.pretraining.run_files import load_run
    from deqseq.tasks.pretraining.train import pretrain

    start = time.perf_counter()
    if steps is not None and (steps < 5 or steps % 5):
        raise ValueError(f"steps must be a multiple of 5, as the first stage has four fifths, got {steps}")
    changes = {} if steps is None else {"steps": steps, "eval_steps": steps // 5}
    output.mkdir(parents=True, exist_ok=True)
    texts = list(texts or [str(help_pages(output / "help.txt"))])
    tokenizer = train_tokenizer(texts, output / "tokenizer.json")
    data = output / "data"
    prepare.prepare(texts, output=data, tokenizer=str(tokenizer), validation_share=0.05)
    runs, lines = [], []
    for name in MODELS:
        logs = []
        for run in (f"{name}-tiny", f"{name}-tiny-explicit"):
            settings = load_run(run, {"data": str(data), **changes})
            print(f"\n{run}, {settings.total_steps} steps of {settings.batch_tokens} tokens: {output / run}")
            pretrain(settings, output / run)
            log = read_record(output / run)["log"]
            logs.append({e["step"]: e for e in log if "eval_loss" in e})
            runs.append((run.replace("-tiny", ""), log, settings))
        settings = runs[-2][2]
        curriculum = settings.curriculum()
        assert curriculum is not None
        for stage, title in zip(curriculum.stages, ("bounded", "free"), strict=True):
            step = curriculum.end(stage, settings.total_steps)
            mine, twin = (scores[step] for scores in logs)
            lines.append(
                Line(
                    name, title, step * settings.batch_tokens, mine["eval_perplexity"],
                    twin["eval_perplexity"], mine["eval_iterations"],
                )
            )  # fmt: skip
    print(f"\nheld-out perplexity in rows of {settings.length} tokens\n{table(_COLUMNS, lines)}\n")
    plot_curves(runs, output / "curves.png")
    folder = TokenFolder(data)
    held_out = folder.rows("validation", settings.length)
    text = folder.tokenizer().decode([int(t) for i in range(len(held_out)) for t in held_out[i]["input_ids"]])
    (output / "held-out.txt").write_text(text)
    prompt = folder.tokenizer().decode(held_out[0]["input_ids"][:_PROMPT_TOKENS])
    for name in MODELS:
        model = str(output / f"{name}-tiny" / "model")
        print(f"\n{name}, a sample:")
        generate.generate(model, prompt, temperature=0.8)
        print(f"\n{name}, deqseq.tasks.evaluate perplexity:")
        kept = output / f"{name}-tiny" / "report"
        text = [str(output / "held-out.txt")]
        Perplexity(model, text=text, length=settings.length, output=kept, force=True).run()
    print(
        f"\nwrote {output / 'curves.png'} and the models' folders; {time.perf_counter() - start:.0f} s in all"
    )
    return lines


def help_pages(path: Path) -> Path:
    """Write Python's own help pages, 0.7 MB of English, to ``path``."""
    from pydoc_data.topics import topics

    path.write_text("\n".join(text for _, text in sorted(topics.items())))
    return path


def train_tokenizer(texts: Sequence[str], path: Path) -> Path:
    """Train a byte-level tokenizer of 1024 tokens on the texts and save it, unless that has been done.

    Raises:
        ValueError: a text that is not there or not UTF-8.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if path.exists():
        return path
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    try:
        made.train([str(text) for text in texts], trainer)
    except Exception as error:  # the library has no classes of its own for these
        raise ValueError(f"no tokenizer can be trained on {', '.join(map(str, texts))}: {error}") from error
    made.save(str(path))
    return path
