"""Wavefront decoding: greedy generation that solves several tokens at once.

Ordinary generation iterates on one token until it has settled, and then begins with the next token. But the
iterates of a token often propose the right next token long before they settle. Wavefront decoding solves a
window of tokens. After every evaluation, the likeliest token after token t becomes the input of token t + 1.
If this input changes, the search for token t + 1 begins anew. A token settles only after the tokens before
it. So the input of a settled token is final, and the tokens are those of ordinary generation, up to the
tolerance of the search.

Shapes: B sequences, L tokens to solve, W tokens in the window, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from deqseq import kernels
from deqseq.backbone import Backbone, Context, State
from deqseq.causal_lm.head import logits_of
from deqseq.causal_lm.support import check_layer, unsupported
from deqseq.checks import check_instance
from deqseq.guesses import Zero
from deqseq.layer import ImplicitSequenceLayer
from deqseq.loop import Runner, drive
from deqseq.policy import ConvergencePolicy, FixedIterations, Judgement
from deqseq.problem import Problem, SolveOptions


class _MatchingInputs(ConvergencePolicy):
    """Wraps ``policy`` and adds a condition.

    A token settles only if its input is also the id that was chosen after the token before it.

    Args:
        policy: the convergence policy of the search.
        choose: f(z) (B, W, D) -> the likeliest id after each token, (B, W).

    Attributes:
        inputs: (B, W) int64, ids of the tokens in the window. Set before each evaluation.
        choices: (B, W) int64, the likeliest id after each token of the window, from the last evaluation.
    """

    inputs: Tensor
    choices: Tensor

    def __init__(self, policy: ConvergencePolicy, choose: Callable[[Tensor], Tensor]) -> None:
        self._policy, self._choose = policy, choose
        self.max_iter, self.check_every = policy.max_iter, policy.check_every

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        judgement = self._policy.judge(z, fz, iterations, active)
        self.choices = self._choose(fz)
        right = F.pad(self.inputs[:, 1:] == self.choices[:, :-1], (1, 0), value=True)
        # A token with a wrong input will change. Set its residual to 1, even if its evaluation is not finite.
        residual = judgement.residual.where(right, 1.0)
        return Judgement(residual, judgement.converged & right, judgement.may_settle & right)


class _Wavefront(Runner):
    """Runs a search with a window. Chooses the inputs of the tokens during the search.

    Attributes:
        ids: (B, L + W + 1) int64, ids of the input tokens. The first id is given; the others are choices.
    """

    def __init__(
        self, problem: Problem, first: Tensor, prepare: Callable[[Tensor, Tensor], Context], end_ids: Tensor
    ) -> None:
        super().__init__(problem)
        assert isinstance(problem.policy, _MatchingInputs)
        self._policy, self._prepare, self._eos = problem.policy, prepare, end_ids
        self.ids = first[:, None].repeat(1, problem.z0.shape[1] + len(problem.offsets) + 1)

    def proceed(self) -> None:
        assert self.carry.start is not None
        place = self.carry.start[:, None] + self.problem.offsets
        self._policy.inputs = self.ids.gather(1, place)
        super().proceed()
        self._draft(place + 1)

    def _draft(self, after: Tensor) -> None:
        """Use the choices as the inputs of the tokens at the places ``after`` (B, W)."""
        choices = self._policy.choices
        changed = F.pad(self.ids.gather(1, after) != choices, (1, 0))[:, :-1, None]
        self.ids.scatter_(1, after, choices)
        for all_tokens, new in zip(
            self.problem.context.tokens, self._prepare(choices, after).tokens, strict=True
        ):
            index = after.view(*after.shape, *[1] * (new.dim() - 2)).expand_as(new)
            all_tokens.scatter_(1, index, new)
        carry, tokens = self.carry, self.carry.tokens
        zero = carry.z.new_zeros(())
        changed_tokens = changed[..., 0]
        iterations = tokens.iterations.masked_fill(changed_tokens, 0)
        # Only the first token of the window may use up its budget, because only its input is final. The other
        # tokens stay below it, also after the next evaluation.
        iterations[:, 1:].clamp_max_(self._policy.max_iter - 2)
        self.carry = carry._replace(
            z=carry.z.where(~changed, zero),
            proposal=carry.proposal.where(~changed, zero),
            tokens=tokens._replace(iterations=iterations, frozen=tokens.frozen & ~changed_tokens),
        )

    def settled(self) -> Tensor:
        assert self.carry.start is not None
        place = torch.arange(self.ids.shape[1], device=self.ids.device)
        final = place <= self.carry.start[:, None]
        ended = (torch.isin(self.ids, self._eos) & final).any(1)
        return (ended | (self.carry.start >= self.problem.sequence_lengths)).all()


def continue_greedily(
    backbone: Backbone,
    embed: Callable[[Tensor], Tensor],
    choose: Callable[[Tensor], Tensor],
    first: Tensor,
    state: State,
    position: Tensor,
    options: SolveOptions,
    most: int,
    end_ids: Tensor,
) -> tuple[Tensor, int]:
    """Continue sequences greedily.

    Returns the new ids after ``first``, (B, L) int64, and the number of evaluations of f. After an id of
    ``end_ids``, the ids of a sequence are meaningless.

    Args:
        backbone: the map f. It keeps a state.
        embed: ids (B, W) -> the layer's input (B, W, D).
        choose: f(z) (B, W, D) -> the id of the next token after each token, (B, W).
        first: (B,) int64, the first token to solve.
        state: the state before this token.
        position: (B, 1) int64, the position of this token.
        options: solver, policy and window W. The search begins at zero.
        most: number L of tokens to solve.
        end_ids: 1-D int64, ids that end a sequence.
    """
    assert options.window is not None
    length = max(most, options.window + 1)  # the window must be smaller than the input, or it would not slide
    x = embed(first[:, None])
    fixed = backbone.prepare(x, position)

    def prepare(ids: Tensor, place: Tensor) -> Context:
        x = embed(ids)
        # The embedding of a draft may not be finite. In matrix products, it would make all tokens of the
        # window non-finite.
        x = x.where(torch.isfinite(x).all(-1, keepdim=True), x.new_zeros(()))
        return backbone.prepare_next(x, position + place, fixed)

    places = torch.arange(length + options.window + 1, device=first.device)
    context = backbone.prepare_next(x.expand(-1, len(places), -1), position + places, fixed)
    context = replace(context, tokens=tuple(t.contiguous() for t in context.tokens))
    policy = _MatchingInputs(options.convergence, choose)
    problem = Problem(
        backbone, context, torch.zeros_like(x).repeat(1, length, 1),
        SolveOptions(options.solver, policy, options.window),
        lengths=torch.full_like(first, most), state=state, training=False,
    )  # fmt: skip
    runner = _Wavefront(problem, first, prepare, end_ids)
    found = drive(runner)
    return runner.ids[:, 1 : most + 1], found.nfe


@torch.no_grad()
def wavefront_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    wavefront: int,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_model: Any = None,
    synced_gpus: bool = False,
    **model_options: Any,
) -> Tensor:
    """The decoding method of ``generate(..., wavefront=W)``. Do not call this function yourself.

    ``model`` is an ImplicitForCausalLM. The other arguments are those of transformers' decoding methods.

    Returns:
        (B, L + new) int64 prompts and new tokens.

    Raises:
        ValueError: the model or the arguments of ``generate`` do not allow wavefront decoding.
    """
    layer, config = model.model.layer, generation_config
    if not isinstance(layer, ImplicitSequenceLayer):
        raise ValueError("wavefront is for implicit models: this model evaluates its layer once")
    check_layer(model, "wavefront")
    options = model_options.get("solve")
    options = layer.solve if options is None else options
    check_instance("solve", options, SolveOptions, "SolveOptions")
    refused = unsupported(model, config, assistant_model, synced_gpus, model_options)
    refused["a streamer"] = streamer is not None
    _check(options, logits_processor, stopping_criteria, config, refused)
    out = model._prefill(input_ids, config, model_options)
    first = out.logits[:, -1].argmax(-1)
    state, positions = out.past_key_values.state, model_options.get("position_ids")
    position = state.seen[:, None] if positions is None else positions[:, -1:] + 1
    eos = config._eos_token_tensor
    end_ids = first.new_empty(0) if eos is None else eos.reshape(-1)

    def choose(z: Tensor) -> Tensor:
        return logits_of(z, model.lm_head)[0].argmax(-1)

    position, most = position.expand(len(first), 1), config.max_length - input_ids.shape[1] - 1
    with kernels.device_of(input_ids):
        rest, _ = continue_greedily(
            layer.backbone, model.model.embed_tokens, choose, first, state, position,
            replace(options, window=min(wavefront, max(most, 1))), most, end_ids,
        )  # fmt: skip
    new = torch.cat([first[:, None], rest], 1)
    is_end = torch.isin(new, end_ids)
    after = is_end.cumsum(1) > is_end.long()
    new = new.masked_fill(after, 0 if eos is None else int(config._pad_token_tensor))
    return torch.cat([input_ids, new[:, : int((~after).sum(1).max())]], 1)


def _check(
    options: SolveOptions,
    processors: LogitsProcessorList,
    criteria: Any,
    config: Any,
    refused: dict[str, bool],
) -> None:
    """Raise ``ValueError`` if a call of ``generate`` uses a feature that wavefront decoding lacks."""
    refused = {
        **refused,
        "sampling": config.do_sample,
        "return_dict_in_generate": config.return_dict_in_generate,
        **{type(processor).__name__: True for processor in processors},
        **{type(c).__name__: not isinstance(c, MaxLengthCriteria | EosTokenCriteria) for c in criteria},
        f"the solver {options.solver}": not options.solver.windowed,
        f"the policy {options.convergence}": isinstance(options.convergence, FixedIterations)
        or options.convergence.max_iter < 2,
        f"the guess {options.guess}": not isinstance(options.guess, Zero),
    }
    if found := [name for name, is_used in refused.items() if is_used]:
        raise ValueError(
            f"wavefront decoding does not support {', '.join(found)}: it needs greedy decoding with a cache, "
            "a policy with a tolerance and the guess 'zero'; call generate without wavefront"
        )
