"""Settings that the models do not support raise an error of one sentence when a model is loaded."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
vllm = pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-vllm")

from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS  # noqa: E402

from deqseq import Residual  # noqa: E402
from deqseq.backbone import backbones  # noqa: E402
from deqseq.backbones import LlamaBackbone  # noqa: E402
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM  # noqa: E402
from deqseq.vllm import register  # noqa: E402

LLAMA = {"name": "llama", "d_model": 64, "n_layer": 1, "n_head": 2}
MAMBA2 = {"name": "mamba2", "d_model": 64, "n_layer": 1, "d_state": 16, "headdim": 16}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
Configure = Callable[..., Any]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """``configure(backbone, settings, **options)``: makes vLLM's configuration, but builds no model."""

    def made(backbone: dict[str, Any], settings: dict[str, Any] | None = None, **options: Any) -> Any:
        settings = {"architectures": ["ImplicitForCausalLM"], **(settings or {})}
        config = ImplicitConfig(vocab_size=259, backbone=backbone, **settings)
        config.save_pretrained(tmp_path)
        arguments = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128, **options}
        return EngineArgs(str(tmp_path), **arguments).create_engine_config()

    return made


def test_models_that_are_served(configure: Configure) -> None:
    """vLLM accepts these models. A refusal in another test is due to the setting that the test adds."""
    assert configure(LLAMA).model_config.architecture == "ImplicitLlamaForCausalLM"
    assert configure(LLAMA, speculative_config=NGRAM).speculative_config is not None
    assert configure(MAMBA2).model_config.architecture == "ImplicitRecurrentForCausalLM"


def test_requests_leave_by_default(configure: Configure) -> None:
    from deqseq.vllm.configuration import compacts

    assert compacts(configure(LLAMA))
    assert not compacts(configure(LLAMA, additional_config={"compact": False}))


@pytest.mark.parametrize("backbone", [LLAMA, MAMBA2], ids=["llama", "mamba2"])
@pytest.mark.parametrize(
    ("sentence", "settings", "options"),
    [
        (
            "vLLM serves ImplicitForCausalLM, got a checkpoint of ImplicitForSequenceClassification",
            {"architectures": ["ImplicitForSequenceClassification"]},
            {},
        ),
        ("without a window of 4 tokens: set hf_overrides={'window': None}", {"window": 4}, {}),
        ("the guess 'previous' starts: set hf_overrides={'guess': 'zero'}", {"guess": "previous"}, {}),
        (
            "additional_config['compact'] must be true or false, got 'no'",
            {},
            {"additional_config": {"compact": "no"}},
        ),
        (
            "additional_config has the unknown setting 'compat': did you mean 'compact'?",
            {},
            {"additional_config": {"compat": False}},
        ),
        (
            "hf_overrides has the unknown setting 'solvr': did you mean 'solver'?",
            {},
            {"hf_overrides": {"solvr": "anderson"}},
        ),
        (
            "hf_overrides sets 'convergence', the policy of training: set 'eval_convergence'",
            {},
            {"hf_overrides": {"convergence": {"name": "residual", "rtol": 1e-4}}},
        ),
        ("take no LoRA adapters in vLLM: merge the adapter", {}, {"enable_lora": True}),
        ("take no quantised weights in vLLM", {}, {"quantization": "fp8"}),
        ("take no quantised keys and values in vLLM", {}, {"kv_cache_dtype": "fp8"}),
        ("cannot be split into pipeline stages", {}, {"pipeline_parallel_size": 2}),
        ("cannot split one sequence over devices", {}, {"prefill_context_parallel_size": 2}),
    ],
)
def test_both_kinds(
    configure: Configure,
    backbone: dict[str, Any],
    sentence: str,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> None:
    with pytest.raises(ValueError) as error:
        configure(backbone, settings, **options)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("sentence", "options"),
    [
        ("runs on one device: set tensor_parallel_size to 1", {"tensor_parallel_size": 2}),
        ("cannot forget drafts that are refused", {"speculative_config": NGRAM}),
    ],
)
def test_recurrent_states(configure: Configure, sentence: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as error:
        configure(MAMBA2, **options)
    assert sentence in str(error.value)


def test_drafts_of_another_model(configure: Configure, tmp_path: Path) -> None:
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="take drafts from the text only"):
        configure(LLAMA, speculative_config=drafts)


@pytest.mark.parametrize(
    ("sentence", "backbone"),
    [
        ("needs a causal backbone, but LlamaBackbone is not causal", {**LLAMA, "causal": False}),
        ("but Pointwise keeps no state between tokens", {"name": "pointwise", "d_model": 64}),
    ],
)
@pytest.mark.usefixtures("extensions")
def test_backbones(configure: Configure, sentence: str, backbone: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as error:
        configure(backbone)
    assert sentence in str(error.value)


def test_a_growing_state(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of ``LlamaBackbone`` may compute something else, so it does not get paged attention."""
    module = SimpleNamespace(Other=type("Other", (LlamaBackbone,), {}))
    monkeypatch.setitem(sys.modules, "other", module)
    monkeypatch.setitem(backbones._builtin, "other", "other:Other")
    with pytest.raises(ValueError, match="the state of Other grows with the number of tokens"):
        configure({**LLAMA, "name": "other"})


def test_evaluation_follows_the_policy_of_training_by_default(configure: Configure) -> None:
    from deqseq.vllm.configuration import solve_options

    tight = {"name": "residual", "rtol": 1e-4, "max_iter": 99}
    made = configure(LLAMA, {"convergence": tight}, hf_overrides={"eval_convergence": None})
    assert solve_options(made.model_config.hf_config).convergence == Residual(rtol=1e-4, max_iter=99)


@pytest.mark.parametrize("backbone", [LLAMA, MAMBA2], ids=["llama", "mamba2"])
def test_checkpoints_of_another_model(backbone: dict[str, Any]) -> None:
    from deqseq.vllm.weights import checked

    def weights(**changes: Any) -> dict[str, torch.Tensor]:
        config = ImplicitConfig(**{"vocab_size": 19, "backbone": backbone, **changes})
        return {**ImplicitForCausalLM(config).state_dict()}

    config = ImplicitConfig(vocab_size=19, backbone=backbone)
    right = weights()
    del right["lm_head.weight"]  # tied to the embeddings
    assert dict(checked(right.items(), config)).keys() == right.keys()
    for wrong, said in (
        (weights(vocab_size=20), r"has shape \(20, 64\), and the model needs \(19, 64\)"),
        ({**right, "other": torch.ones(1)}, "other has shape .*, and the model needs no weight of this name"),
        (weights(implicit=False), r"lacks \['model.layer.backbone.injection"),
    ):
        with pytest.raises(ValueError, match=said):
            list(checked(wrong.items(), config))


def test_an_explicit_model_is_not_solved(configure: Configure) -> None:
    settings = {"implicit": False, "window": 4, "guess": "previous"}
    assert configure(LLAMA, settings).model_config.architecture == "ImplicitLlamaForCausalLM"


def test_another_version(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With another version of vLLM, ``register`` only warns, so that other models still load."""
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    monkeypatch.delitem(MODEL_ARCH_CONFIG_CONVERTORS, "implicit_lm", raising=False)
    register()
    assert "need vLLM 0.32, and this is 0.33.1" in caplog.text
    assert "implicit_lm" not in MODEL_ARCH_CONFIG_CONVERTORS
