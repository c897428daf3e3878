"""The implicit layer: a backbone, a solver, a gradient strategy and a convergence policy, assembled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deqseq import kernels
from deqseq.backbone import Backbone, State, backbones
from deqseq.gradients import GradientStrategy, gradients, solve_with_gradient
from deqseq.loop import evaluate
from deqseq.padding import Packing, real_tokens, sequence_starts
from deqseq.problem import PolicySpec, Problem, SolveOptions
from deqseq.replay import Recordings
from deqseq.search import search
from deqseq.solution import Solution, Status
from deqseq.solver import Solver

Forward = TypeVar("Forward", bound=Callable[..., Any])


@dataclass
class LayerOutput:
    """What a sequence layer returns. Shapes: B sequences, L tokens, D width.

    Attributes:
        z: (B, L, D); zero at padding.
        state: the backbone state after the last token, detached; ``None`` unless the call was given a state.
        solution: how every token was solved; ``None`` for an explicit layer.
    """

    z: Tensor
    state: State | None = None
    solution: Solution | None = None


def _on_its_device(forward: Forward) -> Forward:
    """``forward`` with its kernels and CUDA graphs on the device of its input, whichever is current."""

    @wraps(forward)
    def on_device(self: nn.Module, x: Tensor, *args: Any, **options: Any) -> Any:
        with kernels.device_of(x):
            return forward(self, x, *args, **options)

    return cast(Forward, on_device)


class _Inputs(NamedTuple):
    """The inputs of a solve: every sequence in a row of its own, its tokens first."""

    x: Tensor
    z0: Tensor | None
    position_ids: Tensor
    lengths: Tensor  # (B,) number of tokens to solve
    unsolvable: Tensor  # (B, L) bool, the tokens from a sequence's first non-finite one on
    state: State | None


class SequenceLayer(nn.Module):
    """The common part of implicit and explicit layers: a backbone, and inputs without padding.

    Attributes:
        gradient_checkpointing: recompute every evaluation that carries a graph in the backward pass, instead
            of storing its activations, whatever the gradient strategy. transformers'
            ``gradient_checkpointing_enable`` sets this attribute.
    """

    def __init__(self, backbone: Backbone | Mapping[str, Any]) -> None:
        super().__init__()
        self.backbone = backbones.create(backbone)
        self.gradient_checkpointing = False

    def _inputs(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        state: State | None,
        z0: Tensor | None,
    ) -> tuple[_Inputs, Packing | None]:
        """Check the arguments of a call, remove its padding and number its tokens."""
        _check_x(x, self.backbone.d_model)
        for name, value in (("attention_mask", attention_mask), ("position_ids", position_ids)):
            if value is not None and value.shape != x.shape[:2]:
                raise ValueError(
                    f"{name} must have x's shape (B, L) = {tuple(x.shape[:2])}, got {tuple(value.shape)}"
                )
        if z0 is not None and z0.shape != x.shape:
            raise ValueError(f"z0 must have x's shape {tuple(x.shape)}, got {tuple(z0.shape)}")
        if state is not None and state.batch_size != x.shape[0]:
            raise ValueError(f"state holds {state.batch_size} sequences, but x has {x.shape[0]}")
        packing = _packing(x, attention_mask, position_ids, state)
        lengths = torch.full((x.shape[0],), x.shape[1], device=x.device)
        if packing is not None:
            x, lengths = packing.pack(x), packing.lengths
            z0 = None if z0 is None else packing.pack(z0)
            position_ids = None if position_ids is None else packing.pack(position_ids)
        # A sequence ends before its first token that is not finite: no later token can be right, and one NaN
        # in a matrix product would reach the tokens before it (0 * NaN is NaN).
        place = torch.arange(x.shape[1], device=x.device)
        finite = torch.isfinite(x).all(-1)
        end = torch.where(finite | (place >= lengths[:, None]), x.shape[1], place).amin(1)
        unsolvable = (place >= end[:, None]) & (place < lengths[:, None])
        lengths = torch.minimum(lengths, end)
        real = (place < lengths[:, None])[..., None]
        x = x.where(real, x.new_zeros(()))
        if z0 is not None:  # a guess that is not finite counts as zero
            z0 = z0.to(x.dtype)
            z0 = z0.where(real & torch.isfinite(z0).all(-1, keepdim=True), z0.new_zeros(()))
        if position_ids is None:
            position_ids = place.expand(x.shape[:2])
            if state is not None:
                position_ids = position_ids + state.seen[:, None]
        return _Inputs(x, z0, position_ids, lengths, unsolvable, state), packing


class ImplicitSequenceLayer(SequenceLayer):
    """z* = f(z*, x) for a causal map f: the layer whose output is its own fixed point.

    (Implicit Language Models are RNNs, Schöne et al., ICML 2025, arXiv 2502.07827.)

    Every part is an object, a registered name, or a mapping ``{"name": ..., **options}``.

    Args:
        backbone: the map f.
        solver: proposes iterates; ``"picard"``, ``"anderson"``, ``"broyden"``, ``"torchdeq:<name>"``.
        gradient: decides which evaluations carry a graph; ``"phantom"``, ``"implicit"``, ``Unrolled(n)``.
        convergence: one policy, or a pair (training, evaluation). The default tolerance, 5 % in at most 32
            iterations, is the paper's for training language models.
        window: tokens solved at a time. ``None``: all together (the paper's simultaneous mode). 1: one by one
            (sequential mode). w: a window of w tokens, which slides as tokens settle. The fixed point is the
            same; the work differs. In training the window serves the search: steps with a graph run on all
            tokens in parallel.
        causal: refuse, in training, solvers and policies through which a token's value could depend on later
            tokens. ``False`` allows them.
        compact: in searches without a window and a state, settled sequences leave the batch once they are
            half of it. That saves their evaluations. Results are then equal up to rounding only, because
            matrix products of another number of rows round differently. Context tokens of the backbone and
            the solver's state must have the batch first.
        group: process group in which all ranks must evaluate f equally often (FSDP); they then stop together.

    Attributes:
        train_solve: the :class:`~deqseq.SolveOptions` of training: solver, policy and window.
        eval_solve: those of evaluation.

    Raises:
        ValueError: unknown names or options; a window below 1.

    Example::

        layer = ImplicitSequenceLayer(Mamba2Backbone(d_model=64, n_layer=1), solver="anderson")
        out = layer(torch.randn(2, 128, 64))
        out.z, out.solution.iterations
    """

    def __init__(
        self,
        backbone: Backbone | Mapping[str, Any],
        solver: Solver | str | Mapping[str, Any] = "picard",
        gradient: GradientStrategy | str | Mapping[str, Any] = "phantom",
        convergence: PolicySpec | tuple[PolicySpec, PolicySpec] | None = None,
        window: int | None = None,
        causal: bool = True,
        compact: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(backbone)
        if not self.backbone.injects:
            raise ValueError("an implicit layer needs a backbone that injects x, got injection=False")
        pair = convergence if isinstance(convergence, (tuple, list)) else (convergence, convergence)
        if len(pair) != 2:
            raise ValueError(f"convergence takes one policy or two, got {len(pair)}")
        self.train_solve = SolveOptions(solver, pair[0], window)
        self.eval_solve = SolveOptions(self.train_solve.solver, pair[1], window)
        self.gradient = gradients.create(gradient)
        self.causal = causal
        self.compact = compact
        self.group = group
        self._recordings = Recordings()

    def __deepcopy__(self, memo: dict[int, Any]) -> ImplicitSequenceLayer:
        """A copy that belongs to the same process group, which cannot be copied."""
        memo[id(self.group)] = self.group
        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        copy.__setstate__(deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return copy

    @property
    def solve(self) -> SolveOptions:
        """The options of the present mode, training or evaluation."""
        return self.train_solve if self.training else self.eval_solve

    @_on_its_device
    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        state: State | None = None,
        z0: Tensor | None = None,
        window: int | Literal["layer"] | None = "layer",
        solve: SolveOptions | None = None,
    ) -> LayerOutput:
        """Solve for the equilibrium of every token of ``x``.

        Args:
            x: (B, L, D) input.
            attention_mask: (B, L), non-zero for real tokens; padding may stand anywhere.
            position_ids: (B, L) int64; by default each sequence's real tokens count on from ``state``. Where
                the positions start anew at 0 inside a row, another sequence begins. It is solved
                independently of the sequences before it in the row.
            state: backbone state before the first token; the output then has the state after the last one.
            z0: (B, L, D) initial guess; zero by default, and where it is not finite.
            window: replaces the window of the options for this call.
            solve: replaces the layer's options for this call.

        Raises:
            ValueError: shapes that do not fit; a part that is not causal, in training.
        """
        options = self.solve if solve is None else solve
        if window != "layer":
            options = replace(options, window=window)
        self._check_causal(options)
        inputs, packing = self._inputs(x, attention_mask, position_ids, state, z0)
        # Such a call may be recorded, and a recording cannot check the capacity of the state.
        one_token = state is not None and inputs.x.shape[1] == 1 and not torch.is_grad_enabled()
        if one_token and state is not None:
            inputs = inputs._replace(state=self.backbone.reserve(state, inputs.x))
        make = partial(self._problem, options=options, state_has_capacity=one_token)
        if torch.is_grad_enabled():
            solution = _finished(solve_with_gradient(self.gradient, make(inputs)), inputs)
        elif one_token:
            solution = self._recordings.solve(self, options, inputs, make, _finished)
        else:
            solution = _finished(search(make(inputs)), inputs)
        if packing is not None:
            for name in ("z", "residual", "iterations"):
                setattr(solution, name, packing.unpack(getattr(solution, name)))
            solution.status = packing.unpack(solution.status, int(Status.CONVERGED))
        return LayerOutput(solution.z, solution.state, solution)

    def _problem(self, inputs: _Inputs, options: SolveOptions, state_has_capacity: bool) -> Problem:
        return Problem(
            map=self.backbone,
            context=self.backbone.prepare(inputs.x, inputs.position_ids),
            z0=torch.zeros_like(inputs.x) if inputs.z0 is None else inputs.z0,
            options=options,
            lengths=inputs.lengths,
            state=inputs.state,
            state_has_capacity=state_has_capacity,
            returns_state=True,
            compact=self.compact,
            checkpoint=self.gradient_checkpointing,
            group=self.group,
        )

    def extra_repr(self) -> str:
        return (
            f"gradient={self.gradient}, train_solve={self.train_solve}, eval_solve={self.eval_solve}, "
            f"causal={self.causal}, compact={self.compact}"
        )

    def _check_causal(self, options: SolveOptions) -> None:
        if not (self.training and self.causal):
            return
        searching = self.gradient.searches or not torch.is_grad_enabled()
        for part in (options.solver, options.convergence if searching else None):
            if part is not None and not part.causal:
                raise ValueError(
                    f"{part} lets a token's value depend on later tokens, which leaks the future in causal "
                    "training: use token scope, or allow it with ImplicitSequenceLayer(causal=False)"
                )


class ExplicitSequenceLayer(SequenceLayer):
    """The same backbone applied once to its input: the explicit twin of an implicit model.

    Args:
        backbone: built with ``injection=False``; x enters as z.

    Raises:
        ValueError: the backbone has an injection, which would get no input.
    """

    def __init__(self, backbone: Backbone | Mapping[str, Any]) -> None:
        super().__init__(backbone)
        if self.backbone.injects:
            raise ValueError(
                f"an explicit layer needs a backbone without injection (injection=False), got one with: "
                f"{type(self.backbone).__name__}"
            )

    @_on_its_device
    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        state: State | None = None,
    ) -> LayerOutput:
        """Apply the stack to ``x`` (B, L, D); arguments as in :class:`ImplicitSequenceLayer`."""
        inputs, packing = self._inputs(x, attention_mask, position_ids, state, None)
        x, backbone = inputs.x, self.backbone
        context = backbone.prepare(x, inputs.position_ids)
        z, trace = evaluate(backbone, x, context, state, self.gradient_checkpointing)
        if state is not None:
            state = backbone.advance(trace, backbone.reserve(state, x).copy(), inputs.lengths).detach()
        real = torch.arange(x.shape[1], device=x.device) < inputs.lengths[:, None]
        z = z.where(real[..., None], z.new_zeros(()))
        z = z.masked_fill(inputs.unsolvable[..., None], torch.nan)
        if packing is not None:
            z = packing.unpack(z)
        return LayerOutput(z, _state_after(state, inputs.unsolvable))


def _packing(
    x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, state: State | None
) -> Packing | None:
    """How the tokens of a call go into rows of their own; ``None`` if they already are."""
    real = None if attention_mask is None else real_tokens(attention_mask)
    if position_ids is not None and (x.shape[1] > 1 or state is not None):
        tokens = torch.ones_like(position_ids, dtype=torch.bool) if real is None else real
        starts = sequence_starts(position_ids, tokens)
        if starts is not None:
            if state is not None:
                raise ValueError(
                    "position_ids start anew inside a row: several sequences in a row have no common state, "
                    "so give no state, or one sequence a row"
                )
            return Packing.of_packed(tokens, starts)
        if state is not None and bool((tokens & (position_ids < state.seen[:, None])).any()):
            raise ValueError(
                f"position_ids must go on from the {state.seen.tolist()} tokens that the state has seen"
            )
    return None if real is None else Packing.of(real)


def _finished(solution: Solution, inputs: _Inputs) -> Solution:
    """The solution with NaN at tokens that could not be solved."""
    unsolvable = inputs.unsolvable
    solution.z = solution.z.masked_fill(unsolvable[..., None], torch.nan)
    solution.residual = solution.residual.masked_fill(unsolvable, torch.nan)
    solution.status = solution.status.masked_fill(unsolvable, int(Status.NON_FINITE))
    solution.state = _state_after(solution.state, unsolvable)
    return solution


def _state_after(state: State | None, unsolvable: Tensor) -> State | None:
    """The state after the ``unsolvable`` (B, L) tokens too: NaN in sequences that have any."""
    if state is None:
        return None
    affected = unsolvable.any(1)

    def with_nan(values: Tensor) -> Tensor:
        if not values.is_floating_point():  # integers have no NaN
            return values
        return values.masked_fill(affected.view(-1, *[1] * (values.dim() - 1)), torch.nan)

    layers = tuple(tuple(map(with_nan, layer)) for layer in state.layers)
    return State(state.seen + unsolvable.sum(1), layers)


def _check_x(x: Tensor, d_model: int | None) -> None:
    """Raise ``ValueError`` unless ``x`` is a floating (B, L, D) with L >= 1 and the backbone's D."""
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"x must have shape (B, L, D) without zeros, got {tuple(x.shape)}")
    if d_model is not None and x.shape[-1] != d_model:
        raise ValueError(f"x has width {x.shape[-1]}, but the backbone's d_model is {d_model}")
    if not x.is_floating_point():
        raise ValueError(f"x must be of a floating-point type, got {x.dtype}")
