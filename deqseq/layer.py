"""The implicit layer, which solves for the fixed point of a backbone, and its explicit counterpart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deqseq import kernels
from deqseq.backbone import Backbone, Context, State, backbones
from deqseq.checks import check_flag, check_instance, check_not_sharded, check_tensor
from deqseq.gradient import GradientStrategy, gradients, solve_with_gradient
from deqseq.guess import Guess, guesses, modules_of, propose
from deqseq.inputs import Inputs, check_causal, finite_guess, take_inputs
from deqseq.iteration import search
from deqseq.loop import evaluate
from deqseq.outputs import LayerOutput, mark_unsolvable, state_after
from deqseq.policy import FixedIterations, policies
from deqseq.problem import PolicySpec, Problem, SolveOptions
from deqseq.replay import Recordings
from deqseq.solver import Solver, solvers
from deqseq.status import Status

Forward = TypeVar("Forward", bound=Callable[..., Any])
SolverSpec = Solver | str | Mapping[str, Any]
GuessSpec = Guess | str | Mapping[str, Any]


def _on_its_device(forward: Forward) -> Forward:
    """Decorator that makes the device of ``x`` the current CUDA device during ``forward``.

    Triton kernels and CUDA graphs always run on the current device.
    """

    @wraps(forward)
    def on_device(self: nn.Module, x: Tensor, *args: Any, **options: Any) -> Any:
        check_tensor("x", x)
        with kernels.device_of(x):
            return forward(self, x, *args, **options)

    return cast(Forward, on_device)


class SequenceLayer(nn.Module):
    """Base class of implicit and explicit layers.

    Attributes:
        gradient_checkpointing: if true, evaluations of the backbone store no activations, and the backward
            pass recomputes them. transformers' ``gradient_checkpointing_enable`` sets this attribute.
    """

    def __init__(self, backbone: Backbone | Mapping[str, Any]) -> None:
        super().__init__()
        self.backbone = backbones.create(backbone)
        self.gradient_checkpointing = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. ``backbone`` is checked as in the constructor."""
        super().__setattr__(name, self._checked_backbone(value) if name == "backbone" else value)

    def _checked_backbone(self, value: Any) -> Any:
        """The backbone for ``value``. Raises ``ValueError`` if it is none.

        PEFT and FSDP wrap a backbone in a module that passes attributes on to it: such a module is accepted.
        The module of ``torch.compile`` is not, because it passes on the methods that are not compiled.
        """
        wraps = hasattr(value, "prepare") and not hasattr(value, "_orig_mod")
        return value if wraps else backbones.create(value)

    def decode(
        self,
        x: Tensor,
        position_ids: Tensor,
        state: State,
        context: Context,
        solve: SolveOptions | None = None,
        previous: Tensor | None = None,
    ) -> LayerOutput:
        """Compute one more token of every sequence, as ``forward`` does, but with less work on the host.

        The method does not check its arguments, and records no autograd graph. With
        :class:`~deqseq.FixedIterations`, and in explicit layers, the host never waits for the device.

        Args:
            x: (B, 1, D) input.
            position_ids: (B, 1) int64.
            state: backbone state before the token, with contiguous tensors and capacity for the token; see
                :meth:`~deqseq.Backbone.reserve`. The call may overwrite its tensors.
            context: the result of ``backbone.prepare`` for an earlier token. The method uses its weights.
            solve, previous: arguments of the implicit layer's ``forward``; no effect in an explicit layer.
        """
        raise NotImplementedError


class ImplicitSequenceLayer(SequenceLayer):
    """A layer whose output is the fixed point z* = f(z*, x) of a map f.

    Source: Implicit Language Models are RNNs, Schöne et al., ICML 2025, arXiv 2502.07827.

    Every part can be an object, a registered name, or a mapping ``{"name": ..., **options}``. ``solver``,
    ``convergence`` and ``guess`` take one part for both modes, or a pair (training, evaluation).

    Args:
        backbone: the map f.
        solver: proposes iterates; ``"picard"``, ``"anderson"``, ``"broyden"``, ``"torchdeq:<name>"``.
        gradient: decides which evaluations autograd records; ``"phantom"``, ``"implicit"``, ``Unrolled(n)``.
            In evaluation mode, the strategy changes only gradients: the layer returns the result of the
            search. ``Unrolled`` is an exception: while gradients are enabled, it does not search.
        convergence: decides when to stop. Default: a relative residual of 5 % in at most 32 iterations, the
            paper's setting for training language models.
        window: number of tokens solved together. ``None``: all tokens (the paper's simultaneous mode). 1: one
            token after another (sequential mode). Other numbers: the window slides forward when its first
            tokens have converged or used up their iterations. The window changes the number of evaluations,
            not the fixed point. Only the search for the fixed point uses the window. Evaluations that
            autograd records always run on all tokens at once.
        causal: if true, training refuses parts that let a token's value depend on later tokens. By default
            true if the backbone is causal.
        compact: if true, remove settled sequences from the batch once they are at least an eighth of it. A
            sequence has settled when each of its tokens has converged or used up its iterations. Later
            evaluations are then cheaper. Results differ by rounding errors, because smaller matrix products
            round differently. The option has no effect with a window, a group, a fixed number of iterations,
            a torchdeq solver, or a state of keys and values. If you write your own backbone or solver, every
            tensor in ``Context.tokens`` and in the solver's state must have the shape (B, L, ...), and every
            tensor in a trace (B, ...).
        group: process group whose ranks all do the same number of evaluations, as FSDP requires.
        guess: decides where the search starts; ``"zero"``, ``"noise"``, ``"previous"``, ``Proposal(module)``.

    Attributes:
        train_solve: the :class:`~deqseq.SolveOptions` of training: solver, policy, window and guess.
        eval_solve: the options of evaluation.

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
        solver: SolverSpec | tuple[SolverSpec, SolverSpec] = "picard",
        gradient: GradientStrategy | str | Mapping[str, Any] = "phantom",
        convergence: PolicySpec | tuple[PolicySpec, PolicySpec] | None = None,
        window: int | None = None,
        causal: bool | None = None,
        compact: bool = False,
        group: dist.ProcessGroup | None = None,
        guess: GuessSpec | tuple[GuessSpec, GuessSpec] = "zero",
    ) -> None:
        super().__init__(backbone)
        parts = zip(solvers.pair(solver), policies.pair(convergence), guesses.pair(guess), strict=True)
        self.train_solve, self.eval_solve = (SolveOptions(s, p, window, g) for s, p, g in parts)
        self.gradient = gradients.create(gradient)
        check_instance("group", group, dist.ProcessGroup | None, "a process group")
        self.causal = self.backbone.causal if causal is None else causal
        self.compact = compact
        self.group = group
        self._recordings = Recordings()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. If the value is solve options, also register the modules of the guesses.

        ``gradient`` may be given by its name, as in the constructor. ``backbone`` must have the ``causal`` of
        the old backbone.

        Raises:
            ValueError: the attribute cannot have this value.
            AttributeError: the attribute is a part that belongs to the solve options.
        """
        if name in ("solver", "convergence", "window", "guess"):
            raise AttributeError(
                f"a layer has no attribute {name}, because training and evaluation may differ: set "
                f"layer.train_solve and layer.eval_solve, such as replace(layer.eval_solve, {name}=...)"
            )
        if name == "gradient":
            value = gradients.create(value)
        elif name in ("train_solve", "eval_solve"):
            check_instance(name, value, SolveOptions, "SolveOptions")
        elif name in ("causal", "compact"):
            check_flag(name, value)
        if name == "causal" and value and not self.backbone.causal:
            raise ValueError(f"causal=True needs a causal backbone, got {type(self.backbone).__name__}")
        super().__setattr__(name, value)
        if isinstance(value, SolveOptions):
            options = (vars(self).get("train_solve"), vars(self).get("eval_solve"))
            modules = modules_of(*(each.guess for each in options if each is not None))
            if modules is not None:
                modules.training = self.training
            self.guess_modules = modules

    def _checked_backbone(self, value: Any) -> Any:
        backbone = super()._checked_backbone(value)
        if not backbone.injects:
            raise ValueError("an implicit layer needs a backbone that injects x, got injection=False")
        before = self._modules.get("backbone")
        if before is not None and before.causal != backbone.causal:
            raise ValueError(
                f"a layer's new backbone must have causal={before.causal}, as its old backbone, "
                f"got causal={backbone.causal}: make a new layer"
            )
        return backbone

    def __deepcopy__(self, memo: dict[int, Any]) -> ImplicitSequenceLayer:
        """A deep copy. The copy shares the process group, because process groups cannot be copied."""
        memo[id(self.group)] = self.group
        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        copy.__setstate__(deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return copy

    @property
    def solve(self) -> SolveOptions:
        """The solve options of the layer's current mode, training or evaluation."""
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
        previous: Tensor | None = None,
    ) -> LayerOutput:
        """Solve for the equilibrium of every token of ``x``.

        Args:
            x: (B, L, D) input.
            attention_mask: (B, L), 1 or true for real tokens, 0 or false for padding at any place.
            position_ids: (B, L) int64, at least 0. By default the real tokens are numbered from 0, or from
                ``state.seen`` if there is a state. If positions restart at 0 inside a row, a new sequence
                begins there. All sequences are solved independently.
            state: backbone state before the first token; the output then has the state after the last token.
            z0: (B, L, D) initial guess, instead of the guess of the solve options. Tokens of ``z0`` that are
                not finite become zero.
            window: window of this call; ``"layer"``: the window of the solve options.
            solve: solve options of this call; by default the layer's options for the current mode.
            previous: (B, D) equilibrium of the last token before ``x``, for guesses that use it.

        Raises:
            ValueError: wrong shapes, types or values; a state of another backbone; in training, a solver,
                policy or guess that is not causal; FSDP shards a part of the backbone as a separate unit.
        """
        options = self.solve if solve is None else solve
        check_instance("solve", options, SolveOptions, "SolveOptions")
        if not isinstance(window, str) or window != "layer":
            options = replace(options, window=window)
        self._check_causal(options)
        if options.window is not None:
            check_causal(self.backbone, "a window")
        inputs, packing = take_inputs(
            self.backbone, x, attention_mask, position_ids, state, z0,
            options.guess, None if self.training else 0, previous,
        )  # fmt: skip
        # A call with one token may be recorded as a CUDA graph. The graph cannot enlarge the state, so
        # reserve capacity for the token now.
        one_token = state is not None and inputs.x.shape[1] == 1 and not torch.is_grad_enabled()
        if one_token and state is not None:
            inputs = inputs._replace(state=self.backbone.reserve(state, inputs.x))
        padded = packing is not None
        make = partial(self._problem, options=options, state_has_capacity=one_token, padded=padded)
        if torch.is_grad_enabled():
            solution = mark_unsolvable(solve_with_gradient(self.gradient, make(inputs)), inputs)
        elif one_token:
            solution = self._recordings.solve(self, options, inputs, make, mark_unsolvable)
        else:
            solution = mark_unsolvable(search(make(inputs)), inputs)
        if packing is not None:
            for name in ("z", "residual", "iterations"):
                setattr(solution, name, packing.unpack(getattr(solution, name)))
            solution.status = packing.unpack(solution.status, int(Status.CONVERGED))
        return LayerOutput(solution.z, solution.state, solution)

    @_on_its_device
    @torch.no_grad()
    def decode(
        self,
        x: Tensor,
        position_ids: Tensor,
        state: State,
        context: Context,
        solve: SolveOptions | None = None,
        previous: Tensor | None = None,
    ) -> LayerOutput:
        options = self.solve if solve is None else solve
        if kernels.on_tested_gpu(x) and not isinstance(options.convergence, FixedIterations):
            make = partial(self._problem, options=options, state_has_capacity=True, padded=False)
            inputs = self._token_inputs(x, position_ids, state, options, previous)
            solution = self._recordings.solve(self, options, inputs, make, mark_unsolvable)
        else:
            solution = search(self.token_problem(x, position_ids, state, context, solve, previous))
        return LayerOutput(solution.z, solution.state, solution)

    def token_problem(
        self,
        x: Tensor,
        position_ids: Tensor,
        state: State,
        context: Context,
        solve: SolveOptions | None = None,
        previous: Tensor | None = None,
    ) -> Problem:
        """The problem that :meth:`decode` solves. Arguments: see :meth:`SequenceLayer.decode`."""
        options = self.solve if solve is None else solve
        return self._problem(
            self._token_inputs(x, position_ids, state, options, previous), options, state_has_capacity=True,
            padded=False, context=self.backbone.prepare_next(x, position_ids, context), overwrites_state=True,
        )  # fmt: skip

    def _token_inputs(
        self, x: Tensor, position_ids: Tensor, state: State, options: SolveOptions, previous: Tensor | None
    ) -> Inputs:
        z0 = propose(options.guess, x, None if self.training else 0, previous)
        z0 = None if z0 is None else finite_guess(z0, x)
        count, none = torch.ones_like(state.seen), torch.zeros_like(position_ids, dtype=torch.bool)
        return Inputs(x, z0, position_ids, count, none, state)

    def _problem(
        self,
        inputs: Inputs,
        options: SolveOptions,
        state_has_capacity: bool,
        padded: bool,
        context: Context | None = None,
        overwrites_state: bool = False,
    ) -> Problem:
        return Problem(
            map=self.backbone,
            context=_context(self.backbone, inputs, padded) if context is None else context,
            z0=torch.zeros_like(inputs.x) if inputs.z0 is None else inputs.z0,
            options=options,
            lengths=inputs.lengths,
            state=inputs.state,
            state_has_capacity=state_has_capacity,
            overwrites_state=overwrites_state,
            returns_state=True,
            compact=self.compact,
            checkpoint=self.gradient_checkpointing,
            group=self.group,
            training=self.training,
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
        for part in (options.solver, options.convergence if searching else None, options.guess):
            if part is not None and not part.causal:
                raise ValueError(
                    f"{part} lets a token's value depend on later tokens, which leaks the future in causal "
                    "training: use a causal part (Anderson, Broyden and Residual are, with scope='token'), "
                    "or allow it with ImplicitSequenceLayer(causal=False)"
                )


class ExplicitSequenceLayer(SequenceLayer):
    """A layer that evaluates a backbone once: the counterpart of an implicit layer, without a search.

    With ``injection=False`` the output is f(x): an ordinary stack of blocks. If the backbone injects x, the
    output is f(0, x). This *injected* form has the weights of an implicit layer and does not iterate. Compare
    implicit layers with it to see what iterating contributes.

    Args:
        backbone: the map f.
    """

    @_on_its_device
    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        state: State | None = None,
    ) -> LayerOutput:
        """Apply the backbone to ``x`` (B, L, D). Arguments: see :meth:`ImplicitSequenceLayer.forward`."""
        inputs, packing = take_inputs(self.backbone, x, attention_mask, position_ids, state)
        x, backbone = inputs.x, self.backbone
        context = _context(backbone, inputs, packing is not None)
        z = self._z(x, state)
        z, trace = evaluate(backbone, z, context, state, self.gradient_checkpointing, x.shape)
        if state is not None:
            state = backbone.advance(trace, backbone.reserve(state, x).copy(), inputs.lengths).detach()
        real = torch.arange(x.shape[1], device=x.device) < inputs.lengths[:, None]
        z = z.where(real[..., None], z.new_zeros(()))
        z = z.masked_fill(inputs.unsolvable[..., None], torch.nan)
        if packing is not None:
            z = packing.unpack(z)
        return LayerOutput(z, state_after(state, inputs.unsolvable))

    @_on_its_device
    @torch.no_grad()
    def decode(
        self,
        x: Tensor,
        position_ids: Tensor,
        state: State,
        context: Context,
        solve: SolveOptions | None = None,
        previous: Tensor | None = None,
    ) -> LayerOutput:
        context = self.backbone.prepare_next(x, position_ids, context)
        z, trace = self.backbone.evaluate(self._z(x, state), context, state)
        return LayerOutput(z, self.backbone.advance(trace, state, torch.ones_like(state.seen)))

    def _z(self, x: Tensor, state: State | None) -> Tensor:
        """The argument z of the only evaluation."""
        if not self.backbone.injects:
            return x
        return self.backbone.zero(x) if state is None else torch.zeros_like(x)


def _context(backbone: Backbone, inputs: Inputs, padded: bool) -> Context:
    """The backbone's context. If rows may have padding (``padded``), hide the padding from the backbone.

    Only a backbone that is not causal needs this. Padding comes after the real tokens, and a causal backbone
    never uses later tokens.
    """
    check_not_sharded([backbone])
    context = backbone.prepare(inputs.x, inputs.position_ids)
    return backbone.hide_padding(context, inputs.lengths) if padded and not backbone.causal else context
