"""The commands of docs/serving.md run as printed. 16 clients at once get the same tokens as one by one."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-vllm")
openai = pytest.importorskip("openai", reason="openai is not installed: pip install 'deqseq[vllm]'")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from deqseq.backbone import Backbone  # noqa: E402
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
OFFLINE, CLIENT = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(SERVER,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
ENVIRONMENT = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
MAMBA2 = {"name": "mamba2", "d_model": 32, "n_layer": 1, "d_state": 8, "headdim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture
def model(folder: Path, contractive: Callable[[Backbone], Backbone]) -> ImplicitForCausalLM:
    """A model with a tokenizer whose tokens are bytes, saved in ``folder / "model"``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    policy = {"name": "residual", "rtol": 1e-6, "max_iter": 256}
    model = ImplicitForCausalLM(ImplicitConfig(vocab_size=256, backbone=MAMBA2, eval_convergence=policy))
    contractive(model.model.layer.backbone)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(25)
    model.save_pretrained(folder / "model")
    return model.eval()


@pytest.fixture
def server(folder: Path, model: ImplicitForCausalLM) -> Iterator[str]:
    """Run the server of docs/serving.md on a free port. The value of the fixture is the server's address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [*shlex.split(SERVER), "--port", str(port), "--max-model-len", "256", "--max-num-seqs", "4"]
    assert command[0] == "python"
    log = (folder / "log").open("w")
    (folder / "metrics").mkdir()
    environment = {**ENVIRONMENT, "PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")}
    process = subprocess.Popen(
        [sys.executable, *command[1:]], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                time.sleep(1)
        else:
            pytest.fail("the server did not start in ten minutes")
        yield f"http://localhost:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.mark.usefixtures("model")
def test_offline(folder: Path) -> None:
    (folder / "offline.py").write_text(OFFLINE)
    done = subprocess.run(
        [sys.executable, "offline.py"], cwd=folder, env=ENVIRONMENT, capture_output=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert b"Once upon a time" in done.stdout and b"The end" in done.stdout


def test_sixteen_clients(model: ImplicitForCausalLM, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    client = openai.OpenAI(base_url=server, api_key="none")
    prompts = [torch.randint(0, 256, (3 + 2 * i,)).tolist() for i in range(16)]

    def ask(prompt: list[int]) -> list[int]:
        options = {"return_token_ids": True, "ignore_eos": True}
        answer = client.completions.create(
            model="model", prompt=prompt, max_tokens=12, temperature=0, extra_body=options
        )
        return answer.choices[0].token_ids  # type: ignore[no-any-return]

    with ThreadPoolExecutor(16) as clients:
        together = list(clients.map(ask, prompts))
    alone = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert together == alone
    metrics = urllib.request.urlopen(server.removesuffix("v1") + "metrics").read().decode()
    found = {
        name: float(value)
        for name, value in re.findall(
            r'^deqseq:(\w+)_total{model_name="model"} (\S+)$', metrics, re.MULTILINE
        )
    }
    assert found.keys() == {"steps", "evaluations", "tokens", "token_evaluations", "unconverged_tokens"}
    assert found["tokens"] == sum(map(len, prompts)) + 11 * len(prompts)  # the last token is not read
    assert found["evaluations"] > found["steps"] and found["unconverged_tokens"] == 0
    assert "vllm:generation_tokens_total" in metrics
    exec(CLIENT.replace("http://localhost:8000/v1", server), {})
    assert capsys.readouterr().out
