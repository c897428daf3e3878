"""The body of the models: embeddings and one sequence layer.

Shapes: B sequences, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils.generic import can_return_tuple

from deqseq.causal_lm.cache import EquilibriumCache, StateLayer
from deqseq.causal_lm.configuration import ImplicitConfig
from deqseq.causal_lm.outputs import ImplicitModelOutput
from deqseq.causal_lm.pretrained import ImplicitPreTrainedModel
from deqseq.checks import check_flag, check_integers, check_tensor
from deqseq.inputs import packs_rows, real_tokens
from deqseq.layer import ExplicitSequenceLayer, ImplicitSequenceLayer
from deqseq.problem import SolveOptions

_UNUSED_ARGUMENTS = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx",
    "output_attentions", "token_type_ids", "tokenizer",
}  # fmt: skip


class ImplicitModel(ImplicitPreTrainedModel):
    """Embeddings and the sequence layer: (B, L) token ids -> (B, L, D) equilibria."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012 - the output layer

    def __init__(self, config: ImplicitConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer: ImplicitSequenceLayer | ExplicitSequenceLayer
        if config.implicit:
            self.layer = ImplicitSequenceLayer(
                config.backbone, solver=config.solver, gradient=config.gradient, window=config.window,
                convergence=(config.convergence, config.eval_convergence), causal=config.causal,
                guess=config.guess,
            )  # fmt: skip
        else:
            self.layer = ExplicitSequenceLayer({"injection": False, **config.backbone})
        if not self.layer.backbone.causal:
            raise ValueError(f"a language model needs a causal backbone, got {config.backbone}")
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: EquilibriumCache | None = None,
        inputs_embeds: Tensor | None = None, use_cache: bool | None = None,
        output_hidden_states: bool | None = None, solve: SolveOptions | None = None,
        window: int | Literal["layer"] | None = "layer", z0: Tensor | None = None, **unused: Any,
    ) -> ImplicitModelOutput:  # fmt: skip
        """Solve for the equilibria of a batch.

        Args:
            input_ids: (B, L) int64 token ids. Give either ``input_ids`` or ``inputs_embeds`` (B, L, D).
            attention_mask: (B, L), 1 or true for real tokens, 0 or false for padding. Padding may be
                anywhere. With a cache of C columns, the mask may also be (B, C + L). The columns of earlier
                calls then come first.
            position_ids: (B, L) or (1, L) int64. Where positions restart at 0, another sequence begins.
            past_key_values: the cache of an earlier call, which this call continues and extends.
            use_cache: true: return a cache. By default, a call that gets a cache returns this cache. If a
                call gets no cache, the configuration decides whether to make one. In training, or if a row
                holds several sequences, no cache is made by default.
            output_hidden_states: true: return ``hidden_states``. By default the configuration decides.
            solve: solver, policy, window and guess; by default the configuration's.
            window: number of tokens solved together; ``None``: all; ``"layer"``: the window of ``solve`` or,
                without ``solve``, of the configuration.
            z0: (B, L, D) initial guess, instead of the guess of ``solve`` or of the configuration.
            unused: arguments that tokenizers, collators and ``generate`` may add. They have no effect here:
                ``token_type_ids``, ``cache_position``, ``tokenizer``, ``output_attentions=False``, and the
                sequence boundaries of flattened batches (``position_ids`` also contains these boundaries).

        Raises:
            ValueError: ``input_ids`` and ``inputs_embeds`` are both given or both missing; on the CPU, ids
                that are not in the vocabulary (a GPU raises its own error); a mask that has another shape or
                contradicts the masks of earlier calls; a cache of another model; ``solve``, ``window`` or
                ``z0`` for an explicit model; inputs that the layer rejects; unknown arguments.
        """
        _check_unused(unused)
        if getattr(self, "_is_replica", False):
            raise ValueError(
                "nn.DataParallel cannot gather the solutions: start one process per GPU (accelerate launch, "
                "torchrun), or use one GPU only (CUDA_VISIBLE_DEVICES=0)"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self._embedded(input_ids)
        check_tensor("inputs_embeds", inputs_embeds)
        if inputs_embeds.dim() != 3:
            raise ValueError(f"inputs_embeds must be (B, L, D), got {tuple(inputs_embeds.shape)}")
        batch, length, _ = inputs_embeds.shape
        for name, value in ("attention_mask", attention_mask), ("position_ids", position_ids):
            if value is not None:
                check_tensor(name, value)
        if use_cache is not None:
            check_flag("use_cache", use_cache)
        if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[0] == 1:
            position_ids = position_ids.expand(batch, -1)
        if use_cache is None and past_key_values is None:
            use_cache = self._makes_cache(inputs_embeds, position_ids, attention_mask)
        cache = self._cache_of_call(past_key_values, use_cache)
        content = None if cache is None else cache.content
        attention_mask = _mask_of_call(attention_mask, length, content)
        state = None
        if content is not None:
            backbone = self.layer.backbone
            state = content.starting_state(
                backbone.initial_state(batch, inputs_embeds.device, inputs_embeds.dtype)
            )
        options: dict[str, Any] = {}
        if isinstance(self.layer, ImplicitSequenceLayer):
            previous = None if content is None else content.equilibrium
            options = {"solve": solve, "window": window, "z0": z0, "previous": previous}
        elif window != "layer" or z0 is not None or solve is not None:
            raise ValueError("an explicit model is not solved: it takes no solve, window or z0")
        out = self.layer(inputs_embeds, attention_mask, position_ids=position_ids, state=state, **options)
        if content is not None:
            content.commit(out.state, out.z, attention_mask)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden = (inputs_embeds, out.z) if output_hidden_states else None
        return ImplicitModelOutput(
            last_hidden_state=out.z, past_key_values=cache, hidden_states=hidden, solution=out.solution
        )

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """The embeddings (B, L, D) of the ids. Ids outside the vocabulary raise an error."""
        check_tensor("input_ids", input_ids)
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be (B, L), got {tuple(input_ids.shape)}")
        check_integers("input_ids", input_ids)
        try:
            embedded: Tensor = self.embed_tokens(input_ids)
        except IndexError as error:
            least, most = (int(id) for id in input_ids.aminmax())
            size = self.embed_tokens.weight.shape[0]
            raise ValueError(f"input_ids must be in [0, {size}), got {least} to {most}") from error
        return embedded

    def _makes_cache(self, x: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None) -> bool:
        """Whether a call without ``use_cache`` and without a cache makes a new cache."""
        if self.training or not self.config.use_cache or not self.layer.backbone.keeps_state:
            return False
        fits = all(t is None or t.shape == x.shape[:2] for t in (position_ids, attention_mask))
        # Call ``packs_rows`` only on tensors of the right shape. For other shapes, the layer raises an error.
        return position_ids is None or not fits or not packs_rows(position_ids, attention_mask)

    def _cache_of_call(self, given: Cache | None, use_cache: bool | None) -> EquilibriumCache | None:
        """The cache to fill and return: ``given`` or a new cache; ``None`` if the call uses no cache."""
        if given is not None and not isinstance(given, EquilibriumCache):
            raise ValueError(
                f"past_key_values must be the EquilibriumCache of an earlier call, got {type(given).__name__}"
            )
        if use_cache is False or (given is None and not use_cache):
            if given is not None:
                raise ValueError("past_key_values were given, but use_cache is False")
            return None
        if not self.layer.backbone.keeps_state:
            raise ValueError(
                f"{type(self.layer.backbone).__name__} keeps no state, so there is nothing to cache: leave "
                "use_cache unset"
            )
        if given is None:
            return EquilibriumCache(self.layer.backbone.rewinds)
        content = given.content
        if content.state is None and content.is_croppable and not self.layer.backbone.rewinds:
            raise ValueError(
                "this model cannot remove tokens from its cache: make it with EquilibriumCache(rewinds=False)"
            )
        return given


def _mask_of_call(mask: Tensor | None, length: int, content: StateLayer | None) -> Tensor | None:
    """The part (B, L) of the attention mask that belongs to this call: its last L columns."""
    if mask is None or (mask.dim() == 2 and mask.shape[1] == length):
        return mask
    seen = 0 if content is None else content.get_seq_length()
    if mask.dim() != 2 or mask.shape[1] != seen + length:
        raise ValueError(
            f"attention_mask must be (B, L) for the {length} tokens of the call, or (B, C + L) with the "
            f"{seen} columns of earlier calls, got {tuple(mask.shape)}"
        )
    before = None if content is None else content.real
    same_batch = before is not None and before.shape[0] == mask.shape[0]
    if same_batch and not torch.equal(real_tokens(mask[:, :seen]), cast(Tensor, before)):
        raise ValueError(
            "attention_mask differs from the masks of earlier calls in their columns: tokens that a cache "
            "has consumed cannot be masked afterwards"
        )
    return mask[:, -length:]


def _check_unused(arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for ``output_attentions=True`` and for arguments not in _UNUSED_ARGUMENTS."""
    if arguments.get("output_attentions"):
        raise ValueError("output_attentions: these models keep no attention weights")
    if unknown := set(arguments) - _UNUSED_ARGUMENTS:
        raise ValueError(f"unknown arguments {sorted(unknown)}")
