"""Generation token by token, with little work on the host.

transformers' ``generate`` calls the whole model for every token. The functions of this module call the whole
model for the prompt only. For each new token they call its embedding, its layer and its output layer
(:mod:`deqseq.causal_lm.decoding`).

Shapes: B sequences, L tokens of the prompt, V vocabulary.
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from deqseq.causal_lm.cache import EquilibriumCache
from deqseq.causal_lm.decoding import Decoder, check_model, choose_ids
from deqseq.causal_lm.modeling import ImplicitForCausalLM
from deqseq.causal_lm.support import unsupported
from deqseq.checks import (
    LEAST_TEMPERATURE,
    check_count,
    check_flag,
    check_instance,
    check_positive,
    check_share,
    check_tensor,
)
from deqseq.problem import SolveOptions


def stream(
    model: ImplicitForCausalLM,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
    solve: SolveOptions | None = None,
    past_key_values: EquilibriumCache | None = None,
) -> Generator[Tensor, None, None]:
    """Continue a batch of prompts, and yield the new tokens one by one.

    With the same settings, the tokens are those of ``model.generate``, up to rounding. ``generate`` takes all
    settings from ``model.generation_config``, and samples with ``top_k=50`` by default. ``stream`` takes only
    the ids that end a sequence and the padding from there. The host does less work per token: it makes no
    mask and no output class, checks no arguments, and prepares the backbone's weights only once. So do not
    change weights, hooks, autocast or training mode before the last token. The model's ``forward`` is called
    for the prompt only.

    Args:
        model: the language model, implicit, injected or explicit. Its backbone needs a state.
        input_ids: (B, L) int64 prompts.
        max_new_tokens: maximum number of new tokens.
        attention_mask: (B, L), 1 or true for real tokens, 0 or false for padding at any place.
        do_sample: if true, sample. If false, take the likeliest token.
        temperature, top_k, top_p: change the distribution, in this order, as in ``generate``: divide the
            logits by the temperature, at least 1e-30; keep the k likeliest tokens; keep the likeliest tokens
            whose probabilities add up to p. By default, all tokens are kept. For sampling only.
        eos_token_id: id, or ids, that end a sequence; by default those of ``model.generation_config``. With
            ``()``, no id ends a sequence.
        pad_token_id: id of the tokens of a sequence that has ended. By default, that of
            ``model.generation_config``, or else the first id that ends a sequence.
        generator: random generator for sampling; by default torch's global generator. A generator with the
            same seed gives the same tokens.
        solve: solver, policy, window and guess; by default the model's. For implicit models only.
        past_key_values: a cache to continue. ``input_ids`` are then only the tokens after those in the cache.
            The prompt fills the cache. When the stream ends or is closed, the cache also gets the new tokens
            except the last one, which the model has not consumed. Do not change the cache during the stream.
            If a token raises an error, the cache keeps only the prompt.

    Yields:
        (B,) int64, the next token of every sequence. The stream ends when all sequences have ended.

    Raises:
        ValueError: an argument is invalid; the backbone keeps no state; the model has forward hooks, or is
            spread over several devices by accelerate. The prompt is checked when you ask for the first token.
            At the end: the cache has changed during the stream.

    Example::

        for ids in stream(model, prompt, max_new_tokens=100):
            print(tokenizer.decode(ids[0]), end="", flush=True)
    """
    check_model(model, "stream")
    check_tensor("input_ids", input_ids)
    check_count("max_new_tokens", max_new_tokens)
    check_flag("do_sample", do_sample)
    check_positive("temperature", temperature)
    if temperature < LEAST_TEMPERATURE:
        raise ValueError(f"temperature must be at least {LEAST_TEMPERATURE}, got {temperature}")
    if top_k is not None:
        check_count("top_k", top_k)
    if top_p is not None:
        check_share("top_p", top_p)
    check_instance("generator", generator, torch.Generator | None, "a torch.Generator")
    if not do_sample and (temperature, top_k, top_p, generator) != (1, None, None, None):
        raise ValueError("temperature, top_k, top_p and generator are for sampling: also pass do_sample=True")
    check_instance("past_key_values", past_key_values, EquilibriumCache | None, "an EquilibriumCache")
    keeps = past_key_values is not None
    if past_key_values is None:
        past_key_values = EquilibriumCache(model.model.layer.backbone.rewinds)
    warpers: Any = LogitsProcessorList()  # they do not use the ids, their first argument
    if temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        warpers.append(TopPLogitsWarper(float(top_p)))
    end, pad = _special_ids(model, eos_token_id, pad_token_id)
    ends = torch.tensor(end, dtype=torch.int64, device=input_ids.device)

    def choose(logits: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next tokens (B,), and (B,) bool, true for sequences that have ended."""
        ids = choose_ids(warpers(None, logits), do_sample, generator)
        ids = ids.masked_fill(ended, pad)
        return ids, ended | torch.isin(ids, ends)

    prompt = {"attention_mask": attention_mask, "past_key_values": past_key_values, "solve": solve}
    return _streamed(model, input_ids, prompt, max_new_tokens, bool(end), keeps, choose)


@torch.no_grad()
def _streamed(
    model: ImplicitForCausalLM, input_ids: Tensor, prompt: dict[str, Any], most: int, may_end: bool,
    keeps: bool, choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Generator[Tensor, None, None]:  # fmt: skip
    out = model(input_ids, use_cache=True, logits_to_keep=1, **prompt)
    decoder = Decoder(model, out.past_key_values.content, most - 1, solve=prompt["solve"])
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    ids, ended = choose(out.logits[:, -1].float(), ended)
    try:
        yield ids.clone()  # the caller may change it in place
        for _ in range(most - 1):
            if may_end and bool(ended.all()):
                break
            ids, ended = choose(decoder.feed(ids), ended)
            yield ids.clone()
    finally:
        if keeps:  # the caller has the cache
            decoder.commit()


_MODEL_OPTIONS = {
    "attention_mask", "inputs_embeds", "logits_to_keep", "past_key_values", "position_ids", "solve",
    "token_type_ids", "use_cache", "window",
}  # fmt: skip


@torch.no_grad()
def fast_generate(
    model: ImplicitForCausalLM,
    input_ids: Tensor,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    generator: torch.Generator | None = None,
    tokenizer: Any = None,
    assistant_model: Any = None,
    synced_gpus: bool = False,
    **model_options: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decode as :func:`stream` does, inside transformers' ``generate``.

    Pass this function to ``generate``, with all other arguments as usual::

        model.generate(ids, max_new_tokens=20, custom_generate=fast_generate)

    It supports greedy search and sampling, with all logits processors, stopping criteria, streamers, caches
    to continue, ``inputs_embeds``, ``num_return_sequences`` and ``return_dict_in_generate``. You may also
    pass a ``generator`` for sampling to ``generate``.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, tokenizer,
            assistant_model, synced_gpus, model_options: arguments of transformers' decoding methods.
        generator: random generator for sampling; by default torch's global generator.

    Returns:
        (B, L + new) int64 prompts and new tokens, or transformers' output class if
        ``return_dict_in_generate`` is true.

    Raises:
        ValueError: an unsupported feature, such as beams, speculative decoding, ``use_cache=False`` or
            ``output_hidden_states``; a model that :func:`stream` refuses.
    """
    check_model(model, "fast_generate")
    config = generation_config
    with_dict = config.return_dict_in_generate
    _check_supported(model, config, assistant_model, synced_gpus, model_options)
    check_instance("generator", generator, torch.Generator | None, "a torch.Generator")
    out = cast(Any, model)._prefill(input_ids, config, model_options)
    position_ids = model_options.get("position_ids")
    if position_ids is not None:
        position_ids = (position_ids[:, -1:] + 1).expand(len(input_ids), 1)
    cache = out.past_key_values
    most = config.max_length - input_ids.shape[1]
    decoder = Decoder(model, cache.content, most, position_ids, model_options.get("solve"))
    pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    scores: tuple[Tensor, ...] | None = () if with_dict and config.output_scores else None
    raw_logits: tuple[Tensor, ...] | None = () if with_dict and config.output_logits else None
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    logits = out.logits[:, -1].to(input_ids.device, torch.float32, copy=True)
    del out  # frees the logits of the prompt
    while True:
        raw_logits = None if raw_logits is None else (*raw_logits, logits)
        changed = logits_processor(input_ids, logits)
        scores = None if scores is None else (*scores, changed)
        ids = choose_ids(changed, config.do_sample, generator)
        if pads:
            ids = torch.where(ended, config._pad_token_tensor, ids)
        input_ids = torch.cat([input_ids, ids[:, None]], 1)
        ended = ended | stopping_criteria(input_ids, scores)
        if streamer is not None:
            streamer.put(ids.cpu())
        if bool(ended.all()):
            break
        logits = decoder.feed(ids)
    decoder.commit()
    if streamer is not None:
        streamer.end()
    if not with_dict:
        return input_ids
    fields: Any = {"sequences": input_ids, "scores": scores, "logits": raw_logits, "past_key_values": cache}
    return GenerateDecoderOnlyOutput(**fields)


def _check_supported(
    model: ImplicitForCausalLM, config: Any, assistant_model: Any, synced_gpus: bool, options: dict[str, Any]
) -> None:
    """Raise ``ValueError`` if a call of ``generate`` uses a feature that :func:`fast_generate` lacks."""
    refused = {
        **unsupported(model, config, assistant_model, synced_gpus, options),
        **{name: value is not None and name not in _MODEL_OPTIONS for name, value in options.items()},
    }
    if found := [name for name, is_used in refused.items() if is_used]:
        raise ValueError(
            f"fast_generate does not support {', '.join(found)}: call generate without custom_generate"
        )


def _special_ids(
    model: ImplicitForCausalLM, eos_token_id: int | Iterable[int] | None, pad_token_id: int | None
) -> tuple[list[int], int]:
    """The ids that end a sequence, and the id of the tokens after the end; defaults as in ``generate``."""
    defaults = model.generation_config
    eos = defaults.eos_token_id if eos_token_id is None else eos_token_id
    eos = eos.tolist() if isinstance(eos, Tensor) else eos
    ends = [] if eos is None else list(eos) if isinstance(eos, Iterable) else [eos]
    for end in ends:
        check_count("eos_token_id", end, least=0, most=2**63 - 1)
    pad = defaults.pad_token_id if pad_token_id is None else pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    check_count("pad_token_id", pad, 0, len(model.model.embed_tokens.weight) - 1)
    return ends, pad
