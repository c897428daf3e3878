"""Tests of the program that generates text."""

import ast
import io
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.tasks.generate import SHADES, _SolvedStreamer, in_colour, legend, main, shade_of

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a small implicit model and its tokenizer.

    Beside this folder, the folder ``explicit`` has an explicit model without a tokenizer.
    """
    saved_model(tmp_path / "explicit", ["<unk>", *WORDS], implicit=False, tokenizer=False)
    return saved_model(tmp_path / "m", ["<unk>", *WORDS])


def saved_model(folder: Path, words: list[str], implicit: bool = True, tokenizer: bool = True) -> str:
    """Save a small model with the vocabulary ``words``, by default with a tokenizer. Returns the folder."""
    if tokenizer:
        plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
        plain.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=plain, unk_token=words[0]).save_pretrained(folder)
    backbone = {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2}
    config = ImplicitConfig(
        vocab_size=len(words), backbone=backbone, implicit=implicit, initializer_range=0.5
    )
    ImplicitForCausalLM(config).save_pretrained(folder)
    return str(folder)


def character_tokenizer(folder: Path) -> str:
    """Write a tokenizer.json that keeps line breaks, with one token per character. Returns the path."""
    plain = Tokenizer(models.WordLevel({c: i for i, c in enumerate("cat\n?onme")}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.save(str(folder / "characters.json"))
    return str(folder / "characters.json")


def test_text_streams(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model, "the cat", "--max-new-tokens", "5"]) == 0
    said = capsys.readouterr().out.strip()
    ids = AutoTokenizer.from_pretrained(model)("the cat", return_tensors="pt").input_ids
    out = AutoModelForCausalLM.from_pretrained(model).generate(ids, max_new_tokens=5, do_sample=False)
    assert said == AutoTokenizer.from_pretrained(model).decode(out[0])


def test_the_folder_of_a_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program also accepts the folder of a pretraining run, and uses the model in this folder."""
    shutil.copytree(model, tmp_path / "run" / "model")
    for folder in (model, str(tmp_path / "run")):
        assert main([folder, "the cat", "--max-new-tokens", "5"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and said[0] == said[1]


def test_a_prompt_from_a_pipe(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-new-tokens", "2", "--tokenizer", character_tokenizer(Path(model).parent)]
    (Path(model) / "tokenizer.json").unlink()  # of words, without line breaks
    said = []
    for piped in ("cat\n", "cat\n\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        assert main([model, *options]) == 0
        said.append(capsys.readouterr().out)
    # The program removes one line break from the end of a piped prompt, because ``echo`` adds a line break.
    for given in ("cat", "cat\n"):
        assert main([model, given, *options]) == 0
        assert said.pop(0) == capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\udcff"))  # a byte that is not UTF-8
    assert main([model, *options]) == 2
    assert "the prompt must be UTF-8" in capsys.readouterr().err


SHOW = ["--max-new-tokens", "4", "--rtol", "1e-4", "--max-iter", "7", "--show-iterations"]


def test_iterations_are_coloured_on_a_terminal(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main([model, "the cat sat", *SHOW, "--guess", "previous"]) == 0
    shades, *text, summary = capsys.readouterr().out.strip().splitlines()
    assert shades == legend(7)
    # Three prompt tokens and three of the four new tokens are solved. The last new token is never an input.
    assert len(re.findall(r"\x1b\[38;5;\d+m", "\n".join(text))) == 6
    assert "6 tokens solved" in summary and int(re.search(r"most (\d+)", summary)[1]) <= 7


@pytest.mark.parametrize("terminal", [True, False])
def test_iterations_without_colour_are_one_line_a_token(
    model: str, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", "1" if terminal else "")
    assert main([model, "the cat sat", *SHOW]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    rows = [line.split(maxsplit=1) for line in said.splitlines()[1:8]]
    assert all(1 <= int(iterations) <= 7 for iterations, _ in rows[:-1]) and rows[-1][0] == "-"
    assert main([model, "the cat sat", "--max-new-tokens", "4", "--rtol", "1e-4", "--max-iter", "7"]) == 0
    assert "".join(ast.literal_eval(text) for _, text in rows) == capsys.readouterr().out.rstrip("\n")


def test_a_character_of_several_tokens_is_printed_when_it_is_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Bytes:
        def decode(self, tokens: list[int]) -> str:
            return bytes(tokens).decode(errors="replace")

    watch = SimpleNamespace(iterations=[3] * 5)
    streamer = _SolvedStreamer(Bytes(), watch, lambda text, _: f"[{text}]")
    streamer.put(torch.tensor([list("aé€b".encode())[:3]]))
    streamer.put(torch.tensor(list("aé€b".encode())[3:]))
    streamer.end()
    assert capsys.readouterr().out == "[a][][é][][][€][b]\n"


def test_a_figure_of_iterations(model: str, tmp_path: Path, rendered_figures: Callable[[Path], bool]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'deqseq[plots]'")
    png = tmp_path / "iterations.png"
    for length in ("4", "80"):  # a short output, whose plot shows the tokens' text, and a long one
        assert main([model, "the cat", "--max-new-tokens", length, "--plot", str(png)]) == 0
        assert rendered_figures(png)
        png.unlink()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("text.txt/x.png", "is not a folder"),
        ("folder.png", "is a folder, and this command writes a file"),
        ("x.pdf", "must end in .png"),
        ("x", "must end in .png"),
    ],
)
def test_where_no_figure_can_be_is_found_first(
    path: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("precious")
    (tmp_path / "folder.png").mkdir()
    assert main(["no_model", "the", "--plot", str(tmp_path / path)]) == 2
    assert said in capsys.readouterr().err
    assert {file.name for file in tmp_path.rglob("*")} == {"text.txt", "folder.png"}


def test_line_breaks_have_a_colour() -> None:
    assert re.fullmatch(r"\x1b\[38;5;\d+m⏎\n\x1b\[0m", in_colour("\n", 5, 32))
    assert in_colour("\n", None, 32) == "\n"


def test_shades() -> None:
    assert shade_of(1, 32) == SHADES[0] and shade_of(32, 32) == SHADES[-1]
    assert [SHADES.index(shade_of(n, 100)) for n in range(1, 100)] == sorted(
        SHADES.index(shade_of(n, 100)) for n in range(1, 100)
    )


@pytest.mark.parametrize("budget", [1, 2, 7, 32, 256])
def test_the_legend_names_every_number_of_iterations_in_its_shade(budget: int) -> None:
    named = {}
    for shade, first, last in re.findall(r"\x1b\[38;5;(\d+)m(\d+)(?:-(\d+))?", legend(budget)):
        named |= dict.fromkeys(range(int(first), int(last or first) + 1), int(shade))
    assert named == {n: shade_of(n, budget) for n in range(1, budget + 1)}


def test_sampling_is_seeded(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for seed in ("1", "1", "2", "3", "4"):
        main([model, "the", "--temperature", "1.5", "--seed", seed, "--max-new-tokens", "12"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and len(set(said)) > 1


def test_the_lowest_temperature_takes_the_likeliest_token(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for temperature in ("0", "1e-30"):
        assert main([model, "the", "--temperature", temperature, "--max-new-tokens", "8"]) == 0
    greedy, lowest = capsys.readouterr().out.splitlines()
    assert greedy == lowest


def test_sampling_is_from_all_tokens_or_the_likeliest_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"w{i}" for i in range(200)]
    folder = saved_model(tmp_path / "wide", words, implicit=False)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    ranks = {}
    for share in ("1", "0.5"):  # at temperature 1e6 all tokens are about equally likely
        options = ["--temperature", "1e6", "--top-p", share, "--max-new-tokens", "40"]
        assert main([folder, "w0", *options]) == 0
        ids = torch.tensor([[words.index(word) for word in capsys.readouterr().out.split()]])
        with torch.no_grad():
            logits = loaded(ids).logits[0, :-1]
        ranks[share] = (logits > logits.gather(1, ids[0, 1:, None])).sum(1)
    assert len(ranks["1"]) == 40 and ranks["1"].max() > 150
    assert 50 < ranks["0.5"].max() < 105


def test_a_tokenizer_may_know_more_than_the_model_but_not_say_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = ["--tokenizer", saved_model(tmp_path / "wide", ["<unk>", *WORDS, "dog"]), "--max-new-tokens", "2"]
    assert main([model, "the cat", *wide]) == 0
    assert main([model, "the dog", *wide]) == 2
    assert "token 9 is outside the model's vocabulary of 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{model}/nowhere", "the"], "nowhere"),
        (["{model}", ""], "no tokens"),
        (["{model}", "the", "--device", "meta"], "the device meta cannot be used: "),
        (["{model}", "the", "--device", "hpu"], "the device hpu cannot be used: "),
        (["{model}/../explicit", "the"], "name one with --tokenizer PATH"),
        (["{model}/../explicit", "the", "--tokenizer", "{model}", "--rtol", "0.1"], "is explicit"),
        (["{model}/../explicit", "the", "--tokenizer", "{model}", "--show-iterations"], "explicit"),
    ],
)
def test_wrong_input(model: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([a.format(model=model) for a in arguments]) == 2
    assert said in capsys.readouterr().err
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens must be a whole number >= 1"),
        (["--rtol", "-1"], "rtol must be a positive, finite number"),
        (["--temperature", "-1"], "temperature must be a finite number >= 0"),
        (["--seed", "99999999999999999999"], "seed must be a whole number in [0, 2**32), got 9999"),
        (["--temperature", "nan"], "temperature must be a finite number >= 0"),
        (["--temperature", "inf"], "temperature must be a finite number >= 0"),
        (["--temperature", "1e-40"], "--temperature must be 0 or at least 1e-30, got 1e-40"),
        (["--temperature", "1", "--top-p", "nan"], "top_p"),
        (["--temperature", "1", "--top-p", "1.5"], "--top-p must be in (0, 1]"),
        (["--top-p", "0.5"], "--top-p is for sampling only: also give a --temperature"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere", "the", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
