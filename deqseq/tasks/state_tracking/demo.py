"""The state-tracking demo: compares an implicit Mamba2 with models that apply the same blocks once."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from deqseq.tasks.common.runs import read_record
from deqseq.tasks.state_tracking.evaluate import Evaluation, evaluate_fresh, save, table
from deqseq.tasks.state_tracking.plots import plot_by_position
from deqseq.tasks.state_tracking.settings import TrainSettings
from deqseq.tasks.state_tracking.train import train

FORMS: dict[str, dict[str, Any]] = {
    "implicit": {},
    "injected": {"explicit": True, "backbone": {"name": "mamba2", "injection": True}},
    "explicit": {"explicit": True},
}
"""The settings that distinguish the models."""


def demo(output: Path, seeds: Sequence[int]) -> None:
    """Train the models of ``FORMS`` on the group A5 with every seed, and compare them."""
    rows: list[tuple[str, Evaluation]] = []
    seconds = []
    for seed, name in product(seeds, FORMS):
        settings = TrainSettings(seed=seed, **FORMS[name])
        folder = output / f"{name}-seed{seed}"
        print(f"{name} Mamba2, {settings.group}, length {settings.length}, seed {seed}: {folder}")
        model = train(settings, folder)
        trained = read_record(folder)["seconds"]
        found = [
            evaluate_fresh(model, settings, factor * settings.length, 512, window=8, progress=True)
            for factor in (1, 4)
        ]
        tested = sum(e.seconds for e in found)
        seconds.append(f"{name} seed {seed}: {trained:.0f} s training, {tested:.0f} s tests")
        rows += [(f"{name} {seed}" if len(seeds) > 1 else name, e) for e in found]
    save(rows, output / "demo.json")
    longest = [(name, e) for name, e in rows if e.length > settings.length]
    chance = settings.algebra.chance
    print(f"\n{table(rows)}")
    plot_by_position(longest, output / "demo.png", chance, settings.length)
    print(f"chance is {chance:.4f}; {'; '.join(seconds)}")
    print(f"wrote {output / 'demo.json'} and {output / 'demo.png'}")
