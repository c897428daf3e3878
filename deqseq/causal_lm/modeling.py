"""The causal language model: the body and an output layer.

Shapes: B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import can_return_tuple

from deqseq.causal_lm import conversion, head
from deqseq.causal_lm.body import ImplicitModel
from deqseq.causal_lm.cache import EquilibriumCache
from deqseq.causal_lm.configuration import ImplicitConfig
from deqseq.causal_lm.generation import ImplicitGenerationMixin
from deqseq.causal_lm.outputs import ImplicitCausalLMOutput
from deqseq.causal_lm.pretrained import ImplicitPreTrainedModel
from deqseq.checks import check_integers, check_tensor
from deqseq.ops.cross_entropy import next_token_loss
from deqseq.problem import SolveOptions


class ImplicitForCausalLM(ImplicitPreTrainedModel, ImplicitGenerationMixin):
    """A causal language model: an :class:`ImplicitModel` (implicit or explicit) and a linear output layer."""

    _tied_weights_keys = {  # noqa: RUF012 - transformers declares it as an instance variable
        "lm_head.weight": "model.embed_tokens.weight"
    }

    def __init__(self, config: ImplicitConfig) -> None:
        super().__init__(config)
        self.model = ImplicitModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # True: the cache cannot remove tokens. transformers' speculative decoding then raises an error.
        self._is_stateful = not self.model.layer.backbone.rewinds
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_explicit(
        cls, source: str | os.PathLike[str] | PreTrainedModel, weight_norm: bool = True,
        dtype: torch.dtype | None = None, **config_overrides: Any,
    ) -> ImplicitForCausalLM:  # fmt: skip
        """Convert a ``LlamaForCausalLM`` or ``Mamba2ForCausalLM`` of transformers into an explicit model.

        The logits stay the same, up to rounding. Device and mode (training or evaluation) stay the same too.

        Args:
            source: the model, or its folder or name on the hub.
            weight_norm: true: use weight normalisation in the backbone, as implicit models do by default.
            dtype: type of the weights; by default the type of ``source``.
            config_overrides: further settings of :class:`ImplicitConfig`, such as ``solver``. A later call of
                :meth:`to_implicit` uses these settings.

        Raises:
            ValueError: a model of another class; a setting that this library's backbones do not support
                (biases, scaled rotary positions, another activation, a bounded time step, ...).
        """
        return conversion.from_explicit(cls, source, weight_norm, dtype, config_overrides)

    def to_implicit(self, **config_overrides: Any) -> ImplicitForCausalLM:
        """Make an implicit model with the weights of this explicit or injected model.

        If this model is injected, the new model iterates the same map f(z, x). At z = 0, the map returns the
        output of this model.

        If this model is explicit, the new model differs in two places: its first block gets ``gain * z + x``
        instead of x (the backbone's ``input_skip``), and x is injected into every block. The gain and the
        injection start at 0. So f(z, x) initially does not depend on z and equals the explicit stack, and a
        search needs two evaluations. The gain and the injection get gradients from the first step on.

        Args:
            config_overrides: settings of :class:`ImplicitConfig`, such as ``solver`` and ``convergence``.

        Raises:
            ValueError: this model is implicit; ``config_overrides`` has a setting that must stay the same.
        """
        return conversion.to_implicit(self, config_overrides)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: EquilibriumCache | None = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        output_hidden_states: bool | None = None, logits_to_keep: int | Tensor = 0,
        solve: SolveOptions | None = None, window: int | Literal["layer"] | None = "layer",
        z0: Tensor | None = None, skip_logits: bool = False, **others: Any,
    ) -> ImplicitCausalLMOutput:  # fmt: skip
        """Compute logits (B, L, V) and, with ``labels`` (B, L), the loss of predicting the next token.

        As in transformers, pass the input ids as ``labels``. This method shifts the labels and ignores -100.
        If your labels are shifted already, pass them as ``shift_labels``.

        Args:
            labels: (B, L) int64 ids, or -100.
            logits_to_keep: number of last columns to compute logits for (0: all L), or indices of columns
                (n,). With 1, each row gets the logits of its last real token instead, so ``generate`` accepts
                prompts with padding at any place.
            skip_logits: true: with labels, return the loss and no logits. This saves memory, because
                mixed-precision wrappers copy returned logits to float32.
            others: ``num_items_in_batch``, which transformers' trainer passes, and ``shift_labels``
                (B, L), shifted labels that replace ``labels``. Other arguments are ignored or raise
                ``ValueError``, as in :meth:`ImplicitModel.forward`.

        The other arguments are those of :meth:`ImplicitModel.forward`.
        """
        names = ("num_items_in_batch", "shift_labels")
        loss_options = {name: others.pop(name) for name in names if name in others}
        shifted = loss_options.get("shift_labels")
        out = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache,
            output_hidden_states=output_hidden_states, solve=solve, window=window, z0=z0, **others,
        )  # fmt: skip
        head.check_kept(logits_to_keep, out.last_hidden_state.shape[1])
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = out.last_hidden_state[:, keep]
        if isinstance(logits_to_keep, int) and logits_to_keep == 1 and attention_mask is not None:
            hidden = head.last_real(out.last_hidden_state, attention_mask)
        logits, padded = head.logits_of(hidden, self.lm_head)
        loss = None
        if labels is not None or shifted is not None:
            whole = isinstance(logits_to_keep, int) and hidden.shape == out.last_hidden_state.shape
            for name, given in (("labels", labels), ("shift_labels", shifted)):
                if given is None:
                    continue
                check_tensor(name, given)
                check_integers(name, given)
                if not whole:
                    raise ValueError(f"{name} need the logits of all tokens: logits_to_keep must be 0")
                if logits.shape[:2] != given.shape:
                    raise ValueError(
                        f"{name} must have the shape of the logits, {tuple(logits.shape[:2])}, got "
                        f"{tuple(given.shape)}"
                    )
            labels = None if labels is None else labels.long()
            vocab_size = self.config.vocab_size
            ours = self.loss_function is ForCausalLMLoss and shifted is None
            if ours and labels is not None and logits.shape[-1] == vocab_size:
                loss = next_token_loss(padded, labels, vocab_size, **loss_options)
            else:  # the user set a loss or resized the output layer
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **loss_options)
        return ImplicitCausalLMOutput(
            loss=loss, logits=None if skip_logits and loss is not None else logits,
            past_key_values=out.past_key_values, hidden_states=out.hidden_states, solution=out.solution,
        )  # fmt: skip
