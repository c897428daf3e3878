"""The causal language model: embeddings, one sequence layer, an output layer.

Shapes: B sequences, L tokens, D width, V vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from deqseq.backbone import State
from deqseq.causal_lm import conversion, reference
from deqseq.causal_lm.configuration import ImplicitConfig
from deqseq.layer import ExplicitSequenceLayer, ImplicitSequenceLayer
from deqseq.solution import Solution


@dataclass
class ImplicitModelOutput(ModelOutput):
    """What the body returns.

    Attributes:
        last_hidden_state: (B, L, D) the equilibrium.
        state: backbone state after the last token, if the call was given one.
        solution: residual, iterations and status of every token; ``None`` for explicit models.
    """

    last_hidden_state: Tensor | None = None
    state: State | None = None
    solution: Solution | None = None


@dataclass
class ImplicitCausalLMOutput(ModelOutput):
    """What the language model returns.

    Attributes:
        loss: mean cross-entropy of token t + 1 given tokens up to t, if labels were given.
        logits: (B, L, V).
        state, solution: as in :class:`ImplicitModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: State | None = None
    solution: Solution | None = None


class ImplicitPreTrainedModel(PreTrainedModel):
    """Loading and saving. One class for every backbone, implicit and explicit alike."""

    config_class = ImplicitConfig
    config: ImplicitConfig
    base_model_prefix = "model"

    def _init_weights(self, module: nn.Module) -> None:
        # Backbones initialise themselves as they are built; the embeddings are ours.
        if isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None):
            nn.init.normal_(cast(Tensor, module.weight), std=self.config.initializer_range)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but a checkpoint that does not fit raises instead of warning.

        Raises:
            ValueError: weights are missing, superfluous or of another shape: what is missing could only
                be random.
        """
        with_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("key_mapping", reference.KEYS)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        # What was renamed on loading would be named back on saving, under a configuration of ours.
        vars(model).pop("_weight_conversions", None)
        problems = {
            what: sorted(map(str, info[key]))
            for what, key in (
                ("missing", "missing_keys"),
                ("unknown", "unexpected_keys"),
                ("of another shape", "mismatched_keys"),
            )
            if info.get(key)
        }
        if problems:
            found = "; ".join(f"{what}: {', '.join(keys[:5])}" for what, keys in problems.items())
            raise ValueError(f"the checkpoint does not fit its configuration; weights {found}")
        return (model, info) if with_info else model


class ImplicitModel(ImplicitPreTrainedModel):
    """Embeddings and the sequence layer: (B, L) token ids -> (B, L, D) equilibria."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012 - the output layer's

    def __init__(self, config: ImplicitConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer: ImplicitSequenceLayer | ExplicitSequenceLayer
        assert config.backbone is not None
        if config.implicit:
            assert config.convergence is not None and config.eval_convergence is not None
            self.layer = ImplicitSequenceLayer(
                config.backbone,
                solver=config.solver,
                gradient=config.gradient,
                convergence=(config.convergence, config.eval_convergence),
                window=config.window,
                causal=config.causal,
            )
        else:
            self.layer = ExplicitSequenceLayer({**config.backbone, "injection": False})
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        state: State | None = None,
        **layer_options: Any,
    ) -> ImplicitModelOutput:
        """Solve for the equilibria of a batch.

        Args:
            input_ids: (B, L) int64; or ``inputs_embeds`` (B, L, D).
            attention_mask: (B, L), non-zero for real tokens.
            position_ids: (B, L) int64.
            state: backbone state before the first token.
            layer_options: ``window`` and ``z0`` of :class:`~deqseq.ImplicitSequenceLayer`.

        Raises:
            ValueError: neither or both of ``input_ids`` and ``inputs_embeds``; other options; what the
                layer refuses.
        """
        known = {"window", "z0"} if self.config.implicit else set()
        if unknown := set(layer_options) - known:
            raise ValueError(
                f"unknown options {sorted(unknown)}; this model's layer takes: {sorted(known) or 'none'}"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        out = self.layer(
            inputs_embeds, attention_mask, position_ids=position_ids, state=state, **layer_options
        )
        return ImplicitModelOutput(last_hidden_state=out.z, state=out.state, solution=out.solution)


class ImplicitForCausalLM(ImplicitPreTrainedModel):
    """A causal language model with an implicit (or explicit) body and a linear output layer."""

    _tied_weights_keys = {  # noqa: RUF012 - transformers declares it as an instance variable
        "lm_head.weight": "model.embed_tokens.weight"
    }

    def __init__(self, config: ImplicitConfig) -> None:
        super().__init__(config)
        self.model = ImplicitModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_explicit(
        cls,
        source: str | os.PathLike[str] | PreTrainedModel,
        weight_norm: bool = True,
        **config_overrides: Any,
    ) -> ImplicitForCausalLM:
        """A ``LlamaForCausalLM`` or ``Mamba2ForCausalLM`` of transformers as an explicit model of ours.

        The logits stay the same, up to rounding. Device, type and mode are the model's.

        Args:
            source: the model, or its folder or name on the hub.
            weight_norm: weight normalisation of the body, as implicit models are trained with; the
                function stays the same.
            config_overrides: further settings of :class:`ImplicitConfig`, for :meth:`to_implicit`.

        Raises:
            ValueError: another kind of model; a setting that our backbones have no counterpart for
                (biases, scaled rotary positions, another activation, a bounded time step, ...).
        """
        return conversion.from_explicit(cls, source, weight_norm, config_overrides)

    def to_implicit(self, **config_overrides: Any) -> ImplicitForCausalLM:
        """An implicit model that starts as exactly the function of this explicit one, to be fine-tuned.

        The weights of the body are copied. The input enters the residual stream, ``gain * z + x``
        (``input_skip`` of the backbones), and the input projections by the usual injection; both the
        gain of z and the injection start at 0, so that f(z, x) = F(x) for every z: the equilibrium is the
        explicit model's output, found in two evaluations. Gradients reach both from the first step on.

        On character models of 2 layers (width 64) the explicit loss was 1.83 (Llama) and 1.81 (Mamba2),
        and the equilibrium's the same, before and after 60 steps of fine-tuning. Without the stream, an
        injection of what layer 0 projects gave 4.65 and 3.57 (after 60 steps 2.98 and 2.08), a
        least-squares fit to the explicit activations 4.70 and 4.46; chance is 4.17 (LOG.md).

        Args:
            config_overrides: settings of :class:`ImplicitConfig`, such as ``solver`` and ``convergence``.

        Raises:
            ValueError: this model is implicit; settings that follow from it are given.
        """
        return conversion.to_implicit(self, config_overrides)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        state: State | None = None,
        **options: Any,
    ) -> ImplicitCausalLMOutput:
        """Logits (B, L, V) and, with ``labels`` (B, L), the loss of predicting the next token.

        ``labels`` are the input ids, as everywhere in transformers: they are shifted here, and -100 is
        ignored. Tasks whose targets stand at their inputs compute their loss from the logits.
        """
        loss_options = {k: options.pop(k) for k in ("num_items_in_batch",) if k in options}
        out = self.model(input_ids, attention_mask, position_ids, inputs_embeds, state, **options)
        logits = self.lm_head(out.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **loss_options
            )
        return ImplicitCausalLMOutput(loss=loss, logits=logits, state=out.state, solution=out.solution)
