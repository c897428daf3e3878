"""Run files: YAML with the fields of :class:`RunSettings`.

If a file has ``base: NAME``, the run file NAME sets the fields that are missing in the file. NAME may also be
the path of a YAML file, relative to the file that names it. The command line changes any field by its dotted
name: ``--learning_rate 1e-3 --stages.0.until 0.7``.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

from deqseq.tasks.common.settings import Tree, build_changed, read_yaml, unknown_field
from deqseq.tasks.pretraining.settings import RunSettings, merged, model_options

RUNS = Path(__file__).parent / "runs"
_FORMS = ("explicit", "injected", "growth")


def _fixed(iterations: int) -> Tree:
    return {"name": "fixed", "iterations": iterations}


_PHANTOM = {"name": "phantom", "steps": 1, "damping": 0.8}
_GROWTH: list[Tree] = [
    # One evaluation of f at z = 0, as in the injected form. A damped solver would not return f(0) itself.
    {
        "until": 0.6, "gradient": {"name": "unrolled", "iterations": 1}, "solver": "picard",
        "convergence": _fixed(1), "eval_convergence": _fixed(1),
    },
    {"until": 0.7, "gradient": _PHANTOM, "convergence": _fixed(1), "eval_convergence": _fixed(2)},
    {"until": 0.8, "gradient": _PHANTOM, "convergence": _fixed(2), "eval_convergence": _fixed(3)},
]  # fmt: skip
"""The stages of the form *growth*, without the last. Evaluations (search + gradient): 0+1, 1+1 and 2+1."""


def load_run(source: str, changes: Mapping[str, Any] | None = None) -> RunSettings:
    """Load the settings of a run file. ``source``: its path, or the name of a run file in this package.

    Each run file NAME of this package has three forms:

    - ``NAME-explicit`` sets ``explicit: true``.
    - ``NAME-injected`` sets ``explicit: true``, and ``injection: true`` in the model's backbone.
    - ``NAME-growth`` replaces all stages except the last. Training begins with one evaluation of f. The next
      two stages add iterations.

    ``changes`` maps dotted field names to new values. Wrong names and values raise ``ValueError``.
    """
    changes = dict(changes or {})
    tree = _steps_or_tokens(_read(source), changes)
    if any(name.startswith("model.") for name in changes):
        tree["model"] = model_options(changes.pop("model", tree.get("model", {})))
    return build_changed(RunSettings, tree, changes)


def shipped() -> list[str]:
    """Names of the run files in this package."""
    return sorted(path.stem for path in RUNS.glob("*.yaml"))


def _read(source: str, above: tuple[str, ...] = ()) -> Tree:
    """The fields of a run file and of all its bases. ``above``: the run files that are based on it."""
    if any(_same(source, other) for other in above):
        raise ValueError(f"run files must not be their own base: {' -> '.join((*above, source))}")
    name, _, form = source.rpartition("-")
    if form not in _FORMS or name not in shipped():
        name, form = source, ""
    tree = read_yaml(name, RUNS)
    known = ["base", *(field.name for field in fields(RunSettings))]
    for field in tree:
        if field not in known:
            raise ValueError(f"the run file {source}: {unknown_field(str(field), known)}")
    if base := tree.pop("base", None):
        try:
            under = _steps_or_tokens(_read(_beside(name, str(base)), (*above, source)), tree)
        except ValueError as error:
            raise ValueError(f"the base of {source}: {error}") from error
        if isinstance(tree.get("model"), dict) and "preset" not in tree["model"] and "model" in under:
            tree["model"] = merged(model_options(under["model"]), tree["model"])
        tree = {**under, **tree}
    if form in ("explicit", "injected"):
        tree["explicit"] = True
    if form == "injected":
        model = tree["model"]
        model = {"preset": model} if isinstance(model, str) else model
        tree["model"] = merged(model, {"backbone": {"injection": True}})
    if form == "growth":
        tree["stages"] = [*deepcopy(_GROWTH), tree["stages"][-1]]
    return tree


def _beside(source: str, base: str) -> str:
    """The base that the run file ``source`` names: a name, or a path relative to ``source``."""
    return str(Path(source).parent / base) if _is_path(base) else base


def _same(one: str, other: str) -> bool:
    """Whether two run files are the same."""
    return one == other or (
        _is_path(one) and _is_path(other) and Path(one).resolve() == Path(other).resolve()
    )


def _is_path(source: str) -> bool:
    return Path(source).suffix in (".yaml", ".yml")


def _steps_or_tokens(tree: Tree, changes: Mapping[str, Any]) -> Tree:
    """Drop ``steps`` from ``tree`` if ``changes`` sets ``tokens``. Drop ``tokens`` if it sets ``steps``."""
    gone = [a for a, b in (("steps", "tokens"), ("tokens", "steps")) if changes.get(b) is not None]
    return {name: value for name, value in tree.items() if name not in gone}
