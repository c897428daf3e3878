"""Counts the kept and the dropped files of a corpus from folders, and their bytes."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deqseq.tasks.common.results import column, table

_SHOWN = 15  # rows of the table of folders


@dataclass
class Amount:
    """A number of files, and their bytes."""

    files: int = 0
    bytes: int = 0

    def add(self, bytes: int, files: int = 1) -> None:
        self.files += files
        self.bytes += bytes


class Contents:
    """Counts the files of a corpus.

    Args:
        folders: the folders that are searched.

    Attributes:
        kept: the amount of kept files for every top folder. The top folders are those directly below
            ``folders``. A file directly in one of ``folders`` counts for this folder itself.
        dropped: the amount of dropped files for every reason.
        skipped_folders: the number of folders that were not searched, by reason.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        names = [Path(folder).resolve().name for folder in folders]
        self._titles = dict(zip(folders, names if len({*names}) == len(names) else folders, strict=True))
        self.kept: dict[str, Amount] = {}
        self.dropped: dict[str, Amount] = {}
        self.skipped_folders: Counter[str] = Counter()

    def keep(self, folder: str, name: str, size: int) -> None:
        """Count a kept file. ``name``: its path relative to ``folder``; ``size``: in bytes."""
        top, inner, _ = os.fsencode(name).decode(errors="replace").partition(os.sep)
        parts = [self._titles[folder]] * (len(self._titles) > 1) + [top] * bool(inner)
        self.kept.setdefault("/".join(parts) or ".", Amount()).add(size)

    def drop(self, reason: str, size: int) -> None:
        """Count a dropped file of ``size`` bytes."""
        self.dropped.setdefault(reason, Amount()).add(size)

    def skip_folder(self, reason: str) -> None:
        """Count a folder that is not searched."""
        self.skipped_folders[reason] += 1

    def plain(self) -> dict[str, Any]:
        """The numbers as JSON types. ``found`` is the sum of ``kept`` and ``dropped``."""
        kept, dropped = _total(self.kept), _total(self.dropped)
        return {
            "found": vars(Amount(kept.files + dropped.files, kept.bytes + dropped.bytes)),
            "kept": vars(kept),
            "folders": {name: vars(self.kept[name]) for name in sorted(self.kept)},
            "dropped": {reason: vars(self.dropped[reason]) for reason in sorted(self.dropped)},
            "skipped_folders": dict(sorted(self.skipped_folders.items())),
        }

    def mostly_dropped(self) -> bool:
        """Whether the dropped files have more bytes than the kept files."""
        return _total(self.dropped).bytes > _total(self.kept).bytes

    def tables(self) -> str:
        """Two text tables: the folders with the most kept bytes, and the reasons why files were dropped."""
        whole = _total(self.kept)
        largest = sorted(self.kept.items(), key=lambda pair: -pair[1].bytes)
        rows, rest = largest[:_SHOWN], largest[_SHOWN:]
        if rest:
            rows.append((f"{len(rest)} others", _total(dict(rest))))
        rows.append(("together", whole))
        share = column("share", ".1%")
        said = [table((*_columns("folder"), share), [_row(*row, whole.bytes) for row in rows])]
        if self.dropped:
            reasons = sorted(self.dropped.items(), key=lambda pair: -pair[1].files)
            said.append(table(_columns("dropped because"), [_row(*row) for row in reasons]))
        if self.skipped_folders:
            each = (f"{reason}: {count:,}" for reason, count in self.skipped_folders.most_common())
            said.append(f"folders that were not searched: {', '.join(each)}")
        return "\n\n".join(said)


def _total(amounts: Mapping[str, Amount]) -> Amount:
    found = Amount()
    for amount in amounts.values():
        found.add(amount.bytes, amount.files)
    return found


def _columns(title: str) -> tuple[Any, ...]:
    return column("name", title=title), column("files", ","), column("megabytes", ",.1f", "MB")


def _row(name: str, amount: Amount, whole: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, files=amount.files, megabytes=amount.bytes / 1e6, share=amount.bytes / max(whole, 1)
    )
