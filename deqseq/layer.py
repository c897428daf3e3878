"""The implicit layer: a backbone, a solver, a gradient strategy and a convergence policy, assembled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deqseq import kernels
from deqseq.backbone import Backbone, State, backbones
from deqseq.convergence import ConvergencePolicy, Residual, check_count, policies
from deqseq.gradients import GradientStrategy, checkpointed, gradients, search
from deqseq.loop import Map, Problem
from deqseq.padding import Packing, real_tokens, sequence_starts
from deqseq.replay import Recordings
from deqseq.solution import Solution, Status
from deqseq.solver import Solver, solvers

Forward = TypeVar("Forward", bound=Callable[..., Any])
PolicySpec = ConvergencePolicy | str | Mapping[str, Any]


@dataclass
class LayerOutput:
    """What a sequence layer returns. Shapes: B sequences, L tokens, D width.

    Attributes:
        z: (B, L, D); zero at padding.
        state: to pass to the next call; there if the call was given one. Detached.
        solution: how every token was solved; ``None`` for an explicit layer.
    """

    z: Tensor
    state: State | None = None
    solution: Solution | None = None


def _on_its_device(forward: Forward) -> Forward:
    """``forward`` with its kernels and CUDA graphs on the device of its input."""

    @wraps(forward)
    def on_device(self: nn.Module, x: Tensor, *args: Any, **options: Any) -> Any:
        with kernels.device_of(x):
            return forward(self, x, *args, **options)

    return cast(Forward, on_device)


class SequenceLayer(nn.Module):
    """What implicit and explicit layers share: a backbone, and inputs without padding.

    Attributes:
        gradient_checkpointing: recompute every evaluation that carries a graph in the backward pass, instead
            of storing its activations; whatever the gradient strategy. transformers'
            ``gradient_checkpointing_enable`` sets it by this name.
    """

    def __init__(self, backbone: Backbone | Mapping[str, Any]) -> None:
        super().__init__()
        self.backbone = backbones.create(backbone)
        self.gradient_checkpointing = False

    @property
    def _map(self) -> Map:
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        return checkpointed(self.backbone) if recompute else self.backbone

    def _inputs(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        state: State | None,
        z0: Tensor | None,
    ) -> _Inputs:
        """Check the arguments of a call, take out its padding and number its tokens."""
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
        # A sequence ends before its first token that is not finite: nothing after it can be right, and
        # one NaN in a matrix product would reach the tokens before it (0 * NaN is NaN).
        place = torch.arange(x.shape[1], device=x.device)
        finite = torch.isfinite(x).all(-1)
        sound = torch.where(finite | (place >= lengths[:, None]), x.shape[1], place).amin(1)
        broken = (place >= sound[:, None]) & (place < lengths[:, None])
        lengths = torch.minimum(lengths, sound)
        real = (place < lengths[:, None])[..., None]
        x = x.where(real, x.new_zeros(()))
        if z0 is not None:  # a guess that is not finite is none
            z0 = z0.to(x.dtype)
            z0 = z0.where(real & torch.isfinite(z0).all(-1, keepdim=True), z0.new_zeros(()))
        if position_ids is None:
            position_ids = place.expand(x.shape[:2])
            if state is not None:
                position_ids = position_ids + state.seen[:, None]
        return _Inputs(x, z0, position_ids, lengths, broken, packing)


class _Inputs(NamedTuple):
    x: Tensor
    z0: Tensor | None
    position_ids: Tensor
    lengths: Tensor  # (B,) tokens to solve, which come first
    broken: Tensor  # (B, L) bool, real tokens that cannot be solved, behind them
    packing: Packing | None


_Given = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, State | None]
"""What a solve starts from: x, z0, position_ids, lengths, broken, state."""


class ImplicitSequenceLayer(SequenceLayer):
    """z* = f(z*, x) for a causal map f: the layer whose output is its own fixed point.

    (Implicit Language Models are RNNs, Schöne et al., ICML 2025, arXiv 2502.07827.)

    Every part is an object, a registered name, or a mapping ``{"name": ..., **options}``.

    Args:
        backbone: the map f.
        solver: proposes iterates; ``"picard"``, ``"anderson"``, ``"broyden"``, ``"torchdeq:<name>"``.
        gradient: which evaluations carry a graph; ``"phantom"``, ``"implicit"``, ``Unrolled(n)``.
        convergence: one policy, or a pair (training, evaluation). The default tolerance, 5 % in at most
            32 iterations, is the paper's for training language models.
        window: tokens solved at a time: ``None``: all together (the paper's simultaneous mode); 1: one
            by one (sequential mode); w: a window that slides as tokens settle. The fixed point is the
            same; the work is not. In training the window serves the search: steps with a graph run on
            all tokens in parallel.
        causal: refuse, in training, solvers and policies through which a token's value could depend on
            later tokens. ``False`` allows them.
        compact: in searches without a window and a state, sequences that have settled leave the batch, once
            they are half of it. That spares their evaluations; results are the same up to rounding, no longer
            to the bit, as matrix products of another number of rows are rounded otherwise. Context tokens of
            the backbone and the solver's state must have the batch first.
        group: process group in which all ranks must evaluate f equally often (FSDP); they then stop
            together.

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
        self.solver = solvers.create(solver)
        self.gradient = gradients.create(gradient)
        self.set_convergence(Residual(rtol=0.05, max_iter=32) if convergence is None else convergence)
        self.window = _checked_window(window)
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

    def set_convergence(self, convergence: PolicySpec | tuple[PolicySpec, PolicySpec]) -> None:
        """Set the policy of both modes, or those of training and evaluation."""
        pair = convergence if isinstance(convergence, (tuple, list)) else (convergence, convergence)
        if len(pair) != 2:
            raise ValueError(f"convergence takes one policy or two, got {len(pair)}")
        self.train_convergence, self.eval_convergence = map(policies.create, pair)

    @property
    def convergence(self) -> ConvergencePolicy:
        """The policy of the present mode."""
        return self.train_convergence if self.training else self.eval_convergence

    @_on_its_device
    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        state: State | None = None,
        z0: Tensor | None = None,
        window: int | Literal["layer"] | None = "layer",
    ) -> LayerOutput:
        """Solve for the equilibrium of every token of ``x``.

        Args:
            x: (B, L, D) input.
            attention_mask: (B, L), non-zero for real tokens; padding may stand anywhere.
            position_ids: (B, L) int64; by default each sequence's real tokens count on from ``state``.
                Where they start anew at 0 inside a row, another sequence begins: it is solved as one of
                its own, and sees nothing of those before it in the row.
            state: backbone state before the first token; the output then has the one after the last.
            z0: (B, L, D) initial guess, zero by default, and where it is not finite.
            window: overrides the layer's window for this call.

        Raises:
            ValueError: shapes that do not fit; a part that is not causal, in training.
        """
        self._check_causal()
        window = self.window if window == "layer" else _checked_window(window)
        inputs = self._inputs(x, attention_mask, position_ids, state, z0)
        room = state is not None and inputs.x.shape[1] == 1 and not torch.is_grad_enabled()
        if room and state is not None:  # to be recorded perhaps, which cannot look whether there is room
            state = self.backbone.reserve(state, inputs.x)
        given = (inputs.x, inputs.z0, inputs.position_ids, inputs.lengths, inputs.broken, state)
        make = partial(self._problem, window=window, room=room)
        if torch.is_grad_enabled():
            solution = _marked(self.gradient.solve(make(given)), given)
        elif room:
            solution = self._recordings.solve(self, given, make, _marked, window)
        else:
            solution = _marked(search(make(given)), given)
        if inputs.packing is not None:
            for name in ("z", "residual", "iterations"):
                setattr(solution, name, inputs.packing.unpack(getattr(solution, name)))
            solution.status = inputs.packing.unpack(solution.status, int(Status.CONVERGED))
        return LayerOutput(solution.z, solution.state, solution)

    def _problem(self, given: _Given, window: int | None, room: bool) -> Problem:
        x, z0, position_ids, lengths, _, state = given
        return Problem(
            map=self._map,
            context=self.backbone.prepare(x, position_ids),
            z0=torch.zeros_like(x) if z0 is None else z0,
            solver=self.solver,
            policy=self.convergence,
            window=window,
            lengths=lengths,
            state=state,
            room=room,
            compact=self.compact,
            carry=state is not None,
            group=self.group,
        )

    def extra_repr(self) -> str:
        return (
            f"solver={self.solver}, gradient={self.gradient}, convergence=({self.train_convergence}, "
            f"{self.eval_convergence}), window={self.window}, causal={self.causal}, "
            f"compact={self.compact}"
        )

    def _check_causal(self) -> None:
        if not (self.training and self.causal):
            return
        searching = self.gradient.searches or not torch.is_grad_enabled()
        for part in (self.solver, self.convergence if searching else None):
            if part is not None and not part.causal:
                raise ValueError(
                    f"{part} lets a token's value depend on later tokens, which leaks the future in "
                    "causal training: use token scope, or allow it with "
                    "ImplicitSequenceLayer(causal=False)"
                )


class ExplicitSequenceLayer(SequenceLayer):
    """The same backbone applied once to its input: the explicit twin of an implicit model.

    Args:
        backbone: built with ``injection=False``; x enters as z.

    Raises:
        ValueError: the backbone has an injection, which nothing would feed.
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
        inputs = self._inputs(x, attention_mask, position_ids, state, None)
        x = inputs.x
        z, trace = self._map.evaluate(x, self.backbone.prepare(x, inputs.position_ids), state)
        if state is not None:
            own = self.backbone.reserve(state, x).copy()
            state = self.backbone.advance(trace, own, inputs.lengths).detach()
        real = torch.arange(x.shape[1], device=x.device) < inputs.lengths[:, None]
        z = z.where(real[..., None], z.new_zeros(()))
        z = z.masked_fill(inputs.broken[..., None], torch.nan)
        if inputs.packing is not None:
            z = inputs.packing.unpack(z)
        return LayerOutput(z, _after(state, inputs.broken))


def _packing(
    x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, state: State | None
) -> Packing | None:
    """How the tokens of a call go into rows of their own; ``None`` if that is how they stand."""
    real = None if attention_mask is None else real_tokens(attention_mask)
    if position_ids is not None and (x.shape[1] > 1 or state is not None):
        tokens = torch.ones_like(position_ids, dtype=torch.bool) if real is None else real
        starts = sequence_starts(position_ids, tokens)
        if starts is not None:
            if state is not None:
                raise ValueError(
                    "position_ids start anew inside a row: several sequences in a row have no common "
                    "state to carry (give none, or one sequence a row)"
                )
            return Packing.of_packed(tokens, starts)
        if state is not None and bool((tokens & (position_ids < state.seen[:, None])).any()):
            raise ValueError(
                f"position_ids must go on from the {state.seen.tolist()} tokens that the state has seen"
            )
    return None if real is None else Packing.of(real)


def _marked(solution: Solution, given: _Given) -> Solution:
    """The solution with NaN where tokens could not be solved."""
    broken = given[4]
    solution.z = solution.z.masked_fill(broken[..., None], torch.nan)
    solution.residual = solution.residual.masked_fill(broken, torch.nan)
    solution.status = solution.status.masked_fill(broken, int(Status.NON_FINITE))
    solution.state = _after(solution.state, broken)
    return solution


def _after(state: State | None, broken: Tensor) -> State | None:
    """The state past the ``broken`` (B, L) tokens: of sequences that have any, nothing in it is right."""
    if state is None:
        return None
    spoilt = broken.any(1)

    def spoil(values: Tensor) -> Tensor:
        if not values.is_floating_point():  # has no NaN
            return values
        return values.masked_fill(spoilt.view(-1, *[1] * (values.dim() - 1)), torch.nan)

    layers = tuple(tuple(spoil(values) for values in layer) for layer in state.layers)
    return State(state.seen + broken.sum(1), layers)


def _check_x(x: Tensor, d_model: int | None) -> None:
    """Raise ``ValueError`` unless ``x`` is a floating (B, L, D) with L >= 1 and the backbone's D."""
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"x must have shape (B, L, D) without zeros, got {tuple(x.shape)}")
    if d_model is not None and x.shape[-1] != d_model:
        raise ValueError(f"x has width {x.shape[-1]}, but the backbone's d_model is {d_model}")
    if not x.is_floating_point():
        raise ValueError(f"x must be of a floating-point type, got {x.dtype}")


def _checked_window(window: int | str | None) -> int | None:
    if window is not None:
        check_count("window", window)
    return window  # type: ignore[return-value]
