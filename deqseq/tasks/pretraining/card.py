"""The model card of a finished run: the model, its scores, curves and settings."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

import deqseq
from deqseq.tasks.common.figures import save_figure
from deqseq.tasks.common.results import column, table
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

Held-out perplexity per token after training, in rows of {length} tokens: **{perplexity:.2f}**.

{scores}

![Loss and iterations against tokens](curves.png)

## Settings

```yaml
{settings}
```
"""

_COLUMNS = (
    column("step", ","), column("tokens", ","), column("perplexity", ".2f"), column("iterations", ".3g"),
    column("residual", ".3g"),
)  # fmt: skip


def write_card(folder: Path, settings: RunSettings, record: Mapping[str, Any]) -> None:
    """Write ``README.md`` and ``curves.png`` into the folder of a model.

    ``record``: the content of ``training.json``. It has the ``log``, the number of ``parameters`` and the
    ``validation`` scores.
    """
    config = settings.config()
    plot_curves([(folder.parent.name, record["log"], settings)], folder / "curves.png")
    data = ModelCardData(library_name="transformers", tags=["deqseq", "text-generation"])
    card = _CARD.format(
        data=data.to_yaml(),
        name=folder.parent.name,
        place=folder,
        kind=config.form.capitalize(),
        backbone=config.backbone["name"],
        parameters=record["parameters"],
        version=deqseq.__version__,
        tokens=settings.total_steps * settings.batch_tokens,
        data_name=f" of `{settings.data}`" if isinstance(settings.data, str) else "",
        length=settings.length,
        perplexity=math.exp(record["validation"]["eval_loss"]),
        scores=table(_COLUMNS, list(scores(record["log"], settings).values())[-20:], "github"),
        settings=yaml.safe_dump(settings.to_dict(), sort_keys=False).strip(),
    )
    ModelCard(card).save(folder / "README.md")


def scores(log: Sequence[Mapping[str, Any]], settings: RunSettings) -> dict[int, SimpleNamespace]:
    """The scores of the evaluations during training, by step.

    If a step has two evaluations, takes the first. The second is the evaluation after training on all
    held-out rows. The log gives it the same step as the last evaluation during training, which was on
    ``eval_rows`` rows.
    """
    found: dict[int, SimpleNamespace] = {}
    for entry in log:
        if "eval_loss" in entry and entry["step"] not in found:
            found[entry["step"]] = SimpleNamespace(
                step=entry["step"], tokens=entry["step"] * settings.batch_tokens,
                perplexity=entry["eval_perplexity"], iterations=entry.get("eval_iterations"),
                residual=entry.get("eval_residual"),
            )  # fmt: skip
    return found


def plot_curves(runs: Sequence[tuple[str, Sequence[Mapping[str, Any]], RunSettings]], path: Path) -> bool:
    """Plot losses and iterations of runs against tokens and against time. Held-out losses are points.

    ``runs``: name, log and settings of every run. Returns whether matplotlib is installed.
    """

    def draw(axes: list[Any]) -> None:
        for color, (name, log, settings) in enumerate(runs):
            factors = {"step": settings.batch_tokens, "train_seconds": 1 / 60}
            for (unit, factor), above, below in zip(factors.items(), axes[:2], axes[2:], strict=True):
                for axis, key, style in (
                    (above, "loss", "-"), (above, "eval_loss", "o"), (below, "iterations", "-"),
                ):  # fmt: skip
                    found = [(factor * entry[unit], entry[key]) for entry in log if key in entry]
                    if found:
                        label = None if key == "eval_loss" else name
                        options = {"color": f"C{color}", "label": label, "alpha": 0.8, "markersize": 4}
                        axis.plot(*zip(*found, strict=True), style, **options)
        axes[0].set(ylabel="loss, nats (points: held out)")
        axes[2].set(ylabel="iterations per token", xlabel="tokens", ylim=(0, None))
        axes[3].set(xlabel="minutes of training")
        axes[0].legend()

    return save_figure(path, draw, 2, 2, size=(11, 6), sharex="col", sharey="row")
