"""``stream`` and ``fast_generate`` give the tokens of ``generate``, with less work on the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer

from deqseq import Backbone, SolveOptions, State, graphs
from deqseq.causal_lm import (
    EquilibriumCache,
    ImplicitConfig,
    ImplicitForCausalLM,
    decoding,
    fast_generate,
    stream,
)
from deqseq.causal_lm.decoding import Decoder, choose_ids
from deqseq.causal_lm.recorded import RecordedStep

V = 40
BODIES: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8},
    "llama": {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2},
    "memory": {"name": "memory", "d_model": 16},  # of another package: see tests/extensions
}
FORMS = ("implicit", "injected", "explicit")
FOUR = {"name": "fixed", "iterations": 4}
TIGHT = {"name": "residual", "rtol": 1e-6, "max_iter": 400}
MODELS = [*((body, form) for body in ("mamba2", "llama") for form in FORMS), ("memory", "implicit")]
Make = Callable[..., ImplicitForCausalLM]

pytestmark = pytest.mark.usefixtures("extensions")


@pytest.fixture
def make(contractive: Callable[[Backbone], Backbone]) -> Make:
    """``make(body, form="implicit", **options)`` makes a small model in evaluation mode.

    Implicit models do four iterations by default. With ``convergence=TIGHT``, the map is contractive.
    """

    def build(body: str, form: str = "implicit", **options: Any) -> ImplicitForCausalLM:
        torch.manual_seed(3)
        backbone = {**BODIES[body], **({"injection": True} if form == "injected" else {})}
        options = {"convergence": FOUR, **options} if form == "implicit" else options
        config = ImplicitConfig(
            vocab_size=V, backbone=backbone, implicit=form == "implicit", initializer_range=0.5,
            pad_token_id=0, eos_token_id=None, tie_word_embeddings=False, **options,
        )  # fmt: skip
        model = ImplicitForCausalLM(config).eval()
        if options.get("convergence") is TIGHT:
            contractive(model.model.layer.backbone)
        return model

    return build


def prompts(batch: int = 3, length: int = 9) -> Tensor:
    return torch.randint(1, V, (batch, length))


def streamed(model: ImplicitForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    """The prompts and the streamed tokens, as ``generate`` returns them."""
    return torch.cat([ids, torch.stack(list(stream(model, ids, **options)), 1)], 1)


def generated(model: ImplicitForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    out: Tensor = model.generate(ids, **{"do_sample": False, **options})
    return out


def lengths(rows: Tensor, end: int) -> list[int]:
    """The number of tokens of each row before the id ``end``."""
    return [[*row.tolist(), end].index(end) for row in rows]


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(("body", "form"), MODELS)
def test_tokens_are_those_of_generate(make: Make, body: str, form: str, padding: str) -> None:
    """The tokens are equal, even if sequences end after different numbers of tokens."""
    model, ids = make(body, form), prompts()
    mask = torch.ones_like(ids)
    for row, length in enumerate([9, 4, 1]):
        mask[row, slice(length, None) if padding == "right" else slice(-length)] = 0
    ids = ids * mask
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 10}
    whole = generated(model, ids, **options)
    assert torch.equal(streamed(model, ids, **options), whole)
    assert torch.equal(generated(model, ids, custom_generate=fast_generate, **options), whole)
    new = whole[:, 9:]
    alone = max(new.unique().tolist(), key=lambda id: len(set(lengths(new, id))))
    assert len(set(lengths(new, alone))) > 1
    for eos in ([alone], [int(new[0, 5]), int(new[1, 2]), int(new[2, 7])]):
        ended = generated(model, ids, eos_token_id=eos, **options)
        assert torch.equal(streamed(model, ids, eos_token_id=eos, **options), ended)
        fast = generated(model, ids, eos_token_id=eos, custom_generate=fast_generate, **options)
        assert torch.equal(fast, ended)
    assert ended.shape[1] < whole.shape[1]


def test_ends_are_those_of_the_model_by_default(make: Make) -> None:
    model, ids = make("llama"), prompts(1)
    whole = streamed(model, ids, max_new_tokens=6)
    model.generation_config.eos_token_id = end = int(whole[0, 11])
    found = streamed(model, ids, max_new_tokens=6)
    assert found[0, -1] == end and torch.equal(found, generated(model, ids, max_new_tokens=6))
    assert torch.equal(streamed(model, ids, max_new_tokens=6, eos_token_id=()), whole)


def test_the_caller_may_change_the_tokens_in_place(make: Make) -> None:
    model, ids = make("llama"), prompts()
    tokens = []
    for token in stream(model, ids, max_new_tokens=6):
        tokens.append(token.clone())
        token.zero_()
    assert torch.equal(torch.stack(tokens, 1), streamed(model, ids, max_new_tokens=6)[:, 9:])


@pytest.mark.parametrize("body", ["llama", "mamba2"])
def test_a_cache_that_changes_during_a_stream_is_not_overwritten(make: Make, body: str) -> None:
    model, ids = make(body), prompts()
    cache = EquilibriumCache(model.model.layer.backbone.rewinds)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    first, second = (stream(model, ids[:, :1], max_new_tokens=4, past_key_values=cache) for _ in range(2))
    for tokens in (first, second):
        next(tokens)
        next(tokens)
    with pytest.raises(ValueError, match="the cache has changed during generation"):
        first.close()
    second.close()
    assert cache.state is not None
    assert cache.get_seq_length() == int(cache.state.seen[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("body", ["mamba2", "llama"])
def test_after_an_error_the_cache_holds_the_prompt(make: Make, body: str, form: str) -> None:
    options = {"convergence": TIGHT} if form == "implicit" else {}
    model, ids = make(body, form, **options), prompts(2)
    cache = EquilibriumCache(model.model.layer.backbone.rewinds)
    tokens = stream(model, ids, max_new_tokens=8, past_key_values=cache)
    new = [next(tokens) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt), model_that_fails(model):
        next(tokens)
    assert cache.get_seq_length() == ids.shape[1] and cache.state.seen.tolist() == [9, 9]
    longer = torch.cat([ids, torch.stack(new, 1)], 1)
    expected = generated(model, longer, max_new_tokens=5)
    assert torch.equal(generated(model, longer, max_new_tokens=5, past_key_values=cache), expected)


@contextmanager
def model_that_fails(model: ImplicitForCausalLM) -> Iterator[None]:
    """The output layer of ``model`` raises ``KeyboardInterrupt``."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.lm_head.register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def test_options_of_the_solve(make: Make) -> None:
    model, ids = make("llama", convergence=TIGHT, guess="previous"), prompts()
    expected = generated(model, ids, max_new_tokens=6)
    assert torch.equal(streamed(model, ids, max_new_tokens=6), expected)
    few = SolveOptions("anderson", {"name": "fixed", "iterations": 1}, guess="noise")
    expected = generated(model, ids, max_new_tokens=6, solve=few)
    assert torch.equal(streamed(model, ids, max_new_tokens=6, solve=few), expected)
    fast = generated(model, ids, max_new_tokens=6, solve=few, custom_generate=fast_generate)
    assert torch.equal(fast, expected)


def test_bfloat16_and_autocast(make: Make) -> None:
    model, ids = make("mamba2"), prompts()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        expected = generated(model, ids, max_new_tokens=4)
        assert torch.equal(streamed(model, ids, max_new_tokens=4), expected)
    model = model.bfloat16()
    expected = generated(model, ids, max_new_tokens=4)
    assert torch.equal(streamed(model, ids, max_new_tokens=4), expected)


def test_adapters(make: Make) -> None:
    """Adapters of PEFT work, except those that change the prompt."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'deqseq[dev]'")
    ids, options = prompts(), {"max_new_tokens": 5, "do_sample": False}
    lora = peft.LoraConfig(target_modules=["wq", "fc2"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make("llama"), lora).eval()
    expected = model.generate(input_ids=ids, **options)
    assert torch.equal(model.generate(input_ids=ids, custom_generate=fast_generate, **options), expected)
    assert torch.equal(streamed(model.get_base_model(), ids, max_new_tokens=5), expected)
    with pytest.raises(ValueError, match=r"pass model.get_base_model\(\)"):
        stream(model, ids, max_new_tokens=5)
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make("llama"), prompt).eval()
    with pytest.raises(ValueError, match="does not support prompt tuning"):
        model.generate(input_ids=ids, custom_generate=fast_generate, **options)


@pytest.mark.parametrize(("body", "form"), [("mamba2", "implicit"), ("llama", "explicit")])
def test_the_cache_ends_as_after_generate(make: Make, body: str, form: str) -> None:
    """The caches are equal, even if the stream is closed early or the cache already has tokens."""
    model, ids = make(body, form), prompts(2, 62)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0

    def empty() -> EquilibriumCache:
        return EquilibriumCache(model.model.layer.backbone.rewinds)

    expected, found, fast = empty(), empty(), empty()
    whole = generated(model, ids, attention_mask=mask, max_new_tokens=5, past_key_values=expected)
    tokens = stream(model, ids, attention_mask=mask, max_new_tokens=9, past_key_values=found)
    some = torch.stack([next(tokens) for _ in range(5)], 1)
    tokens.close()
    options: dict[str, Any] = {"max_new_tokens": 5, "custom_generate": fast_generate}
    generated(model, ids, attention_mask=mask, past_key_values=fast, **options)
    assert torch.equal(some, whole[:, 62:])
    for cache in (found, fast):
        same_content(cache, expected)
    more, last = prompts(2, 3), whole[:, -1:]
    ids, mask = torch.cat([whole, more], 1), torch.nn.functional.pad(mask, (0, 8), value=1)
    options = {"attention_mask": mask, "max_new_tokens": 4}
    whole = generated(model, ids, past_key_values=expected, **options)
    again = generated(model, ids, past_key_values=fast, custom_generate=fast_generate, **options)
    rest = stream(model, torch.cat([last, more], 1), max_new_tokens=4, past_key_values=found)
    assert torch.equal(torch.stack(list(rest), 1), whole[:, -4:]) and torch.equal(again, whole)
    for cache in (found, fast):
        same_content(cache, expected)


def same_content(found: EquilibriumCache, expected: EquilibriumCache) -> None:
    a, b = found.content, expected.content
    assert torch.equal(a.state.seen, b.state.seen) and torch.equal(a.real, b.real)
    torch.testing.assert_close(a.equilibrium, b.equilibrium, rtol=1e-4, atol=1e-4)
    for one, other in zip(values(a.state), values(b.state), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def values(state: State) -> list[Tensor]:
    """The tensors of a state. Keys and values include only the filled slots of each sequence."""
    tensors = state.tensors()[1:]
    if tensors[0].shape[1:] == tensors[1].shape[1:]:  # keys and values (B, J, S, P)
        return [t[row, :, :n] for t in tensors for row, n in enumerate(state.seen.tolist())]
    return tensors


def test_a_state_that_grows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LEAST_CAPACITY", 2)
    model, ids = make("llama", "explicit"), prompts(2, 60)  # a state with 64 slots
    expected = generated(model, ids, max_new_tokens=12)
    assert torch.equal(streamed(model, ids, max_new_tokens=12), expected)


class NeverWaits(TorchDispatchMode):
    """Raises an error for operations that make the host wait for the device, such as reading a value."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITS, f"{func} makes the host wait"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("body", "form"), MODELS)
@torch.no_grad()
def test_a_token_never_makes_the_host_wait_and_keeps_all_shapes(make: Make, body: str, form: str) -> None:
    model, ids = make(body, form), prompts()
    decoder = Decoder(model, model(ids, use_cache=True).past_key_values.content, 9)
    decoder.feed(ids[:, 0])  # this call gives the state capacity
    memory = decoder.memory
    with NeverWaits():
        logits, after = decoder.step(ids[:, 1], memory)
        choose_ids(logits, True, None)
    assert [t.shape for t in after.state.tensors()] == [t.shape for t in memory.state.tensors()]
    assert after.position_ids.shape == memory.position_ids.shape
    with pytest.raises(AssertionError, match="wait"), NeverWaits():
        bool(logits.isnan().any())


RECORDED = [(body, form, None) for body, form in MODELS if body != "memory"] + [
    (body, "implicit", guess) for body in ("mamba2", "llama") for guess in ("zero", "previous")
]


@pytest.mark.parametrize(("body", "form", "guess"), RECORDED)
def test_recorded_steps_give_the_same_tokens(
    make: Make, body: str, form: str, guess: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models with a fixed number of iterations, with a search (``guess`` is given), and explicit ones."""
    options: dict[str, Any] = {} if guess is None else {"convergence": TIGHT, "guess": guess}
    model, ids = make(body, form, **options), prompts()
    runs = []
    for record in (False, True):
        cache = EquilibriumCache(model.model.layer.backbone.rewinds)
        made = allow_recordings(monkeypatch) if record else []
        tokens = [streamed(model, ids, max_new_tokens=7, past_key_values=cache)]
        tokens.append(generated(model, ids, max_new_tokens=6, custom_generate=fast_generate))
        # The cache has the new tokens too, and goes on.
        tokens.append(streamed(model, tokens[0][:, -1:], max_new_tokens=6, past_key_values=cache))
        runs.append(tokens)
        assert len(made) == 3 * record
    for plain, replayed in zip(*runs, strict=True):
        assert torch.equal(plain, replayed)


def test_recorded_steps_give_the_same_logits_after_the_state_has_grown(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the state moves to larger tensors, the step is recorded anew. Earlier logits do not change."""
    model, ids = make("llama", convergence=TIGHT), prompts(2, 60)  # a state with 64 slots
    monkeypatch.setattr(decoding, "LEAST_CAPACITY", 4)
    monkeypatch.setattr(decoding, "LEAST_CAPACITY_RECORDED", 4)
    runs = []
    for record in (False, True):
        made = allow_recordings(monkeypatch) if record else []
        with torch.no_grad():
            decoder = Decoder(model, model(ids, use_cache=True).past_key_values.content, 20)
            runs.append([decoder.feed(ids[:, n]) for n in range(20)])
        assert len(made) == (2 if record else 0)  # for 64 slots and for 128
    for plain, replayed in zip(*runs, strict=True):
        assert torch.equal(plain, replayed)


@torch.no_grad()
def test_steps_that_cannot_be_recorded_are_not(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks would not run in a replay, a guess of noise draws numbers, and large batches gain nothing."""
    made = allow_recordings(monkeypatch)
    model = make("llama")
    streamed(model, prompts(65), max_new_tokens=6)
    custom = make("llama")
    custom.lm_head = torch.nn.Sequential(custom.lm_head)  # a graph would not notice how such a module changes
    streamed(custom, prompts(), max_new_tokens=6)
    hook = model.model.layer.backbone.layers[0].register_forward_hook(lambda *_: None)
    streamed(model, prompts(), max_new_tokens=6)
    hook.remove()
    streamed(make("llama", guess="noise"), prompts(), max_new_tokens=6)
    streamed(model, prompts(), max_new_tokens=3)  # too few tokens
    assert not made
    streamed(model, prompts(), max_new_tokens=6)
    assert len(made) == 1


@pytest.mark.parametrize(("body", "form", "guess"), RECORDED)
@torch.no_grad()
def test_what_is_recorded_never_makes_the_host_wait(
    make: Make, body: str, form: str, guess: str | None
) -> None:
    """A CUDA graph cannot record such operations. On a CPU, making a recording runs what it records."""
    options: dict[str, Any] = {} if guess is None else {"convergence": TIGHT, "guess": guess}
    model, ids = make(body, form, **options), prompts()
    decoder = Decoder(model, model(ids, use_cache=True).past_key_values.content, 9)
    decoder.feed(ids[:, 0])
    with NeverWaits():
        RecordedStep(decoder.step, decoder.memory)


def allow_recordings(monkeypatch: pytest.MonkeyPatch) -> list[RecordedStep]:
    """Record on a CPU too, where a replay calls the recorded functions. Returns a list of all recordings."""
    made: list[RecordedStep] = []

    class Counted(RecordedStep):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(
        graphs, "can_record", lambda x, *parts: all(getattr(part, "capturable", False) for part in parts)
    )
    monkeypatch.setattr(decoding, "RecordedStep", Counted)
    monkeypatch.setattr(decoding, "LEAST_RECORDED", 2)
    return made


SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9}


def test_samples_are_those_of_generate_and_of_their_seed(make: Make) -> None:
    model, ids = make("mamba2", "injected"), prompts()
    options = {**SAMPLING, "max_new_tokens": 12}
    runs = []
    for run in (generated, streamed, partial(generated, custom_generate=fast_generate)):
        torch.manual_seed(5)
        runs.append(run(model, ids, **options))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    found = []
    for seed in (7, 7, 8):
        generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        found.append(streamed(model, ids, generator=generator, **options))
    again = generated(
        model, ids, custom_generate=fast_generate, generator=generator.manual_seed(7), **options
    )
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(found[0], again)


def test_samples_have_the_right_distribution(make: Make) -> None:
    model, ids = make("llama", "explicit"), prompts(1).expand(4000, -1)
    with torch.no_grad():
        logits = model(ids[:1]).logits[0, -1] / 0.7
    for options in ({}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 6, "top_p": 0.7}):
        kept = logits.clone()
        order = kept.argsort(descending=True)
        kept[order[options.get("top_k", V) :]] = -torch.inf
        before = kept[order].softmax(0).cumsum(0) - kept[order].softmax(0)
        kept[order[before >= options.get("top_p", 1.0)]] = -torch.inf  # enough likelier tokens are kept
        expected = kept.softmax(0)
        generator = torch.Generator(torch.get_default_device()).manual_seed(2)
        (drawn,) = stream(
            model, ids, max_new_tokens=1, do_sample=True, temperature=0.7, generator=generator, **options
        )
        share = drawn.bincount(minlength=V) / len(ids)
        deviation = (expected * (1 - expected) / len(ids)).sqrt()
        assert share[expected == 0].sum() == 0
        assert ((share - expected).abs() <= 5 * deviation).all()


class _Ids:
    """A tokenizer that decodes each token to its number."""

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(f"{int(i)} " for i in ids)


def test_fast_generate_takes_the_arguments_of_generate(make: Make) -> None:
    model, ids = make("mamba2", "injected"), prompts(2)
    for options in (
        {"repetition_penalty": 3.0, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 4, "eos_token_id": list(range(V))},
        {"stopping_criteria": [lambda sequences, scores: sequences[:, -1] % 3 == 0]},
        {"num_return_sequences": 2, "do_sample": True, "top_k": 4},
        {"inputs_embeds": model.model.embed_tokens(prompts(2)).detach()},
        {"prefill_chunk_size": 4},
    ):
        options = {"max_new_tokens": 8, **options}
        given = () if "inputs_embeds" in options else (ids,)
        found = []
        for way in ({}, {"custom_generate": fast_generate}):
            torch.manual_seed(1)
            found.append(model.generate(*given, **{"do_sample": False, **options, **way}))
        assert torch.equal(*found), options
    streamer = TextIteratorStreamer(_Ids(), skip_prompt=True)
    options = {"custom_generate": fast_generate, "max_new_tokens": 5, "return_dict_in_generate": True}
    out = model.generate(ids[:1], streamer=streamer, output_scores=True, do_sample=False, **options)
    assert "".join(streamer).split() == [str(int(i)) for i in out.sequences[0, 9:]]
    assert torch.equal(torch.cat(out.scores).argmax(-1), out.sequences[0, 9:])
    assert out.past_key_values.get_seq_length() == 9 + 4


def test_strings_that_stop(make: Make) -> None:
    model, ids, letters = make("mamba2", "explicit"), prompts(1), [chr(65 + i) for i in range(V)]
    plain = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
    whole = generated(model, ids, max_new_tokens=12)
    options = {"stop_strings": [letters[whole[0, 12]]], "tokenizer": tokenizer, "max_new_tokens": 12}
    stopped = generated(model, ids, **options)
    assert stopped.shape[1] < whole.shape[1]
    assert torch.equal(generated(model, ids, custom_generate=fast_generate, **options), stopped)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"use_cache": False}, "use_cache=False"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"z0": torch.zeros(1, 9, 16)}, "z0"),
    ],
)
def test_fast_generate_refuses_what_it_does_not_support(
    make: Make, options: dict[str, Any], said: str
) -> None:
    model = make("llama", "implicit")
    with pytest.raises(ValueError, match=f"fast_generate does not support .*{said}"):
        model.generate(prompts(1), max_new_tokens=3, custom_generate=fast_generate, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number >= 1, got 0"),
        ({"do_sample": 1}, "do_sample must be true or false"),
        ({"do_sample": True, "temperature": 0}, "temperature must be a finite number above 0"),
        ({"do_sample": True, "temperature": 1e-40}, "temperature must be at least 1e-30, got 1e-40"),
        ({"do_sample": True, "top_k": 0}, "top_k must be a whole number >= 1, got 0"),
        ({"do_sample": True, "top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"do_sample": True, "generator": 3}, "generator must be a torch.Generator, got 3"),
        ({"top_p": 0.5}, "for sampling: also pass do_sample=True"),
        ({"eos_token_id": -1}, "eos_token_id must be a whole number from 0 to 9223372036854775807, got -1"),
        ({"eos_token_id": torch.tensor(3.0)}, "eos_token_id must be a whole number .*, got 3.0"),
        ({"pad_token_id": V}, f"pad_token_id must be a whole number from 0 to {V - 1}, got {V}"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask must be \(B, L\)"),
        ({"solve": "picard"}, "solve must be SolveOptions, got 'picard'"),
        ({"past_key_values": 3}, "past_key_values must be an EquilibriumCache, got 3"),
    ],
)
def test_wrong_arguments(make: Make, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        next(stream(make("llama"), prompts(1), **{"max_new_tokens": 3, **options}))


def test_wrong_models(make: Make) -> None:
    model, ids = make("llama", "explicit"), prompts(1)
    with pytest.raises(ValueError, match="stream is for ImplicitForCausalLM, got Linear"):
        stream(torch.nn.Linear(2, 2), ids, max_new_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an explicit model is not solved"):
        next(stream(model, ids, max_new_tokens=1, solve=SolveOptions()))
    handle = model.model.layer.register_forward_hook(lambda *_: None)
    for call in (stream, partial(ImplicitForCausalLM.generate, custom_generate=fast_generate)):
        with pytest.raises(ValueError, match="forward hooks of this ExplicitSequenceLayer"):
            call(model, ids, max_new_tokens=1)
    handle.remove()
    pointwise = ImplicitForCausalLM(
        ImplicitConfig(vocab_size=V, backbone={"name": "pointwise", "d_model": 16})
    )
    with pytest.raises(ValueError, match="Pointwise keeps no state"):
        stream(pointwise, ids, max_new_tokens=1)


def test_gradients_stay_enabled_outside(make: Make) -> None:
    tokens = stream(make("llama"), prompts(1), max_new_tokens=3)
    for ids in tokens:
        assert torch.is_grad_enabled() and not ids.requires_grad
