"""Other packages can register solvers, policies, gradient strategies, guesses and backbones by name.

Such parts work in the layer, in every task and in benchmarks/solvers.py. Each folder in extensions/ is a
package that registers a part.
"""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq import (
    Backbone,
    Context,
    ConvergencePolicy,
    ExplicitSequenceLayer,
    GradientStrategy,
    ImplicitSequenceLayer,
    Judgement,
    Phantom,
    Problem,
    Residual,
    Solver,
    Status,
    search,
)
from deqseq.backbone import backbones
from deqseq.backbones import ModuleBackbone
from deqseq.gradient import gradients
from deqseq.guess import guesses
from deqseq.policy import policies
from deqseq.registry import Registry
from deqseq.solver import solvers
from deqseq.tasks.catbabi.__main__ import main as catbabi
from deqseq.tasks.catbabi.data import build
from deqseq.tasks.pretrain import main as pretrain
from deqseq.tasks.state_tracking.__main__ import main as state_tracking

pytestmark = pytest.mark.usefixtures("extensions")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PARTS: list[tuple[Registry[object], str]] = [
    (solvers, "momentum"),
    (policies, "largest_change"),
    (gradients, "jfb"),
    (guesses, "input"),
    (backbones, "pointwise"),
    (backbones, "memory"),
]
MakeLayer = Callable[..., ImplicitSequenceLayer]
GradientsOf = Callable[..., list[Tensor]]


@pytest.mark.parametrize(("registry", "name"), PARTS, ids=[name for _, name in PARTS])
def test_names_are_known(registry: Registry[object], name: str) -> None:
    assert name in registry.names()
    registry.check({"name": name, "d_model": 4} if registry is backbones else name)


@pytest.mark.parametrize("window", [None, 3])
def test_a_solver_and_a_policy(make_layer: MakeLayer, gradients_of: GradientsOf, window: int | None) -> None:
    x, weight = torch.randn(2, 2, 8, 16)
    tight = {"rtol": 1e-5, "max_iter": 200}
    theirs = make_layer("mamba2", solver="momentum", convergence={"name": "largest_change", **tight})
    ours = make_layer("mamba2", solver="picard", convergence=Residual(**tight))
    for a, b in zip(
        *(gradients_of(layer, x, weight, window=window) for layer in (theirs, ours)), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    with torch.no_grad():
        found, expected = (layer.eval()(x, window=window) for layer in (theirs, ours))
    torch.testing.assert_close(found.z, expected.z, atol=1e-4, rtol=1e-4)
    assert (found.solution.status == Status.CONVERGED).all()
    assert (found.solution.residual <= 1e-5).all()


def test_a_gradient_strategy(make_layer: MakeLayer, gradients_of: GradientsOf) -> None:
    x, weight = torch.randn(2, 2, 8, 16)
    theirs, ours = (make_layer("mamba2", gradient=g) for g in ("jfb", Phantom(1, 1.0)))
    for a, b in zip(*(gradients_of(layer, x, weight) for layer in (theirs, ours)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(theirs(x.requires_grad_()).z.sum(), x, create_graph=True)
    x = x.detach()
    x[0, 5] = torch.nan  # the NaN is later than all tokens in the loss
    theirs(x).z[:, :5].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in theirs.parameters() if p.grad is not None)


def test_a_guess(make_layer: MakeLayer) -> None:
    x = torch.randn(2, 8, 16)
    layer = make_layer("mamba2", guess={"name": "input", "scale": 0.5}).eval()
    with torch.no_grad():
        expected = make_layer("mamba2").eval()(x, z0=0.5 * x)
        assert torch.equal(layer(x).z, expected.z)


@pytest.mark.parametrize("name", ["pointwise", "memory"])
def test_a_backbone(name: str) -> None:
    layer = ImplicitSequenceLayer(
        {"name": name, "d_model": 16}, convergence=Residual(rtol=1e-6, max_iter=200)
    )
    x = torch.randn(2, 8, 16)
    layer(x).z.sum().backward()
    assert all(p.grad.abs().max() > 0 for p in layer.parameters())
    layer.eval()
    with torch.no_grad():
        z = layer(x).z
        torch.testing.assert_close(layer.backbone(z, layer.backbone.prepare(x)), z, atol=1e-5, rtol=1e-5)
        if name == "pointwise":
            with pytest.raises(ValueError, match="keeps no state"):
                layer(x, window=3)
            return
        torch.testing.assert_close(layer(x, window=3).z, z, atol=1e-5, rtol=1e-5)
        state = layer.backbone.initial_state(2)
        parts = []
        for part in x.split([5, 3], dim=1):
            out = layer(part, state=state)
            state = out.state
            parts.append(out.z)
        torch.testing.assert_close(torch.cat(parts, 1), z, atol=1e-5, rtol=1e-5)


def test_in_the_benchmark_of_solvers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--cases", "random", "--batch", "2", "--length", "8", "--device", "cpu", "--dtypes", "float32"]
    small += ["--tolerances", "1e-3", "--windows", "all", "4", "--solvers", "momentum", "momentum:0.2"]
    monkeypatch.setattr(sys, "argv", ["solvers.py", *small, "--output", str(tmp_path)])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for policy, problem in (("largest_change", None), ("nonesuch", "unknown convergence policy")):
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--policy", policy])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(BENCHMARKS / "solvers.py"), run_name="__main__")
        assert end.value.code == (2 if problem else 0)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["settings"]["policy"] == "largest_change"
    assert [row["solver"] for row in found["rows"]] == ["momentum"] * 2 + ["momentum:0.2"] * 2
    for row in found["rows"]:
        assert row["problem"] is None and row["converged"] == 1 and row["leak"] == 0


SMALL = ["--d_model", "8", "--steps", "2", "--batch_size", "2", "--max_iter", "4", "--eval_max_iter", "4"]
TINY = [*SMALL, "--headdim", "8", "--group", "S3"]
KINDS = {"solver": "momentum", "convergence": "largest_change", "gradient": "jfb", "backbone": "memory"}
CHOICES = [KINDS, {"backbone": "pointwise"}]


def config(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


def name_of(part: Any) -> str:
    return str(part["name"] if isinstance(part, dict) else part)


@pytest.mark.parametrize("chosen", CHOICES, ids=lambda chosen: chosen["backbone"])
def test_in_state_tracking(chosen: dict[str, str], tmp_path: Path) -> None:
    parts = [word for kind, name in chosen.items() for word in (f"--{kind}", name)]
    assert state_tracking(["train", "--output", str(tmp_path), *TINY, *parts]) == 0
    assert {kind: name_of(config(tmp_path)[kind]) for kind in chosen} == chosen
    windows = ["all"] if chosen["backbone"] == "pointwise" else ["all", "2"]
    test = ["evaluate", str(tmp_path), "--sequences", "2", "--length", "4", "--window", *windows]
    assert state_tracking(test) == 0


def test_options_of_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--output", str(tmp_path), *TINY, "--backbone", "memory", "--solver", "momentum"]
    parts = [
        "--convergence",
        "{name: largest_change, rtol: 0.3}",
        "--gradient",
        "jfb",
        "--solver.beta",
        "0.2",
    ]
    assert state_tracking([*train, *parts]) == 0
    found = config(tmp_path)
    assert found["backbone"] == {"name": "memory", "d_model": 8}
    assert found["solver"] == {"name": "momentum", "beta": 0.2}
    assert found["convergence"] == {"name": "largest_change", "rtol": 0.3, "max_iter": 4}
    assert found["gradient"] == {"name": "jfb"}
    for wrong, message in (
        (["--damping", "0.3"], "damping is for picard, got 0.3 with solver momentum"),
        (["--solver.btea", "0.2"], "it takes (beta=0.1)"),
    ):
        assert state_tracking([*train, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_in_catbabi(tmp_path: Path) -> None:
    story = ["mary", "moved", "to", "the", "garden", ".", "where", "is", "mary", "?", "garden"]
    build(lambda split, task: [story] * 4, tmp_path / "data")
    run = tmp_path / "run"
    parts = [word for kind, name in KINDS.items() for word in (f"--{kind}", name)]
    command = ["train", "--data", str(tmp_path / "data"), "--output", str(run), "--cut", "5", *SMALL]
    assert catbabi([*command, *parts]) == 0
    assert {kind: config(run)[kind]["name"] for kind in KINDS} == KINDS
    assert catbabi(["evaluate", str(run)]) == 0


@pytest.mark.parametrize("chosen", CHOICES, ids=lambda chosen: chosen["backbone"])
def test_in_pretraining(
    chosen: dict[str, str], token_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"solver": "picard", "gradient": "phantom", "convergence": "residual", **chosen}
    options = {
        "--model": f"{{vocab_size: 300, backbone: {{name: {parts['backbone']}, d_model: 8}}, "
        f"solver: {parts['solver']}}}",
        "--stages.0.until": "0.5", "--stages.1.gradient": parts["gradient"],
        "--stages.1.convergence": f"{{name: {parts['convergence']}, rtol: 0.1, max_iter: 4}}",
        "--length": "16", "--batch_tokens": "32", "--per_device_batch_size": "2", "--steps": "2",
        "--data": str(token_folder), "--eval_rows": "2", "--log_steps": "1",
    }  # fmt: skip
    words = [word for pair in options.items() for word in pair]
    command = ["llama-tiny", "--output", str(tmp_path / "run"), *words]
    assert pretrain([*command, "--dry-run"]) == 0
    assert f"implicit {parts['backbone']}" in capsys.readouterr().out
    assert pretrain(command) == 0
    found = config(tmp_path / "run" / "model")
    assert {kind: name_of(found[kind]) for kind in chosen} == chosen


class Scaled(Backbone):
    """f(z, x) = z / 2 + x, returned as ``answer`` says."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.answer = answer

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        return Context((x,))

    def evaluate(self, z: Tensor, context: Context, state: Any = None) -> Any:
        return self.answer(z / 2 + context.tokens[0])


class Plain(Solver):
    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        self.answer = answer

    def init(self, z: Tensor) -> Any:
        return ()

    def step(self, z: Tensor, fz: Tensor, state: Any, progress: Any) -> Any:
        return self.answer(fz)


class Largest(ConvergencePolicy):
    max_iter = 9

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        self.answer = answer

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Any:
        return self.answer((fz - z).abs().amax())


class InPlace(Scaled):
    """The same map, computed in the memory of z."""

    def evaluate(self, z: Tensor, context: Context, state: Any = None) -> Any:
        return z.div_(2).add_(context.tokens[0]), None


class Nothing(GradientStrategy):
    def solve(self, problem: Problem) -> Any:
        search(problem)


def as_trace(fz: Tensor) -> Any:
    return fz, None


def test_the_state_of_a_solver_has_a_value_for_every_token_of_a_window() -> None:
    class PerSequence(Plain):
        def init(self, z: Tensor) -> Any:
            return (z.new_zeros(z.shape[0]),)

    layer = ImplicitSequenceLayer(ModuleBackbone(nn.Identity(), d_model=4), PerSequence(lambda fz: (fz, ())))
    with pytest.raises(ValueError, match=r"PerSequence.init must return .* \(2, 3, ...\), got \(2,\)"):
        layer.eval()(torch.randn(2, 5, 4), window=3)


def test_a_solver_may_compute_in_another_dtype() -> None:
    x = torch.randn(2, 5, 4)
    for answer in (lambda fz: (fz.double(), ()), lambda fz: (fz.bfloat16(), ())):
        layer = ImplicitSequenceLayer(Scaled(as_trace), Plain(answer), convergence=Residual(rtol=1e-2)).eval()
        z = layer(x).z
        assert z.dtype == torch.float32
        torch.testing.assert_close(z, 2 * x, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"backbone": Scaled(lambda fz: fz)}, r"Scaled.evaluate must return \(f\(z\), trace\), got Tensor"),
        ({"backbone": Scaled(lambda fz: (fz[..., :1], None))}, r"shape of z, \(2, 5, 4\), got \(2, 5, 1\)"),
        (
            {"backbone": InPlace(as_trace)},
            "InPlace.evaluate must return a new tensor and keep z, got z itself",
        ),
        ({"gradient": Nothing()}, "Nothing.solve must return a Solution, got None"),
        ({"solver": Plain(lambda fz: fz)}, r"Plain.step must return \(next z, state\), got Tensor"),
        ({"solver": Plain(lambda fz: (fz[:1], ()))}, r"shape of z, \(2, 5, 4\), got \(1, 5, 4\)"),
        ({"convergence": Largest(lambda c: Judgement(c, c < 1))}, r"one value for every token, \(2, 5\)"),
        ({"convergence": Largest(lambda c: (c, c < 1))}, "must return a Judgement"),
        ({"convergence": Largest(lambda c: Judgement(0.1, True))}, "must return a Judgement"),
        ({"convergence": Largest(lambda c: Judgement(c.expand(2, 5), c.expand(2, 5)))}, "must be bool"),
    ],
)
def test_answers_of_a_wrong_form_are_refused(parts: dict[str, Any], said: str) -> None:
    """With two sequences, a tensor would unpack like a pair."""
    layer = ImplicitSequenceLayer(**{"backbone": Scaled(as_trace), **parts})
    with pytest.raises(ValueError, match=said):
        layer(torch.randn(2, 5, 4))
    if "backbone" in parts:
        with pytest.raises(ValueError, match=said):
            ExplicitSequenceLayer(layer.backbone)(torch.randn(2, 5, 4))
