"""A model that classifies sequences. With one label, it is a reward model.

Shapes: B sequences, L tokens, D width, N labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils.generic import can_return_tuple

from deqseq.causal_lm.cache import EquilibriumCache
from deqseq.causal_lm.configuration import ImplicitConfig
from deqseq.causal_lm.head import last_real
from deqseq.causal_lm.outputs import ImplicitCausalLMOutput
from deqseq.causal_lm.pretrained import ImplicitPreTrainedModel
from deqseq.checks import check_count, check_tensor

_KINDS = ("regression", "single_label_classification", "multi_label_classification")


@dataclass
class ImplicitSequenceClassifierOutput(ImplicitCausalLMOutput):
    """The output of the classification model.

    Attributes:
        loss: the loss of ``config.problem_type``; ``None`` without labels.
        logits: (B, ``config.num_labels``).
        past_key_values, hidden_states, solution: as in :class:`ImplicitModelOutput`.
    """


class ImplicitForSequenceClassification(GenericForSequenceClassification, ImplicitPreTrainedModel):
    """Classifies sequences: an :class:`ImplicitModel`, and a linear map ``score`` of the last real token.

    ``config.num_labels`` is the number N of classes; 1 makes a reward model. ``from_pretrained`` also takes a
    checkpoint of :class:`ImplicitForCausalLM`. The weights of ``score`` then start at random values.

    Raises:
        ValueError: ``num_labels`` below 1; an unknown ``problem_type``.
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012 - the output layer
    accepts_loss_kwargs = False  # the loss is a mean over the batch, so the Trainer averages micro-batches

    def __init__(self, config: ImplicitConfig) -> None:
        check_count("num_labels", config.num_labels)
        if config.problem_type not in (None, *_KINDS):
            raise ValueError(f"problem_type must be one of {', '.join(_KINDS)}, got {config.problem_type!r}")
        super().__init__(config)  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: EquilibriumCache | None = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        **options: Any,
    ) -> ImplicitSequenceClassifierOutput:  # fmt: skip
        """Compute the logits (B, N) and, with ``labels``, the loss of ``config.problem_type``.

        Padding may be anywhere. Without ``attention_mask``, the last token that is not
        ``config.pad_token_id`` is classified, as in transformers.

        Args:
            labels: ``config.problem_type`` decides what the labels are. Single-label classification: (B,)
                class ids, with -100 for sequences without a label. Multi-label classification: (B, N) floats.
                Regression: (B, N) floats; (B,) too if N is 1. If ``problem_type`` is ``None``, N = 1 means
                regression. For larger N, integers mean single-label and floats multi-label classification.

        The other arguments are those of :meth:`ImplicitModel.forward`.

        Raises:
            ValueError: several sequences with neither a mask nor a ``pad_token_id``; a sequence without a
                real token in this call; ``labels`` of another shape, dtype or range; see
                :meth:`ImplicitModel.forward`.
        """
        out = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **options,
        )  # fmt: skip
        hidden = out.last_hidden_state
        if attention_mask is None and input_ids is not None:
            pad = self.config.pad_token_id
            if pad is not None:
                attention_mask = input_ids != pad
            elif input_ids.dim() == 2 and len(input_ids) > 1:
                raise ValueError(
                    f"{len(input_ids)} sequences need an attention_mask, or a pad_token_id in the "
                    "configuration: without them, the last real token of each sequence is not known"
                )
        if attention_mask is None:
            last = hidden[:, -1:]
        else:
            if not bool(attention_mask[:, -hidden.shape[1] :].bool().any(1).all()):
                raise ValueError("each sequence needs a real token in this call, got only padding in one")
            last = last_real(hidden, attention_mask)
        logits = self.score(last)[:, 0]
        loss = None
        if labels is not None:
            labels, kind = self._checked(labels, len(logits))
            described = SimpleNamespace(problem_type=kind, num_labels=self.config.num_labels)
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=described)
        return ImplicitSequenceClassifierOutput(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states,
            solution=out.solution,
        )  # fmt: skip

    def _checked(self, labels: Tensor, size: int) -> tuple[Tensor, str]:
        """Check the labels. Returns them (class ids as int64) and the kind of problem. ``size``: B."""
        check_tensor("labels", labels)
        count = int(self.config.num_labels or 0)
        whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype.itemsize < 2)
        kind: str | None = self.config.problem_type
        if kind is None:
            kind = _KINDS[0] if count == 1 else _KINDS[1] if whole else _KINDS[2]
        if kind == _KINDS[1]:
            shapes: list[tuple[int, ...]] = [(size,)]
            fits, dtype = whole, "integers"
        else:
            shapes, fits, dtype = [(size, count)], labels.is_floating_point(), "floats"
            if kind == _KINDS[0] and count == 1:
                shapes = [(size,), (size, 1)]
        if tuple(labels.shape) not in shapes or not fits:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(
                f"labels of a {kind} must be {dtype} of shape {wanted}, got {labels.dtype} of shape "
                f"{tuple(labels.shape)}"
            )
        if kind != _KINDS[1]:
            return labels, kind
        labels = labels.long()
        if labels.device.type == "cpu" and bool(((labels >= count) | (labels < 0) & (labels != -100)).any()):
            raise ValueError(
                f"labels must be class ids below num_labels = {count}, or -100, got {labels.tolist()[:9]}"
            )
        return labels, kind
