"""The recurrent baseline, an LSTM. It can solve state tracking, but it reads one token at a time."""

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from deqseq.causal_lm import ImplicitCausalLMOutput


class LSTMConfig(PretrainedConfig):
    """The sizes of an LSTM: vocabulary size, width and number of layers."""

    model_type = "state_tracking_lstm"

    vocab_size: int = 60
    d_model: int = 256
    n_layer: int = 1


class LSTM(PreTrainedModel):
    """Maps token ids (B, L) to logits (B, L, V), where V is the vocabulary size.

    Consists of embeddings, LSTM layers and an output layer.
    """

    config_class = LSTMConfig
    config: LSTMConfig

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.lstm = nn.LSTM(config.d_model, config.d_model, config.n_layer, batch_first=True)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing, so that the layers keep torch's own initialisation."""

    def forward(self, input_ids: Tensor) -> ImplicitCausalLMOutput:
        hidden, _state = self.lstm(self.embed_tokens(input_ids))
        return ImplicitCausalLMOutput(logits=self.lm_head(hidden))
