"""Implicit and explicit causal language models for the transformers library.

Importing this package registers the models, so that ``AutoConfig``, ``AutoModel`` and
``AutoModelForCausalLM`` load them. The package needs the ``lm`` extra: ``pip install 'deqseq[lm]'``.

The files, in the order of a first reading:

- ``configuration``: the settings of a model; ``presets``: configurations by name; ``reference``: checkpoints
  of the paper's code
- ``body``: embeddings and the sequence layer; ``head``: the output layer; ``modeling``: the language model of
  both; ``classification``: a classifier; ``outputs``: what their calls return
- ``pretrained``: loading and saving; ``conversion``: from explicit to implicit models
- ``cache``: what a model remembers of a text; ``generation``: transformers' ``generate``; ``wavefront``:
  several new tokens at once
- ``streaming``: fast generation, token by token, with ``decoding`` and ``token_step``; ``recorded``: a token
  as CUDA graphs; ``support``: what fast generation and wavefronts refuse
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deqseq.causal_lm.body import ImplicitModel
from deqseq.causal_lm.cache import EquilibriumCache
from deqseq.causal_lm.classification import (
    ImplicitForSequenceClassification,
    ImplicitSequenceClassifierOutput,
)
from deqseq.causal_lm.configuration import ImplicitConfig, ReferenceLlamaConfig, ReferenceMamba2Config
from deqseq.causal_lm.modeling import ImplicitForCausalLM
from deqseq.causal_lm.outputs import ImplicitCausalLMOutput, ImplicitModelOutput
from deqseq.causal_lm.pretrained import ImplicitPreTrainedModel
from deqseq.causal_lm.streaming import fast_generate, stream

for _config in (ImplicitConfig, ReferenceMamba2Config, ReferenceLlamaConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
AutoModel.register(ImplicitConfig, ImplicitModel, exist_ok=True)
AutoModelForCausalLM.register(ImplicitConfig, ImplicitForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(ImplicitConfig, ImplicitForSequenceClassification, exist_ok=True)
# Register the model in a table of transformers. With label smoothing, the Trainer shifts labels only for the
# models in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[ImplicitConfig.model_type] = ImplicitForCausalLM.__name__

__all__ = [
    "EquilibriumCache", "ImplicitCausalLMOutput", "ImplicitConfig", "ImplicitForCausalLM",
    "ImplicitForSequenceClassification", "ImplicitModel", "ImplicitModelOutput", "ImplicitPreTrainedModel",
    "ImplicitSequenceClassifierOutput", "fast_generate", "stream",
]  # fmt: skip
