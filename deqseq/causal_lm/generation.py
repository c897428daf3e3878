"""transformers' ``generate`` for these models: their cache, positions and wavefront decoding."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from deqseq.backbones.weights import keep_weights
from deqseq.causal_lm.body import ImplicitModel
from deqseq.causal_lm.cache import EquilibriumCache
from deqseq.causal_lm.wavefront import wavefront_generate
from deqseq.checks import check_count
from deqseq.inputs import real_tokens


class ImplicitGenerationMixin(GenerationMixin):
    """``generate`` with an :class:`EquilibriumCache`, and with wavefronts."""

    model: ImplicitModel

    def generate(self, *args: Any, wavefront: int | None = None, **options: Any) -> Any:
        """Generate tokens: transformers' ``generate``, with one more argument.

        It calls the model for every new token. So a forward hook of the model gets ``out.solution`` with the
        iterations, residual and status of every token, except the last one, which the model does not read.

        Normalised and dequantised weights are computed once, unless the model has adapters. They are computed
        again if a parameter changes meanwhile, but not after a change through ``parameter.data``.

        Args:
            wavefront: solve up to this number of new tokens at once. Only for greedy decoding with implicit
                models. The tokens are those of ordinary greedy decoding, up to the tolerance of the search.
                One evaluation of f works on several tokens, so generation needs fewer evaluations in
                sequence. A cache that you pass gets the tokens of the prompt only, not the new tokens.

        Raises:
            ValueError: ``wavefront`` is below 1, or is combined with a feature that it does not support, such
                as sampling or beams.
        """
        if wavefront is not None:
            check_count("wavefront", wavefront)
            if options.get("custom_generate") is not None:
                raise ValueError("give either wavefront or custom_generate")
            options["custom_generate"] = partial(wavefront_generate, wavefront=wavefront)
        with keep_weights():
            return super().generate(*args, **options)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **options: Any) -> Any:
        """Raise ``ValueError``: ``generate_batch`` of transformers needs paged attention.

        Without this method, it would fail in another thread and return empty results.
        """
        raise ValueError(
            "continuous batching (generate_batch) does not work: an EquilibriumCache has no pages; use "
            "generate, or the plug-in for vLLM"
        )

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: Any) -> Tensor:
        """Positions (B, L) that count real tokens only. Padding gets the position of the token before it.

        ``generate`` adds 1 to the last column's position to get the first new token's position. transformers
        gives padding position 0. So after padding in the last column, the new token would get position 1.
        """
        mask = model_kwargs.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return (real_tokens(mask).long().cumsum(-1) - 1).clamp_min(0)

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict[str, Any], *standard: Any
    ) -> dict[str, Any]:
        """The arguments of ``generate`` for the decoding method.

        If ``custom_generate`` is a function, transformers drops some arguments, such as ``streamer``. This
        method keeps those for which the function has a parameter.
        """
        usual = super()._extract_generation_mode_kwargs(None, dict(kwargs), *standard)
        found = super()._extract_generation_mode_kwargs(custom_generate, kwargs, *standard)
        if callable(custom_generate):
            accepted = inspect.signature(custom_generate).parameters
            found.update({name: value for name, value in usual.items() if name in accepted})
        return found

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Give ``generate`` an :class:`EquilibriumCache` instead of transformers' cache."""
        refused = {"cache_implementation": "one kind of cache", "assistant_early_exit": "no early exit"}
        for option, reason in refused.items():
            value = getattr(generation_config, option)
            if value is not None and value != "dynamic":  # "dynamic": a growing cache, like ours
                raise ValueError(f"these models have {reason}: leave {option} unset, got {value!r}")
        if (cache := model_kwargs.get("past_key_values")) is not None:
            if isinstance(cache, EquilibriumCache):
                _check_longer(cache.get_seq_length(), model_kwargs)
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, *args, **kwargs
            )
        elif not self.model.layer.backbone.keeps_state:
            generation_config.use_cache = model_kwargs["use_cache"] = False
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = EquilibriumCache(self.model.layer.backbone.rewinds)


def _check_longer(held: int, inputs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the text of ``generate`` is longer than a cache of ``held`` tokens."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None:
        length = mask.shape[1]
    elif positions is not None:  # without a mask, there is no padding
        length = int(positions.max()) + 1
    else:
        return
    if 0 < length <= held:
        raise ValueError(
            f"past_key_values holds {held} tokens, and the text has {length}: pass the whole text, which "
            "must have at least one token more than the cache"
        )
