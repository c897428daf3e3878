"""Wavefront decoding gives the tokens of greedy decoding, with fewer evaluations one after the other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer

from deqseq import ConvergencePolicy, Residual, SolveOptions
from deqseq.causal_lm import EquilibriumCache, ImplicitConfig, ImplicitForCausalLM
from deqseq.causal_lm.wavefront import _MatchingInputs
from deqseq.policy import Judgement

V = 40
BODIES: dict[str, dict[str, Any]] = {
    "mamba2": {"name": "mamba2", "d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8},
    "llama": {"name": "llama", "d_model": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2},
    "memory": {"name": "memory", "d_model": 16},  # of another package: see tests/extensions
}
TIGHT = Residual(rtol=1e-4, max_iter=400)

pytestmark = pytest.mark.usefixtures("extensions")
Make = Callable[..., ImplicitForCausalLM]


class Passes(ConvergencePolicy):
    """Applies ``policy``, and counts the evaluations."""

    def __init__(self, policy: Residual) -> None:
        self.policy, self.max_iter, self.count = policy, policy.max_iter, 0

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        self.count += 1
        return self.policy.judge(z, fz, iterations, active)


@pytest.fixture
def make(make_model: Make) -> Make:
    """``make(body, **options)`` makes a small implicit model."""

    def build(body: str, **options: Any) -> ImplicitForCausalLM:
        options = {"eos_token_id": None, "tie_word_embeddings": False, **options}
        return make_model(BODIES[body], vocab_size=V, **options)

    return build


def generated(model: ImplicitForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    solve = SolveOptions(options.pop("solver", "picard"), options.pop("convergence", TIGHT))
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "solve": solve}
    out: Tensor = model.generate(ids, **settings | options)
    return out


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are characters."""
    plain = Tokenizer(models.BPE({chr(ord("A") + i): i for i in range(V)}, []))
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


def prompts(batch: int = 3, length: int = 6) -> tuple[Tensor, Tensor]:
    """Prompts and their mask. The second prompt has padding on the left, the third on the right."""
    ids = torch.randint(
        1, V, (batch, length), generator=torch.Generator(torch.get_default_device()).manual_seed(1)
    )
    mask = torch.ones_like(ids)
    mask[1:2, :2] = 0
    mask[2:3, -2:] = 0
    return ids, mask


@pytest.mark.parametrize("window", [1, 3, 8, 64])
@pytest.mark.parametrize("body", BODIES)
def test_tokens_are_those_of_generate(make: Make, body: str, window: int) -> None:
    model, (ids, mask) = make(body), prompts()
    plain = generated(model, ids, attention_mask=mask)
    assert len(plain[:, 6:].unique()) > 4  # one repeated token would prove nothing
    assert torch.equal(generated(model, ids, attention_mask=mask, wavefront=window), plain)


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden", {"name": "picard", "damping": 0.7}])
def test_solvers(make: Make, solver: Any) -> None:
    model, (ids, mask) = make("mamba2"), prompts()
    plain = generated(model, ids, attention_mask=mask, solver=solver)
    assert torch.equal(generated(model, ids, attention_mask=mask, solver=solver, wavefront=4), plain)


@pytest.mark.parametrize("body", BODIES)
def test_a_token_waits_for_its_input(make: Make, body: str) -> None:
    """At this tolerance a token settles in its first evaluation, if its input is final."""
    model, (ids, _) = make(body), prompts()
    loose = Residual(rtol=10.0)
    plain = generated(model, ids, convergence=loose)
    assert torch.equal(generated(model, ids, convergence=loose, wavefront=2), plain)


def test_a_token_with_another_input_has_not_failed() -> None:
    """A draft may lead to values that are not finite. The token is evaluated again with its final input."""
    policy = _MatchingInputs(Residual(rtol=0.1), lambda z: torch.tensor([[5, 6, 7]]))
    policy.inputs = torch.tensor([[4, 8, 6]])  # the second token read 8, but the first chooses 5
    fz = torch.ones(1, 3, 2)
    fz[0, 1] = torch.nan
    judgement = policy.judge(fz.nan_to_num(1.0), fz, torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
    assert judgement.residual.isfinite().all()
    assert judgement.may_settle.tolist() == [[True, False, True]]


@pytest.mark.parametrize("body", ["mamba2", "llama"])
def test_fewer_evaluations_one_after_the_other(make: Make, body: str) -> None:
    model, (ids, _) = make(body), prompts(batch=1)
    counts = []
    for options in ({}, {"wavefront": 1}, {"wavefront": 8}):
        policy = Passes(TIGHT)
        generated(model, ids, convergence=policy, **options)
        counts.append(policy.count)
    assert counts[1] <= counts[0]
    assert counts[2] < counts[0] / 2


def test_each_sequence_ends_at_its_own_end(make: Make) -> None:
    model, (ids, mask) = make("llama"), prompts()
    plain = generated(model, ids, attention_mask=mask)
    ends = [int(plain[0, 8]), int(plain[1, 11])]
    expected = generated(model, ids, attention_mask=mask, eos_token_id=ends)
    assert 0 in expected[0, 9:] or expected.shape[1] < plain.shape[1]
    assert torch.equal(generated(model, ids, attention_mask=mask, eos_token_id=ends, wavefront=4), expected)


def test_sequences_do_not_influence_each_other(make: Make) -> None:
    model, (ids, _) = make("mamba2"), prompts()
    together = generated(model, ids, wavefront=4)
    for row in range(3):
        assert torch.equal(generated(model, ids[row : row + 1], wavefront=4), together[row : row + 1])


@pytest.mark.parametrize("max_iter", [2, 3, 5])
def test_tokens_that_do_not_converge_end_with_their_budget(make: Make, max_iter: int) -> None:
    model, (ids, _) = make("llama"), prompts(batch=2)
    policy = Passes(Residual(rtol=1e-30, max_iter=max_iter))
    out = generated(model, ids, convergence=policy, wavefront=4)
    assert out.shape == (2, 14)
    assert policy.count >= 7 + max_iter  # one token at most settles in a pass


def test_other_positions(make: Make) -> None:
    model, (ids, _) = make("llama"), prompts()
    positions = torch.tensor([[0, 3, 9, 11, 40, 90]]).expand(3, -1)
    plain = generated(model, ids, position_ids=positions)
    assert not torch.equal(plain, generated(model, ids))
    assert torch.equal(generated(model, ids, position_ids=positions, wavefront=4), plain)


@pytest.mark.parametrize("new", [1, 2])
def test_few_tokens(make: Make, new: int) -> None:
    model, (ids, _) = make("mamba2"), prompts()
    plain = generated(model, ids, max_new_tokens=new)
    assert torch.equal(generated(model, ids, max_new_tokens=new, wavefront=8), plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "sampling"),
        ({"num_beams": 2}, "beams"),
        ({"repetition_penalty": 1.5}, "RepetitionPenalty"),
        ({"max_time": 3.0}, "MaxTimeCriteria"),
        ({"stop_strings": ["A"], "tokenizer": letters()}, "StopStringCriteria"),
        ({"streamer": TextIteratorStreamer(None, skip_prompt=True)}, "a streamer"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation"),
        ({"penalty_alpha": 0.5, "top_k": 3}, "contrastive_search"),
        ({"solve": "anderson"}, "solve must be SolveOptions, got 'anderson'"),
        ({"use_cache": False}, "use_cache=False"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"convergence": {"name": "fixed", "iterations": 4}}, "FixedIterations"),
        ({"wavefront": 0}, "wavefront must be a whole number >= 1, got 0"),
        ({"custom_generate": print}, "either wavefront or custom_generate"),
    ],
)
def test_what_it_does_not_support(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generated(make("llama"), prompts(batch=1)[0], **{"wavefront": 4, **options})


@pytest.mark.parametrize("part", ["", "model", "model.layer", "model.layer.backbone"])
def test_forward_hooks_raise(make: Make, part: str) -> None:
    model = make("llama")
    model.get_submodule(part).register_forward_hook(lambda module, args, out: out)
    with pytest.raises(ValueError, match="wavefront does not call forward for new tokens"):
        generated(model, prompts()[0], wavefront=4)


def test_the_window_of_the_prompt_does_not_change_the_wavefront(make: Make) -> None:
    model, (ids, _) = make("llama"), prompts(batch=1)
    counts = []
    for options in ({}, {"window": None}, {"window": 6}, {"window": 1}):
        policy = Passes(TIGHT)
        generated(model, ids, convergence=policy, wavefront=8, **options)
        counts.append(policy.count)
    assert counts[0] == counts[1] == counts[2] < counts[3]


def test_a_huge_window_needs_no_more_memory(make: Make) -> None:
    model, (ids, _) = make("llama"), prompts(batch=1)
    out = generated(model, ids, wavefront=10**15)
    assert torch.equal(out, generated(model, ids))


@pytest.mark.parametrize("body", BODIES)
def test_a_draft_that_is_not_finite_changes_no_token(make: Make, body: str) -> None:
    """Ids that only wavefront decoding reads, as drafts, get embeddings of NaN."""
    model = make(body)
    ids = torch.randint(1, V, (16, 6))
    expected = generated(model, ids, max_new_tokens=5)
    read: list[Tensor] = []
    handle = model.model.embed_tokens.register_forward_hook(lambda _, given, out: read.append(given[0]))
    generated(model, ids, max_new_tokens=5, wavefront=4)
    handle.remove()
    for row, answer in enumerate(expected):
        unread = sorted({int(i) for given in read for i in given[row]} - set(answer.tolist()))
        if unread:
            break
    assert unread, "all drafts are in the answers"
    ids, expected = ids[row : row + 1], expected[row : row + 1]
    with torch.no_grad():
        model.model.embed_tokens.weight[unread] = float("nan")
    assert torch.equal(generated(model, ids, max_new_tokens=5), expected)
    assert torch.equal(generated(model, ids, max_new_tokens=5, wavefront=4), expected)


@pytest.mark.parametrize("body", BODIES)
def test_a_cache_keeps_the_prompt_and_can_be_continued(make: Make, body: str) -> None:
    model, (ids, _) = make(body), prompts()
    cache = EquilibriumCache(model.model.layer.backbone.rewinds)
    new = generated(model, ids, past_key_values=cache, wavefront=4)
    assert cache.get_seq_length() == ids.shape[1] and cache.state.seen.tolist() == [6, 6, 6]
    longer = torch.cat([new, ids], 1)
    expected = generated(model, longer)
    assert torch.equal(generated(model, longer, past_key_values=cache, wavefront=4), expected)


@pytest.mark.parametrize("guess", ["previous", "noise"])
def test_other_guesses(make: Make, guess: str) -> None:
    model = make("llama", guess=guess)
    with pytest.raises(ValueError, match="guess"):
        model.generate(prompts()[0], max_new_tokens=3, wavefront=4)


def test_explicit_models() -> None:
    model = ImplicitForCausalLM(ImplicitConfig(vocab_size=V, backbone=BODIES["llama"], implicit=False))
    with pytest.raises(ValueError, match="implicit models"):
        model.generate(prompts()[0], max_new_tokens=3, wavefront=4)
