"""Makes documents with marked answers, and reads and writes them as JSONL."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

from tqdm.auto import tqdm

from deqseq.checks import check_count
from deqseq.tasks.common.files import PART, rename
from deqseq.tasks.text_tracking.worlds import WORLDS, Answer, check_places

Kind = Literal["programs", "boxes", "cards"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Document:
    """A text of words and single spaces. ``answers``: the answers in it, in the order of the text."""

    kind: Kind
    text: str
    answers: list[Answer]

    @property
    def words(self) -> list[str]:
        return self.text.split(" ")

    @property
    def tracked(self) -> list[bool]:
        """The mask of the answers: one entry for every word, true if the word is an answer."""
        places = {answer.at for answer in self.answers}
        return [i in places for i in range(len(self.words))]


def make_document(
    kinds: Sequence[Kind], length: int, places: int, seed: str, longest_run: int | None = None
) -> Document:
    """A random document of ``length`` - 1 words; with the end-of-text token it has ``length`` tokens.

    Args:
        kinds: one of these kinds is chosen at random.
        places: number of variables, things or cards.
        seed: equal seeds give equal documents.
        longest_run: largest number of operations between two answers, with the exceptions of
            :meth:`World.write`; ``None``: as many as fit into the document.

    Raises:
        ValueError: see :func:`check_options`.
    """
    check_options(kinds, length, places, longest_run)
    random = Random(seed)  # seeded with a text: gives the same numbers in every process
    kind = random.choice(sorted(kinds))
    world = WORLDS[kind](places, random)
    world.write(length - 1, longest_run)
    return Document(kind, " ".join(world.words), world.answers)


def check_options(kinds: Sequence[str], length: int, places: int, longest_run: int | None = None) -> None:
    """Check the options of :func:`make_document`.

    Raises:
        ValueError: no kind, an unknown kind, or a kind named twice; ``places`` or ``longest_run`` is
            out of range; ``length`` may be too short for one operation and one answer.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"kinds must be among {', '.join(KINDS)}, got {unknown[0]!r}")
    if not kinds or len(set(kinds)) < len(kinds):
        raise ValueError(f"kinds must name one or more different kinds, got {list(kinds)}")
    check_places(places)
    if longest_run is not None:
        check_count("longest_run", longest_run)
    check_count("length", length)
    for kind in kinds:
        if length <= (needed := WORLDS[kind].shortest_document(places)):
            raise ValueError(
                f"documents of kind {kind} with {places} places need a length of at least {needed + 1} "
                f"tokens, got {length}"
            )


def write_documents(path: Path, documents: Iterable[Document], total: int) -> None:
    """Write documents as JSONL, one object per line. The file gets its name when it is complete.

    ``total``: number of documents, for the progress bar.
    """
    part = path.with_name(path.name + PART)
    with part.open("w") as file:
        for document in tqdm(documents, path.name, total, unit="doc", disable=None):
            file.write(json.dumps(asdict(document)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    rename(part, path)


def read_documents(path: Path) -> list[Document]:
    """Read the documents in a JSONL file.

    Raises:
        ValueError: the file is missing, empty or damaged. The message names the line.
    """
    if not path.is_file():
        raise ValueError(f"no documents in {path}: make them with the command data")
    found = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                found.append(_document(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}:{number} is not a document with answers: {error}") from error
    if not found:
        raise ValueError(f"{path} is empty")
    return found


def _document(content: dict[str, Any]) -> Document:
    found = Document(content["kind"], content["text"], [Answer(**answer) for answer in content["answers"]])
    for answer in found.answers:
        check_count("at", answer.at, 1, len(found.words) - 1)  # the first word is not predicted
        check_count("operations", answer.operations)
    return found
