"""Prepares token shards on several machines: each machine prepares one part, then the parts are merged.

A part is a range of consecutive documents. All parts together have the same tokens as one preparation
without parts. Merging makes one folder with the tokenizer and hard links to the shards of all parts.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deqseq.tasks.common.corpus.documents import DatasetRows
from deqseq.tasks.common.corpus.holdout import SPLITS
from deqseq.tasks.common.corpus.rows import TokenFolder
from deqseq.tasks.common.corpus.shards import TOKENIZER, Manifest, Place, Preparation, flat_head, shard_name
from deqseq.tasks.common.corpus.sources import Source
from deqseq.tasks.common.files import locked
from deqseq.tasks.common.results import changes

logger = logging.getLogger(__name__)

WHOLE = (1, 1)


def parse_part(text: str) -> tuple[int, int]:
    """Read ``"K/N"``, which means part K of N parts, as ``(K, N)``.

    Raises:
        ValueError: ``text`` has another form, or K is not in the range from 1 to N.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"a part must be K/N with 1 <= K <= N, such as 2/8, got {text!r}")
    return int(number), int(count)


def divide(sources: Sequence[Source], part: tuple[int, int]) -> tuple[Sequence[Source], Place, Place]:
    """The sources of a part, the place where this part begins, and the place where the next part begins.

    A dataset is divided by its files. If it has fewer files than parts, it is divided by the row groups of
    its parquet files. Text files are divided into parts with about equal numbers of bytes. They are cut only
    where a document ends. Compressed files are not cut.
    """
    number, count = part
    if part != WHOLE and len(sources) == 1 and isinstance(sources[0], DatasetRows):
        return [sources[0].part(number, count)], Place(), Place(1)
    return sources, _border(sources, number - 1, count), _border(sources, number, count)


def _border(sources: Sequence[Source], number: int, count: int) -> Place:
    """The place where part ``number + 1`` begins, after about ``number / count`` of all bytes."""
    if number == 0:
        return Place()
    if number == count:
        return Place(len(sources))
    at = sum(source.stored for source in sources) * number // count
    for index, source in enumerate(sources):
        if at < source.stored:
            offset = source.cut(at)
            return Place(index + 1) if offset is None else Place(index, offset)
        at -= source.stored
    return Place(len(sources))


def merge(output: Path, parts: Sequence[str | Path], force: bool = False) -> None:
    """Link the shards of all parts, in order, into ``output``. An interrupted merge can be repeated.

    First checks that every file of the parts still has its recorded checksum. Warns if the parts recorded
    different modification times of their sources. There are two possible reasons: the sources are copies on
    several machines, or a source changed between the preparations.

    Raises:
        ValueError: a part is missing, given twice, unfinished or damaged; parts have different settings or
            sources; ``output`` is one of the parts; a part is not on the file system of ``output``, so hard
            links cannot be made.
    """
    found = sorted(((_finished(Path(path)), Path(path)) for path in parts), key=lambda pair: _part(pair[0]))
    first, place = found[0]
    for manifest, path in found[1:]:
        if differ := changes(_settings(first, times=False), _settings(manifest, times=False)):
            raise ValueError(
                f"{place} and {path} were prepared with other settings ({', '.join(differ[:3])})"
            )
    count = _part(first)[1]
    numbers = [_part(manifest)[0] for manifest, _ in found]
    if doubled := [number for number in range(1, count + 1) if numbers.count(number) > 1]:
        raise ValueError(f"part {doubled[0]}/{count} is given {numbers.count(doubled[0])} times")
    if missing := [f"{number}/{count}" for number in range(1, count + 1) if number not in numbers]:
        raise ValueError(f"parts are missing: {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}")
    if output.exists() and any(output.samefile(path) for _, path in found):
        raise ValueError(f"{output} is one of the parts: name another folder with --output")
    if touched := [str(path) for manifest, path in found if changes(_settings(first), _settings(manifest))]:
        logger.warning(
            "the inputs of %s and %s have different modification times: if their texts differ, prepare the "
            "parts again", place, ", ".join(touched),
        )  # fmt: skip
    head = {name: value for name, value in first.head.items() if name != "part"}
    with locked(output, "prepares or trains on", shared=not force and Manifest.finished(output)):
        if Preparation(output, head, force).manifest.next is None:
            return
        for _, path in found:
            TokenFolder(path).verify()
        preparation = Preparation(output, head, force=True)  # replace an unfinished preparation
        preparation.start(lambda to: shutil.copytree(place / TOKENIZER, to, dirs_exist_ok=True))
        written = dict.fromkeys(SPLITS, 0)
        for manifest, path in found:
            for shard in manifest.shards:
                name = shard_name(shard.split, written[shard.split])
                written[shard.split] += 1
                _link(path / shard.file, output / name)
                preparation.manifest.shards.append(replace(shard, file=name))
        preparation.commit({}, None)


def _finished(path: Path) -> Manifest:
    """Read the manifest of a part. Raises ``ValueError`` if the part is unfinished."""
    TokenFolder(path)
    return Manifest.read(path)


def _part(manifest: Manifest) -> tuple[int, int]:
    return tuple(manifest.head.get("part", WHOLE))


def _settings(manifest: Manifest, times: bool = True) -> dict[str, Any]:
    """The settings of a part without its number, so that the settings of two parts can be compared.

    ``times``: include the modification times of the sources.
    """
    return flat_head({**manifest.head, "part": _part(manifest)[1]}, times)


def _link(file: Path, to: Path) -> None:
    to.unlink(missing_ok=True)
    try:
        os.link(file, to)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be linked to {to.parent}: {error.strerror}; --output must be on the file system "
            "of the parts"
        ) from error
