"""Bad input must raise a ``ValueError`` whose message is one line with the value and the rule.

Every case has a name, a call, and a regular expression that the error message must match.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer, models
from torch import Tensor, nn

from deqseq import (
    ExplicitSequenceLayer,
    FixedIterations,
    ImplicitDifferentiation,
    ImplicitSequenceLayer,
    Phantom,
    Residual,
    SolveOptions,
    Unrolled,
    search,
    steps,
)
from deqseq.backbone import State
from deqseq.backbones import (
    LlamaBackbone,
    Mamba2Backbone,
    MixerBackbone,
    ModuleBackbone,
    RecursionBackbone,
    fold_weight_norm,
)
from deqseq.budget import AdaptiveBudget
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.curriculum import Curriculum, Stage
from deqseq.guesses import Noise, Proposal
from deqseq.policies import Quantile
from deqseq.regularisation import jacobian_penalty, spectral_radius
from deqseq.solvers import Anderson, BestIterate, Broyden, Noisy, Picard, TorchDEQ
from deqseq.statistics import SolveStatistics
from deqseq.tasks import prepare, pretrain

Case = tuple[str, Callable[[], object], str]
B, L, D, V = 2, 6, 16, 32
MAMBA2 = {"name": "mamba2", "d_model": D, "n_layer": 1, "d_state": 8, "headdim": 8}
LLAMA = {"name": "llama", "d_model": D, "n_layer": 1, "n_head": 2}
FEW = FixedIterations(2)


@cache
def layer(kind: str = "llama") -> ImplicitSequenceLayer:
    module = ModuleBackbone(nn.Tanh())
    made = {"llama": LLAMA, "mamba2": MAMBA2, "module": module, "wide": {**LLAMA, "n_head": 4}}
    deep = {**LLAMA, "n_layer": 2}
    return ImplicitSequenceLayer({**made, "deep": deep}[kind], convergence=FEW).eval()


def x(dtype: torch.dtype = torch.float32, tokens: int = L) -> Tensor:
    return torch.ones(B, tokens, D, dtype=dtype)


def call(given: Any = None, kind: str = "llama", **arguments: Any) -> Callable[[], object]:
    return lambda: layer(kind)(x() if given is None else given, **arguments)


def state(kind: str = "llama", **changes: Any) -> State:
    return replace(layer(kind).backbone.initial_state(B), **changes)


def built(**arguments: Any) -> Callable[[], object]:
    return lambda: ImplicitSequenceLayer(**{"backbone": LLAMA, **arguments})


def values(*rows: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor (B, L) with B equal rows. If ``rows`` has fewer than L values, its last value is repeated."""
    row = list(rows) + [rows[-1]] * (L - len(rows))
    return torch.tensor([row] * B, dtype=dtype)


places = torch.arange(L).expand(B, L)

CALLS: list[Case] = [
    ("x is None", lambda: layer()(None), "x must be a tensor, got None"),
    ("x is a numpy array", call(np.ones((B, L, D))), "x must be a tensor, got array"),
    ("x is a list", call([[[1.0] * D]]), "x must be a tensor, got "),
    (
        "x of an explicit layer is None",
        lambda: ExplicitSequenceLayer({**LLAMA, "injection": False})(None),
        "x must be a tensor, got None",
    ),
    ("x is complex", call(x(torch.complex64)), "x must be of a floating-point type, got torch.complex64"),
    ("x is of whole numbers", call(x(torch.int64)), "x must be of a floating-point type, got torch.int64"),
    ("x is float64, the weights float32", call(x(torch.float64)), "x is torch.float64, .*torch.float32"),
    (
        "x is bfloat16, the weights float32",
        call(x(torch.bfloat16), "mamba2"),
        "x is torch.bfloat16, .*float32",
    ),
    ("mask with -1", call(attention_mask=values(-1, 1)), "attention_mask must be 1 .*got -1"),
    ("mask with 2", call(attention_mask=values(1, 2)), "attention_mask must be 1 .*got 2"),
    ("mask with 0.5", call(attention_mask=values(1.0, 0.5)), "attention_mask must be 1 .*got 0.5"),
    ("mask with NaN", call(attention_mask=values(1.0, math.nan)), "attention_mask must be 1 .*got nan"),
    ("mask with infinity", call(attention_mask=values(1.0, math.inf)), "attention_mask must be 1 .*got inf"),
    ("additive mask", call(attention_mask=values(0.0, -1e9)), "attention_mask .*additive mask"),
    ("mask is a list", call(attention_mask=[[1] * L] * B), "attention_mask must be a tensor, got "),
    ("mask is a numpy array", call(attention_mask=np.ones((B, L))), "attention_mask must be a tensor, got"),
    (
        "mask of four dimensions",
        call(attention_mask=torch.ones(B, 1, L, L)),
        r"attention_mask must have .*\(2, 6\)",
    ),
    (
        "positions are floats",
        call(position_ids=places.float()),
        "position_ids must be int64 or int32, got torch.float32",
    ),
    ("positions are NaN", call(position_ids=values(math.nan)), "position_ids must be int64 or int32"),
    (
        "positions are bools",
        call(position_ids=values(True)),
        "position_ids must be int64 or int32, got torch.bool",
    ),
    ("positions are complex", call(position_ids=places + 0j), "position_ids must be int64 or int32"),
    ("positions begin below 0", call(position_ids=places - 3), "position_ids must .*got -3"),
    (
        "a position is below 0",
        call(position_ids=values(0, 1, -2, 3, 4, 5)),
        "position_ids must .*got -2 after 1",
    ),
    (
        "the only position is below 0",
        call(x(tokens=1), position_ids=torch.full((B, 1), -1)),
        "position_ids must .*got -1",
    ),
    ("positions decrease", call(position_ids=values(0, 1, 5, 3, 4, 6)), "position_ids must .*got 3 after 5"),
    ("positions are a list", call(position_ids=[[0] * L] * B), "position_ids must be a tensor, got "),
    ("positions are uint8", call(position_ids=places.to(torch.uint8)), "position_ids must be int64 or int32"),
    ("state is a tuple", call(state=(1, 2)), r"state must be a State, got \(1, 2\)"),
    ("state has seen -1 tokens", call(state=state(seen=torch.tensor([-1, 0]))), "state.seen must .*got -1"),
    (
        "state has seen 1.5 tokens",
        call(state=state(seen=torch.ones(B) * 1.5)),
        "state.seen must be int64 or int32",
    ),
    (
        "state has seen bools",
        call(state=state(seen=torch.ones(B).bool())),
        "state.seen must be int64 or int32",
    ),
    ("state has seen a list", call(state=state(seen=[0, 0])), r"state.seen must be a tensor, got \[0, 0\]"),
    ("state has seen (B, 1)", call(state=state(seen=torch.zeros(B, 1).long())), "state.seen must have "),
    ("state of Mamba2 for Llama", call(state=state("mamba2")), "state is of another backbone"),
    ("state of Llama for Mamba2", call(kind="mamba2", state=state("llama")), "state is of another backbone"),
    (
        "state of Llama for a module",
        call(kind="module", state=state("llama")),
        "state is of another backbone",
    ),
    ("state of a module for Llama", call(state=state("module")), "state is of another backbone"),
    ("state of more blocks", call(state=state("deep")), "state is of another backbone"),
    ("state of other heads", call(state=state("wide")), "state is of another backbone"),
    ("state without layers", call(state=state(layers=())), "state is of another backbone"),
    (
        "state with layers of another batch",
        call(kind="mamba2", state=state("mamba2", layers=layer("mamba2").backbone.initial_state(3).layers)),
        "state is of another backbone",
    ),
    ("z0 of whole numbers", call(z0=x(torch.int64)), "z0 must be of a floating-point type, got torch.int64"),
    (
        "z0 is complex",
        call(z0=x(torch.complex64)),
        "z0 must be of a floating-point type, got torch.complex64",
    ),
    ("z0 of bools", call(z0=x(torch.bool)), "z0 must be of a floating-point type, got torch.bool"),
    ("z0 is a number", call(z0=0), "z0 must be a tensor, got 0"),
    ("z0 is a numpy array", call(z0=np.ones((B, L, D))), "z0 must be a tensor, got array"),
    ("previous is a number", call(previous=0.0), "previous must be a tensor, got 0.0"),
    (
        "previous is of whole numbers",
        call(previous=torch.ones(B, D).long()),
        "previous must be of a floating-point",
    ),
    ("window is a string", call(window="all"), "window must be a whole number >= 1, got 'all'"),
    ("window is a float", call(window=2.0), "window must be a whole number >= 1, got 2.0"),
    ("window is a bool", call(window=True), "window must be a whole number >= 1, got True"),
    ("window is a list", call(window=[2]), r"window must be a whole number >= 1, got \[2\]"),
    (
        "window is a numpy array",
        call(window=np.array([2, 3])),
        r"window must be a whole number >= 1, got array",
    ),
    (
        "window is a tensor",
        call(window=torch.tensor([2, 3])),
        "window must be a whole number >= 1, got tensor",
    ),
    ("solve is a name", call(solve="anderson"), "solve must be SolveOptions, got 'anderson'"),
    ("solve is a mapping", call(solve={"window": 2}, window=3), "solve must be SolveOptions, got {'window'"),
]


def assigned(name: str, value: object) -> Callable[[], object]:
    return lambda: setattr(ImplicitSequenceLayer(LLAMA), name, value)


LAYERS: list[Case] = [
    ("train_solve becomes None", assigned("train_solve", None), "train_solve must be SolveOptions, got None"),
    (
        "eval_solve becomes a name",
        assigned("eval_solve", "anderson"),
        "eval_solve must be SolveOptions, got 'and",
    ),
    (
        "eval_solve becomes a pair",
        assigned("eval_solve", (FEW, FEW)),
        "eval_solve must be SolveOptions, got ",
    ),
    ("compact becomes a name", assigned("compact", "no"), "compact must be true or false, got 'no'"),
    ("gradient becomes None", assigned("gradient", None), "gradient strategy must be .*got None"),
    ("causal is a string", built(causal="no"), "causal must be true or false, got 'no'"),
    ("causal is a number", built(causal=0), "causal must be true or false, got 0"),
    ("compact is a number", built(compact=3), "compact must be true or false, got 3"),
    ("compact is None", built(compact=None), "compact must be true or false, got None"),
    ("group is a number", built(group=1), "group must be a process group, got 1"),
    ("group is a string", built(group="world"), "group must be a process group, got 'world'"),
    ("window is a bool", built(window=True), "window must be a whole number >= 1, got True"),
    ("window is a name", built(window="layer"), "window must be a whole number >= 1, got 'layer'"),
    ("window is a list", built(window=[8]), r"window must be a whole number >= 1, got \[8\]"),
    ("solver is None", built(solver=None), "solver must be a Solver, .*got None"),
    ("solver is a class", built(solver=Picard), "solver must be a Solver, .*got <class"),
    ("solver is a policy", built(solver=FEW), "solver must be a Solver, .*got FixedIterations"),
    ("gradient is None", built(gradient=None), "gradient strategy must be a GradientStrategy, .*got None"),
    ("convergence is a number", built(convergence=1e-3), "convergence policy must be .*got 0.001"),
    ("guess is a tensor", built(guess=torch.zeros(2)), "guess must be a Guess, .*got tensor"),
    ("backbone is None", built(backbone=None), "backbone must be a Backbone, .*got None"),
    ("backbone without a name", built(backbone={"d_model": 16}), "backbone .*needs a 'name'"),
]

BAD_NUMBERS = [True, "1", None, [1.0], math.nan, math.inf, 1 + 2j, torch.tensor(0.5)]


def numbers(name: str, make: Callable[..., object], more: list[Any] = []) -> list[Case]:  # noqa: B006
    """Cases that set the number ``name`` of a part to bad values.

    The bad values are of another type, NaN, infinity, or a value in ``more``.
    """
    words = name.rpartition(".")[2]
    return [
        (f"{name} = {value!r}", lambda value=value: make(**{words: value}), f"{words} must be .*, got ")
        for value in [*BAD_NUMBERS, *more]
    ]


def counts(name: str, make: Callable[..., object], more: list[Any] = [0]) -> list[Case]:  # noqa: B006
    """Cases that set the whole number ``name`` of a part to bad values.

    The bad values are -1, the values in ``more``, and values of other types than int.
    """
    return numbers(name, make, [-1, 1.5, 2.0, *more])


def flag(name: str, make: Callable[..., object]) -> list[Case]:
    word = name.rpartition(".")[2]
    return [
        (
            f"{name} = {value!r}",
            lambda value=value: make(**{word: value}),
            f"{word} must be true or false, got {value!r}",
        )
        for value in ("no", 1, None)
    ]


def llama(**options: Any) -> LlamaBackbone:
    return LlamaBackbone(**{"d_model": D, "n_layer": 1, "n_head": 2, **options})


def mamba2(**options: Any) -> Mamba2Backbone:
    return Mamba2Backbone(**{"d_model": D, "n_layer": 1, "headdim": 8, **options})


def mixer(**options: Any) -> MixerBackbone:
    return MixerBackbone(**{"d_model": D, "n_layer": 1, "tokens": 4, **options})


class Wider(nn.Module):
    """A module that doubles the width of its input."""

    def forward(self, u: Tensor) -> Tensor:
        return torch.cat([u, u], -1)


class Narrow(nn.Module):
    """A module whose result has width 1, so PyTorch would broadcast it to every width."""

    def forward(self, u: Tensor) -> Tensor:
        return u[..., :1]


def budget() -> AdaptiveBudget:
    return AdaptiveBudget(ImplicitSequenceLayer(LLAMA, convergence=Residual(rtol=0.1)), residual=0.1)


def quantile(**options: Any) -> Quantile:
    return Quantile(FEW, **options)


def staged(*stages: Any) -> Callable[[], object]:
    return lambda: Curriculum(list(stages))


PARTS: list[Case] = [
    *numbers("Picard.damping", Picard, [0, 1.5, -1]),
    *numbers("Anderson.damping", Anderson, [0, 1.5]),
    *numbers("Anderson.regularisation", Anderson, [-1]),
    *counts("Anderson.memory", Anderson, [0, 10**9]),
    *counts("Broyden.memory", Broyden, [0, 10**9]),
    *numbers("Noisy.std", Noisy, [0, -1]),
    ("Anderson.scope", lambda: Anderson(scope=3), "scope must be 'token' or 'sequence', got 3"),
    ("Broyden.scope", lambda: Broyden(scope=None), "scope must be 'token' or 'sequence', got None"),
    (
        "BestIterate.scope",
        lambda: BestIterate("picard", ["token"]),
        "scope must be 'token' or 'sequence', got ",
    ),
    ("BestIterate.solver", lambda: BestIterate(None), "solver must be a Solver, .*got None"),
    ("TorchDEQ.method is a list", lambda: TorchDEQ([]), r"unknown torchdeq solver \[\]"),
    *[
        (
            f"TorchDEQ {method} {name} = {value!r}",
            lambda m=method, n=name, v=value: TorchDEQ(m, **{n: v}),
            f"{name} must be .*, got ",
        )
        for method, name, given in (
            ("anderson", "m", [0, 1, -1, 2.5, "5", None, True, 10**9]),
            ("anderson", "lam", [-1, "1", None, math.nan, True]),
            ("anderson", "tau", [0, -1, "1", None, math.inf, True]),
            ("fixed_point_iter", "tau", [0, "1"]),
            ("broyden", "LBFGS_thres", [0, 1.5, "5", None, 10**9]),
            ("broyden", "ls", ["no", 1]),
        )
        for value in given
    ],
    *numbers("Residual.rtol", Residual, [-1]),
    *numbers("Residual.atol", lambda atol: Residual(rtol=0.1, atol=atol), [-1]),
    *counts("Residual.max_iter", lambda max_iter: Residual(rtol=0.1, max_iter=max_iter)),
    *[
        case
        for case in counts(
            "Residual.check_every", lambda check_every: Residual(rtol=0.1, check_every=check_every)
        )
        if "None" not in case[0]
    ],
    *counts("FixedIterations.iterations", FixedIterations),
    (
        "FixedIterations.iterations, of NumPy",
        lambda: FixedIterations(np.int64(5)),
        r"a whole number >= 1, got np.int64\(5\), a numpy.int64: use .item\(\)",
    ),
    (
        "Residual.rtol, of NumPy",
        lambda: Residual(rtol=np.float32(0.25), max_iter=5),
        r"got np.float32\(0.25\), a numpy.float32: use .item\(\)",
    ),
    (
        "Picard.damping, of torch",
        lambda: Picard(torch.tensor(0.5)),
        r"got tensor\(0.5000\), a torch.Tensor: use .item\(\)",
    ),
    (
        "Phantom.checkpoint, of NumPy",
        lambda: Phantom(checkpoint=np.bool_(True)),
        r"true or false, got np.True_, a numpy.bool: use .item\(\)",
    ),
    *numbers("Quantile.share", quantile, [0, 1.5]),
    ("policy & 3", lambda: FEW & 3, "a policy combines only with another policy, got 3"),
    ("policy | None", lambda: FEW | None, "a policy combines only with another policy, got None"),
    ("policy & a name", lambda: FEW & "fixed:3", "a policy combines only with another policy, got 'fixed:3'"),
    *counts("Phantom.steps", Phantom),
    *numbers("Phantom.damping", Phantom, [0, 1.5]),
    *flag("Phantom.checkpoint", Phantom),
    *counts("Unrolled.iterations", Unrolled),
    *counts("Unrolled.before", lambda before: Unrolled(3, before=before), []),
    (
        "Unrolled.before, 3 numbers",
        lambda: Unrolled(3, before=(1, 2, 3)),
        r"a number or a pair .*got \(1, 2, 3\)",
    ),
    ("Unrolled.before, below 0", lambda: Unrolled(3, before=(-1, 2)), "the first number of before .*got -1"),
    (
        "Unrolled.before, not increasing",
        lambda: Unrolled(3, before=(2, 2)),
        "the second number .*>= 3, got 2",
    ),
    *flag("Unrolled.checkpoint", lambda checkpoint: Unrolled(3, checkpoint=checkpoint)),
    (
        "ImplicitDifferentiation.solver",
        lambda: ImplicitDifferentiation(solver=3),
        "solver must be a Solver, .*got 3",
    ),
    (
        "ImplicitDifferentiation.convergence",
        lambda: ImplicitDifferentiation(convergence=3),
        "convergence policy must be .*got 3",
    ),
    *numbers("Noise.std", Noise, [0, -1]),
    *counts("Noise.seed", Noise, []),
    *flag("Proposal.causal", lambda causal: Proposal(nn.Identity(), causal=causal)),
    ("Proposal.module", lambda: Proposal(None), "Proposal takes a module, got None"),
    (
        "a part whose name is no text",
        lambda: SolveOptions({"name": 3}),
        "name of a solver must be text, got 3",
    ),
    ("a part by a name of numbers", lambda: SolveOptions("picard:yes"), "damping must be .*got 'yes'"),
    (
        "curriculum of strings",
        staged("phantom", "implicit"),
        "a curriculum is a list of Stage, got .*'phantom'",
    ),
    (
        "curriculum of dictionaries",
        staged({"until": 1, "gradient": "phantom"}),
        "a curriculum is a list of Stage, got .*until",
    ),
    (
        "curriculum is a string",
        lambda: Curriculum("phantom"),
        "a curriculum is a list of Stage, got 'phantom'",
    ),
    ("curriculum is None", lambda: Curriculum(None), "a curriculum is a list of Stage, got None"),
    (
        "curriculum is one stage",
        lambda: Curriculum(Stage(1, "phantom")),
        "a curriculum is a list of Stage, got Stage",
    ),
    (
        "curriculum is a generator",
        lambda: Curriculum(iter([Stage(1, "phantom")])),
        "a curriculum is a list of Stage, got ",
    ),
    *[
        (f"until = {value!r}", staged(Stage(value, "phantom"), Stage(1, "phantom")), "until must .*, got ")
        for value in BAD_NUMBERS
    ],
    (
        "window of a stage",
        staged(Stage(1, "phantom", window="all")),
        "window must be a whole number >= 1, got 'all'",
    ),
    *numbers("Llama.rope_theta", llama, [0, -1]),
    *numbers("Llama.norm_eps", llama, [0, -1]),
    *numbers("Mamba2.norm_eps", mamba2, [0]),
    *numbers("Mamba2.dt_min", mamba2, [0]),
    *numbers("Mamba2.dt_max", mamba2, [0]),
    *counts("Mamba2.d_state", mamba2),
    *[case for case in counts("Mamba2.d_inner", mamba2, [False])],
    *counts("Llama.d_model", llama),
    *counts("Llama.n_layer", llama),
    *counts("Mixer.tokens", mixer),
    *counts("Mixer.d_model", mixer),
    *flag("Llama.weight_norm", llama),
    *flag("Llama.injection", llama),
    *flag("Mamba2.input_skip", mamba2),
    *flag("Llama.post_norm", llama),
    ("Llama.attention is a list", lambda: llama(attention=["sdpa"]), r"unknown attention \['sdpa'\]"),
    *numbers("Recursion.noise", lambda noise: RecursionBackbone(mixer(injection=False), noise=noise), [-1]),
    *numbers(
        "Recursion.damping", lambda damping: RecursionBackbone(mixer(injection=False), damping=damping), [0]
    ),
    *counts("Recursion.updates", lambda updates: RecursionBackbone(mixer(injection=False), updates=updates)),
    ("ModuleBackbone(None)", lambda: ModuleBackbone(None), "module must be a module, got None"),
    (
        "ModuleBackbone of a backbone",
        lambda: ModuleBackbone(llama()),
        "LlamaBackbone is a backbone already: use it without ModuleBackbone",
    ),
    ("ModuleBackbone of a name", lambda: ModuleBackbone("tanh"), "module must be a module, got 'tanh'"),
    *[
        case
        for case in counts(
            "ModuleBackbone.d_model", lambda d_model: ModuleBackbone(nn.Tanh(), d_model=d_model)
        )
        if "None" not in case[0]
    ],
    (
        "a module that changes the width",
        lambda: ImplicitSequenceLayer(ModuleBackbone(Wider()))(x()),
        r"must return .*\(2, 6, 16\), Wider returned \(2, 6, 32\)",
    ),
    (
        "an injection that changes the width",
        lambda: ImplicitSequenceLayer(ModuleBackbone(nn.Tanh(), Wider()))(x()),
        r"must return .*\(2, 6, 16\), Wider returned \(2, 6, 32\)",
    ),
    (
        "an injection that broadcasts",
        lambda: ImplicitSequenceLayer(ModuleBackbone(nn.Tanh(), Narrow()))(x()),
        r"must return .*\(2, 6, 16\), Narrow returned \(2, 6, 1\)",
    ),
    *[
        (
            f"summary of tokens {kind}",
            lambda counted=counted: layer()(x()).solution.summary(counted),
            rf"counted must {said}",
        )
        for kind, counted, said in (
            ("in a list", [1], r"be a tensor, got \[1\]"),
            ("without sequences", torch.ones(L), r"have one value for every token, \(2, 6\), got \(6,\)"),
            ("of one sequence", torch.ones(1, L), r"have one value for every token, \(2, 6\), got \(1, 6\)"),
        )
    ],
    (
        "by_position of an unknown statistic",
        lambda: SolveStatistics().by_position("loss"),
        "unknown statistic 'loss'; known: iterations, residual, ",
    ),
    *counts("jacobian_penalty.samples", lambda samples: jacobian_penalty(torch.tanh, x(), samples)),
    *counts(
        "spectral_radius.iterations", lambda iterations: spectral_radius(torch.tanh, x(), iterations), [1]
    ),
    *[
        (f"{measure.__name__} {kind}", lambda measure=measure, f=f, z=z: measure(f, z), said)
        for measure in (jacobian_penalty, spectral_radius)
        for kind, f, z, said in (
            ("at None", torch.tanh, None, "z must be a tensor, got None"),
            ("at whole numbers", torch.tanh, x(torch.int64), "z must be of a floating-point type"),
            ("at one token", torch.tanh, torch.ones(B, D), r"z must be \(B, L, D\), got \(2, 16\)"),
            ("of a map that returns a pair", lambda z: (z, z), x(), r"f\(z\) must be a tensor, got \("),
            ("of a map that widens", Wider(), x(), r"f\(z\) must have the shape of z, \(2, 6, 16\), got "),
        )
    ],
    ("search of no problem", lambda: search(None), "problem must be a Problem, got None"),
    ("steps of no problem", lambda: steps(None, 3), "problem must be a Problem, got None"),
    *[
        (
            f"initial_state of {kind} for {size!r} sequences",
            lambda kind=kind, size=size: layer(kind).backbone.initial_state(size),
            "batch_size must be a whole number >= 0, got ",
        )
        for kind in ("llama", "module")
        for size in (-1, 1.5, "2", None, True)
    ],
    ("fold_weight_norm of None", lambda: fold_weight_norm(None), "module must be a module, got None"),
    (
        "a stage for an explicit layer",
        lambda: Curriculum.apply(Stage(1, "phantom"), ExplicitSequenceLayer({**LLAMA, "injection": False})),
        "layer must be an ImplicitSequenceLayer, got ExplicitSequenceLayer",
    ),
    ("no stage for a layer", lambda: Curriculum.apply(None, layer()), "stage must be a Stage, got None"),
    *counts("Curriculum.at.step", lambda step: Curriculum([Stage(1, "phantom")]).at(step, 10), []),
    *counts("Curriculum.at.steps", lambda steps: Curriculum([Stage(1, "phantom")]).at(0, steps)),
    *counts("AdaptiveBudget.max_iter", lambda max_iter: budget().set(max_iter), []),
]


@cache
def model() -> ImplicitForCausalLM:
    convergence = {"name": "fixed", "iterations": 2}
    return ImplicitForCausalLM(ImplicitConfig(vocab_size=V, backbone=LLAMA, convergence=convergence)).eval()


def ask(ids: Any = None, **arguments: Any) -> Callable[[], object]:
    return lambda: model()(torch.ones(B, L, dtype=torch.int64) if ids is None else ids, **arguments)


def config(**options: Any) -> Callable[[], object]:
    return lambda: ImplicitConfig(**{"vocab_size": V, "backbone": LLAMA, **options})


MODELS: list[Case] = [
    ("an id is V", ask(values(1, V)), rf"input_ids must be in \[0, {V}\), got 1 to {V}"),
    ("an id is below 0", ask(values(1, -1)), rf"input_ids must be in \[0, {V}\), got -1 to 1"),
    ("ids are floats", ask(values(1.0)), "input_ids must be int64 or int32, got torch.float32"),
    ("ids are bools", ask(values(True)), "input_ids must be int64 or int32, got torch.bool"),
    ("ids are uint8", ask(values(1, dtype=torch.uint8)), "input_ids must be int64 or int32, got torch.uint8"),
    ("ids are a list", ask([[1, 2, 3]]), "input_ids must be a tensor, got "),
    ("ids are a text", ask("a text"), "input_ids must be a tensor, got 'a text'"),
    ("ids are a numpy array", ask(np.ones((B, L))), "input_ids must be a tensor, got array"),
    ("ids of one dimension", ask(torch.ones(L).long()), r"input_ids must be \(B, L\), got \(6,\)"),
    ("embeddings are a list", lambda: model()(inputs_embeds=[[1.0]]), "inputs_embeds must be a tensor, got "),
    (
        "embeddings of whole numbers",
        lambda: model()(inputs_embeds=x(torch.int64)),
        "must be of a floating-point type, got torch.int64",
    ),
    ("embeddings of another type", lambda: model()(inputs_embeds=x(torch.float64)), "x is torch.float64"),
    (
        "mask of the model is a list",
        ask(attention_mask=[[1] * L] * B),
        "attention_mask must be a tensor, got ",
    ),
    ("mask of the model with 2", ask(attention_mask=values(1, 2)), "attention_mask must be 1 .*got 2"),
    (
        "positions of the model are floats",
        ask(position_ids=places.float()),
        "position_ids must be int64 or int32",
    ),
    (
        "positions of the model are a list",
        ask(position_ids=[[0] * L] * B),
        "position_ids must be a tensor, got ",
    ),
    ("a label is V", ask(labels=values(1, V)), rf"labels must be in \[0, {V}\) or -100, got {V}"),
    ("a label is -1", ask(labels=values(1, -1)), rf"labels must be in \[0, {V}\) or -100, got -1"),
    ("labels are floats", ask(labels=values(1.0)), "labels must be int64 or int32, got torch.float32"),
    ("labels are bools", ask(labels=values(True)), "labels must be int64 or int32, got torch.bool"),
    ("labels are a list", ask(labels=[[1] * L] * B), "labels must be a tensor, got "),
    (
        "labels are one-hot",
        ask(labels=torch.ones(B, L, V)),
        "labels must be int64 or int32, got torch.float32",
    ),
    ("logits_to_keep is -1", ask(logits_to_keep=-1), "logits_to_keep must be .*got -1"),
    ("logits_to_keep is a bool", ask(logits_to_keep=True), "logits_to_keep must be .*got True"),
    ("logits_to_keep is a float", ask(logits_to_keep=1.0), "logits_to_keep must be .*got 1.0"),
    ("logits_to_keep is None", ask(logits_to_keep=None), "logits_to_keep must be .*got None"),
    ("logits_to_keep is a text", ask(logits_to_keep="all"), "logits_to_keep must be .*got 'all'"),
    (
        "logits_to_keep has the index 6",
        ask(logits_to_keep=torch.tensor([0, 6])),
        "logits_to_keep must be .*got 6",
    ),
    (
        "logits_to_keep has the index -7",
        ask(logits_to_keep=torch.tensor([0, -7])),
        "logits_to_keep must be .*got -7",
    ),
    (
        "logits_to_keep has bools",
        ask(logits_to_keep=torch.ones(L).bool()),
        "logits_to_keep must be int64 or int32",
    ),
    (
        "logits_to_keep of two dimensions",
        ask(logits_to_keep=torch.zeros(B, 1).long()),
        r"logits_to_keep must .*\(2, 1\)",
    ),
    ("window of a call", ask(window="all"), "window must be a whole number >= 1, got 'all'"),
    ("solve of a call", ask(solve="anderson"), "solve must be SolveOptions, got 'anderson'"),
    ("use_cache is a text", ask(use_cache="no"), "use_cache must be true or false, got 'no'"),
    ("cache of another kind", ask(past_key_values=3), "past_key_values must be .*got int"),
    ("pad id is V", config(pad_token_id=V), f"pad_token_id must be below vocab_size = {V}, got {V}"),
    (
        "pad id is 10**9",
        config(pad_token_id=10**9),
        f"pad_token_id must be below vocab_size = {V}, got 1{9 * '0'}",
    ),
    ("initializer_range is negative", config(initializer_range=-1.0), "initializer_range must be .*got -1.0"),
    (
        "backbone of the configuration is a list",
        config(backbone=[LLAMA]),
        "backbone must be a name or a mapping",
    ),
    ("d_model is a text", config(backbone={**LLAMA, "d_model": "16"}), "backbone needs a d_model"),
    ("d_model is a bool", config(backbone={**LLAMA, "d_model": True}), "backbone needs a d_model"),
    ("solver of the configuration is a number", config(solver=3), "solver must be a name or a mapping"),
]


@pytest.mark.parametrize(
    ("make", "said"), [pytest.param(*case[1:], id=case[0]) for case in [*CALLS, *LAYERS, *PARTS, *MODELS]]
)
def test_bad_input(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        make()
    assert type(caught.value) is ValueError and "\n" not in str(caught.value)


RUN = {
    "model": {"vocab_size": V, "backbone": LLAMA},
    "data": "unused",
    "length": 8,
    "steps": 10,
    "batch_tokens": 64,
    "learning_rate": 1e-3,
}
STAGES = [
    {"until": 0.5, "gradient": "phantom", "convergence": "fixed:2"},
    {"until": 1, "gradient": "phantom", "convergence": "fixed:3"},
]


def with_model(**options: Any) -> dict[str, Any]:
    return {"model": {"vocab_size": V, "backbone": LLAMA, **options}}


def with_stage(**options: Any) -> dict[str, Any]:
    return {"stages": [{**STAGES[0], **options}, STAGES[1]]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {**with_model()["model"], 3: 4}}, "the fields of model must have names, got 3"),
        (with_model(vocab_size="many"), "vocab_size"),
        (with_model(vocab_size=10**30), "the model cannot be built"),
        (with_model(backbone={**LLAMA, "d_model": True}), "backbone needs a d_model, a whole number"),
        (with_model(backbone="nosuch"), r"unknown backbone 'nosuch'; known: llama, mamba2"),
        (with_model(backbone={**LLAMA, "weight_norm": "no"}), "weight_norm must be true or false, got 'no'"),
        (with_model(backbone={**LLAMA, "rope_theta": [1]}), r"rope_theta must be .*got \[1\]"),
        (with_model(pad_token_id=V), "pad_token_id must be below"),
        (with_model(solver={"name": "picard", "damping": "1"}), "damping must be .*got '1'"),
        ({"model": [1]}, "model"),
        ({"learning_rate": [1]}, "learning_rate must be"),
        ({"learning_rate": "1\n2"}, "learning_rate must be"),
        ({"length": {"a": 1}}, "length must be"),
        ({"stages": "phantom"}, "stages"),
        ({"stages": [3]}, "stages"),
        (with_stage(until={"steps": True}), "stages.0.until must be .*True"),
        (with_stage(until="half"), "stages.0.until must be .*half"),
        (with_stage(gradient={"name": "phantom", "damping": True}), "damping must be .*got True"),
        (with_stage(gradient=[1]), "gradient"),
        ({1: 2}, "unknown field 1"),
    ],
    ids=str,
)
def test_run_files(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, **change}))
    assert pretrain.main([str(tmp_path / "run.yaml"), "--dry-run", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: .*{said}", error) and error.count("\n") == 1


@pytest.mark.parametrize(
    "text", [b"a: [1\nb: {", b"a: *b", b"\xff\xfe\xff", b"- 1", b"", b"a: |\n  b\n  c\n"]
)
def test_run_files_that_are_no_mapping(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_bytes(text)
    assert pretrain.main([str(tmp_path / "run.yaml"), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("deep.jsonl", b'{"text": "a"}\n' + b"[" * 100_000 + b"\n", "deep.jsonl:2: .*nested too deeply"),
        ("number.jsonl", b'{"text": 3}\n', "no text in the column 'text': its value is of type int"),
        ("digits.jsonl", b'{"text": ' + b"1" * 10_000 + b"}\n", "digits.jsonl:1: "),
        ("column.jsonl", b'{"a\\nb": "c"}\n', "no text in the column 'text': its columns are a b"),
        ("broken.parquet", b"PAR1xxxxPAR1", "parquet cannot be loaded"),
        ("bytes.txt", b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_texts(name: str, data: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>")
    Tokenizer(vocabulary).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(data)
    options = ["--output", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert prepare.main([str(tmp_path / name), *options, "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: .*{said}", error) and error.count("\n") == 1


def test_good_input_is_still_accepted() -> None:
    """The checks must accept good input, such as masks of any dtype, int32 positions, or 1 instead of 1.0."""
    mask = values(1, 1, 1, 0)
    expected = layer()(x(), attention_mask=mask).z
    for dtype in (torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16):
        assert torch.equal(layer()(x(), attention_mask=mask.to(dtype)).z, expected)
    positions = places.to(torch.int32)
    assert torch.equal(layer()(x(), position_ids=positions).z, layer()(x(), position_ids=places).z)
    at_padding = values(-1, 0, 1, 2, 3, 4)  # positions of padding do not matter
    assert layer()(x(), attention_mask=values(0, 1), position_ids=at_padding).z.isfinite().all()
    labels = values(1, 2, -100)
    assert torch.equal(ask(labels=labels)().loss, ask(labels=labels.int())().loss)
    assert ask(logits_to_keep=L)().logits.shape == (B, L, V)
    assert ask(logits_to_keep=torch.tensor([0, -1]))().logits.shape == (B, 2, V)
    assert Picard(1) == Picard(1.0) and Curriculum([Stage(1, "phantom")]).stages[0].until == 1
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert layer()(x()).z.isfinite().all() and layer()(x(torch.bfloat16)).z.isfinite().all()
