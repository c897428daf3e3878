"""The folder of one training run: its settings, its checkpoints and, at the end, the model."""

import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from deqseq.tasks.common.files import PART, write_json
from deqseq.tasks.common.settings import flat

logger = logging.getLogger(__name__)

_SETTINGS = "settings.json"
_RECORD = "training.json"
_SEAL = "complete.json"


class RunFolder:
    """The folder of one run, with its settings in ``settings.json``. Nothing is written before :meth:`start`.

    Args:
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
        write_json(self.path / _SETTINGS, self._settings)

    @property
    def finished(self) -> bool:
        """Whether the trained model has been saved."""
        return (self.path / _RECORD).exists()

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write how training went. This file says that the run is finished, so it must be written last."""
        write_json(self.path / _RECORD, record)

    def last_checkpoint(self) -> str | None:
        """The newest checkpoint that was written to its end; ``None`` if there is none."""
        found = [path for path in self.path.glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
        for path in sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True):
            if _is_whole(path):
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


def _is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was sealed, and all its files still have the sizes that they had then."""
    try:
        sizes = json.loads((checkpoint / _SEAL).read_text())
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings of the run in folder ``path``; ``ValueError`` if there is none, or it cannot be read."""
    file = Path(path) / _SETTINGS
    if not file.exists():
        raise ValueError(f"{path} holds no run: {file} does not exist")
    return _read_json(file)


def read_record(path: str | Path) -> dict[str, Any]:
    """The record of a finished run: seconds, parameters, ``log``; ``ValueError`` if it cannot be read."""
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
