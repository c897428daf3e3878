"""transformers' own test suites, run on implicit and explicit models with both backbones.

The wheel of transformers does not contain the suites. ``make suites`` downloads the suites of the installed
version into ``.transformers``. The variable ``DEQSEQ_TRANSFORMERS_TESTS`` may name another folder: a checkout
of transformers with ``tests`` and ``utils``. Without such a folder, these tests are skipped.
"""

import os
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from deqseq import Backbone
from deqseq.causal_lm import (
    EquilibriumCache,
    ImplicitConfig,
    ImplicitForCausalLM,
    ImplicitForSequenceClassification,
    ImplicitModel,
)

FOLDER = Path(os.environ.get("DEQSEQ_TRANSFORMERS_TESTS") or Path(__file__).parents[2] / ".transformers")
if not (FOLDER / "tests" / "generation").is_dir():
    reason = f"optional data: {FOLDER} has no tests of transformers; `make suites` downloads them"
    pytest.skip(reason, allow_module_level=True)


@contextmanager
def package(modules: dict[str, ModuleType]) -> Iterator[None]:
    """In the block, the name ``tests`` means the package of transformers, instead of ours."""

    def removed() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] == "tests"]
        return {name: sys.modules.pop(name) for name in names}

    ours = removed()
    sys.modules.update(modules)
    try:
        yield
    finally:
        modules.update(removed())
        sys.modules.update(ours)


def imported(names: list[str]) -> dict[str, Any]:
    """Import modules of transformers' package ``tests``. Returns all its modules by name."""
    modules: dict[str, Any] = {}
    with (
        package(modules),
        mock.patch.object(sys, "path", [str(FOLDER.absolute()), *sys.path]),
        mock.patch.object(pytest.mark, "_config", None),  # else --strict-markers would refuse their marks
        # The suites would load transformers a second time, from the checkout.
        mock.patch("transformers.utils.direct_transformers_import", return_value=transformers),
    ):
        for name in names:
            import_module(name)
    return modules


MODELING, PIPELINES = "tests.test_modeling_common", "tests.test_pipeline_mixin"
TASKS = [
    f"tests.pipelines.test_pipelines_{task}"
    for task in ("feature_extraction", "text_classification", "text_generation")
]
THEIRS = imported([MODELING, PIPELINES, "tests.test_configuration_common", *TASKS])

V, D = 99, 32
BODIES: dict[str, dict[str, Any]] = {
    "llama": {"name": "llama", "d_model": D, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_inner": 48},
    "mamba2": {"name": "mamba2", "d_model": D, "n_layer": 2, "d_state": 8, "headdim": 8},
}
TIGHT = {"name": "residual", "rtol": 1e-6, "max_iter": 200}
CHECKPOINTING = (
    "This test needs a GradientCheckpointingLayer. Our layer has none: it recomputes the whole solve itself "
    "(tests/causal_lm/test_hugging_face.py)."
)


class Inputs:
    """The configuration, inputs and sizes for the suites, which call such an object a model tester."""

    batch_size, seq_length, is_training = 3, 7, True
    vocab_size, hidden_size, num_hidden_layers = V, D, 2
    expected_num_hidden_layers = 2  # hidden states: the embeddings and the equilibria

    def __init__(self, body: str, implicit: bool) -> None:
        self.body, self.implicit = body, implicit

    def get_config(self) -> ImplicitConfig:
        return ImplicitConfig(
            vocab_size=V, backbone=BODIES[self.body], implicit=self.implicit, eval_convergence=TIGHT,
            pad_token_id=0, bos_token_id=2, tie_word_embeddings=False,
        )  # fmt: skip

    def prepare_config_and_inputs_for_common(self) -> tuple[ImplicitConfig, dict[str, torch.Tensor]]:
        ids = torch.randint(1, V, (self.batch_size, self.seq_length))
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Suite(
    THEIRS[MODELING].ModelTesterMixin,  # type: ignore[misc, name-defined]
    THEIRS[MODELING].GenerationTesterMixin,
    THEIRS[PIPELINES].PipelineTesterMixin,
):
    all_model_classes = (ImplicitModel, ImplicitForCausalLM, ImplicitForSequenceClassification)
    pipeline_model_mapping = {  # noqa: RUF012 - the form of the suites
        "feature-extraction": ImplicitModel,
        "text-classification": ImplicitForSequenceClassification,
        "text-generation": ImplicitForCausalLM,
    }
    has_attentions = False  # the models return no attention weights
    body: str
    implicit: bool

    def setUp(self) -> None:
        torch.manual_seed(0)
        self.model_tester = Inputs(self.body, self.implicit)
        self.config_tester = THEIRS["tests.test_configuration_common"].ConfigTester(
            self, ImplicitConfig, common_properties=["hidden_size", "num_hidden_layers"],
            backbone=BODIES[self.body],
        )  # fmt: skip
        tables = {  # where the suites look up which labels a model takes
            "MODEL_MAPPING_NAMES": ImplicitModel,
            "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": ImplicitForSequenceClassification,
        }
        for table, model_class in tables.items():
            names = {"implicit_lm": model_class.__name__}
            self.enterContext(mock.patch.dict(getattr(THEIRS[MODELING], table), names))
        for context in (
            package(THEIRS),
            # A cache of Mamba2 cannot forget tokens, so it does not support speculative decoding.
            mock.patch.object(ImplicitForCausalLM, "_is_stateful", self.body == "mamba2"),
            mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
        ):
            self.enterContext(context)

    @pytest.fixture(autouse=True)
    def contracted(
        self, contractive: Callable[[Backbone], Backbone], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Make the maps of implicit models contractions, so that their searches converge to the tolerance."""
        build = ImplicitModel.__init__

        def build_contracted(model: ImplicitModel, config: ImplicitConfig) -> None:
            build(model, config)
            contractive(model.layer.backbone)

        if self.implicit:
            monkeypatch.setattr(ImplicitModel, "__init__", build_contracted)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def run_task_tests(self, task: str, dtype: str = "float32") -> None:
        """Test the pipelines with a model and a tokenizer made here, instead of those of a hub."""
        words = ["<pad>", "<unk>", "<s>", "This", "is", "a", "test", *(f"word{i}" for i in range(V - 7))]
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>"}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
        summary = {"tokenizer_classes": ["PreTrainedTokenizerFast"], "processor_classes": []}
        with TemporaryDirectory() as folder:
            for model_class in self.all_model_classes:
                made = Path(folder, "implicit_lm", model_class.__name__)
                model_class(self.model_tester.get_config()).save_pretrained(made)
                fast.save_pretrained(made)
            with (
                mock.patch.object(THEIRS[PIPELINES], "TRANSFORMERS_TINY_MODEL_PATH", folder),
                mock.patch.object(
                    THEIRS[PIPELINES],
                    "tiny_model_summary",
                    {model_class.__name__: summary for model_class in self.all_model_classes},
                ),
            ):
                super().run_task_tests(task, dtype)

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: EquilibriumCache, seq_length: int, config: ImplicitConfig
    ) -> None:
        """The suite asks models with a cache of their own to override this check."""
        assert type(past_key_values) is EquilibriumCache and past_key_values.state is not None
        found = (len(past_key_values), past_key_values.state.batch_size, past_key_values.get_seq_length())
        assert found == (1, batch_size, seq_length)

    # Overridden tests.

    @unittest.skip(CHECKPOINTING)
    def test_gradient_checkpointing_enable_disable(self) -> None: ...

    @unittest.skip(CHECKPOINTING)
    def test_training_gradient_checkpointing(self) -> None: ...

    @unittest.skip(CHECKPOINTING)
    def test_training_gradient_checkpointing_use_reentrant_false(self) -> None: ...

    @unittest.skip(CHECKPOINTING)
    def test_training_gradient_checkpointing_use_reentrant_true(self) -> None: ...


class TestImplicitLlama(Suite, unittest.TestCase):
    body, implicit = "llama", True


class TestExplicitLlama(Suite, unittest.TestCase):
    body, implicit = "llama", False


class TestImplicitMamba2(Suite, unittest.TestCase):
    body, implicit = "mamba2", True


class TestExplicitMamba2(Suite, unittest.TestCase):
    body, implicit = "mamba2", False
