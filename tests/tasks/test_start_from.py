"""Runs start from the models of runs with other forms, or refuse and say what to do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from deqseq import FixedIterations, SolveOptions
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.tasks.pretraining.data import open_data
from deqseq.tasks.pretraining.run_files import load_run
from deqseq.tasks.pretraining.settings import RunSettings
from deqseq.tasks.pretraining.start import make_model
from deqseq.tasks.pretraining.train import check_start

LLAMA = {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 2}
MAMBA2 = {"name": "mamba2", "d_model": 16, "n_layer": 2, "d_state": 4, "headdim": 8, "chunk_size": 8}
FORMS = ("injected", "explicit", "bounded", "free", "growth")
IDS = torch.arange(24).view(2, 12)


def settings(form: str, data: Path, backbone: dict[str, Any] = LLAMA, **changes: Any) -> RunSettings:
    """A small run of a form. *bounded* has only the first stage of llama-tiny, *free* only the last."""
    name = f"llama-tiny-{form}" if form in ("injected", "explicit", "growth") else "llama-tiny"
    run = load_run(name)
    if form in ("bounded", "free"):
        assert run.stages is not None
        changes["stages"] = [{**run.stages[0 if form == "bounded" else -1], "until": 1.0}]
    model = {**run.model, "backbone": backbone, "vocab_size": 300}  # type: ignore[dict-item]
    if form == "injected":
        model["backbone"] = {**backbone, "injection": True}
    return load_run(name, {"model": model, "data": str(data), "length": 16, "batch_tokens": 64, **changes})


def made(form: str, data: Path, **options: Any) -> ImplicitForCausalLM:
    run = settings(form, data, **options)
    return make_model(run, open_data(run))


def logits(model: ImplicitForCausalLM, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(IDS, **options).logits
    return found


@pytest.mark.parametrize("start", FORMS)
def test_every_form_starts_from_every_form(start: str, token_folder: Path, tmp_path: Path) -> None:
    source = made(start, token_folder, seed=1)
    source.save_pretrained(tmp_path)
    for form in FORMS:
        if (start == "explicit") == (form == "explicit"):
            weights = made(form, token_folder, start_from=str(tmp_path)).state_dict()
            assert weights.keys() == source.state_dict().keys()
            for name, weight in source.state_dict().items():
                assert torch.equal(weight, weights[name]), (form, name)
            continue
        with pytest.raises(ValueError) as error:
            made(form, token_folder, start_from=str(tmp_path))
        advice = "input_skip true" if start == "explicit" else "the injected form"
        assert advice in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("backbone", [LLAMA, MAMBA2], ids=["llama", "mamba2"])
@pytest.mark.parametrize("form", ["injected", "bounded", "free", "growth"])
def test_from_an_explicit_model_with_an_injection_of_zero(
    form: str, backbone: dict[str, Any], token_folder: Path, tmp_path: Path
) -> None:
    """With ``input_skip``, the model computes what the explicit model computes, and its injection trains."""
    source = made("explicit", token_folder, backbone=backbone, seed=1)
    source.save_pretrained(tmp_path)
    skipping = {**backbone, "input_skip": True}
    model = made(form, token_folder, backbone=skipping, start_from=str(tmp_path))
    solve = {} if form == "injected" else {"solve": SolveOptions(convergence=FixedIterations(2))}
    torch.testing.assert_close(logits(model, **solve), logits(source), atol=1e-5, rtol=0)
    assert not source.model.layer.backbone.injects and model.model.layer.backbone.injects
    model.train()(IDS, labels=IDS).loss.backward()
    linear: Any = model.model.layer.backbone.injection.linear  # type: ignore[union-attr]
    for weight in (linear.bias, linear.parametrizations.weight.original0):
        assert not weight.any() and weight.grad.any()


def test_the_input_skip_must_be_equal(token_folder: Path, tmp_path: Path) -> None:
    made("free", token_folder).save_pretrained(tmp_path / "without")
    skipping = {**LLAMA, "input_skip": True}
    made("free", token_folder, backbone=skipping).save_pretrained(tmp_path / "with")
    with pytest.raises(ValueError, match=r"set --model\.backbone\.input_skip false"):
        made("injected", token_folder, backbone=skipping, start_from=str(tmp_path / "without"))
    with pytest.raises(ValueError, match=r"set --model\.backbone\.input_skip true"):
        made("growth", token_folder, start_from=str(tmp_path / "with"))


def test_sharded_checkpoints_follow_the_same_rules(token_folder: Path, tmp_path: Path) -> None:
    for form in ("explicit", "injected"):
        source = made(form, token_folder, seed=1)
        source.config.save_pretrained(tmp_path / form)
        save({"model": source.state_dict()}, checkpoint_id=tmp_path / form / "shards", no_dist=True)
        same = made(form, token_folder, start_from=str(tmp_path / form))
        torch.testing.assert_close(logits(same), logits(source), atol=0, rtol=0)
    with pytest.raises(ValueError, match=r"input_skip true"):
        made("growth", token_folder, start_from=str(tmp_path / "explicit"))
    with pytest.raises(ValueError, match="the injected form"):
        made("explicit", token_folder, start_from=str(tmp_path / "injected"))
    skipping = {**LLAMA, "input_skip": True}
    model = made("injected", token_folder, backbone=skipping, start_from=str(tmp_path / "explicit"))
    explicit = made("explicit", token_folder, start_from=str(tmp_path / "explicit"))
    torch.testing.assert_close(logits(model), logits(explicit), atol=1e-5, rtol=0)


def test_a_model_with_another_tokenizer_is_refused(token_folder: Path, tmp_path: Path) -> None:
    made("injected", token_folder).save_pretrained(tmp_path)
    open_data(settings("injected", token_folder)).tokenizer.save_pretrained(tmp_path)
    run = settings("injected", token_folder, start_from=str(tmp_path), report_to="none")
    check_start(run, None, open_data(run))
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    known = tokenizer["model"]["vocab"]
    known["a"], known["b"] = known["b"], known["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(
        ValueError,
        match=r"another tokenizer than the data: token \d+ is 'b' in the model and 'a' in the data",
    ):
        check_start(run, None, open_data(run))
    check_start(run, Path("checkpoint-1"), open_data(run))  # a run that resumes does not start from a model
    file.write_text("{")
    with pytest.raises(ValueError, match=r"cannot be loaded.*copy it again") as error:
        check_start(run, None, open_data(run))
    assert "--tokenizer" not in str(error.value)


def test_the_data_may_have_more_tokens_up_to_the_models_embeddings(
    token_folder: Path, tmp_path: Path
) -> None:
    made("injected", token_folder).save_pretrained(tmp_path)  # with 300 embeddings
    run = settings("injected", token_folder, start_from=str(tmp_path), report_to="none")
    data = open_data(run)
    form = json.loads(data.tokenizer.backend_tokenizer.to_str())
    known = form["model"]["vocab"]
    del known[max(known, key=known.__getitem__)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(form))
    check_start(run, None, data)
    make_model(run, data)
    narrow = {**run.model, "vocab_size": data.vocab_size - 1}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"the data's tokenizer has 257 tokens, the model 256"):
        make_model(replace(run, model=narrow), data)
    with pytest.raises(ValueError, match="cannot be loaded"):  # 300 embeddings do not fit a run with 257
        make_model(replace(run, model={**narrow, "vocab_size": data.vocab_size}), data)
