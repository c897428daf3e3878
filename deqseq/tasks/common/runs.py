"""The folder of one training run: its settings, its checkpoints and, at the end, the model."""

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deqseq.tasks.common.files import PART, locked, nearest_folder, write_json
from deqseq.tasks.common.seals import SEAL, checkpoints, fault, seal, unseal
from deqseq.tasks.common.settings import differences

logger = logging.getLogger(__name__)

_SETTINGS = "settings.json"
_RECORD = "training.json"
_SETTINGS_OF_CHECKPOINT = "run_settings.json"
_FOLDERS = re.compile(r"model|stage-\d+|checkpoint-\d+")  # names of folders that training makes


class RunFolder:
    """The folder of one run, with its settings in ``settings.json``. Nothing is written before :meth:`start`.

    A run that has saved nothing of use (see :func:`has_saved`) may be replaced by a run with other settings.

    Args:
        settings: settings of the run as JSON types; may be nested.
        may_change: names of settings that may differ when a run is resumed. The new values then replace the
            old ones in ``settings.json``.
        defaults: default values of settings. If a run of an older version has not recorded a setting, its
            default counts. So the default of a new setting must be what the program did before.

    Raises:
        ValueError: ``path`` holds a run with other settings, or something that is not a run.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], may_change: Collection[str] = (),
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self._settings = json.loads(json.dumps(settings))
        self._may_change = may_change
        self._defaults = json.loads(json.dumps(dict(defaults)))
        self._check()

    def _check(self) -> None:
        nearest_folder(self.path)
        for entry in self.path.glob("*"):
            if _FOLDERS.fullmatch(entry.name) and not entry.is_dir():
                raise ValueError(f"{entry} is a file, and training writes a folder of this name: remove it")
            if entry.name in (_SETTINGS, _RECORD, SEAL) and entry.is_dir():
                raise ValueError(f"{entry} is a folder, and training writes a file of this name: remove it")
        self._is_old = (self.path / _SETTINGS).exists()
        self._has_saved = has_saved(self.path)
        if self._is_old and not self._has_saved:  # settings without a common name are another program's
            self._has_saved = not self._settings.keys() & read_json(self.path / _SETTINGS).keys()
        if self._is_old and self._has_saved:
            self._check_same(
                self.path / _SETTINGS, "choose another folder, or repeat its settings to resume it"
            )
        elif (
            not self._is_old
            and self.path.exists()
            and any(not file.name.endswith(PART) for file in self.path.iterdir())
        ):
            raise ValueError(
                f"{self.path} is not empty and holds no run (no {_SETTINGS}): choose another folder"
            )

    def start(self) -> None:
        """Make the folder and write the settings. In an old folder, change only settings that may change."""
        self.path.mkdir(parents=True, exist_ok=True)
        recorded = read_json(self.path / _SETTINGS) if self._is_old and self._has_saved else self._settings
        changed = {name: value for name, value in self._settings.items() if name in self._may_change}
        write_json(self.path / _SETTINGS, {**recorded, **changed})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for training.

        Raises:
            ValueError: another process trains in the folder, or has begun another run there.
        """
        with locked(self.path, "trains in"):
            self._check()  # check again: another process may have begun a run before we had the lock
            yield

    def finished(self) -> bool:
        """Whether the trained model exists and is undamaged. A warning says what is damaged.

        Raises:
            ValueError: the model is damaged, and there is no undamaged checkpoint to resume from.
        """
        if not (self.path / _RECORD).is_file():
            return False
        wrong = _fault_of_finished(self.path)
        if wrong is None:
            return True
        if self.last_checkpoint() is None:
            raise ValueError(
                f"the finished run in {self.path} {wrong}, and no checkpoint is whole: remove the folder to "
                "train again, or name another one"
            )
        logger.warning("the finished run in %s %s: its end is repeated", self.path, wrong)
        return False

    def finish(self, record: Mapping[str, Any], files: Iterable[Path]) -> None:
        """Write the record of training, then the seal: a file with the checksums of the run's files.

        ``files``: the files of the trained model.
        """
        # "sealed" says that the run must have a seal. Runs of versions 0.1 and 0.2 have no seal.
        write_json(self.path / _RECORD, {**record, "sealed": True})
        seal(self.path, [self.path / _SETTINGS, self.path / _RECORD, *files])

    def last_checkpoint(self) -> Path | None:
        """The newest complete, undamaged checkpoint; ``None`` if there is none.

        Checkpoints that are newer than the returned checkpoint are incomplete or damaged. This method logs a
        warning for each of them and removes its seal.

        Raises:
            ValueError: the checkpoint belongs to a run with other settings.
            OSError: a checkpoint cannot be read.
        """
        found = checkpoints(self.path)
        for path in reversed(found):
            wrong = fault(path)
            if wrong is None:
                if (path / _SETTINGS_OF_CHECKPOINT).exists():  # checkpoints of version 0.2 have no settings
                    self._check_same(path / _SETTINGS_OF_CHECKPOINT, f"remove {path.name}")
                return path
            logger.warning("%s %s: going back to the checkpoint before it", path, wrong)
            unseal(path)
        if found or self._is_old:
            logger.warning("%s has no whole checkpoint: training starts from step 0", self.path)
        return None

    def _check_same(self, file: Path, advice: str) -> None:
        recorded = read_json(file)
        missing = {name: value for name, value in self._defaults.items() if name not in recorded}
        different = [
            f"{name}: {there} there, {here} asked for"
            for name, there, here in differences({**recorded, **missing}, self._settings)
            if name.partition(".")[0] not in self._may_change
        ]
        if different:
            raise ValueError(
                f"{file.parent} holds a run with other settings ({'; '.join(different)}): {advice}"
            )


def has_saved(run: Path) -> bool:
    """Whether a run has saved more than its settings and checkpoints that were not written to their end.

    Otherwise the run has nothing to lose or to resume. One example is a run that diverged early. Another is a
    run that was killed while it wrote its first checkpoint.
    """
    incomplete = [path for path in checkpoints(run) if not (path / SEAL).exists()]
    return any(
        path.name != _SETTINGS and not path.name.endswith(PART) and path not in incomplete
        for path in run.glob("*")
    )


def copy_settings(checkpoint: Path) -> None:
    """Copy the settings of a run, if it has any, into one of its checkpoints."""
    if (checkpoint.parent / _SETTINGS).exists():
        shutil.copyfile(checkpoint.parent / _SETTINGS, checkpoint / _SETTINGS_OF_CHECKPOINT)


def model_folder(path: str | Path) -> Path:
    """The folder with the model: ``path``, or the folder ``model`` in it if ``path`` is a pretraining run."""
    path = Path(path)
    inside = path / "model"
    is_run = not (path / "config.json").is_file() and (inside / "config.json").is_file()
    return inside if is_run else path


def names_of(folders: Sequence[str | Path]) -> list[str]:
    """A name for every folder: the last part of its path, or as many last parts as make the names differ.

    Raises:
        ValueError: a folder is given twice.
    """
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ValueError(f"{folders[number]} is given twice")
    ends = ([str(Path(*path.parts[-count:])) for path in paths] for count in itertools.count(1))
    return next(names for names in ends if len(set(names)) == len(names))


def check_model(path: str | Path) -> None:
    """Raise ``ValueError`` if a model is incomplete or damaged.

    A model that has no seal and is not part of a run is accepted without a check.

    Args:
        path: the folder of the model: a finished run; a checkpoint, a stage or the final model in a run; or
            any other folder with a model.
    """
    place = Path(os.path.abspath(path))
    inside = _FOLDERS.fullmatch(place.name) and not (place / _SETTINGS).exists()
    run = place.parent if inside else place
    sealed = (place / SEAL).exists()
    if not sealed and not (run / _SETTINGS).exists():
        return
    if sealed or place in checkpoints(run) or not (run / _RECORD).exists():
        wrong = fault(place)
    else:  # check the whole run: the final model and the stages of version 0.2 have no seal of their own
        place, wrong = run, _fault_of_finished(run)
    if wrong:
        raise ValueError(f"{place} {wrong}: copy it again, or name another one")


def _fault_of_finished(run: Path) -> str | None:
    """What is wrong with a finished run, or ``None``. Runs of versions 0.1 and 0.2 have no seal and pass."""
    return fault(run) if (run / SEAL).exists() or read_record(run).get("sealed") else None


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings of the run in folder ``path``. Raises ``ValueError`` if they are missing or unreadable."""
    file = Path(path) / _SETTINGS
    if not file.exists():
        raise ValueError(f"{path} holds no run: {file} does not exist")
    return read_json(file)


def read_record(path: str | Path) -> dict[str, Any]:
    """The record of a finished run: seconds, parameters, ``log``. Raises ``ValueError`` if unreadable."""
    file = Path(path) / _RECORD
    if not file.is_file():
        raise ValueError(f"{path} holds no finished run: repeat its command to finish it")
    found = read_json(file)
    if not isinstance(found.get("log"), list):
        raise ValueError(f"{file} cannot be read: it has no log")
    return found


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds a mapping. Raises ``ValueError`` if it does not."""
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} cannot be read: it must be a mapping, got {found!r}")
    return found
