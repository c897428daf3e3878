"""The model card of a finished run: what it is, scores, curves, settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

import deqseq
from deqseq.tasks.common.figures import pyplot
from deqseq.tasks.pretraining.settings import RunSettings

_CARD = """\
---
{data}
---

# {name}

{kind} language model ({backbone}, {parameters:,} parameters), pretrained with
[deqseq](https://arxiv.org/abs/2502.07827) {version} on {tokens:,} tokens{data_name}.

```python
import deqseq.causal_lm
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
```

## Scores

Held-out perplexity of a token, in rows of {length} tokens: **{perplexity:.2f}** at the end.

{table}

![Loss and iterations against tokens](curves.png)

## Settings

```yaml
{settings}
```
"""


def write_card(folder: Path, settings: RunSettings, record: Mapping[str, Any]) -> None:
    """Write ``README.md`` and ``curves.png`` into the model's folder.

    Args:
        folder: of the model.
        settings: of the run.
        record: ``log``, ``parameters`` and ``validation`` of the run.
    """
    config = settings.config()
    plot_curves([(folder.parent.name, record["log"], settings)], folder / "curves.png")
    data = ModelCardData(library_name="transformers", tags=["deqseq", "text-generation"])
    card = _CARD.format(
        data=data.to_yaml(),
        name=folder.parent.name,
        place=folder,
        kind="Implicit" if config.implicit else "Explicit",
        backbone=config.backbone["name"],
        parameters=record["parameters"],
        version=deqseq.__version__,
        tokens=settings.total_steps * settings.batch_tokens,
        data_name=f" of `{settings.data}`" if isinstance(settings.data, str) else "",
        length=settings.length,
        perplexity=math.exp(record["validation"]["eval_loss"]),
        table=_table(record["log"], settings),
        settings=yaml.safe_dump(settings.to_dict(), sort_keys=False).strip(),
    )
    ModelCard(card).save(folder / "README.md")


def _table(log: Sequence[Mapping[str, Any]], settings: RunSettings) -> str:
    """Evaluations during training, as Markdown: the last twenty."""
    lines = ["| step | tokens | perplexity | iterations | residual |", "|---|---|---|---|---|"]
    scores: dict[float, Mapping[str, Any]] = {}
    for entry in log:
        if "eval_loss" in entry:
            scores.setdefault(entry["step"], entry)  # the last step's second one is of all that is held out
    for entry in list(scores.values())[-20:]:
        tokens = entry["step"] * settings.batch_tokens
        solved = [f"{entry[k]:.3g}" if k in entry else "-" for k in ("eval_iterations", "eval_residual")]
        lines.append(
            f"| {entry['step']:,} | {tokens:,} | {entry['eval_perplexity']:.2f} | {' | '.join(solved)} |"
        )
    return "\n".join(lines)


def plot_curves(runs: Sequence[tuple[str, Sequence[Mapping[str, Any]], RunSettings]], path: Path) -> bool:
    """Draw losses and iterations of runs against tokens and against time; the held-out loss as points.

    Args:
        runs: name, log and settings of each.
        path: the PNG to write.

    Returns:
        Whether it was drawn.
    """
    plt = pyplot()
    if plt is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(2, 2, figsize=(11, 6), sharex="col", sharey="row", layout="constrained")
    for color, (name, log, settings) in enumerate(runs):
        places = (
            lambda entry: entry["step"] * settings.batch_tokens,  # noqa: B023
            lambda entry: entry["train_seconds"] / 60,
        )
        for column, place in enumerate(places):
            for row, key, style in ((0, "loss", "-"), (0, "eval_loss", "o"), (1, "iterations", "-")):
                found = [(place(entry), entry[key]) for entry in log if key in entry]
                if found:
                    label = None if key == "eval_loss" else name
                    options = {"color": f"C{color}", "label": label, "alpha": 0.8, "markersize": 4}
                    axes[row, column].plot(*zip(*found, strict=True), style, **options)
    axes[0, 0].set(ylabel="loss, nats (points: held out)")
    axes[1, 0].set(ylabel="iterations of a token", xlabel="tokens", ylim=(0, None))
    axes[1, 1].set(xlabel="minutes of training")
    axes[0, 0].legend(fontsize="small")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
