"""vLLM generates the same tokens as ``ImplicitForCausalLM.generate``.

``make test-vllm`` runs these tests, in an environment of their own.
"""

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine runs in the process of the tests
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
vllm = pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-vllm")

from prometheus_client import REGISTRY  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

from deqseq.backbone import Backbone  # noqa: E402
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM  # noqa: E402

LLAMA = {"name": "llama", "d_model": 64, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "d_inner": 96}
MAMBA2 = {"name": "mamba2", "d_model": 64, "n_layer": 2, "d_state": 16, "headdim": 16}
MEMORY = {"name": "memory", "d_model": 64}  # in tests/extensions
TIGHT = {"name": "residual", "rtol": 1e-6, "max_iter": 256}
VOCABULARY = 259
Prompts = list[list[int]]
MakeModel = Callable[..., str]


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """``make_model(backbone, contract, **settings)``: saves a model and returns its folder.

    The weights are random, and ``contract`` makes f a contraction. The model generates many different tokens.
    """
    made: dict[str, str] = {}

    def make(backbone: dict[str, Any], contract: Callable[[Backbone], Any], **settings: Any) -> str:
        key = repr((backbone, settings))
        if key not in made:
            torch.manual_seed(0)
            settings = {"vocab_size": VOCABULARY, "tie_word_embeddings": False, **settings}
            config = ImplicitConfig(backbone=backbone, eval_convergence=TIGHT, **settings)
            model = ImplicitForCausalLM(config)
            contract(model.model.layer.backbone)
            with torch.no_grad():
                model.model.embed_tokens.weight.mul_(25)
                model.lm_head.weight.mul_(25)
                for name, parameter in model.named_parameters():
                    if "injection.linear" in name and name.endswith(("original0", "linear.weight")):
                        parameter.mul_(3)  # tokens then differ more
                    if name.endswith("gain"):
                        parameter.fill_(0.3)
            made[key] = str(tmp_path_factory.mktemp("model"))
            model.save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture
def model(make_model: MakeModel, contractive: Callable[[Backbone], Backbone]) -> MakeModel:
    return lambda backbone, **settings: make_model(backbone, contractive, **settings)


def make_prompts(*lengths: int) -> Prompts:
    return [torch.randint(0, VOCABULARY, (length,)).tolist() for length in lengths]


def expected(folder: str, prompts: Prompts, new: int = 16, **settings: Any) -> list[list[int]]:
    """The tokens that the model generates without vLLM, for each prompt alone."""
    model = ImplicitForCausalLM.from_pretrained(folder, **settings).eval()
    rows = [
        model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=None)[0]
        for ids in prompts
    ]
    found = [row[len(ids) :].tolist() for row, ids in zip(rows, prompts, strict=True)]
    assert len({token for row in found for token in row}) >= new // 2  # not one token again and again
    return found


class Engine:
    """vLLM with a model. ``settings`` override the model's configuration."""

    def __init__(self, folder: str, settings: dict[str, Any] | None = None, **options: Any) -> None:
        defaults = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 4}
        self.llm = vllm.LLM(
            folder, skip_tokenizer_init=True, dtype="float32", max_model_len=256, disable_log_stats=False,
            hf_overrides=settings or {}, **{**defaults, **options},
        )  # fmt: skip

    def __call__(self, prompts: Prompts, new: int = 16) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return [list(r.outputs[0].token_ids) for r in self.llm.generate(requests, sampling, use_tqdm=False)]

    def count(self, name: str) -> float:
        """The value of vLLM's counter ``name``."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}")


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """``engine(folder, settings, **options)``: an :class:`Engine`, removed after the test."""
    yield Engine
    gc.collect()
    cleanup_dist_env_and_memory()


LENGTHS = (1, 3, 10, 17, 24, 31, 38, 45)
"""Lengths of the prompts. There are more prompts than the engine runs at once (4)."""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"solver": "anderson"},
        {"solver": "broyden"},
        {"eval_convergence": {"name": "fixed", "iterations": 3}, "guess": "input"},
        {"eval_convergence": {"name": "residual", "rtol": 0.5}},
        {"eval_convergence": {"name": "residual", "rtol": 0.5, "scope": "sequence"}, "guess": "noise"},
    ],
    ids=["picard", "anderson", "broyden", "fixed-input", "loose", "sequence-noise"],
)
@pytest.mark.usefixtures("extensions")
def test_llama(model: MakeModel, engine: Callable[..., Engine], settings: dict[str, Any]) -> None:
    folder, prompts = model(LLAMA), make_prompts(*LENGTHS)
    assert engine(folder, settings)(prompts) == expected(folder, prompts, **settings)


def test_settled_requests_leave(
    model: MakeModel, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If settled requests leave the batch, f is evaluated for fewer tokens, and the results are the same."""
    monkeypatch.setattr("deqseq.compact.SHARE", 1e-9)  # every request leaves at once
    folder, prompts = model(LLAMA), make_prompts(*LENGTHS)
    served, sizes = engine(folder), list[int]()

    def count(model: Any) -> None:
        linear = model.evaluation.layers[0].qkv_proj
        linear.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))

    served.llm.apply_model(count)
    found, evaluated = {}, {}
    for compact in (True, False):
        sizes.clear()
        served.llm.apply_model(lambda model, compact=compact: setattr(model, "compact", compact))
        found[compact], evaluated[compact] = served(prompts), sum(sizes)
    assert found[True] == found[False] == expected(folder, prompts)
    assert evaluated[True] < 0.95 * evaluated[False]


@pytest.mark.parametrize("backbone", [LLAMA, MAMBA2], ids=["llama", "mamba2"])
def test_iterations_are_counted(
    model: MakeModel, engine: Callable[..., Engine], backbone: dict[str, Any], tmp_path: Path
) -> None:
    """With three evaluations and a tight tolerance, no token converges."""
    folder, prompts = shutil.copytree(model(backbone), tmp_path / "model"), make_prompts(*LENGTHS)
    policy = {"name": "residual", "rtol": 1e-6, "max_iter": 3}
    engine(str(folder), {"eval_convergence": policy})(prompts, new=4)
    names = ("tokens", "token_evaluations", "unconverged_tokens", "evaluations", "steps")
    tokens, token_evaluations, unconverged, evaluations, steps = (
        REGISTRY.get_sample_value(f"deqseq:{name}_total", {"model_name": str(folder)}) for name in names
    )
    assert tokens == unconverged == sum(LENGTHS) + 3 * len(LENGTHS)  # the last token is not read
    assert token_evaluations == 3 * tokens
    assert evaluations == 3 * steps if backbone == LLAMA else evaluations >= 3 * steps
    assert 0 < steps < tokens


PATHS = {
    "compiled": {"enforce_eager": False},
    "chunks": {"max_num_batched_tokens": 16},
    "prefixes": {"enable_prefix_caching": True, "block_size": 32},
    "preemption": {"block_size": 32, "num_gpu_blocks_override": 10},
    "speculation": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    },
}
"""Options of vLLM that change how it runs a model, not what the model computes."""


def check_path(engine: Engine, name: str, prompts: Prompts, tokens: list[list[int]]) -> None:
    """Check the tokens, and that vLLM used the feature ``name``."""
    assert engine(prompts, len(tokens[0])) == tokens
    if name == "prefixes":
        assert engine(prompts, len(tokens[0])) == tokens
        assert engine.count("prefix_cache_hits") > 0
    if name == "preemption":
        assert engine.count("num_preemptions") > 0
    if name == "speculation":
        assert engine.count("spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize("name", PATHS)
def test_paths_of_llama(
    model: MakeModel, engine: Callable[..., Engine], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "speculation":  # in a process of its own: vLLM cannot start again after it has loaded numba
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    folder, prompts = model(LLAMA), make_prompts(*LENGTHS, 70)
    check_path(engine(folder, **PATHS[name]), name, prompts, expected(folder, prompts, new=40))


@pytest.mark.parametrize(
    ("backbone", "settings"),
    [
        ({**LLAMA, "input_skip": True}, {"tie_word_embeddings": True}),
        ({**LLAMA, "weight_norm": False}, {}),
        (LLAMA, {"implicit": False}),
        ({**LLAMA, "injection": True}, {"implicit": False}),
        (MAMBA2, {}),
        ({**MAMBA2, "input_skip": True}, {"tie_word_embeddings": True}),
        ({**MAMBA2, "weight_norm": False}, {}),
        (MAMBA2, {"implicit": False}),
        ({**MAMBA2, "injection": True}, {"implicit": False}),
        (MEMORY, {}),
    ],
    ids=[
        "llama-input-skip", "llama-plain", "llama-explicit", "llama-injected", "mamba2", "mamba2-input-skip",
        "mamba2-plain", "mamba2-explicit", "mamba2-injected", "third-party",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("extensions")
def test_backbones(
    model: MakeModel, engine: Callable[..., Engine], backbone: dict[str, Any], settings: dict[str, Any]
) -> None:
    folder, prompts = model(backbone, **settings), make_prompts(*LENGTHS)
    served = engine(folder)
    assert served(prompts) == expected(folder, prompts)
    (normalised,) = served.llm.apply_model(
        lambda inside: [name for name, _ in inside.named_parameters() if "parametrizations" in name]
    )
    assert not normalised


def test_explicit_and_compiled(model: MakeModel, engine: Callable[..., Engine]) -> None:
    folder, prompts = model(LLAMA, implicit=False), make_prompts(*LENGTHS)
    assert engine(folder, **PATHS["compiled"])(prompts) == expected(folder, prompts)


@pytest.mark.parametrize(
    "settings",
    [{"solver": "anderson"}, {"eval_convergence": {"name": "residual", "rtol": 0.5}, "guess": "noise"}],
    ids=["anderson", "loose-noise"],
)
def test_solves_of_mamba2(model: MakeModel, engine: Callable[..., Engine], settings: dict[str, Any]) -> None:
    folder, prompts = model(MAMBA2), make_prompts(*LENGTHS)
    assert engine(folder, settings)(prompts) == expected(folder, prompts, **settings)


@pytest.mark.parametrize("name", ["chunks", "prefixes", "preemption"])
def test_paths_of_mamba2(model: MakeModel, engine: Callable[..., Engine], name: str) -> None:
    folder, prompts = model(MAMBA2), make_prompts(*LENGTHS, 70)
    options = PATHS[name]
    if name == "preemption":  # without the prefix cache a request never needs a second block
        options = {**PATHS["prefixes"], "num_gpu_blocks_override": 6}
    check_path(engine(folder, **options), name, prompts, expected(folder, prompts, new=40))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores, one for each rank")
def test_two_ranks(model: MakeModel, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes share the weights of a Llama, and stop after the same evaluation."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")  # both cores may be on one NUMA node
    backbone = {**LLAMA, "n_kv_head": 2}
    folder, prompts = model(backbone), make_prompts(*LENGTHS)
    assert engine(folder, tensor_parallel_size=2)(prompts) == expected(folder, prompts)


def test_an_unknown_attention_backend(
    model: MakeModel, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deqseq.vllm.llama.WITH_STARTS", ("FLASH_ATTN",))
    with pytest.raises(ValueError, match="one of FLASH_ATTN, got CPU_ATTN"):
        engine(model(LLAMA))
