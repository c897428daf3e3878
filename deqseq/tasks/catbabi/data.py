"""Builds, saves and loads CatbAbI (concatenated bAbI stories) as tensors, and reads it in parallel streams.

A story is ``<eos>`` followed by its words. Stories are concatenated, so ``<eos>`` also follows a story's last
word. The target of every token is the next token.

A stream is a long sequence of stories. B streams are read in parallel: a batch has the next L tokens of each
stream. L is called the cut.

Shapes: S stories, N tokens in all stories together, B streams, L tokens per stream in a batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

from deqseq.checks import check_count
from deqseq.tasks.catbabi.stories import QUESTION, SPLITS, TASKS, Story
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.runs import read_json

PAD, EOS = "<pad>", "<eos>"
IGNORE_INDEX = -100
"""Label of tokens that do not count in the loss."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Stories:
    """Stories of one split.

    Attributes:
        tokens: (N,) int16, the concatenated stories; each starts with ``<eos>``.
        lengths: (S,) int64, number of tokens of each story.
        tasks: (S,) int64, task of each story, 1 to 20.
    """

    tokens: Tensor
    lengths: Tensor
    tasks: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def edges(self) -> Tensor:
        """(S + 1,) int64: the index of each story's first token, then N."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def take(self, index: Tensor) -> Stories:
        """The stories at the indices ``index`` (int64), in this order."""
        lengths = self.lengths[index]
        moved = self.edges[index] - (lengths.cumsum(0) - lengths)
        source = torch.arange(int(lengths.sum())) + moved.repeat_interleave(lengths)
        return Stories(self.tokens[source], lengths, self.tasks[index])

    def of_tasks(self, tasks: Sequence[int] | None) -> Stories:
        """The stories of these tasks; all stories if ``tasks`` is ``None``."""
        if tasks is None:
            return self
        return self.take(torch.isin(self.tasks, torch.tensor(tasks)).nonzero()[:, 0])

    def shuffled(self, generator: torch.Generator) -> Stories:
        """All stories in random order."""
        return self.take(torch.randperm(len(self), generator=generator))

    def runs(self, streams: int) -> list[int]:
        """Divide the stories into ``streams`` consecutive runs with about equally many tokens.

        Returns a list ``ends`` of ``streams`` + 1 token indices. Run i is ``tokens[ends[i] : ends[i + 1]]``.
        """
        wanted = torch.arange(streams + 1) * (len(self.tokens) / streams)
        middles = (self.edges[1:] + self.edges[:-1]) / 2
        edges: list[int] = self.edges[torch.searchsorted(middles, wanted)].tolist()
        return edges


@dataclass(frozen=True)
class CatBabi:
    """The data of CatbAbI: three splits and one vocabulary, which begins with ``<pad>`` and ``<eos>``."""

    vocabulary: list[str]
    splits: dict[str, Stories]
    manifest: dict[str, Any]

    @property
    def question(self) -> int:
        """The vocabulary index of ``?``. The token after ``?`` is the answer."""
        return self.vocabulary.index(QUESTION)

    @property
    def vocabulary_sum(self) -> Any:
        """The vocabulary's checksum."""
        return self.manifest["vocabulary"]

    @property
    def fingerprint(self) -> str:
        """A checksum of the vocabulary and all splits."""
        parts = [self.vocabulary_sum, *(self.manifest["splits"][s]["sha256"] for s in SPLITS)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def build(
    read: Callable[[str, int], list[Story]], output: str | Path, drop_last: bool = False
) -> dict[str, Any]:
    """Encode the stories of all splits and tasks, and write them to the folder ``output``.

    Writes one safetensors file per split, ``vocabulary.json`` and ``manifest.json``.

    Args:
        read: ``read(split, task)`` returns the stories of one task in one split.
        output: folder to write.
        drop_last: leave out the last story of every split of every task, as in the original CatbAbI.

    Returns:
        The content of ``manifest.json``: counts and checksums.

    Raises:
        ValueError: ``output`` contains other files, or CatbAbI of other stories; a split has no stories;
            ``read`` raised a ``ValueError``.
    """
    output = Path(output)
    ours = {"manifest.json", "vocabulary.json", *(f"{split}.safetensors" for split in SPLITS)}
    if output.exists() and (not output.is_dir() or any(f.name not in ours for f in output.iterdir())):
        raise ValueError(f"{output} holds other files than CatbAbI data: name another folder")
    read_stories = {
        split: [(task, story) for task in TASKS for story in read(split, task)[: -1 if drop_last else None]]
        for split in SPLITS
    }
    words = {word for stories in read_stories.values() for _, story in stories for word in story}
    vocabulary = [PAD, EOS, *sorted(words)]
    number = {word: i for i, word in enumerate(vocabulary)}
    files, counts = {}, {}
    for split, stories in read_stories.items():
        if not stories:
            raise ValueError(f"no stories in split {split}")
        tokens = [[number[EOS], *(number[word] for word in story)] for _, story in stories]
        encoded = Stories(
            torch.tensor([token for story in tokens for token in story], dtype=torch.int16),
            torch.tensor([len(story) for story in tokens]),
            torch.tensor([task for task, _ in stories]),
        )
        content = save({"tokens": encoded.tokens, "lengths": encoded.lengths, "tasks": encoded.tasks})
        files[output / f"{split}.safetensors"] = content
        counts[split] = {
            "stories": len(encoded),
            "tokens": len(encoded.tokens),
            "questions": int((encoded.tokens == number[QUESTION]).sum()),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    again = "remove the folder, or name another one"
    if (output / "manifest.json").exists():
        try:
            former = read_json(output / "manifest.json")
        except ValueError as error:
            raise ValueError(f"{error}; {again}") from error
        if former.get("splits") != counts:
            raise ValueError(f"{output} holds CatbAbI made from other stories: {again}")
    output.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        file.write_bytes(content)
    write_json(output / "vocabulary.json", vocabulary)
    manifest = {"drop_last": drop_last, "vocabulary": _sha256(output / "vocabulary.json"), "splits": counts}
    write_json(output / "manifest.json", manifest)
    return manifest


def load(folder: str | Path) -> CatBabi:
    """Load the data that :func:`build` wrote to ``folder``.

    Raises:
        ValueError: ``folder`` does not contain CatbAbI, or a file has changed since it was written.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        vocabulary = json.loads((folder / "vocabulary.json").read_text())
        sums = {f"{split}.safetensors": manifest["splits"][split]["sha256"] for split in SPLITS}
        sums["vocabulary.json"] = manifest["vocabulary"]
        changed = [name for name, expected in sums.items() if _sha256(folder / name) != expected]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} holds no CatbAbI ({error}): python -m deqseq.tasks.catbabi build --help"
        ) from error
    if changed:
        raise ValueError(
            f"{folder} is damaged: {', '.join(changed)} changed since it was built: build it again"
        )
    splits = {split: Stories(**load_file(folder / f"{split}.safetensors")) for split in SPLITS}
    return CatBabi(vocabulary, splits, manifest)


class StoryStreams(IterableDataset[Batch]):
    """Endless training batches from B streams of shuffled stories.

    Each batch has the next L tokens of every stream, so a model can carry its state from batch to batch.
    Every pass over the data shuffles all stories, divides them into B runs and appends one run to each
    stream. To resume training, set ``start`` to the number of batches to skip.

    Args:
        stories: stories to read.
        question: index of the token ``?``. The loss then counts only the answers, which follow ``?``; other
            labels are ``IGNORE_INDEX``. ``None``: the loss counts all tokens.
        batch_size: number B of streams.
        cut: number L of tokens per stream in a batch.
        seed: seed of the shuffles.

    Raises:
        ValueError: ``batch_size`` or ``cut`` is below 1; there are fewer stories than streams; ``cut`` is
            more than a stream's share of the tokens.
    """

    def __init__(self, stories: Stories, question: int | None, batch_size: int, cut: int, seed: int) -> None:
        super().__init__()
        check_count("batch_size", batch_size)
        check_count("cut", cut)
        if len(stories) < batch_size:
            raise ValueError(f"batch_size must be at most the {len(stories)} stories, got {batch_size}")
        if cut > (share := len(stories.tokens) // batch_size):
            raise ValueError(f"cut must be at most the {share} tokens of a stream in a pass, got {cut}")
        self.stories, self.question = stories, question
        self.batch_size, self.cut, self.seed = batch_size, cut, seed
        self.start = 0

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.seed)
        rows = [self.stories.tokens[:0]] * self.batch_size
        index = 0  # number of batches in all earlier passes over the stories
        while True:
            stories = self.stories.shuffled(generator)
            edges = stories.runs(self.batch_size)
            rows = [
                torch.cat([row, stories.tokens[start:end]])
                for row, (start, end) in zip(rows, pairwise(edges), strict=True)
            ]
            cuts = max(0, (min(map(len, rows)) - 1) // self.cut)  # the last input needs a next token
            for i in range(max(0, self.start - index), cuts):
                piece = torch.stack([row[i * self.cut : (i + 1) * self.cut + 1] for row in rows]).long()
                inputs, labels = piece[:, :-1].contiguous(), piece[:, 1:].contiguous()
                if self.question is not None:
                    labels = labels.where(inputs == self.question, IGNORE_INDEX)
                yield {"input_ids": inputs, "labels": labels}
            index += cuts
            rows = [row[cuts * self.cut :] for row in rows]


def once(stories: Stories, batch_size: int, cut: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Read all stories once, shuffled, in B parallel streams.

    Yields batches (inputs, targets, tasks), each tensor (B, L) int64. The last batch may be shorter. A stream
    that ends early is padded, and its padding has ``IGNORE_INDEX`` as targets.
    """
    stories = stories.shuffled(torch.Generator().manual_seed(0))
    edges = stories.runs(min(batch_size, len(stories)))

    def streams(values: Tensor, padding: int) -> Tensor:
        runs = [values[start:end] for start, end in pairwise(edges)]
        return pad_sequence(runs, batch_first=True, padding_value=padding)

    inputs = streams(stories.tokens, 0)
    # The target of a token is the next token. The target of the last token is the first token, <eos>.
    targets = streams(stories.tokens.roll(-1), IGNORE_INDEX)
    tasks = streams(stories.tasks.repeat_interleave(stories.lengths), 0)
    for start in range(0, inputs.shape[1], cut):
        x, y, task = (values[:, start : start + cut].long() for values in (inputs, targets, tasks))
        yield x, y, task


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
