"""The demo: trains small Llama and Mamba2 models (implicit, injected, explicit), and samples from them."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

from deqseq.tasks.common.corpus import TokenFolder
from deqseq.tasks.common.results import column, table
from deqseq.tasks.common.runs import read_record
from deqseq.tasks.common.tokenizer import train_bpe
from deqseq.tasks.pretraining.card import plot_curves
from deqseq.tasks.pretraining.run_files import load_run
from deqseq.tasks.pretraining.train import pretrain

MODELS = ("llama", "mamba2")
_PROMPT_TOKENS = 8

_COLUMNS = (
    column("model"), column("stage"), column("tokens", ","), column("perplexity", ".2f"),
    column("injected", ".2f", "evaluated once"), column("explicit", ".2f", "explicit twin"),
    column("iterations", ".2f"),
)  # fmt: skip


def demo(texts: Sequence[str] | None, output: Path, steps: int | None = None) -> None:
    """Prepare data, train models in folder ``output``, and print comparisons, samples and evaluations."""
    start = time.perf_counter()
    if steps is not None and (steps < 5 or steps % 5):
        raise ValueError(f"steps must be a multiple of 5: the first stage takes 4/5 of them; got {steps}")
    changes = {} if steps is None else {"steps": steps, "eval_steps": steps // 5}
    output.mkdir(parents=True, exist_ok=True)
    texts = texts or [str(help_pages(output / "help.txt"))]
    tokenizer = train_tokenizer(texts, output / "tokenizer.json")
    data = output / "data"
    _run("prepare", *texts, "--output", data, "--tokenizer", tokenizer, "--validation-share", "0.05")
    runs, lines = [], []
    for name in MODELS:
        logs = []
        for form in ("", "-injected", "-explicit"):
            run = f"{name}-tiny{form}"
            settings = load_run(run, {"data": str(data), **changes})
            print(f"\n{run}, {settings.total_steps} steps of {settings.batch_tokens} tokens: {output / run}")
            pretrain(settings, output / run)
            log = read_record(output / run)["log"]
            logs.append({e["step"]: e for e in log if "eval_loss" in e})
            runs.append((run.replace("-tiny", ""), log, settings))
        for title, step in zip(("bounded", "free"), runs[-3][2].stage_ends, strict=True):
            mine, injected, twin = (scores[step] for scores in logs)
            lines.append(SimpleNamespace(
                model=name, stage=title, tokens=step * settings.batch_tokens,
                perplexity=mine["eval_perplexity"], injected=injected["eval_perplexity"],
                explicit=twin["eval_perplexity"], iterations=mine["eval_iterations"],
            ))  # fmt: skip
    print(f"\nheld-out perplexity in rows of {settings.length} tokens\n{table(_COLUMNS, lines)}\n")
    plot_curves(runs, output / "curves.png")
    folder = TokenFolder(data)
    rows = folder.rows("validation", settings.length)
    decode = folder.tokenizer().decode
    held_out = output / "held-out.txt"
    held_out.write_text(decode([int(t) for i in range(len(rows)) for t in rows[i]["input_ids"]]))
    prompt = decode(rows[0]["input_ids"][:_PROMPT_TOKENS])
    for name in MODELS:
        model = output / f"{name}-tiny" / "model"
        print(f"\n{name}, a sample:")
        _run("generate", model, prompt, "--temperature", "0.8", "--max-new-tokens", "100")
        print(f"\n{name}, deqseq.tasks.evaluate perplexity:")
        report = ["--text", held_out, "--length", settings.length, "--output", model.parent / "report"]
        _run("evaluate", "perplexity", model, *report, "--force")
    seconds = time.perf_counter() - start
    print(f"\nwrote {output / 'curves.png'} and the models' folders; {seconds:.0f} s in all")


def _run(task: str, *arguments: Any) -> None:
    """Run ``python -m deqseq.tasks.TASK`` with these arguments."""
    sys.stdout.flush()
    command = [sys.executable, "-m", f"deqseq.tasks.{task}", *map(str, arguments)]
    if subprocess.run(command).returncode:
        raise ValueError(f"the command deqseq.tasks.{task} failed, see above")


def help_pages(path: Path) -> Path:
    """Write Python's help pages, 0.7 MB of English, to ``path``; returns ``path``."""
    path.write_text("\n".join(text for _, text in sorted(topics.items())))
    return path


def train_tokenizer(texts: Sequence[str], path: Path) -> Path:
    """Train a byte-level tokenizer of 1024 tokens on the texts and save it. An existing file is kept."""
    if path.exists():
        return path
    try:
        made = train_bpe(_lines(texts), 1024)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"no tokenizer can be trained on {', '.join(texts)}: {error}") from error
    made.save(str(path))
    return path


def _lines(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        with open(text, encoding="utf-8", newline="\n") as file:
            yield from file
