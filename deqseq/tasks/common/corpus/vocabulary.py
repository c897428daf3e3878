"""Trains a tokenizer on the training documents of a corpus."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm.auto import tqdm

from deqseq.tasks.common.corpus.holdout import HoldOut
from deqseq.tasks.common.corpus.shards import TOKENIZER, Manifest
from deqseq.tasks.common.corpus.sources import Source
from deqseq.tasks.common.files import writing
from deqseq.tasks.common.tokenizer import load_tokenizer, train_bpe

_SAMPLE = 50_000_000  # bytes of text for the training of a tokenizer


def trained_tokenizer(
    output: Path, name: str, size: int, sources: Sequence[Source], hold_out: HoldOut, force: bool = False
) -> Any:
    """A tokenizer with ``size`` tokens, trained on the training documents of ``sources``.

    If an earlier preparation in ``output`` has trained this tokenizer already, it is loaded. Otherwise it is
    trained. Training is deterministic: the same texts give the same tokenizer.

    Args:
        name: name of the tokenizer in the manifest of ``output``, such as ``train:32000``.
        size: maximum number of tokens; a small corpus may give fewer.
        force: train even if there is a tokenizer already.

    Raises:
        ValueError: a document cannot be read.
    """
    saved = output / TOKENIZER / "tokenizer.json"
    if not force and saved.is_file():
        with suppress(ValueError):  # no manifest, or a damaged one: Preparation reports this
            if Manifest.read(output).head["tokenizer"]["name"] == name:
                return load_tokenizer(str(saved))
    trained = train_bpe(sample(sources, hold_out), size)
    with TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.json")
        with writing(file):
            trained.save(str(file))
        return load_tokenizer(str(file))


def sample(sources: Sequence[Source], hold_out: HoldOut, size: int = _SAMPLE) -> Iterator[str]:
    """About ``size`` bytes of training documents, the same in each call.

    A hash of the text chooses the documents, so they come from all sources. If the size of a source is
    unknown, as for compressed files and datasets, the first documents are chosen.
    """
    known = [source.size for source in sources if source.size is not None]
    whole = sum(known) if len(known) == len(sources) else None
    share = 1.0 if whole is None else size / max(whole, 1)
    # A larger share holds out the same documents, and additional documents. These are the sample.
    wider = HoldOut(hold_out.share + share) if hold_out.share + share < 1 else None
    total, read = size if whole is None else min(size, whole), 0
    with tqdm(desc="sample", total=total, unit="B", unit_scale=True, disable=None) as bar:
        for document in (document for source in sources for document in source.documents()):
            if hold_out.split(document.text) == "validation":
                continue
            if wider is None or wider.split(document.text) == "validation":
                yield document.text
                bar.update(document.size)
                read += document.size
                if whole is None and read >= size:
                    return
