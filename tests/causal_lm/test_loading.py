"""Saved folders load with ``trust_remote_code`` in a process that has not imported deqseq."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    configuration_utils,
    modeling_utils,
    pipeline,
)
from transformers.utils import hub

from deqseq.causal_lm import (
    ImplicitConfig,
    ImplicitForCausalLM,
    ImplicitForSequenceClassification,
    ImplicitModel,
    ImplicitPreTrainedModel,
)

WORDS = ["the", "cat", "sat", "on", "a", "mat"]
MODULE = "modeling_deqseq.py"
MODELS = {
    "AutoModel": ImplicitModel,
    "AutoModelForCausalLM": ImplicitForCausalLM,
    "AutoModelForSequenceClassification": ImplicitForSequenceClassification,
}
PROMPTS = ["the cat", "a mat on the"]


def config(**options: Any) -> ImplicitConfig:
    options = {"num_labels": 3, "pad_token_id": 0, "initializer_range": 0.5, **options}
    backbone = {"name": "mamba2", "d_model": 16, "n_layer": 1, "d_state": 8, "headdim": 8}
    return ImplicitConfig(vocab_size=8, backbone=backbone, **options)


def run(script: str, *arguments: str, cache: Path) -> Any:
    """Run a script in a new process that has not imported deqseq. Returns what the script prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys\nassert 'deqseq' not in sys.modules\n{script}", *arguments],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.tensor([[2, 3, 4, 5, 6], [4, 2, 7, 3, 2]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model and tokenizer for each key of ``MODELS``."""
    root = tmp_path_factory.mktemp("folders")
    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>")
    kind: Any
    for auto, kind in MODELS.items():
        kind(config()).save_pretrained(root / auto)
        tokenizer.save_pretrained(root / auto)
    return root


def loaded(root: Path, auto: str) -> Any:
    return MODELS[auto].from_pretrained(root / auto).eval()


LOAD = """
import json
from pathlib import Path
import torch, transformers

root = Path(sys.argv[1])
tokens, prompts = json.loads(sys.argv[2])
found = {"types": {}, "outputs": {}}
for auto in ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"):
    folder = root / auto
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    found["types"][auto] = [f"{type(x).__module__}.{type(x).__name__}" for x in (config, model)]
    with torch.no_grad():
        found["outputs"][auto] = model(torch.tensor(tokens))[0].tolist()
    model.save_pretrained(root / "again" / auto)
options = {"device": "cpu", "trust_remote_code": True}
generate = transformers.pipeline("text-generation", model=str(root / "AutoModelForCausalLM"), **options)
found["texts"] = [generate(p, max_new_tokens=4, do_sample=False)[0]["generated_text"] for p in prompts]
name = "AutoModelForSequenceClassification"
classify = transformers.pipeline("text-classification", model=str(root / name), **options)
found["labels"] = [classify(p)[0]["score"] for p in prompts]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(folders: Path, tokens: Tensor) -> Any:
    """What ``LOAD`` prints for ``folders``, in a process that has not imported deqseq."""
    return run(LOAD, str(folders), json.dumps([tokens.tolist(), PROMPTS]), cache=folders / "hf")


def test_auto_classes(found: Any, folders: Path, tokens: Tensor) -> None:
    for auto, kind in MODELS.items():
        names = ["deqseq.causal_lm.configuration.ImplicitConfig", f"{kind.__module__}.{kind.__name__}"]
        assert found["types"][auto] == names
        with torch.no_grad():
            expected = loaded(folders, auto)(tokens)[0]
        torch.testing.assert_close(torch.tensor(found["outputs"][auto]), expected)


def test_pipelines(found: Any, folders: Path) -> None:
    answer = pipeline("text-generation", model=str(folders / "AutoModelForCausalLM"), device="cpu")
    expected = [answer(p, max_new_tokens=4, do_sample=False)[0]["generated_text"] for p in PROMPTS]
    assert found["texts"] == expected
    folder = str(folders / "AutoModelForSequenceClassification")
    classify = pipeline("text-classification", model=folder, device="cpu")
    assert found["labels"] == pytest.approx([classify(p)[0]["score"] for p in PROMPTS], rel=1e-5)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("auto", MODELS)
def test_saved_again(folders: Path, auto: str) -> None:
    """The second save writes the same module and ``auto_map``, and no file of this package."""
    folder, again = folders / auto, folders / "again" / auto
    assert {p.suffix for p in again.iterdir()} == {".json", ".safetensors", ".py"}
    assert [p.name for p in again.glob("*.py")] == [MODULE]
    assert (again / MODULE).read_text() == (folder / MODULE).read_text()
    maps = [json.loads((each / "config.json").read_text())["auto_map"] for each in (folder, again)]
    assert maps[0] == maps[1] and set(maps[0]) == {"AutoConfig", *MODELS}


def test_checkpoints_of_the_trainer(tmp_path: Path, tokens: Tensor) -> None:
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
    Trainer(ImplicitForCausalLM(config()), arguments, train_dataset=rows).train()
    assert (tmp_path / "checkpoint-1" / MODULE).is_file()


ADAPTER = """
import json
import torch
from transformers import AutoModelForCausalLM
from peft import AutoPeftModelForCausalLM

tokens = torch.tensor(json.loads(sys.argv[2]))
found = []
for kind in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
    model = kind.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
    with torch.no_grad():
        found.append(model(input_ids=tokens).logits.tolist())
print(json.dumps(found))
"""


def test_adapters(folders: Path, tokens: Tensor, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'deqseq[dev]'")
    torch.manual_seed(1)
    options = peft.LoraConfig(
        r=2, target_modules=["out_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(loaded(folders, "AutoModelForCausalLM"), options).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    for logits in run(ADAPTER, str(tmp_path / "adapter"), json.dumps(tokens.tolist()), cache=tmp_path / "hf"):
        torch.testing.assert_close(torch.tensor(logits), expected)


PUSHES: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda saved, folder: saved.save_pretrained(folder, push_to_hub=True, repo_id="me/model"),
    "push": lambda saved, folder: saved.push_to_hub("me/model"),
}


@pytest.mark.parametrize("what", ["config", "model"])
@pytest.mark.parametrize("push", PUSHES.values(), ids=PUSHES)
def test_pushing_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, push: Callable[[Any, Path], Any], what: str
) -> None:
    uploaded: set[str] = set()

    class Api:
        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return type("Repository", (), {"repo_id": repo_id})

    def upload(
        self: Any, folder: Any, repo_id: str, files_timestamps: dict[str, float], **_: Any
    ) -> None:  # fmt: skip
        assert repo_id == "me/model"
        uploaded.update(set(os.listdir(folder)) - set(files_timestamps))

    # Without this line, transformers would look for a model card on the hub, and try again for a long time.
    monkeypatch.setattr("huggingface_hub.ModelCard.load", lambda *_, **__: ModelCard(""))
    for module in (configuration_utils, modeling_utils, hub):
        monkeypatch.setattr(module, "hf_api", Api)
    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    push({"config": config(), "model": ImplicitModel(config())}[what], tmp_path / "saved")
    assert uploaded >= {"config.json", MODULE}


FOREIGN = """
import json
from transformers import AutoConfig, AutoModelForCausalLM

said = []
for kind in (AutoConfig, AutoModelForCausalLM):
    try:
        kind.from_pretrained(sys.argv[1], trust_remote_code=False)
    except ValueError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_foreign_code_is_refused(folders: Path, tmp_path: Path) -> None:
    """Foreign code in ``auto_map`` needs ``trust_remote_code``. It never runs once deqseq is imported."""
    folder = tmp_path / "foreign"
    ImplicitForCausalLM(config()).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {
        auto: f"foreign.{name.partition('.')[2]}" for auto, name in settings["auto_map"].items()
    }
    (folder / "config.json").write_text(json.dumps(settings))
    ran = folder / "ran"
    (folder / "foreign.py").write_text(f"open({str(ran)!r}, 'w')\n{(folder / MODULE).read_text()}")
    said = run(FOREIGN, str(folder), cache=tmp_path / "hf")
    assert len(said) == 2 and all("trust_remote_code=True" in each for each in said)
    for trust in (None, True):
        assert type(AutoConfig.from_pretrained(folder, trust_remote_code=trust)) is ImplicitConfig
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        assert type(model) is ImplicitForCausalLM
    assert not ran.exists()


def test_derived_classes_keep_their_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``register_for_auto_class`` saves the file of a class that is derived from ours."""
    (tmp_path / "modeling_mine.py").write_text(
        "from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM\n"
        "class MyConfig(ImplicitConfig): pass\n"
        "class MyModel(ImplicitForCausalLM):\n"
        "    config_class = MyConfig\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import modeling_mine  # type: ignore[import-not-found]

    modeling_mine.MyConfig.register_for_auto_class()
    modeling_mine.MyModel.register_for_auto_class("AutoModelForCausalLM")
    model: ImplicitPreTrainedModel = modeling_mine.MyModel(modeling_mine.MyConfig(**config().to_dict()))
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    assert saved["AutoConfig"] == "modeling_mine.MyConfig"
    assert saved["AutoModelForCausalLM"] == "modeling_mine.MyModel"
    assert saved["AutoModel"] == "modeling_deqseq.ImplicitModel"
    assert (tmp_path / "saved" / "modeling_mine.py").is_file()
    assert modeling_mine.MyConfig.from_pretrained(tmp_path / "saved").auto_map == saved
