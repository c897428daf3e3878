"""The folder of one training run, with its settings, checkpoints, and in the end the model; run files."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from inspect import get_annotations
from pathlib import Path
from typing import Any

import yaml


class RunFolder:
    """The folder of one run; the settings are in ``settings.json``. Nothing is written before :meth:`start`.

    Args:
        path: the folder.
        settings: plain data, nested as it likes.
        may_change: names of settings that a run may go on with when they differ; the folder keeps the new
            ones.

    Raises:
        ValueError: the folder holds something else, or a run with other settings.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], may_change: Collection[str] = ()
    ) -> None:
        self.path = Path(path)
        self._settings = json.loads(json.dumps(settings))
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, not a folder")
        if self.file.exists():
            self._check_same(self._settings, may_change)
        elif self.path.exists() and any(self.path.iterdir()):
            raise ValueError(
                f"{self.path} is not empty and holds no run (no settings.json): choose another folder"
            )

    def start(self) -> None:
        """Make the folder and write the settings down."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._settings, indent=2) + "\n"
        if not self.file.exists() or self.file.read_text() != text:
            part = self.file.with_suffix(".part")
            part.write_text(text)
            part.replace(self.file)

    @property
    def file(self) -> Path:
        return self.path / "settings.json"

    @property
    def finished(self) -> bool:
        """Whether the trained model has been saved."""
        return (self.path / "training.json").exists()

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write down how training went; says that the run is finished, so it comes last."""
        part = self.path / "training.part"
        part.write_text(json.dumps(record, indent=2) + "\n")
        part.replace(self.path / "training.json")

    def _check_same(self, wanted: Mapping[str, Any], may_change: Collection[str]) -> None:
        there, here = dict(flat(read_settings(self.path))), dict(flat(wanted))
        different = [
            f"{name}: {there.get(name)} there, {here.get(name)} asked for"
            for name in {**there, **here}
            if there.get(name) != here.get(name) and name.partition(".")[0] not in may_change
        ]
        if different:
            raise ValueError(
                f"{self.path} holds a run with other settings ({'; '.join(different)}): "
                "choose another folder, or repeat its settings to resume it"
            )


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings of the run in folder ``path``.

    Raises:
        ValueError: no run there, or a settings file that cannot be read.
    """
    file = Path(path) / "settings.json"
    if not file.exists():
        raise ValueError(f"{path} holds no run: {file} does not exist")
    return _read_json(file)


def read_record(path: str | Path) -> dict[str, Any]:
    """How training went: what the run in folder ``path`` wrote down when it was finished, with its ``log``.

    Raises:
        ValueError: no finished run there, or a record that cannot be read.
    """
    file = Path(path) / "training.json"
    if not file.is_file():
        raise ValueError(f"{path} holds no finished run: repeat its command to finish it")
    found = _read_json(file)
    if not isinstance(found.get("log"), list):
        raise ValueError(f"{file} cannot be read: it has no log")
    return found


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} cannot be read: it must be a mapping, got {found!r}")
    return found


def flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings and lists, by dotted names: ``stages.0.until``."""
    if not isinstance(tree, (Mapping, list)) or not tree:
        yield name, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from flat(value, f"{name}.{key}" if name else str(key))


_KINDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a name"),
}


def check_seed(seed: int) -> None:
    """Raise ``ValueError`` unless numpy, whose range is the smallest, takes ``seed``."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")


def check_types(settings: Any) -> None:
    """Raise ``ValueError`` for fields of a dataclass that are not what their annotations say.

    Run files are text that people write: ``explicit: "false"`` would be true otherwise.
    """
    # As they are written: parsers of the command line replace the types of the fields.
    for name, annotation in get_annotations(type(settings)).items():
        kind, what = _KINDS.get(annotation.removesuffix(" | None"), (object, ""))
        value = getattr(settings, name)
        if value is None and annotation.endswith(" | None"):
            continue
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object))
        if wrong or (kind is not object and value != value):  # not a number
            raise ValueError(f"{name} must be {what}, got {value!r}")


class Loader(yaml.SafeLoader):
    """YAML in which 3e-3 is a number, as everywhere else."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(source: str, shipped: Path) -> dict[str, Any]:
    """A mapping in YAML: a file, or by its name one in the folder ``shipped``.

    Raises:
        ValueError: no such file or name, or no mapping.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        names = sorted(path.stem for path in shipped.glob("*.yaml"))
        if source not in names:
            raise ValueError(f"there is no {source!r}: name a YAML file, or one of {', '.join(names)}")
        path = shipped / f"{source}.yaml"
    try:
        tree = yaml.load(path.read_text(), Loader)
    except OSError as error:
        raise ValueError(f"the file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the file {path} is no YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"the file {path} must be a mapping of fields, got {tree!r}")
    return tree
