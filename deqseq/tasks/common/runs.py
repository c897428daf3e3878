"""The folder of one training run, with its settings, checkpoints, and in the end the model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from deqseq.tasks.common.settings import flat


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
