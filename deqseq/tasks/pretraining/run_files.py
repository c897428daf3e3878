"""Run files, and the fields of a run that the command line changes.

A run file is YAML with the fields of :class:`RunSettings`; ``base: NAME`` takes over those of another that it
does not give itself. Any field, however deep, can be changed by its dotted name:
``--learning_rate 1e-3 --stages.0.until 0.7``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from deqseq.causal_lm import ImplicitConfig
from deqseq.tasks.common.runs import Loader, flat, read_yaml
from deqseq.tasks.pretraining.settings import (
    RunSettings,
    Tree,
    check_known,
    merged,
    model_options,
    unknown,
)

RUNS = Path(__file__).parent / "runs"


def load_run(source: str, overrides: Sequence[tuple[str, str]] = ()) -> RunSettings:
    """The settings of a run file, or of one of ours by its name, with fields changed by dotted names.

    ``NAME-explicit`` is the explicit twin of ``NAME``.

    Raises:
        ValueError: no such file or name, unknown fields, values out of range.
    """
    tree = _read(source)
    known = [f.name for f in fields(RunSettings)]
    for name in tree:
        check_known(name, known, "")
    for name, text in overrides:
        _override(tree, name, text, known)
    for f in fields(RunSettings):
        value = tree.get(f.name)
        if f.default is MISSING and value is None:
            raise ValueError(f"{source} has no {f.name}: {f.metadata['help']}")
        if isinstance(value, float) and value.is_integer() and str(f.type).startswith("int"):
            tree[f.name] = int(value)  # 207e9 tokens
    return RunSettings(**tree)


def describe_fields() -> str:
    """The fields of a run, their defaults and what they are, a line each."""
    lines = []
    for f in fields(RunSettings):
        default = "" if f.default is MISSING else f" (default: {f.default})"
        lines.append(f"  {f.name}: {f.metadata['help']}{default}")
    return "\n".join(lines)


_EITHER = (("tokens", "steps"), ("steps", "tokens"))
"""Of two ways to say the same the last one counts."""


def shipped() -> list[str]:
    """Names of the run files that come along."""
    return sorted(path.stem for path in RUNS.glob("*.yaml"))


def _read(source: str, above: tuple[str, ...] = ()) -> Tree:
    """A run file with its bases below it; ``above``: the files whose base it is."""
    if source in above:
        raise ValueError(f"run files must not be their own base: {' -> '.join((*above, source))}")
    name, explicit = source.removesuffix("-explicit"), source.endswith("-explicit")
    tree = read_yaml(name if name in shipped() else source, RUNS)
    if base := tree.pop("base", None):
        under = _read(str(base), (*above, source))
        for one, other in _EITHER:
            if tree.get(one) is not None:
                under.pop(other, None)
        if isinstance(tree.get("model"), dict) and "preset" not in tree["model"] and "model" in under:
            tree["model"] = merged(model_options(under["model"]), tree["model"])
        tree = {**under, **tree}
    if explicit and name in shipped():
        tree["explicit"] = True
    return tree


def _override(tree: Tree, name: str, text: str, known: Sequence[str]) -> None:
    """Set the field of a dotted name, in place; the text is YAML."""
    first, *rest = name.split(".")
    check_known(first, [*known, *(leaf for leaf, _ in flat(_expanded(tree)))], "", shown=name)
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"the value of {name} is no YAML: {text!r}") from error
    if not rest:
        tree[first] = value
        for one, other in _EITHER:
            if first == one and value is not None:
                tree.pop(other, None)
        return
    if first == "model":
        tree["model"] = model_options(tree["model"])
    place: Any = tree.get(first)
    *parents, last = rest
    for key in parents:
        place = _item(place, key, name, tree)
    if isinstance(place, list):
        place[_index(place, last, name)] = value
    elif isinstance(place, dict):
        leaves = [leaf for leaf, _ in flat(_expanded(tree))]
        if first == "model" and not parents:
            check_known(last, list(ImplicitConfig.__annotations__), "model.", also=leaves)
        place[last] = value
    else:
        raise ValueError(f"unknown field {name}: {name.rpartition('.')[0]} is {place!r}, which has no fields")


def _item(place: Any, key: str, name: str, tree: Tree) -> Any:
    if isinstance(place, list):
        return place[_index(place, key, name)]
    if isinstance(place, dict) and key in place:
        return place[key]
    raise ValueError(unknown(name, [leaf for leaf, _ in flat(_expanded(tree))]))


def _index(place: list[Any], key: str, name: str) -> int:
    if not key.isdigit() or int(key) >= len(place):
        raise ValueError(f"{name}: the list has entries 0 to {len(place) - 1}, got {key!r}")
    return int(key)


def _expanded(tree: Tree) -> Tree:
    return {**tree, "model": model_options(tree["model"])} if tree.get("model") else tree
