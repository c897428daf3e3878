"""Saved folders load with ``trust_remote_code`` in a process that has not imported deqseq."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
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
    return ImplicitConfig(vocab_size=9, backbone=backbone, **options)


# This process has imported everything but deqseq. It reads scripts, and runs each in a fork.
SERVER = """
import importlib.util, json, os, signal, sys
import torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import Trainer, pipeline
if importlib.util.find_spec("peft"):
    from peft import AutoPeftModelForCausalLM

for line in sys.stdin:
    script, arguments, output = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(300)
        sys.argv[1:] = arguments
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
        assert "deqseq" not in sys.modules
        exec(script, {"sys": sys, "__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """``run(script, *arguments)``: what a script prints in a process that has not imported deqseq.

    No script finds modules that an earlier script has copied to the cache of Hugging Face.
    """
    folder = tmp_path_factory.mktemp("server")
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", SERVER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(command, **pipes, stderr=errors, env=environment) as server,
    ):

        def run(script: str, *arguments: str) -> str:
            assert server.stdin is not None and server.stdout is not None
            shutil.rmtree(folder / "hf", ignore_errors=True)
            output = tmp_path_factory.mktemp("output") / "stdout"
            print(json.dumps([script, arguments, str(output)]), file=server.stdin, flush=True)
            status = server.stdout.readline().strip()
            assert status == "0", f"status {status}: {(folder / 'stderr').read_text()[-2000:]}"
            return output.read_text()

        yield run


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.tensor([[2, 3, 4, 5, 6], [4, 2, 7, 3, 2]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model and tokenizer for each key of ``MODELS``."""
    root = tmp_path_factory.mktemp("folders")
    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", *WORDS, "<eos>"])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )
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
def found(run: Run, folders: Path, tokens: Tensor) -> Any:
    """What ``LOAD`` prints for ``folders``, in a process that has not imported deqseq."""
    return json.loads(run(LOAD, str(folders), json.dumps([tokens.tolist(), PROMPTS])))


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


def test_adapters(run: Run, folders: Path, tokens: Tensor, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'deqseq[dev]'")
    torch.manual_seed(1)
    options = peft.LoraConfig(
        r=2, target_modules=["out_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(loaded(folders, "AutoModelForCausalLM"), options).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    found = json.loads(run(ADAPTER, str(tmp_path / "adapter"), json.dumps(tokens.tolist())))
    assert len(found) == 2
    for logits in found:
        torch.testing.assert_close(torch.tensor(logits), expected)


TRAIN = """
import json
import datasets, trl

folder, arguments, texts, pairs = json.loads(sys.argv[1])

def distinct_words(completions, **_):
    return [float(len(set(text.split()))) for text in completions]

generation = {"num_generations": 4, "max_completion_length": 6}
for name, rows, options, more in (
    ("SFT", [{"text": text} for text in texts], {"packing": True, "max_length": 16}, {}),
    ("DPO", pairs, {}, {}),
    ("Reward", pairs, {}, {}),
    ("GRPO", [{"prompt": text} for text in texts], generation, {"reward_funcs": distinct_words}),
):
    made = getattr(trl, f"{name}Config")(**arguments, **options)
    rows = datasets.Dataset.from_list(rows)
    trainer = getattr(trl, f"{name}Trainer")(folder, args=made, train_dataset=rows, **more)
    trainer.train()
    print("RAN", name, type(trainer.model).__name__, trainer.state.global_step)
"""


def test_trainers_of_trl(run: Run, folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'deqseq[dev]'")
    texts = [*PROMPTS, "cat sat on", "the mat"]
    pairs = [{"prompt": text, "chosen": " on a mat", "rejected": " cat the"} for text in texts]
    arguments = {
        "output_dir": str(tmp_path), "max_steps": 2, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "bf16": False, "disable_tqdm": True, "per_device_train_batch_size": 4, "trust_remote_code": True,
    }  # fmt: skip
    folder = str(folders / "AutoModelForCausalLM")
    printed = run(TRAIN, json.dumps([folder, arguments, texts, pairs]))
    assert [line.split()[1:] for line in printed.splitlines() if line.startswith("RAN")] == [
        ["SFT", "ImplicitForCausalLM", "2"], ["DPO", "ImplicitForCausalLM", "2"],
        ["Reward", "ImplicitForSequenceClassification", "2"], ["GRPO", "ImplicitForCausalLM", "2"],
    ]  # fmt: skip


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


def test_foreign_code_is_refused(run: Run, tmp_path: Path) -> None:
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
    said = json.loads(run(FOREIGN, str(folder)))
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
