"""The folder of one training run: settings, checkpoints, and in the end the model. Run files."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from inspect import get_annotations
from pathlib import Path
from typing import Any

import yaml

from deqseq.tasks.common.files import PART, write_json

logger = logging.getLogger(__name__)

_SETTINGS = "settings.json"
_RECORD = "training.json"
_SEAL = "complete.json"


class RunFolder:
    """The folder of one run, with its settings in ``settings.json``. Nothing is written before :meth:`start`.

    Args:
        path: the folder.
        settings: plain data, nested as needed.
        may_change: names of settings that may differ when a run is resumed; the folder then keeps the new
            values.

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
        if (self.path / _SETTINGS).exists():
            self._check_same(may_change)
        elif self.path.exists() and any(not file.name.endswith(PART) for file in self.path.iterdir()):
            raise ValueError(
                f"{self.path} is not empty and holds no run (no {_SETTINGS}): choose another folder"
            )

    def start(self) -> None:
        """Make the folder and write the settings."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / _SETTINGS
        if not file.exists() or _read_json(file) != self._settings:
            write_json(file, self._settings)

    @property
    def finished(self) -> bool:
        """Whether the trained model has been saved."""
        return (self.path / _RECORD).exists()

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write how training went. This file says that the run is finished, so it must be written last."""
        write_json(self.path / _RECORD, record)

    def last_checkpoint(self) -> str | None:
        """The newest checkpoint that was written to its end; ``None`` if there is none.

        A run that is killed while it writes a checkpoint leaves a folder without a seal.
        """
        found = [path for path in self.path.glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
        for path in sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True):
            if is_whole(path):
                return str(path)
            logger.warning("%s was not written to its end: going back to the checkpoint before it", path)
        return None

    def _check_same(self, may_change: Collection[str]) -> None:
        there, here = dict(flat(read_settings(self.path))), dict(flat(self._settings))
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


def seal(checkpoint: Path) -> None:
    """Mark a checkpoint as whole: sync all its files, then list them with their sizes."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != _SEAL)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    write_json(checkpoint / _SEAL, {str(path.relative_to(checkpoint)): path.stat().st_size for path in files})


def unseal(checkpoint: Path) -> None:
    """Mark a checkpoint as not whole, before it is written again."""
    (checkpoint / _SEAL).unlink(missing_ok=True)


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was sealed, and all its files still have the sizes that they had then."""
    try:
        sizes = json.loads((checkpoint / _SEAL).read_text())
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings of the run in folder ``path``.

    Raises:
        ValueError: no run there, or a settings file that cannot be read.
    """
    file = Path(path) / _SETTINGS
    if not file.exists():
        raise ValueError(f"{path} holds no run: {file} does not exist")
    return _read_json(file)


def read_record(path: str | Path) -> dict[str, Any]:
    """The record of the finished run in folder ``path``: seconds, parameters, the ``log`` and so on.

    Raises:
        ValueError: no finished run there, or a record that cannot be read.
    """
    file = Path(path) / _RECORD
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
