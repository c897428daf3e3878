"""The program that continues a prompt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.tasks.generate import SHADES, main, shade_of

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a small implicit model and its tokenizer."""
    plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", *WORDS])}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>").save_pretrained(tmp_path / "m")
    backbone = {"name": "llama", "d_model": 16, "n_layer": 1, "n_head": 2}
    for name, implicit in (("m", True), ("explicit", False)):
        config = ImplicitConfig(vocab_size=9, backbone=backbone, implicit=implicit, initializer_range=0.5)
        ImplicitForCausalLM(config).save_pretrained(tmp_path / name)
    return str(tmp_path / "m")


def test_text_streams(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model, "the cat", "--max-new-tokens", "5"]) == 0
    said = capsys.readouterr().out.strip()
    ids = AutoTokenizer.from_pretrained(model)("the cat", return_tensors="pt").input_ids
    out = AutoModelForCausalLM.from_pretrained(model).generate(ids, max_new_tokens=5, do_sample=False)
    assert said == AutoTokenizer.from_pretrained(model).decode(out[0])


def test_iterations_are_shown(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "plots" / "iterations.png"
    arguments = ["--max-new-tokens", "4", "--rtol", "1e-4", "--max-iter", "7", "--initial-guess", "previous"]
    assert main([model, "the cat sat", *arguments, "--show-iterations", "--plot", str(png)]) == 0
    said = capsys.readouterr().out
    # Three tokens of the prompt and three of the four new ones are solved; the last is only chosen.
    assert len(re.findall(r"\x1b\[38;5;\d+m", said)) == 6
    assert "6 tokens solved" in said and int(re.search(r"most (\d+)", said)[1]) <= 7
    assert png.read_bytes().startswith(b"\x89PNG")


def test_shades() -> None:
    assert shade_of(1, 32) == SHADES[0] and shade_of(32, 32) == SHADES[-1]
    assert [SHADES.index(shade_of(n, 100)) for n in range(1, 100)] == sorted(
        SHADES.index(shade_of(n, 100)) for n in range(1, 100)
    )


def test_sampling_is_seeded(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for seed in ("1", "1", "2", "3", "4"):
        main([model, "the", "--temperature", "1.5", "--seed", seed, "--max-new-tokens", "12"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and len(set(said)) > 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{model}/nowhere", "the"], "nowhere"),
        (["{model}", ""], "no tokens"),
        (["{model}", "the", "--rtol", "-1"], "-1"),
        (["{model}/../explicit", "the", "--tokenizer", "{model}", "--show-iterations"], "explicit"),
    ],
)
def test_wrong_input(model: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([a.format(model=model) for a in arguments]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([model, "the", "--max-new-tokens", "0"])
    assert torch.is_grad_enabled()
