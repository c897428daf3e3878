"""Describes our models to vLLM before vLLM builds them, and refuses unsupported settings."""

from collections.abc import Iterable
from difflib import get_close_matches

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import MambaModelConfig, VerifyAndUpdateConfig
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from deqseq.backbone import Backbone, backbones
from deqseq.backbones import LlamaBackbone
from deqseq.causal_lm import ImplicitConfig
from deqseq.checks import check_flag
from deqseq.guesses import Previous
from deqseq.problem import SolveOptions

logger = init_logger(f"vllm.{__name__}")  # vLLM prints only what its own loggers get

LLAMA = "ImplicitLlamaForCausalLM"
RECURRENT = "ImplicitRecurrentForCausalLM"


def backbone_of(config: ImplicitConfig) -> Backbone:
    """The backbone that ``config`` describes, on the meta device: it has sizes, but no weights."""
    injection = {} if config.implicit else {"injection": False}
    with torch.device("meta"):
        return backbones.create({**injection, **config.backbone})


def solve_options(config: ImplicitConfig) -> SolveOptions:
    """The solve options for vLLM: the configuration's solver, evaluation policy and guess.

    Raises:
        ValueError: vLLM cannot serve the configuration's window or guess.
    """
    if config.window is not None:
        raise ValueError(
            f"in vLLM, all tokens of a step are solved together, without a window of {config.window} tokens: "
            "set hf_overrides={'window': None}, which changes no fixed point"
        )
    policy = config.convergence if config.eval_convergence is None else config.eval_convergence
    options = SolveOptions(config.solver, policy, guess=config.guess)
    if isinstance(options.guess, Previous):
        raise ValueError(
            "vLLM keeps no equilibrium of the token before, from which the guess 'previous' starts: set "
            "hf_overrides={'guess': 'zero'}, which changes no fixed point"
        )
    return options


def check_overrides(overrides: object) -> None:
    """Check vLLM's ``hf_overrides``.

    Raises:
        ValueError: they set the policy of training, or a name looks like a misspelt setting.
    """
    if not isinstance(overrides, dict):
        return
    _check_spelling("hf_overrides", overrides, ImplicitConfig.__annotations__)
    if "convergence" in overrides and "eval_convergence" not in overrides:
        raise ValueError(
            "hf_overrides sets 'convergence', the policy of training: set 'eval_convergence', which vLLM uses"
        )


def _check_spelling(place: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``ValueError`` if a name in ``given`` is not ``known``, but similar to a known name.

    Other unknown names raise no error, because other programs may use them.
    """
    for name in given:
        if name not in known and (near := get_close_matches(name, known, 1, cutoff=0.8)):
            raise ValueError(f"{place} has the unknown setting {name!r}: did you mean {near[0]!r}?")


def compacts(vllm_config: VllmConfig) -> bool:
    """Whether to remove settled requests from a step's batch.

    Users set this as ``compact`` in vLLM's ``additional_config``. The default is true.

    Raises:
        ValueError: the value is not true or false, or the name looks misspelt.
    """
    settings = vllm_config.additional_config
    settings = settings if isinstance(settings, dict) else {}
    _check_spelling("additional_config", settings, ["compact"])
    compact = settings.get("compact", True)
    check_flag("additional_config['compact']", compact)
    return bool(compact)


class Architecture(ModelArchConfigConvertorBase):
    """Tells vLLM which class serves a configuration.

    Raises:
        ValueError: the checkpoint is not a language model; the backbone is not causal or keeps no state; the
            state of a backbone other than ``LlamaBackbone`` grows; see also :func:`solve_options`.
    """

    def get_architectures(self) -> list[str]:
        # Also store the name in the configuration, because vLLM's weight loader reads it there.
        self.hf_config.architectures = names = [self._architecture()]
        return names

    def _architecture(self) -> str:
        kinds = set(self.hf_config.architectures or ()) - {"ImplicitForCausalLM", LLAMA, RECURRENT}
        if kinds:
            raise ValueError(f"vLLM serves ImplicitForCausalLM, got a checkpoint of {', '.join(kinds)}")
        if self.hf_config.implicit:
            solve_options(self.hf_config)
        backbone = backbone_of(self.hf_config)
        name = type(backbone).__name__
        if not backbone.causal:
            raise ValueError(f"vLLM generates text, which needs a causal backbone, but {name} is not causal")
        if type(backbone) is LlamaBackbone:
            return LLAMA
        state = backbone.initial_state(1).tensors()[1:] if backbone.keeps_state else []
        if not state:
            raise ValueError(f"vLLM generates text token by token, but {name} keeps no state between tokens")
        if any(0 in tensor.shape for tensor in state):
            raise ValueError(
                "vLLM serves LlamaBackbone and backbones whose state has a constant size, but the state of "
                f"{name} grows with the number of tokens"
            )
        return RECURRENT


def _check(vllm_config: VllmConfig, refused: dict[str, bool]) -> None:
    """Refuse settings of vLLM that the models do not support.

    ``refused`` maps an error message to whether to raise it. This function adds the messages for all models.

    The function also turns off CUDA graphs of whole forward passes. The host checks for convergence between
    two evaluations, so vLLM may only record pieces of one evaluation.
    """
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    refused = {
        "deqseq's models take no LoRA adapters in vLLM: merge the adapter and save the model": (
            vllm_config.lora_config is not None
        ),
        "deqseq's models take no quantised weights in vLLM: use the weights as they were trained": (
            vllm_config.model_config.quantization is not None
        ),
        "deqseq's models take no quantised keys and values in vLLM: set kv_cache_dtype to 'auto'": (
            vllm_config.cache_config.cache_dtype != "auto"
        ),
        "deqseq's models cannot be split into pipeline stages: set pipeline_parallel_size to 1": (
            parallel.pipeline_parallel_size > 1
        ),
        "deqseq's models cannot split one sequence over devices: set both context_parallel_sizes to 1": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        "deqseq's models take drafts from the text only: set the speculative method to 'ngram'": (
            speculative is not None and speculative.method != "ngram"
        ),
        **refused,
    }
    for sentence, wrong in refused.items():
        if wrong:
            raise ValueError(sentence)
    model = vllm_config.model_config
    check_overrides(model.hf_overrides)
    compact = compacts(vllm_config)
    if model.hf_config.implicit:
        options = solve_options(model.hf_config)
        logger.info(
            "deqseq solves with %s, %s, guess %s, compact=%s",
            options.solver, options.convergence, options.guess, compact,
        )  # fmt: skip
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode is None or compilation.cudagraph_mode.has_full_cudagraphs():
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE


class LlamaChecks(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        _check(vllm_config, {})


class RecurrentChecks(MambaModelConfig):
    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        _check(
            vllm_config,
            {
                "a model with a recurrent state runs on one device: set tensor_parallel_size to 1": (
                    vllm_config.parallel_config.tensor_parallel_size > 1
                ),
                "a recurrent state cannot forget drafts that are refused: unset the speculative_config": (
                    vllm_config.speculative_config is not None
                ),
            },
        )
        super().verify_and_update_config(vllm_config)
