"""Makes the sources of documents that a user names: files, folders, a dataset or the installed packages."""

import os
from collections.abc import Sequence
from pathlib import Path

from deqseq.tasks.common.corpus.documents import DatasetRows, JsonLines, TextFile
from deqseq.tasks.common.corpus.folders import FolderFiles, installed_folders
from deqseq.tasks.common.corpus.storage import expanded, is_compressed, is_remote

Source = TextFile | DatasetRows | FolderFiles
"""A source of documents, in a fixed order."""


def sources(
    paths: Sequence[str], documents: str = "file", column: str = "text", dataset: str | None = None,
    subset: str | None = None, split: str = "train", files: str | None = None, rules: str = "code",
    installed: bool = False, without: Sequence[str] = (),
) -> list[Source]:  # fmt: skip
    """Make the sources of documents that the user has named.

    With ``dataset``, the only source is this dataset, and ``paths`` are its data files. If ``paths`` are
    folders, one source has all files in them. Otherwise every file in ``paths`` is a source; the suffix of a
    file determines its format.

    Args:
        files: pattern for the files of folders; by default ``"*"``, or ``"*.py"`` with ``installed``.
        rules: name of the rules for the files of folders.
        installed: also read the folders of Python's installed packages and standard library.
        without: folders that are not searched, such as the folder for the result.

    Raises:
        ValueError: nothing is named; a file is named twice or does not exist; both files and folders are
            named; the dataset cannot be loaded; arguments do not fit together.
    """
    if not paths and dataset is None and not installed:
        raise ValueError("nothing to read: name text files, folders, a --dataset or --installed")
    paths = [file for path in paths for file in expanded(path)]
    real = [path if is_remote(path) else Path(path).resolve() for path in paths]
    if twice := [path for i, path in enumerate(paths) if real[i] in real[:i]]:
        raise ValueError(f"{twice[0]} is named twice")
    if dataset is not None:
        if installed or files is not None or rules != "code":
            raise ValueError("--files, --rules and --installed are for folders: leave out --dataset")
        if documents != "file":
            raise ValueError(f"each row of a dataset is one document, but --documents is {documents!r}")
        return [DatasetRows(dataset, subset, split, paths, column)]
    if subset is not None or split != "train":
        raise ValueError("subset and split need a --dataset, but none is named")
    if not installed and not any(map(os.path.isdir, paths)):
        if files is not None or rules != "code":
            raise ValueError("--files and --rules need a folder, but none is named")
        found = [_file(path, documents, column) for path in paths]
        plain = [type(source) is TextFile for source in found]
        if column != "text" and all(plain):
            raise ValueError(f"plain text has no columns, but --column is {column!r}")
        if documents != "file" and not any(plain):
            raise ValueError(f"--documents is for plain text, but none is named; got {documents!r}")
        return found
    if other := [path for path in paths if not os.path.isdir(path)]:
        raise ValueError(f"{other[0]} is not a folder: name files or folders, not both")
    if documents != "file":
        raise ValueError(f"each file of a folder is one document, but --documents is {documents!r}")
    if column != "text":
        raise ValueError(
            f"the files of a folder are read as plain text, which has no columns, but --column is {column!r}"
        )
    more, foreign = installed_folders() if installed else ([], [])
    folders = [*paths, *(folder for folder in more if Path(folder) not in real)]
    pattern = files if files is not None else "*.py" if installed else "*"
    return [FolderFiles(folders, pattern, rules, [*without, *foreign])]


def _file(path: str, documents: str, column: str) -> Source:
    plain = TextFile(path, documents)  # checks that the file exists
    ending = (Path(path).with_suffix("") if is_compressed(path) else Path(path)).suffix.lower()
    if ending == ".parquet":
        rows = DatasetRows("parquet", files=[path], column=column)
        rows.stored = plain.stored
        return rows
    return JsonLines(path, column) if ending in (".jsonl", ".ndjson", ".json") else plain
