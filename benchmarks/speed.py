"""Speed and memory at the paper's model sizes, compared with the reference implementation.

The numbers of the reference implementation are from one H100 (torch 2.11). Weights and data are random, with
a fixed seed. Timed runs use bfloat16 autocast, except decoding, which uses bfloat16 weights.

The script first checks every implementation of the map f: it compares values and gradients with plain PyTorch
in float64. The script stops if an error is above its limit.

Times are medians over repeats, after a warm-up. "over reference" is our time divided by the reference's time.
A value below 1 means that we are faster. "over explicit" is the median ratio to the explicit twin's time.
If a case fails, its row has the reason.

The sections:

    state-tracking, llama, mamba2   a training step with AdamW; the learning rate is 0, so all steps are equal
    injected                        a training step of the injected form, which evaluates f once, and one of
                                    the explicit twin, in turn
    evaluation                      one evaluation of f, and the shortest time that the device allows
    decode                          generation with a cache, token by token
    sequential                      state tracking with window 1

    python benchmarks/speed.py
    python benchmarks/speed.py --sections state-tracking evaluation --repeats 20
    python benchmarks/speed.py --kernels triton
    python benchmarks/speed.py --quick --device cpu
"""

import argparse
import copy
import gc
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import common
import torch
import torch._functorch.config
import torch.nn.functional as F
from common import Row
from decoding import decode
from limits import parts, rates
from torch import Tensor

from deqseq import Backbone, Context, kernels
from deqseq.backbone import backbones
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM

Tables = dict[str, list[Row]]

TRACKING, LLAMA, MAMBA2 = "mamba2-state-tracking", "llama-130m", "mamba2-130m"
SIZES = {TRACKING: (512, 256), LLAMA: (8, 2048), MAMBA2: (8, 2048)}  # batch size, sequence length
SMALL = {  # sizes that mamba_ssm and fla support, for --quick and the check of correctness
    "mamba2": {"name": "mamba2", "d_model": 64, "n_layer": 2, "d_state": 32, "headdim": 16},
    "llama": {"name": "llama", "d_model": 64, "n_layer": 2, "n_head": 4},
}


def fixed(iterations: int) -> Row:
    return {"convergence": {"name": "fixed", "iterations": iterations}}


def language_model(n: int, explicit: Row, bounded: Row, free: Row) -> dict[str, tuple[str, Row, Row]]:
    """The cases in which the training step of a language model is timed.

    For example, "bounded, 4 + 1" is the bounded model with 4 iterations and 1 phantom step.

    Args:
        n: number of iterations in the case "free, {n} + 4".
        explicit, bounded, free: time and memory of the reference implementation, for each of these models.
    """
    return {
        "explicit": ("-explicit", {}, explicit),
        "bounded, 4 + 1": ("-bounded", {}, bounded),
        f"free, {n} + 4": ("-free", fixed(n), free),
        "free, residual 0.05 + 4": ("-free", {}, free),
    }


# For every preset, its cases. A case has three parts: a suffix for the preset's name, changes to the preset's
# options, and time and memory of the reference implementation.
STEPS: dict[str, dict[str, tuple[str, Row, Row]]] = {
    TRACKING: {
        "unrolled 4": ("", {"gradient": {"name": "unrolled", "iterations": 4}}, {"ms": 77, "GiB": 8.2}),
        # the limit of the run file a5xm
        "at most 11 + 4": ("", {"convergence": {"name": "residual", "rtol": 0.05, "max_iter": 11}}, {}),
        "fixed 17 + 4": ("", fixed(17), {"ms": 169, "GiB": 8.4}),
        "residual 0.05 + 4": ("", {}, {"ms": 169, "GiB": 8.4}),
        "explicit": ("", {"implicit": False}, {}),
    },
    LLAMA: language_model(15, {"ms": 106, "GiB": 19}, {"ms": 215, "GiB": 22}, {"ms": 712, "GiB": 43}),
    MAMBA2: language_model(14, {"ms": 134, "GiB": 18}, {"ms": 270, "GiB": 20}, {"ms": 950, "GiB": 37}),
}


class Bench(argparse.Namespace):
    """The options of the command line, and methods that the sections share."""

    device: str
    quick: bool
    repeats: int
    compile: bool
    kernels: list[str]

    def size(self, name: str) -> tuple[int, int]:
        return (2, 24) if self.quick else SIZES[name]

    def config(self, name: str, form: str = "", **changes: Any) -> ImplicitConfig:
        small = {"backbone": SMALL[name.partition("-")[0]], "vocab_size": 64} if self.quick else {}
        return ImplicitConfig.from_preset(f"{name}{form}", **{**small, **changes})

    def model(self, config: ImplicitConfig) -> ImplicitForCausalLM:
        torch.manual_seed(0)
        with torch.device(self.device):
            return ImplicitForCausalLM(config)

    def bare(self, name: str) -> tuple[Backbone, Tensor, Context]:
        """The backbone of a preset, a random iterate z, and the backbone's context for a random input x."""
        torch.manual_seed(0)
        with torch.device(self.device), self.autocast():
            backbone = backbones.create(self.config(name, "" if name == TRACKING else "-free").backbone)
            z, x = torch.randn(2, *self.size(name), backbone.d_model)
            return backbone, z, backbone.prepare(x)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16)

    def implementations(self, body: str) -> list[str]:
        """The names of the implementations of f that run on this machine.

        ``body`` is ``"mamba2"`` or ``"llama"``. Llama has at most three implementations: our Triton kernels
        (used for the norms), plain PyTorch, and compiled PyTorch.
        """
        names = [n for n in self.kernels if kernels.available(n)] if self.device != "cpu" else ["torch"]
        if body == "llama":
            names = [n for n in names if n in ("triton", "torch")] + ["compiled"] * self.compile
        return names

    def milliseconds(
        self, function: Callable[[], Any], setup: Callable[[], Any] = lambda: None, warm_up: int = 3
    ) -> float:
        """The median time of a call of ``function``, in milliseconds.

        ``setup`` runs before each call, and its time is not counted.
        """
        seconds = []
        for i in range(-warm_up, self.repeats):
            setup()
            if i == 0 and self.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            seconds.append(common.stopwatch(function, self.device))
        return 1e3 * statistics.median(seconds[warm_up:])

    def peak(self) -> float | None:
        """The peak of allocated GPU memory since the timed calls began, in GiB; ``None`` on the CPU."""
        return None if self.device == "cpu" else torch.cuda.max_memory_allocated() / 2**30

    def against(self, ms: float, reference: float | None) -> Row:
        reference = None if self.quick else reference
        return {"reference ms": reference, "over reference": reference and ms / reference}

    def rows(self, measure: Callable[..., Row], cases: Mapping[str, tuple[Any, ...]]) -> list[Row]:
        """Measure one row for each case, and print it to stderr. If a case fails, its row has the reason.

        Frees memory after each case.
        """
        rows: list[Row] = []
        for case, arguments in cases.items():
            try:
                rows.append({"case": case, **measure(self, *arguments)})
            except Exception as error:
                failed = "out of memory" if isinstance(error, torch.OutOfMemoryError) else repr(error)[:100]
                rows.append({"case": case, "failed": failed})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            gc.collect()
            if self.device != "cpu":
                torch.cuda.empty_cache()
            if self.compile:
                torch.compiler.reset()
        return rows


def compile_blocks(backbone: Backbone) -> None:
    """Compile every block. To halve the memory of activations, backward passes recompute cheap operations."""
    torch._functorch.config.activation_memory_budget = 0.5
    for block in backbone.layers:
        block.compile()


def computed_by(name: str, backbone: Backbone) -> AbstractContextManager[None]:
    """A context manager in which the implementation ``name`` computes f.

    If ``name`` is "compiled", this function compiles the backbone in place.
    """
    if name != "compiled":
        return kernels.use(name)
    compile_blocks(backbone)
    return nullcontext()


def correctness(bench: Bench) -> Tables:
    """Measure the relative L2 errors of f(z) and of its gradients. Plain PyTorch in float64 counts as exact.

    The limit applies to the error of f(z), and to the error of all gradients concatenated. The error of a
    single gradient may be five times the limit. The sequences have an odd length, and span several chunks of
    the Mamba2 recurrence.
    """
    rows = []
    for body, options in SMALL.items():
        torch.manual_seed(0)
        original = backbones.create(options).to(bench.device)
        z, x, weight = torch.randn(3, 2, 301, original.d_model, device=bench.device)
        exact = value_and_gradients(copy.deepcopy(original).double(), z.double(), x.double(), weight)
        for name, dtype in product(bench.implementations(body), ("float32", "bfloat16")):
            if (body, name, dtype) == ("mamba2", "triton", "float32") and bench.device != "cpu":
                continue  # skip: this case takes Triton minutes to compile, and the tests check it
            tf32 = name in ("mamba_ssm", "fla")  # kernels that round float32 products to TF32
            limit = 3e-2 if dtype == "bfloat16" else 1e-2 if tf32 else 1e-4
            row, backbone = {"f": f"{body}, {name}", "type": dtype}, copy.deepcopy(original)
            try:
                with computed_by(name, backbone), bench.autocast() if dtype == "bfloat16" else nullcontext():
                    found = value_and_gradients(backbone, z, x, weight)
            except RuntimeError as error:  # a package may not support this device
                rows.append({**row, "failed": str(error)[:100]})
                continue
            value, *gradients = (distance([a], [b]) for a, b in zip(found, exact, strict=True))
            together, worst = distance(found[1:], exact[1:]), max(gradients)
            right = all(error < limit for error in (value, together, worst / 5))  # false if an error is NaN
            errors = {"of f(z)": value, "of all gradients": together, "of the worst gradient": worst}
            rows.append({**row, **errors, "limit (worst: 5 times)": limit, "right": right})
    return {"relative errors": rows}


def value_and_gradients(backbone: Backbone, z: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    """f(z), and the gradients of the sum of f(z) * weight with respect to z and every parameter."""
    z = z.clone().requires_grad_()
    fz = backbone(z, backbone.prepare(x))
    return [fz.detach(), *torch.autograd.grad((fz * weight).sum(), [z, *backbone.parameters()])]


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    a, b = (torch.cat([t.flatten().double() for t in tensors]) for tensors in (found, exact))
    return ((a - b).norm() / b.norm()).item()


def training_step(bench: Bench, name: str, form: str, changes: Row, reference: Row) -> Row:
    """Time a training step."""
    step, solved = stepper(bench, name, form, changes)
    ms = bench.milliseconds(step)
    memory = {"GiB": bench.peak(), "reference GiB": None if bench.quick else reference.get("GiB")}
    if "iterations" in solved:
        solved["iterations"] = solved["iterations"].float().mean().item()
    batch, length = bench.size(name)
    speed = {"ms": ms, **bench.against(ms, reference.get("ms")), "tokens/s": round(1e3 * batch * length / ms)}
    return {**speed, **memory, **solved}


def stepper(bench: Bench, name: str, form: str, changes: Row) -> tuple[Callable[[], None], Row]:
    """A training step of a new model, and a row to which each step writes how the model was solved.

    Language models predict the next token; state tracking has random targets.
    """
    model = bench.model(bench.config(name, form, **changes)).train()
    if bench.compile and name == LLAMA:
        compile_blocks(model.model.layer.backbone)
    tokens, targets = torch.randint(model.config.vocab_size, (2, *bench.size(name)), device=bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=bench.device != "cpu")
    solved: Row = {"evaluations": 1}

    def loss() -> Tensor:
        with bench.autocast():
            out = model(tokens, labels=None if name == TRACKING else tokens)
            if out.solution is not None:
                # Store only two values. Storing all of `out` would keep the logits in memory.
                solved.update(evaluations=out.solution.nfe, iterations=out.solution.iterations)
            if name == TRACKING:
                return F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())
            return out.loss

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, solved


def injected_step(bench: Bench, name: str) -> Row:
    """Time steps of the explicit twin and of the injected form in turn, so that both see the same machine."""
    explicit, injected = (stepper(bench, name, form, {})[0] for form in ("-explicit", "-injected"))
    explicit(), injected()  # the first step compiles
    seconds, ratio = common.time_over(explicit, injected, bench.device, rounds=4 * bench.repeats)
    return {"ms": 1e3 * seconds, "over explicit": ratio}


@torch.no_grad()
def evaluation(bench: Bench) -> Tables:
    """Time one evaluation of f, and compute the shortest time that the device allows (the limit).

    The limit is the longer of two times: the time to move all bytes at the speed of a copy, and the time to
    compute all operations at the speed of a large matrix product.
    """
    bandwidth, peak = rates(bench)
    rows, limits = [], []
    for name, reference in ((TRACKING, 3.5), (LLAMA, None), (MAMBA2, None)):
        counted = parts(bench.bare(name)[0], *bench.size(name))
        counted["all"] = tuple(map(sum, zip(*counted.values(), strict=True)))
        for part, (moved, operations) in counted.items():
            counts = {"GB": moved / 1e9, "TFLOP": operations / 1e12}
            times = {"bytes ms": moved / bandwidth, "operations ms": operations / peak}
            limits.append({"case": name, "part": part, **counts, **times})
        limit = max(times.values())
        names = bench.implementations(name.partition("-")[0])
        rows += bench.rows(evaluate, {f"{name}, {how}": (name, how, limit, reference) for how in names})
    speeds = {"copy TB/s": bandwidth / 1e9, "matrix product TFLOP/s": peak / 1e9}
    return {"device": [speeds], "limits of f": limits, "an evaluation of f": rows}


def evaluate(bench: Bench, name: str, how: str, limit: float, reference: float | None) -> Row:
    backbone, z, context = bench.bare(name)
    calls = 1 if bench.quick else 8  # several calls in a row, so that the device never waits for the host
    with computed_by(how, backbone), bench.autocast():
        ms = bench.milliseconds(lambda: [backbone(z, context) for _ in range(calls)]) / calls
    return {"ms": ms, **bench.against(ms, reference), "limit ms": limit, "share": limit / ms}


@torch.no_grad()
def one_by_one(bench: Bench) -> Row:
    """Time state tracking with a window of one token.

    A sequence moves to its next token when its current token has converged, or has used all its evaluations.
    """
    rule = {"name": "residual", "rtol": 0.05, "max_iter": 32}
    model = bench.model(bench.config(TRACKING, eval_convergence=rule)).eval()
    batch, length = bench.size(TRACKING)
    tokens = torch.randint(model.config.vocab_size, (batch, length), device=bench.device)
    solution: Any = None

    def run() -> None:
        nonlocal solution
        with bench.autocast():
            solution = model(tokens, window=1, use_cache=False).solution

    ms = bench.milliseconds(run, warm_up=1) / length
    mean = solution.iterations.float().mean().item()
    found = {"iterations a token": mean, "passes a token": solution.nfe / length, "GiB": bench.peak()}
    return {"ms a token": ms, **bench.against(ms, 36.6), **found}


def section(bench: Bench, name: str) -> Tables:
    """Run one section. Returns its tables by title."""
    if name == "correctness":
        return correctness(bench)
    if name == "evaluation":
        return evaluation(bench)
    if name == "decode":
        models = [
            (model, form, batch, reference if (form, batch) == ("-free", 1) else None)
            for model, reference in ((LLAMA, 110), (MAMBA2, 236))
            for form, batch in product(("-explicit", "-free"), (4,) if bench.quick else (1, 64))
        ]
        return {name: bench.rows(decode, {f"{m[0]}{m[1]}, batch {m[2]}": m for m in models})}
    if name == "injected":
        return {
            name: bench.rows(injected_step, {f"{model}, injected": (model,) for model in (LLAMA, MAMBA2)})
        }
    if name == "sequential":
        return {name: bench.rows(one_by_one, {f"{TRACKING}, window 1": ()})}
    model = TRAINING[name]
    steps = {case: (model, *step) for case, step in STEPS[model].items()}
    return {f"training step, {model}": bench.rows(training_step, steps)}


TRAINING = {"state-tracking": TRACKING, "llama": LLAMA, "mamba2": MAMBA2}
SECTIONS = [*TRAINING, "injected", "evaluation", "decode", "sequential"]


def main() -> None:
    made = common.parser(__doc__, "speed.json")
    add = made.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    add("--repeats", type=int, default=5)
    add("--quick", action="store_true", help="tiny sizes, to test that everything runs")
    add("--kernels", nargs="+", choices=kernels.NAMES, default=list(kernels.NAMES),
        help="implementations of f to compare (default: all that can be imported; mamba_ssm and fla tune "
        "themselves for minutes on a fresh machine)")  # fmt: skip
    add("--compile", action=argparse.BooleanOptionalAction, help="compile Llama's blocks (default: on a GPU)")
    bench = made.parse_args(namespace=Bench())
    if bench.compile is None:
        bench.compile = bench.device != "cpu"
    implementations = bench.implementations("mamba2")
    sections: dict[str, Tables] = {}
    for name in ("correctness", *bench.sections):
        sections[name] = section(bench, name)
        for title, rows in sections[name].items():
            size = ", tiny models: do not compare these times" if bench.quick else ""
            common.print_table(f"\n{title}, {common.machine_name(bench.device)}{size}", rows)
        common.write_results(bench.output, bench, implementations=implementations, sections=sections)
        if not all(row.get("right", True) for row in sections["correctness"]["relative errors"]):
            sys.exit("an implementation is wrong: the run ends here")


if __name__ == "__main__":
    common.run(main)
