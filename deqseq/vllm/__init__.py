"""Serves deqseq's language models with vLLM.

vLLM calls :func:`register` in each of its processes, because this package has an entry point in the group
``vllm.general_plugins``. You need not import anything. The package needs the ``vllm`` extra.
"""

import logging

logger = logging.getLogger(__name__)

TESTED = "0.32"
"""The version of vLLM that the tests run with. The plug-in uses interfaces that vLLM may change."""


def register() -> None:
    """Register the models with vLLM. If the installed vLLM is not version 0.32, only log a warning."""
    import vllm

    if not vllm.__version__.startswith(f"{TESTED}."):
        logger.warning(
            "deqseq's models are not available: they need vLLM %s, and this is %s", TESTED, vllm.__version__
        )
        return
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from deqseq.causal_lm import ImplicitConfig
    from deqseq.vllm import configuration

    MODEL_ARCH_CONFIG_CONVERTORS[ImplicitConfig.model_type] = configuration.Architecture
    MODELS_CONFIG_MAP[configuration.LLAMA] = configuration.LlamaChecks
    MODELS_CONFIG_MAP[configuration.RECURRENT] = configuration.RecurrentChecks
    ModelRegistry.register_model(configuration.LLAMA, f"deqseq.vllm.llama:{configuration.LLAMA}")
    ModelRegistry.register_model(configuration.RECURRENT, f"deqseq.vllm.recurrent:{configuration.RECURRENT}")
