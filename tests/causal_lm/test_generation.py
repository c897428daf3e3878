"""Caches and generation: decoding with a cache gives the same result as a full forward pass."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.parametrize import ParametrizationList
from transformers import DynamicCache, GenerationConfig, TextIteratorStreamer

from deqseq import Backbone, Context, State
from deqseq.backbone import backbones
from deqseq.backbones.weights import keep_weights
from deqseq.causal_lm import EquilibriumCache, ImplicitConfig, ImplicitForCausalLM, fast_generate
from deqseq.guesses import Previous

V = 40
BODIES: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8},
    "llama": {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2},
}
MODELS = [(body, implicit) for body in BODIES for implicit in (True, False)]
TIGHT = {"name": "residual", "rtol": 1e-6, "max_iter": 400}

Make = Callable[..., ImplicitForCausalLM]


@pytest.fixture
def make(make_model: Make) -> Make:
    """``make(body, implicit=True, **options)`` makes a small model. Implicit models get a tight tolerance."""

    def build(body: str, implicit: bool = True, **options: Any) -> ImplicitForCausalLM:
        if implicit:
            options = {"convergence": TIGHT, **options}
        options = {"backbone": BODIES[body], "eos_token_id": None, "tie_word_embeddings": False, **options}
        return make_model(vocab_size=V, implicit=implicit, **options)

    return build


def prompts(batch: int = 4, length: int = 12) -> Tensor:
    return torch.randint(1, V, (batch, length))


def greedy(model: ImplicitForCausalLM, ids: Tensor, new: int, **options: Any) -> Tensor:
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **options}
    out: Tensor = model.generate(ids, **options)
    return out


@torch.no_grad()
def by_full_forward(model: ImplicitForCausalLM, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize(("body", "implicit"), MODELS)
@pytest.mark.parametrize("calls", [[1], [3], [17], [5, 1, 1, 10], [1] * 6])
@torch.no_grad()
def test_cached_calls_equal_the_full_forward(make: Make, body: str, implicit: bool, calls: list[int]) -> None:
    model, ids = make(body, implicit), prompts(2, 8 + sum(calls))
    whole = model(ids).logits
    out = model(ids[:, :8], use_cache=True)
    torch.testing.assert_close(out.logits, whole[:, :8], rtol=1e-4, atol=1e-4)
    at = 8
    for count in calls:
        out = model(ids[:, at : at + count], past_key_values=out.past_key_values)
        torch.testing.assert_close(out.logits, whole[:, at : at + count], rtol=1e-4, atol=1e-4)
        at += count
    assert out.past_key_values.get_seq_length() == at


@pytest.mark.parametrize(("body", "implicit"), MODELS)
def test_greedy_generation_is_the_argmax_of_the_full_forward(make: Make, body: str, implicit: bool) -> None:
    model, ids = make(body, implicit), prompts(2)
    expected = by_full_forward(model, ids, 8)
    assert torch.equal(greedy(model, ids, 8), expected)
    assert torch.equal(greedy(model, ids, 8, use_cache=False), expected)


@pytest.mark.parametrize("guess", ["zero", "previous"])
@pytest.mark.parametrize("body", BODIES)
def test_a_forward_hook_gets_the_iterations_of_every_token(make: Make, body: str, guess: str) -> None:
    """The columns are those of the ids. They equal the iterations of calls with one token at a time."""
    model, ids = make(body, guess=guess, convergence={**TIGHT, "rtol": 1e-3}), prompts(2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    collected: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, args, out: collected.append(out.solution.iterations))
    out: Any = greedy(model, ids, 8, attention_mask=mask, return_dict_in_generate=True)
    hook.remove()
    found = torch.cat(collected, 1)
    assert found.shape == out.sequences[:, :-1].shape
    assert torch.equal(found[:, :12] > 0, mask.bool()) and (found[:, 12:] > 0).all()
    with torch.no_grad():
        call = model(ids, attention_mask=mask, use_cache=True)
        expected = [call.solution.iterations]
        for column in range(12, 19):
            call = model(out.sequences[:, column : column + 1], past_key_values=call.past_key_values)
            expected.append(call.solution.iterations)
    assert torch.equal(found, torch.cat(expected, 1))


@pytest.mark.parametrize("guess", ["zero", "previous"])
@pytest.mark.parametrize("layout", ["left", "right", "inside"])
@pytest.mark.parametrize("body", BODIES)
def test_padded_prompts_equal_each_alone(make: Make, body: str, layout: str, guess: str) -> None:
    """A padded prompt in a batch is continued in the same way as the prompt alone.

    The padding may be on the left, on the right, or between the tokens of the prompt.
    """
    model = make(body, guess=guess, convergence={**TIGHT, "rtol": 1e-4})
    ids, mask = prompts(4), torch.ones(4, 12, dtype=torch.int64)
    for row, length in enumerate([12, 7, 1, 4]):
        first = {"left": 0, "right": length, "inside": length // 2}[layout]
        mask[row, first : first + 12 - length] = 0
    ids = ids * mask
    alone = [greedy(model, ids[row : row + 1, mask[row].bool()], 4)[:, -4:] for row in range(4)]
    for cached in (True, False):
        together = greedy(model, ids, 4, attention_mask=mask, use_cache=cached)
        assert torch.equal(together[:, 12:], torch.cat(alone))


@pytest.mark.parametrize("body", BODIES)
def test_sampling_and_beams_with_padding_on_the_right(make: Make, body: str) -> None:
    model, ids = make(body, False), prompts(1, 5)
    padded = torch.nn.functional.pad(ids, (0, 3))
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    for options in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 5}):
        torch.manual_seed(1)
        alone = model.generate(ids, max_new_tokens=6, min_new_tokens=6, **options)
        torch.manual_seed(1)
        found = model.generate(padded, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, **options)
        assert torch.equal(found[0, 8:], alone[0, 5:])


@pytest.mark.parametrize(("body", "implicit"), MODELS)
@torch.no_grad()
def test_beams(make: Make, body: str, implicit: bool) -> None:
    """A beam's score equals the log-likelihood of its tokens in a full forward pass."""
    model, ids = make(body, implicit), prompts(2, 5)
    out = model.generate(
        ids, num_beams=3, max_new_tokens=6, min_new_tokens=6, do_sample=False, length_penalty=0.0,
        num_return_sequences=3, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    logs = model(out.sequences).logits.log_softmax(-1)[:, 4:-1]
    scores = logs.gather(-1, out.sequences[:, 5:, None]).sum((1, 2))
    torch.testing.assert_close(out.sequences_scores, scores, rtol=1e-4, atol=1e-4)
    assert (out.sequences_scores.view(2, 3).diff(dim=1) <= 0).all()


@pytest.mark.parametrize("body", BODIES)
def test_sampling_is_seeded_and_batches_return_several(make: Make, body: str) -> None:
    model, ids = make(body), prompts(2, 4)
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(
            model.generate(ids, do_sample=True, num_return_sequences=2, max_new_tokens=5, min_new_tokens=5)
        )
    assert runs[0].shape == (4, 9) and torch.equal(*runs)


class _Ids:
    """A tokenizer that decodes each token to its number."""

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(f"{int(i)} " for i in ids)


@pytest.mark.parametrize("body", BODIES)
def test_generation_computes_the_weights_once(make: Make, body: str) -> None:
    """The tokens are those of a loop over the model. Later changes of the weights take effect."""
    model, ids = make(body), prompts(2)
    backbone, computed = model.model.layer.backbone, list[Any]()
    maps = [part for part in backbone.modules() if isinstance(part, ParametrizationList)]
    for part in maps:
        part.register_forward_hook(lambda part, *_: computed.append(part))
    for _ in range(2):
        computed.clear()
        found = greedy(model, ids, 3)
        assert len(computed) == len(maps) == len({*computed})
        computed.clear()
        assert torch.equal(found, by_full_forward(model, ids, 3)) and len(computed) == 3 * len(maps)
        for parameter in backbone.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        assert not torch.equal(found, by_full_forward(model, ids, 3))
    called: list[Any] = []
    backbone.injection.linear.register_forward_hook(lambda *_: called.append(1))
    greedy(model, ids, 3)
    assert len(called) == 3


def test_kept_weights_have_gradients_and_belong_to_one_thread(make: Make) -> None:
    model, ids = make("llama"), prompts(2)
    backbone = model.model.layer.backbone
    with keep_weights():
        with torch.no_grad():
            before = model(ids).logits
            gain = backbone.layers[0].mixer.out_proj.parametrizations.weight.original0
            gain.data.mul_(0.5)  # PyTorch does not record this change
            assert torch.equal(model(ids).logits, before)
            with ThreadPoolExecutor(1) as other:
                after = other.submit(torch.no_grad()(lambda: model(ids).logits)).result()
            assert not torch.equal(after, before)
            gain.mul_(1)
            assert torch.equal(model(ids).logits, after)
        loss = model(ids).logits.sum()
        loss.backward()
    assert gain.grad is not None and gain.grad.abs().sum() > 0
    with torch.no_grad():
        assert torch.equal(model(ids).logits, after)


def test_streaming(make: Make) -> None:
    model, ids = make("mamba2"), prompts(1, 4)
    streamer = TextIteratorStreamer(_Ids(), skip_prompt=True)
    out = greedy(model, ids, 5, streamer=streamer)
    assert "".join(streamer).split() == [str(int(i)) for i in out[0, 4:]]


def test_a_window_can_be_asked_for(make: Make) -> None:
    model, ids = make("llama"), prompts(2)
    assert torch.equal(greedy(model, ids, 4, window=4), greedy(model, ids, 4))


@torch.no_grad()
def test_cropping_takes_tokens_back(make: Make) -> None:
    model, ids = make("llama"), prompts(3, 14)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    whole = model(ids, attention_mask=mask).logits
    cache = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True).past_key_values
    model(prompts(3, 5), past_key_values=cache)  # five draft tokens; all are rejected
    cache.crop(-5)
    assert cache.get_seq_length() == 8 and cache.state.seen.tolist() == [8, 0, 8]
    out = model(ids[:, 8:], attention_mask=mask, past_key_values=cache)
    real = mask[:, 8:].bool()
    torch.testing.assert_close(out.logits[real], whole[:, 8:][real], rtol=1e-4, atol=1e-4)
    for wrong in (1, -100):
        with pytest.raises(ValueError, match="crop"):
            cache.crop(wrong)


@torch.no_grad()
def test_a_broken_token_breaks_its_own_sequence_only(make: Make) -> None:
    """Cropping does not repair a sequence whose removed token was not finite. A copy of the cache does."""
    model, ids = make("llama"), prompts(2, 12)
    whole = model(ids).logits
    cache = model(ids[:, :8], use_cache=True).past_key_values
    before = copy.deepcopy(cache)
    broken = model.get_input_embeddings()(prompts(2, 2))
    broken[0] = torch.nan
    model(inputs_embeds=broken, past_key_values=cache)
    cache.crop(-2)
    found = model(ids[:, 8:], past_key_values=cache).logits
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1], whole[1, 8:], rtol=1e-4, atol=1e-4)
    repaired = model(ids[:, 8:], past_key_values=before).logits
    torch.testing.assert_close(repaired, whole[:, 8:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_given_state_counts_as_seen(make: Make) -> None:
    model, ids = make("llama"), prompts(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    whole = model(ids, attention_mask=mask).logits
    state = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True).past_key_values.state
    cache = EquilibriumCache(True, state)
    assert cache.get_seq_length() == 8 and torch.equal(cache.content.real, mask[:, :8].bool())
    model(prompts(2, 4), past_key_values=cache)  # four draft tokens; the last one is rejected
    cache.crop(-1)
    assert cache.get_seq_length() == 11 and cache.state.seen.tolist() == [11, 8]
    cache.crop(-5)  # removes the other three draft tokens and the last two tokens of `state`
    assert cache.get_seq_length() == 6 and cache.state.seen.tolist() == [6, 3]
    cache.batch_repeat_interleave(2)
    again, long = (t.repeat_interleave(2, 0) for t in (ids, mask))
    out = model(again[:, 6:], attention_mask=long, past_key_values=cache)
    torch.testing.assert_close(out.logits, whole[:, 6:].repeat_interleave(2, 0), rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 12 and cache.state.seen.tolist() == [12, 12, 9, 9]
    cache.batch_select_indices(torch.tensor([2]))
    cache.crop(-10)
    assert cache.get_seq_length() == 2 and cache.state.seen.tolist() == [0]
    assert state.seen.tolist() == [8, 5]


def test_speculative_decoding(make: Make) -> None:
    """Speculative decoding by prompt look-up gives the same tokens as greedy decoding.

    Attention models remove rejected tokens from their cache. Recurrent models cannot remove tokens, so they
    raise an error.
    """
    model = make("llama")
    ids = prompts(1, 6).repeat(1, 3)
    assert torch.equal(greedy(model, ids, 8, prompt_lookup_num_tokens=3), greedy(model, ids, 8))
    with pytest.raises(ValueError, match="stateful"):
        greedy(make("mamba2"), ids, 8, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="cache_implementation"):
        greedy(model, ids, 8, cache_implementation="static")
    assert torch.equal(greedy(model, ids, 8, cache_implementation="dynamic"), greedy(model, ids, 8))
    with pytest.raises(ValueError, match="assistant_early_exit"):
        greedy(model, ids, 8, assistant_early_exit=1)
    cache = make("mamba2")(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="recurrent"):
        cache.crop(-1)


@pytest.mark.parametrize("body", BODIES)
@torch.no_grad()
def test_a_copied_cache_goes_its_own_way(make: Make, body: str) -> None:
    model, ids = make(body), prompts(2, 10)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    copied = copy.deepcopy(cache)
    first = model(ids[:, 6:], past_key_values=cache).logits
    assert copied.get_seq_length() == 6
    again = model(ids[:, 6:], past_key_values=copied).logits
    assert torch.equal(first, again)
    copied.batch_repeat_interleave(2)
    assert copied.state.seen.tolist() == [10] * 4
    copied.batch_select_indices(torch.tensor([3, 0]))
    assert torch.equal(copied.state.layers[0][0][1], cache.state.layers[0][0][0])
    copied.reset()
    assert copied.get_seq_length() == 0 and copied.state is None


def test_wrong_caches(make: Make) -> None:
    model, ids = make("llama"), prompts(2, 4)
    with pytest.raises(ValueError, match="DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    cache = model(ids, use_cache=True).past_key_values
    assert isinstance(cache, EquilibriumCache)
    with pytest.raises(ValueError, match="use_cache"):
        model(ids, past_key_values=cache, use_cache=False)
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, past_key_values=cache, attention_mask=torch.ones(2, 7))
    with pytest.raises(ValueError, match="sequences"):
        model(ids[:1], past_key_values=cache)
    assert model(ids, use_cache=False).past_key_values is None
    assert model.train()(ids).past_key_values is None
    model.eval().config.use_cache = False
    assert model(ids).past_key_values is None


def test_the_previous_equilibrium_as_a_guess(make: Make) -> None:
    """Starting from the previous equilibrium changes the residuals, but not the logits."""
    model, warm_model, ids = make("llama"), make("llama", guess="previous"), prompts(1, 6)
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
        caches = [copy.deepcopy(cache) for _ in range(3)]
        zero = model(ids[:, 4:5], past_key_values=cache)
        warm = warm_model(ids[:, 4:5], past_key_values=caches[0])
        z0 = caches[1].content.equilibrium[:, None]
        given = model(ids[:, 4:5], past_key_values=caches[1], z0=z0)
        solve = replace(model.model.layer.eval_solve, guess=Previous())
        chosen = model(ids[:, 4:5], past_key_values=caches[2], solve=solve)
    torch.testing.assert_close(zero.logits, warm.logits, rtol=1e-4, atol=1e-4)
    assert not torch.equal(zero.solution.residual, warm.solution.residual)
    for same in (given, chosen):
        assert torch.equal(same.solution.residual, warm.solution.residual)
        assert torch.equal(same.logits, warm.logits)
    for wrong in ("last", Previous(), None):
        with pytest.raises(ValueError, match="guess"):
            make("llama", guess=wrong)


def test_a_configuration_of_version_0_2_names_the_guess_otherwise(make: Make) -> None:
    settings = make("llama", guess="previous").config.to_dict()
    settings["initial_guess"] = settings.pop("guess")
    old = ImplicitConfig.from_dict(settings)
    assert old.guess == "previous" and "initial_guess" not in old.to_dict()
    assert ImplicitConfig.from_dict(settings, guess="noise").guess == "noise"


@pytest.mark.parametrize("layout", ["left", "right"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("body", "implicit"), MODELS)
@torch.no_grad()
def test_packed_sequences_equal_separate_ones(
    make: Make, body: str, implicit: bool, window: int | None, layout: str
) -> None:
    """Position ids that restart at 0 begin a new sequence within the row.

    The logits of this sequence must be the same as in a row of its own.
    """
    model = make(body, implicit, **({"window": window} if implicit else {}))
    lengths = [[5, 1, 4], [7, 2], [10]]
    ids, mask = prompts(3, 12), torch.zeros(3, 12, dtype=torch.int64)
    position = torch.zeros(3, 12, dtype=torch.int64)
    parts = []
    for row, row_lengths in enumerate(lengths):
        at = 12 - sum(row_lengths) if layout == "left" else 0
        for length in row_lengths:
            mask[row, at : at + length] = 1
            position[row, at : at + length] = torch.arange(length)
            parts.append((row, slice(at, at + length)))
            at += length
    out = model(ids, attention_mask=mask, position_ids=position)
    for row, part in parts:
        alone = model(ids[row : row + 1, part])
        torch.testing.assert_close(out.logits[row, part], alone.logits[0], rtol=1e-4, atol=1e-4)
    if implicit:
        assert out.solution.iterations.shape == (3, 12)
        assert not out.solution.iterations[mask == 0].any()
    with pytest.raises(ValueError, match="restart inside"):
        model(ids, attention_mask=mask, position_ids=position, use_cache=True)
    position[0, 6 if layout == "left" else 4] = 1
    with pytest.raises(ValueError, match="must increase"):
        model(ids, attention_mask=mask, position_ids=position)


@pytest.mark.parametrize("body", BODIES)
@torch.no_grad()
def test_a_loop_over_the_model(make: Make, body: str) -> None:
    """In evaluation mode, calls return a cache by default, and a later call can continue from this cache."""
    model, ids = make(body), prompts(2, 9)
    expected = model(ids).logits
    out = model(ids[:, :8])
    out = model(ids[:, 8:], past_key_values=out.past_key_values)
    torch.testing.assert_close(out.logits[:, 0], expected[:, 8], rtol=1e-4, atol=1e-4)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    assert model(ids, position_ids=packed).past_key_values is None


@torch.no_grad()
@pytest.mark.parametrize("way", [{}, {"custom_generate": fast_generate}, {"wavefront": 4}])
def test_the_text_must_be_longer_than_the_cache(make: Make, way: dict[str, Any]) -> None:
    model, ids = make("llama"), prompts(2, 5)
    cache = model(ids).past_key_values
    options = {"max_new_tokens": 4, "do_sample": False, **way}
    with pytest.raises(ValueError, match="past_key_values holds 5 tokens, and the text has 5"):
        model.generate(ids, past_key_values=cache, **options)
    assert cache.get_seq_length() == 5
    longer = torch.cat([ids, ids], 1)
    assert torch.equal(
        model.generate(longer, past_key_values=cache, **options), model.generate(longer, **options)
    )


def test_a_cache_that_claims_to_remove_tokens_of_a_recurrent_state(make: Make) -> None:
    with pytest.raises(ValueError, match="make it with EquilibriumCache\\(rewinds=False\\)"):
        make("mamba2")(prompts(2, 5), past_key_values=EquilibriumCache(rewinds=True), use_cache=True)


def test_calls_that_contradict_their_cache(make: Make) -> None:
    model, ids = make("llama"), prompts(2, 5)
    cache = model(ids).past_key_values
    hidden = torch.ones(2, 6)
    hidden[0, 0] = 0
    with pytest.raises(ValueError, match="differs from the masks of earlier calls"):
        model(ids[:, :1], past_key_values=cache, attention_mask=hidden)
    with pytest.raises(ValueError, match="continue after"):
        model(ids[:, :2], past_key_values=cache, position_ids=torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="continue after"):
        model(ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[0]]))
    for other in (
        make("mamba2"),
        make("llama", backbone={**BODIES["llama"], "n_layer": 1}),
        make("llama").half(),
    ):
        with pytest.raises(ValueError, match="another model"):
            other(ids[:, :1], past_key_values=cache)


class Stateless(Backbone):
    """f(z, x) = tanh(cumsum(x) + z / 2). The backbone keeps no state: no call continues an earlier call."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        return Context((x.cumsum(1),))

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, None]:
        return torch.tanh(context.tokens[0] + z / 2), None


@torch.no_grad()
def test_generation_without_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = backbones.lookup
    monkeypatch.setattr(backbones, "lookup", lambda name: Stateless if name == "own" else lookup(name))
    config = ImplicitConfig(vocab_size=V, backbone={"name": "own", "d_model": 16}, convergence=TIGHT)
    model, ids = ImplicitForCausalLM(config).eval(), prompts(2, 4)
    assert model(ids).past_key_values is None
    assert torch.equal(greedy(model, ids, 4), by_full_forward(model, ids, 4))
    with pytest.raises(ValueError, match="Stateless keeps no state"):
        model(ids, use_cache=True)


@torch.no_grad()
def test_continuous_batching_is_refused_at_once(make: Make) -> None:
    with pytest.raises(ValueError, match=r"continuous batching .* does not work"):
        make("llama").generate_batch([[1, 2, 3]], generation_config=GenerationConfig(max_new_tokens=2))
