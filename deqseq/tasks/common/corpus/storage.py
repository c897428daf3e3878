"""Opens files of documents: local or remote (any protocol of fsspec, such as s3://), compressed or not."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast
from zipfile import ZipFile

import fsspec
from fsspec.core import url_to_fs
from fsspec.utils import infer_compression

from deqseq.tasks.common.tokenizer import first_line

_COMPRESSED = (".gz", ".xz", ".bz2", ".zst", ".zip")


def is_remote(path: str) -> bool:
    """Whether ``path`` names a remote file. fsspec reads remote files."""
    return "://" in path


def is_compressed(path: str) -> bool:
    """Whether the suffix of a file says that the file is compressed.

    Raises ``ValueError`` if the package that unpacks such files is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix in _COMPRESSED and infer_compression(path) is None:
        raise ValueError(f"{path} cannot be unpacked: for {suffix}, install deqseq[lm]")
    return suffix in _COMPRESSED


def expanded(path: str) -> list[str]:
    """The remote files that match ``path``, sorted. Raises ``ValueError`` if no file matches.

    If ``path`` is local or has no ``*``, returns ``[path]`` and does not check whether the file exists.
    """
    if not is_remote(path) or "*" not in path:
        return [path]
    with _one_line(path):
        system, pattern = url_to_fs(path)
        found = [system.unstrip_protocol(name) for name in sorted(system.glob(pattern))]
    if not found:
        raise ValueError(f"no file {path}")
    return found


def stamp(path: str) -> dict[str, Any]:
    """Path, size in bytes and modification time of a file.

    If a local file does not exist, returns only its path. If a remote file does not exist, raises
    ``ValueError``.
    """
    if not is_remote(path):
        return local_stamp(Path(path))
    with _one_line(path):
        system, name = url_to_fs(path)
        found: dict[str, Any] = {"path": path, "bytes": system.size(name)}
        with suppress(NotImplementedError):  # some file systems have no modification times
            found["modified"] = str(system.modified(name))
    return found


def local_stamp(path: Path) -> dict[str, Any]:
    """Path, size in bytes and modification time of a local file; only the path if the file is missing."""
    if not path.is_file():
        return {"path": str(path)}
    known = path.stat()
    return {"path": str(path), "bytes": known.st_size, "modified_ns": known.st_mtime_ns}


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading. A compressed file is decompressed while it is read.

    Seeking in a compressed file reads the file from its start. A zip archive must contain exactly one file.
    """
    if not is_remote(path) and not is_compressed(path):
        with open(path, "rb") as file:
            yield file
    else:
        # Unpack zip archives here: fsspec would read only the first file of an archive.
        zipped = Path(path).suffix.lower() == ".zip"
        with _one_line(path), fsspec.open(path, "rb", compression=None if zipped else "infer") as content:
            yield cast(BinaryIO, io.BufferedReader(_only_file(content) if zipped else content, 2**20))


def _only_file(archive: BinaryIO) -> Any:
    """Open the only file in a zip archive. Raises ``ValueError`` if there is no file, or several files."""
    unpacked = ZipFile(archive)
    files = [entry for entry in unpacked.infolist() if not entry.is_dir()]
    if len(files) != 1:
        raise ValueError(f"a .zip must have one file, this one has {len(files)}")
    return unpacked.open(files[0])


@contextmanager
def _one_line(path: str) -> Iterator[None]:
    """Replace any error in the block by a ``ValueError`` with one line that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"no file {path}") from error
    except Exception as error:  # fsspec and compression libraries raise many classes of errors
        if isinstance(error, ValueError) and path in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {first_line(error)}") from error
