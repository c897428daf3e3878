"""Data for language modelling: documents, held-out documents, shards, rows, streams."""

import bz2
import copy
import gzip
import io
import json
import lzma
import pickle
import random
import resource
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import datasets
import fsspec
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from deqseq.tasks.common.corpus import HoldOut, StreamedRows, TokenFolder, parts, pipeline, shards
from deqseq.tasks.common.corpus import encoder as encoder_module
from deqseq.tasks.common.corpus.documents import JsonLines, TextFile
from deqseq.tasks.common.corpus.encoder import Encoder
from deqseq.tasks.common.corpus.rows import TokenRows
from deqseq.tasks.common.corpus.sources import Source, sources

WORDS = ("the", "cat", "saw", "a", "dog", "near", "river", "and", "old king", "naïve", "猫", "über", "🙂")
END = "<|endoftext|>"
FIFTH = HoldOut(0.2)


def make_text(sentences: int, seed: int = 0) -> str:
    """Lines of random words, with blank lines here and there."""
    draw = random.Random(seed)
    lines = (" ".join(draw.choices(WORDS, k=draw.randint(1, 30))) for _ in range(sentences))
    return "".join(line + draw.choice((".\n", ".\n", "!\n\n", " ...\n\n\n")) for line in lines)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_BATCH", 4096)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    found.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator([make_text(200)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END)


def prepare(
    folder: Path, read: list[Source], tokenizer: Any, hold_out: HoldOut = FIFTH,
    shard_tokens: int = 10**9, workers: int = 1, force: bool = False,
) -> TokenFolder:  # fmt: skip
    pipeline.prepare(folder, read, tokenizer, "test", hold_out, shard_tokens, workers, force)
    return TokenFolder(folder)


def stored(folder: TokenFolder, split: Any) -> np.ndarray:
    """All tokens of a split."""
    files = sorted(folder.path.glob(f"{split}-*.bin"))
    return np.concatenate([np.fromfile(file, "<u2") for file in files])


def texts(tokens: np.ndarray, tokenizer: Any) -> list[str]:
    """The decoded documents in ``tokens``, which must end with a whole document."""
    assert tokens[-1] == tokenizer.eos_token_id
    return tokenizer.decode(tokens.tolist()).split(END)[:-1]


def write_jsonl(path: Path, documents: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in documents))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A plain text file of 100 kB."""
    path = tmp_path / "book.txt"
    path.write_text(make_text(1200))
    return path


# Documents


@pytest.mark.parametrize("kind", ["file", "blank", "line"])
def test_reading_goes_on_at_every_document(book: Path, kind: str) -> None:
    whole = list(TextFile(str(book), kind).documents())
    assert len(whole) > 10
    for i in range(0, len(whole), 7):
        assert list(TextFile(str(book), kind).documents(whole[i].next)) == whole[i + 1 :]


def test_what_a_document_is(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbf\n one\r\ntwo\n\n \n\nthree\n\nfour")
    found = {
        kind: [d.text for d in TextFile(str(path), kind).documents()] for kind in ("blank", "line", "file")
    }
    assert found["blank"] == [" one\r\ntwo\n\n ", "three", "four"]
    assert found["line"] == [" one", "two", "three", "four"]
    assert found["file"] == ["\n one\r\ntwo\n\n \n\nthree\n\nfour"]


@pytest.mark.parametrize(
    "text", [make_text(1500), "word " * 20_000, "é" * 30_000, "a" + "🙂" * 9_000, "x" * 8192, "x" * 8193]
)
def test_pieces_are_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text"
    path.write_text(text)
    pieces = list(TextFile(str(path)).documents())
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(4000 < piece.size <= 8192 for piece in pieces[:-1])
    assert sum(piece.size for piece in pieces) == pieces[-1].next == path.stat().st_size


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\ntwo"}\n\n{"text": ""}\n{"n": 1, "text": "half \\ud83d"}\n')
    assert [d.text for d in JsonLines(str(path)).documents()] == ["one\ntwo", "half ?"]


def zipped(**files: bytes) -> bytes:
    """A zip archive that contains a folder, and ``files`` in this folder."""
    content = io.BytesIO()
    with ZipFile(content, "w") as archive:
        archive.mkdir("folder")
        for name, data in files.items():
            archive.writestr(f"folder/{name}", data)
    return content.getvalue()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"fine\n" + b"x" * 10_000 + b"\xff", r"a.txt is not UTF-8: .*0xff at offset 10005"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b", "id": 1}\n', r"a.jsonl:2: .*'text'.*body, id"),
        ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', r"a.jsonl:3: .*no JSON object"),
        ("a.jsonl", b'{"text": 1}\n', r"a.jsonl:1: no text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl:2: Expecting value"),
        ("a.txt", b"", r"a.txt is empty"),
        ("a.jsonl", b"\n\n", r"no documents in .*a.jsonl"),
        ("a.txt.gz", b"x", r"a.txt.gz cannot be read: Not a gzipped file"),
        ("a.txt.gz", gzip.compress(random.Random(0).randbytes(999), mtime=0)[:-9], r"a.txt.gz"),
        ("a.txt.zip", zipped(a=b"a", b=b"b"), r"a.txt.zip cannot be read: a .zip must have one file.* has 2"),
        ("a.txt.zip", zipped(), r"a.txt.zip cannot be read: a .zip must have one file.* has 0"),
        ("a.parquet", b"x", r"the dataset parquet cannot be loaded"),
    ],
)
def test_what_is_not_a_document_is_named(
    tmp_path: Path, tokenizer: Any, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "out", sources([str(tmp_path / name)]), tokenizer)
    assert not (tmp_path / "out").exists()


def test_sources_that_cannot_be_opened(tmp_path: Path, book: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*none.txt"):
        sources([str(tmp_path / "none.txt")])
    with pytest.raises(ValueError, match="is not a folder: name files or folders"):
        sources([str(tmp_path), str(book)])
    with pytest.raises(ValueError, match="named twice"):
        sources([str(book), str(book)])
    with pytest.raises(ValueError, match="nothing to read"):
        sources([])
    with pytest.raises(ValueError, match="cannot be loaded"):
        sources([str(tmp_path / "none.json")], dataset="json")


def compressed(data: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        zstd = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
        return zstd.compress(data)
    if suffix == ".zip":
        return zipped(a=data)
    return {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, "": bytes}[suffix](data)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".xz", ".bz2", ".zip"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("remote", [False, True])
def test_compressed_and_remote_files_give_what_plain_ones_give(
    tmp_path: Path, name: str, suffix: str, remote: bool
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [make_text(2, seed) for seed in range(200)])
    (tmp_path / "a.txt").write_text(make_text(600))
    plain = list(sources([str(tmp_path / name)])[0].documents())
    data = compressed((tmp_path / name).read_bytes(), suffix)
    path = f"memory://{tmp_path}/{name}{suffix}" if remote else str(tmp_path / f"{name}{suffix}")
    with fsspec.open(path, "wb") as file:
        file.write(data)
    source = sources([path])[0]
    assert list(source.documents()) == plain
    for i in range(0, len(plain), max(1, len(plain) // 5)):
        assert list(source.documents(plain[i].next)) == plain[i + 1 :]
    before = source.describe()
    assert before == sources([path])[0].describe() and before["path"] == path
    with fsspec.open(path, "wb") as file:
        file.write(compressed(b'{"text": "other"}', suffix))
    assert before != sources([path])[0].describe()


def test_remote_files_are_found_by_patterns(tmp_path: Path) -> None:
    place = f"memory://{tmp_path}/patterns"
    for name in ("b.txt", "a.txt", "c.jsonl"):
        with fsspec.open(f"{place}/{name}", "w") as file:
            file.write(name)
    found = [document.text for source in sources([f"{place}/*.txt"]) for document in source.documents()]
    assert found == ["a.txt", "b.txt"]
    for path in (f"{place}/none.txt", f"{place}/*.csv"):
        with pytest.raises(ValueError, match="no file memory://"):
            sources([path])
    with pytest.raises(ValueError, match=r"^[^\n]*none://[^\n]*$"):
        sources(["none://a.txt"])
    with pytest.raises(ValueError, match="named twice"):
        sources([f"{place}/a.txt", f"{place}/*.txt"])


def test_datasets_and_parquet_give_what_jsonl_gives(tmp_path: Path, tokenizer: Any) -> None:
    documents = [make_text(2, seed) for seed in range(30)]
    write_jsonl(tmp_path / "a.jsonl", documents)
    datasets.Dataset.from_dict({"text": documents}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("\n".join(text.replace("\n", " ") for text in documents))
    jsonl, parquet = str(tmp_path / "a.jsonl"), str(tmp_path / "a.parquet")
    for read in (sources([jsonl]), sources([parquet]), sources([jsonl], dataset="json")):
        found = list(read[0].documents())
        assert [document.text for document in found] == documents
        assert list(read[0].documents(found[9].next)) == found[10:]
    lines = list(sources([str(tmp_path / "a.txt")], dataset="text")[0].documents())
    assert len(lines) == len(documents)
    with pytest.raises(ValueError, match=r"row 0 of json .*'body': its columns are text, n"):
        prepare(tmp_path / "out", sources([jsonl], dataset="json", column="body"), tokenizer)


# Hold-out


def test_the_share_held_out_is_what_was_asked_for_and_grows() -> None:
    documents = [f"document {i}" for i in range(20_000)]
    held = {
        share: {d for d in documents if HoldOut(share).split(d) == "validation"} for share in (0, 0.01, 0.1)
    }
    assert not held[0]
    assert len(held[0.1]) / len(documents) == pytest.approx(0.1, abs=0.01)
    assert held[0.01] < held[0.1]


@pytest.mark.parametrize("share", [1, 1.5, -0.1, float("nan")])
def test_shares_that_are_none(share: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        HoldOut(share)


# Tokens


@pytest.mark.parametrize("remember", [True, False])
def test_texts_have_the_tokens_that_the_tokenizer_gives_the_whole(tokenizer: Any, remember: bool) -> None:
    encoder = Encoder(tokenizer, remember)
    texts = [
        make_text(1000),
        "",
        "a",
        " a",
        "a ",
        "  a\n b \n\n  c d\n",
        "the the  the\tthe",
        make_text(1000),
    ]
    texts.append("".join(random.Random(0).choices("ab,. \n\t\u00a0é猫", k=3000)))
    for text, ids in zip(texts, encoder(texts), strict=True):
        assert ids.tolist() == tokenizer(text)["input_ids"]
    endless = "猫" * 20_000
    assert tokenizer.decode(encoder([endless])[0].tolist()) == endless


@pytest.mark.parametrize("remember", [True, False])
def test_tokenizers_that_do_not_cut_between_words_get_whole_texts(remember: bool) -> None:
    pieces = [(END, 0.0), ("\u2581", -2.0), *((c, -3.0) for c in "abcd"), ("a\u2581b", -1.0)]
    model = Tokenizer(models.Unigram(pieces, unk_id=0))
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END)
    text = "a b a b c d a b " * 900
    assert Encoder(tokenizer, remember)([text])[0].tolist() == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("remember", [True, False])
@pytest.mark.parametrize(
    "token",
    [AddedToken("the cat"), AddedToken("saw a", normalized=False), AddedToken("dog", rstrip=True),
     AddedToken(" a"), AddedToken("cat", lstrip=True), AddedToken("   "),
     AddedToken("near", single_word=True)],
    ids=str,
)  # fmt: skip
def test_added_tokens_may_reach_over_spaces(tokenizer: Any, token: AddedToken, remember: bool) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([token])
    text = make_text(300) + " the cat    saw a dog near a \n the cat"
    assert Encoder(tokenizer, remember)([text])[0].tolist() == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("remember", [True, False])
def test_normalisers_may_reach_over_spaces(tokenizer: Any, remember: bool) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("the cat", "a dog")
    text = make_text(300)
    assert "the cat" in text
    assert Encoder(tokenizer, remember)([text])[0].tolist() == tokenizer(text)["input_ids"]


def test_lines_without_spaces_have_the_tokens_of_the_whole(tokenizer: Any) -> None:
    text = "\n".join(random.Random(0).choices(WORDS, k=3000)).replace(" ", "")
    for remember in (True, False):
        assert Encoder(tokenizer, remember)([text])[0].tolist() == tokenizer(text)["input_ids"]


def test_a_full_memory_begins_anew(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "_REMEMBERED", 3)
    encoder = Encoder(tokenizer)
    for text in (make_text(50), "one two three four five", make_text(50)):
        assert encoder([text])[0].tolist() == tokenizer(text)["input_ids"]


def test_tokenizers_that_do_not_fit() -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ValueError, match="no end-of-text token"):
        Encoder(plain)


@pytest.mark.parametrize("largest, dtype", [(65_535, "<u2"), (65_536, "<u4")])
def test_the_smallest_type_that_holds_all_ids(tmp_path: Path, largest: int, dtype: str) -> None:
    words = Tokenizer(models.WordLevel({END: 0, "last": largest}, unk_token=END))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END)
    (tmp_path / "a.txt").write_text("last")
    folder = prepare(tmp_path / "out", sources([str(tmp_path / "a.txt")]), tokenizer, HoldOut(0))
    assert np.fromfile(tmp_path / "out" / "train-00000.bin", dtype).tolist() == [largest, 0]
    assert folder.vocab_size == largest + 1
    assert folder.rows("train", 2)[0]["input_ids"].tolist() == [largest, 0]


# Shards


def test_every_document_is_on_its_side_whole_and_in_order(tmp_path: Path, tokenizer: Any) -> None:
    documents = [make_text(1 + seed % 5, seed) for seed in range(300)]
    write_jsonl(tmp_path / "a.jsonl", documents)
    folder = prepare(tmp_path / "out", sources([str(tmp_path / "a.jsonl")]), tokenizer, shard_tokens=2000)
    for split in ("train", "validation"):
        expected = [text for text in documents if FIFTH.split(text) == split]
        assert texts(stored(folder, split), tokenizer) == expected
        assert folder.documents(split) == len(expected)  # type: ignore[arg-type]
        assert folder.tokens(split) == len(stored(folder, split))  # type: ignore[arg-type]
    folder.verify()
    assert folder.end_of_text == tokenizer.eos_token_id
    assert folder.vocab_size == len(tokenizer)
    assert folder.tokenizer()(documents[0])["input_ids"] == tokenizer(documents[0])["input_ids"]


def test_a_file_breaks_off_only_where_a_piece_is_held_out(tmp_path: Path, book: Path, tokenizer: Any) -> None:
    other = tmp_path / "other.txt"
    other.write_text("The end.")
    read = sources([str(book), str(other)])
    folder = prepare(tmp_path / "out", read, tokenizer, FIFTH)
    runs: dict[str, list[str]] = {"train": [], "validation": []}
    before = None
    for piece in chain(*(source.documents() for source in read)):
        split = FIFTH.split(piece.text)
        if split == before:
            runs[split][-1] += piece.text
        else:
            runs[split].append(piece.text)
        before = None if piece.ends else split
    assert len(runs["train"]) > 2 and runs["validation"]
    for split, expected in runs.items():
        assert texts(stored(folder, split), tokenizer) == expected


@pytest.mark.parametrize("kind", ["file", "blank", "line"])
def test_parts_have_the_texts_of_the_whole(tmp_path: Path, kind: str) -> None:
    for i, sentences in enumerate((1, 900, 3, 40, 300, 2)):
        text = make_text(sentences, i)
        (tmp_path / f"{i}.txt").write_text("\n \n" * (i % 2) + text)
        write_jsonl(tmp_path / f"{i}.jsonl", text.split("\n"))
        (tmp_path / f"{i}.txt.gz").write_bytes(gzip.compress(text.encode()))
    read = sources([str(file) for file in sorted(tmp_path.iterdir())], kind)

    def texts_of(part: tuple[int, int]) -> list[pipeline.Text]:
        own, begin, end = parts.divide(read, part)
        return [text for batch in pipeline.batches(own, FIFTH, begin, end) for text in batch.texts]

    whole = texts_of((1, 1))
    for count in (1, 2, 3, 7, 40, 1000):
        assert [text for k in range(1, count + 1) for text in texts_of((k, count))] == whole


def test_fingerprint_is_of_the_content(tmp_path: Path, book: Path, tokenizer: Any) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_bytes(book.read_bytes())
    folders = [prepare(tmp_path / p.stem, sources([str(p)]), tokenizer) for p in (book, copy)]
    other = prepare(tmp_path / "other", sources([str(book)]), tokenizer, HoldOut(0.3))
    assert folders[0].fingerprint == folders[1].fingerprint != other.fingerprint


def test_damage_is_named(tmp_path: Path, book: Path, tokenizer: Any) -> None:
    folder = prepare(tmp_path / "out", sources([str(book)]), tokenizer, shard_tokens=5000)
    shard = folder.path / "train-00001.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:100] + b"\xff\x00" + data[102:])
    with pytest.raises(ValueError, match=r"train-00001.bin is corrupted"):
        TokenFolder(folder.path).verify()
    shard.write_bytes(data[:-2])
    with pytest.raises(
        ValueError, match=rf"train-00001.bin has {len(data) - 2} bytes instead of {len(data)}"
    ):
        TokenFolder(folder.path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train-00001.bin is missing"):
        TokenFolder(folder.path)
    with pytest.raises(ValueError, match="no token shards"):
        TokenFolder(tmp_path)
    whole = json.loads((folder.path / "manifest.json").read_text())
    (folder.path / "manifest.json").write_text(json.dumps({**whole, "tokenizer": {}}))
    with pytest.raises(ValueError, match="not a manifest"):
        TokenFolder(folder.path)
    (folder.path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="not a manifest"):
        TokenFolder(folder.path)


def test_every_flipped_bit_is_noticed(tmp_path: Path, book: Path, tokenizer: Any) -> None:
    folder = prepare(tmp_path / "out", sources([str(book)], "blank"), tokenizer, shard_tokens=5000)
    files = [file for file in sorted(folder.path.rglob("*")) if file.is_file()]
    assert {"manifest.json", "tokenizer.json", "tokenizer_config.json"} < {file.name for file in files}
    sizes = [file.stat().st_size for file in files]
    draw = random.Random(0)

    def opened() -> tuple[Any, ...]:
        found = TokenFolder(folder.path)
        found.tokenizer()
        found.verify()
        return found.fingerprint, found.vocab_size, found.end_of_text, found.rows("train", 8)[0].keys()

    whole, noticed = opened(), 0
    for i in range(150):
        file = draw.choice(files) if i % 2 else draw.choices(files, sizes)[0]
        data = file.read_bytes()
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        try:
            assert opened() == whole  # the flip changed the JSON text, but not its values
        except ValueError as error:
            assert "\n" not in str(error)
            noticed += 1
        file.write_bytes(data)
    assert noticed > 140 and opened() == whole


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A prepared folder with one shard."""
    place = tmp_path_factory.mktemp("tiny")
    (place / "a.txt").write_text("the cat")
    return prepare(place / "out", sources([str(place / "a.txt")]), tokenizer).path


def with_manifest(folder: TokenFolder, change: Callable[[dict[str, Any]], Any], version: int = 2) -> Path:
    """Change the manifest of a folder, write it in the given version, and return the folder's path.

    In version 2, the manifest gets a matching checksum. Version 1 has no checksum.
    """
    file = folder.path / "manifest.json"
    content = json.loads(file.read_text())
    change(content)
    content.pop("checksum"), content.pop("version")
    if version == 1:
        content.pop("tokenizer_files")
        file.write_text(json.dumps({"version": 1, **content}))
    else:
        file.write_text(json.dumps({"version": 2, "checksum": shards._checksum(content), **content}))
    return folder.path


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m["shards"][0].update(split="test"), "must be train or validation, got 'test'"),
        (lambda m: m["shards"][0].update(file="../x.bin"), r"without a folder, got '../x.bin'"),
        (lambda m: m["shards"][0].update(file="/x.bin"), "without a folder"),
        (lambda m: m["shards"][0].update(file=".."), "without a folder"),
        (lambda m: m["shards"][0].update(file=3), "without a folder, got 3"),
        (lambda m: m["shards"][0].update(tokens="7"), "whole number >= 0, got '7'"),
        (lambda m: m["shards"][0].update(tokens=-1), "whole number >= 0, got -1"),
        (lambda m: m["shards"][0].update(documents=1.5), "whole number >= 0, got 1.5"),
        (lambda m: m["shards"][0].update(sha256=None), "sha256 of .* must be text"),
        (lambda m: m["shards"][0].update(colour="red"), "colour"),
        (lambda m: m["shards"][0].pop("documents"), "documents"),
        (lambda m: m["shards"].append(7), "not a manifest"),
        (lambda m: m.update(shards={"a": 1}), "not a manifest"),
        (lambda m: m.update(next=[1, 2]), "not a manifest"),
        (lambda m: m.update(next={"source": True, "offset": 0}), "next.source must be"),
        (lambda m: m.update(dtype="<f4"), "dtype must be <u2 or <u4, got '<f4'"),
        (lambda m: m["tokenizer"].update(vocab_size=2.0), "vocab_size must be"),
        (lambda m: m["tokenizer"].update(end_of_text=10**6), "end_of_text must be below vocab_size"),
        (lambda m: m["tokenizer"].update(sha256=1), "sha256 must be text"),
        (lambda m: m.update(colour="red"), "colour"),
        (lambda m: m.pop("hold_out"), "hold_out"),
        (lambda m: m.update(tokenizer="gpt2"), "not a manifest"),
    ],
)  # fmt: skip
def test_values_that_a_manifest_cannot_have(
    tmp_path: Path, tiny: Path, change: Callable[[dict[str, Any]], Any], message: str, version: int
) -> None:
    folder = TokenFolder(shutil.copytree(tiny, tmp_path / "out"))
    with pytest.raises(ValueError, match=message) as error:
        TokenFolder(with_manifest(folder, change, version))
    assert "manifest.json is not a manifest of token shards" in str(error.value)


@pytest.mark.parametrize("name", ["dtype", "end_of_text", "vocab_size", "name", "documents", "split"])
def test_a_changed_value_does_not_have_the_checksum(tmp_path: Path, tiny: Path, name: str) -> None:
    folder = TokenFolder(shutil.copytree(tiny, tmp_path / "out"))
    file = folder.path / "manifest.json"
    content = json.loads(file.read_text())
    for place in (content, content["tokenizer"], content["shards"][0]):
        if name in place:
            place[name] = {"split": "validation", "dtype": "<u4", "name": "other"}.get(name, 9)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="checksum"):
        TokenFolder(folder.path)


def test_folders_of_version_1_are_read_and_verified(tmp_path: Path, book: Path, tokenizer: Any) -> None:
    read = sources([str(book)])
    folder = prepare(tmp_path / "out", read, tokenizer)
    old = TokenFolder(with_manifest(folder, lambda _: None, version=1))
    assert old.fingerprint == folder.fingerprint
    old.verify()
    assert pipeline.prepare(folder.path, read, tokenizer, "test", FIFTH, 10**9, 1) == 0  # nothing to read
    for name in ("tokenizer/tokenizer.json", "train-00000.bin"):
        data = (folder.path / name).read_bytes()
        (folder.path / name).write_bytes(data[:-1] + b"x")
        with pytest.raises(ValueError, match="corrupted"):
            old.verify()
        (folder.path / name).write_bytes(data)


def test_damaged_tokenizer_configuration_is_named(tmp_path: Path, book: Path, tokenizer: Any) -> None:
    folder = prepare(tmp_path / "out", sources([str(book)]), tokenizer)
    file = folder.path / "tokenizer" / "tokenizer_config.json"
    file.write_text(file.read_text().replace(END, "the"))
    for check in (folder.verify, folder.tokenizer):
        with pytest.raises(ValueError, match=r"tokenizer_config.json is corrupted"):
            check()


# Rows


@pytest.fixture
def folder(tmp_path: Path, book: Path, tokenizer: Any) -> TokenFolder:
    """A prepared folder with several shards of short documents."""
    found = prepare(tmp_path / "out", sources([str(book)], "blank"), tokenizer, shard_tokens=3000)
    assert len(list(found.path.glob("train-*.bin"))) > 2
    return found


@pytest.mark.parametrize("length", [1, 7, 64, 5000])
def test_rows_are_the_tokens_across_shards(folder: TokenFolder, length: int) -> None:
    tokens = stored(folder, "train")
    rows = folder.rows("train", length)
    assert len(rows) == len(tokens) // length
    step = max(1, len(rows) // 50)
    for i in (*range(0, len(rows), step), len(rows) - 1):
        assert rows[i].keys() == {"input_ids"}
        assert rows[i]["input_ids"].dtype == torch.int64
        assert rows[i]["input_ids"].tolist() == tokens[i * length : (i + 1) * length].tolist()
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_separate_documents_have_positions_of_their_own(folder: TokenFolder) -> None:
    rows = folder.rows("train", 50, documents="separate")
    for i in range(len(rows)):
        row, expected, place = rows[i], [], 0
        for token in row["input_ids"].tolist():
            expected.append(place)
            place = 0 if token == folder.end_of_text else place + 1
        assert row["position_ids"].tolist() == expected


def test_rows_in_other_processes(folder: TokenFolder) -> None:
    rows = folder.rows("train", 32)
    first = rows[0]["input_ids"]
    assert len(pickle.dumps(rows)) < 10_000
    assert torch.equal(pickle.loads(pickle.dumps(rows))[0]["input_ids"], first)
    loaded = torch.cat([b["input_ids"] for b in DataLoader(rows, batch_size=4, num_workers=2)])
    assert torch.equal(loaded, torch.stack([rows[i]["input_ids"] for i in range(len(rows))]))


def test_more_shards_than_a_process_may_open(tmp_path: Path) -> None:
    files = {tmp_path / f"{i}.bin": 4 for i in range(5000)}
    for i, file in enumerate(files):
        np.arange(4 * i, 4 * i + 4, dtype="<u2").tofile(file)
    rows = TokenRows(files, "<u2", 5, None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        found = torch.cat([rows[i]["input_ids"] for i in range(len(rows))])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert torch.equal(found, torch.arange(20_000))


def test_rows_that_are_not_there(folder: TokenFolder) -> None:
    with pytest.raises(ValueError, match=r"validation split of .* not one row of 1000000; prepare with"):
        folder.rows("validation", 10**6)
    with pytest.raises(ValueError, match="split must be"):
        folder.rows("test", 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="documents must be"):
        folder.rows("train", 8, documents="apart")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length"):
        folder.rows("train", 0)


@pytest.mark.parametrize("mode", ["joined", "separate"])
def test_streamed_rows_are_those_of_shards(tmp_path: Path, tokenizer: Any, mode: Any) -> None:
    documents = [{"text": make_text(1 + seed % 5, seed)} for seed in range(60)]
    write_jsonl(tmp_path / "a.jsonl", [row["text"] for row in documents])
    hold_out = HoldOut(0.3)
    folder = prepare(tmp_path / "out", sources([str(tmp_path / "a.jsonl")]), tokenizer, hold_out)
    for split in ("train", "validation"):
        rows = folder.rows(split, 40, mode)  # type: ignore[arg-type]
        streamed = StreamedRows(documents, tokenizer, 40, mode, split=split, hold_out=hold_out)  # type: ignore[arg-type]
        for _ in range(2):  # a second pass starts at the beginning
            found = list(streamed)
            assert len(found) == len(rows)
            for i, row in enumerate(found):
                assert row.keys() == rows[i].keys()
                assert all(torch.equal(row[name], rows[i][name]) for name in row)


def test_streams_of_texts(tokenizer: Any) -> None:
    documents = [make_text(3, seed) for seed in range(10)]
    streamed = StreamedRows(documents, tokenizer, 16)
    tokens = torch.cat([row["input_ids"] for row in streamed]).tolist()
    expected = [t for d in documents for t in [*tokenizer(d)["input_ids"], tokenizer.eos_token_id]]
    assert tokens == expected[: len(tokens)] and len(expected) - len(tokens) < 16
    with pytest.raises(ValueError, match="'body'"):
        list(StreamedRows([{"text": "a"}], tokenizer, 16, column="body"))
