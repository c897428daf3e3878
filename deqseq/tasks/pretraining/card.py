"""The model card of a finished run: the model, its scores, curves and settings."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

import deqseq
from deqseq.tasks.common.figures import save_figure
from deqseq.tasks.common.results import Column, table
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

{scores}

![Loss and iterations against tokens](curves.png)

## Settings

```yaml
{settings}
```
"""


def write_card(folder: Path, settings: RunSettings, record: Mapping[str, Any]) -> None:
    """Write ``README.md`` and ``curves.png`` into the folder of a model.

    ``record`` has ``log``, ``parameters`` and ``validation`` of the run.
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
        scores=_table(record["log"], settings),
        settings=yaml.safe_dump(settings.to_dict(), sort_keys=False).strip(),
    )
    ModelCard(card).save(folder / "README.md")


def _table(log: Sequence[Mapping[str, Any]], settings: RunSettings) -> str:
    """The last twenty evaluations during training, as Markdown."""
    scores: dict[float, Mapping[str, Any]] = {}
    for entry in log:
        if "eval_loss" in entry:  # the last step also has an evaluation on all held-out rows; keep the first
            scores.setdefault(entry["step"], entry)

    def solved(name: str) -> Column:
        return name, lambda entry: f"{entry[f'eval_{name}']:.3g}" if f"eval_{name}" in entry else "-"

    columns: list[Column] = [
        ("step", lambda entry: f"{entry['step']:,}"),
        ("tokens", lambda entry: f"{entry['step'] * settings.batch_tokens:,}"),
        ("perplexity", lambda entry: f"{entry['eval_perplexity']:.2f}"),
        *map(solved, ("iterations", "residual")),
    ]
    return table(columns, list(scores.values())[-20:], "github")


def plot_curves(runs: Sequence[tuple[str, Sequence[Mapping[str, Any]], RunSettings]], path: Path) -> bool:
    """Draw losses and iterations of runs against tokens and against time; the held-out loss as points.

    ``runs`` has name, log and settings of each. Returns whether matplotlib is installed.
    """

    def draw(axes: list[Any]) -> None:
        by_row = axes[:2], axes[2:]
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
                        by_row[row][column].plot(*zip(*found, strict=True), style, **options)
        axes[0].set(ylabel="loss, nats (points: held out)")
        axes[2].set(ylabel="iterations of a token", xlabel="tokens", ylim=(0, None))
        axes[3].set(xlabel="minutes of training")
        axes[0].legend()

    return save_figure(path, draw, 2, 2, size=(11, 6), sharex="col", sharey="row")
