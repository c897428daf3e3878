"""Tests of torchdeq's solvers, which our loop runs through the class ``TorchDEQ``."""

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deqseq import Backbone, FixedIterations, ImplicitSequenceLayer, Phantom, Residual, Status
from deqseq.solver import solvers
from deqseq.solvers import TorchDEQ

get_solver = pytest.importorskip(
    "torchdeq.solver", reason="torchdeq is not installed: pip install 'deqseq[torchdeq]'"
).get_solver

MakeLayer = Callable[..., ImplicitSequenceLayer]
CountCalls = Callable[[Backbone], list[tuple[int, ...]]]
METHODS = ["fixed_point_iter", "anderson", "broyden"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backbone", ["mamba2", "llama", "module"])
def test_same_fixed_point(make_layer: MakeLayer, backbone: str, method: str) -> None:
    x = torch.randn(2, 10, 16)
    policy = Residual(rtol=1e-5, max_iter=200)
    layer = make_layer(backbone, solver=f"torchdeq:{method}", convergence=policy).eval()
    with torch.no_grad():
        out = layer(x)
        expected = make_layer(backbone, convergence=policy).eval()(x)
    assert (out.solution.status == Status.CONVERGED).all()
    torch.testing.assert_close(out.z, expected.z, rtol=1e-3, atol=1e-3)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdeq.solver", None)
    with pytest.raises(ValueError, match=r"needs torchdeq: pip install 'deqseq\[torchdeq\]'"):
        TorchDEQ("anderson")


def test_simple_fixed_point_iter_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown torchdeq solver 'simple_fixed_point_iter'"):
        TorchDEQ("simple_fixed_point_iter")


@pytest.mark.parametrize("method", METHODS)
def test_iterates_are_torchdeqs_own(make_layer: MakeLayer, method: str) -> None:
    layer = make_layer("mamba2", solver=f"torchdeq:{method}").eval()
    f, x = layer.backbone, torch.randn(2, 10, 16)
    options = {} if method != "broyden" else {"LBFGS_thres": 32}
    context, asked, evaluated = f.prepare(x), [], []

    def asking(z: Tensor) -> Tensor:
        asked.append(z.clone())
        return f(z, context)

    with torch.no_grad():
        get_solver(method)(asking, torch.zeros_like(x), max_iter=8, tol=0.0, **options)
        evaluate = f.evaluate

        def recorded(z: Tensor, *rest: object) -> object:
            evaluated.append(z.clone())
            return evaluate(z, *rest)

        f.evaluate = recorded  # type: ignore[method-assign]
        layer.train_solve = layer.eval_solve = replace(layer.solve, convergence=FixedIterations(6))
        layer(x)
    assert len(evaluated) == 6
    for ours, theirs in zip(evaluated, asked, strict=False):
        torch.testing.assert_close(ours, theirs)


def test_no_thread_is_left(make_layer: MakeLayer) -> None:
    before = set(threading.enumerate())
    layer = make_layer("module", solver="torchdeq:anderson", gradient=Phantom(1), causal=False)
    for _ in range(5):
        layer(torch.randn(1, 4, 16)).z.sum().backward()
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before


def test_options_reach_the_solver(make_layer: MakeLayer) -> None:
    solver = solvers.create({"name": "torchdeq:fixed_point_iter", "tau": 0.5})
    layer = make_layer("mamba2", solver=solver, convergence=FixedIterations(3)).eval()
    damped = make_layer(
        "mamba2", solver={"name": "picard", "damping": 0.5}, convergence=FixedIterations(3)
    ).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        # Both results are the next iterate after three evaluations of f: ``TorchDEQ`` returns the point that
        # torchdeq would evaluate next.
        torch.testing.assert_close(layer(x).z, damped(x).z)


@pytest.mark.parametrize(
    "options",
    [{"m": "five"}, {"m": 1}, {"lam": "small"}],
    ids=["before the first evaluation", "at the second", "later"],
)
def test_an_error_inside_torchdeq_is_raised(make_layer: MakeLayer, options: dict[str, object]) -> None:
    """An error inside torchdeq must reach the caller, before the first evaluation of f and also later.

    The solve runs in a thread with a timeout, because a bug could make our loop and torchdeq wait forever.
    """
    solver = TorchDEQ("anderson")
    solver.options = options  # set here, because the constructor would refuse these options
    layer = make_layer("mamba2", solver=solver, causal=False)
    raised: list[Exception] = []

    def solve() -> None:
        try:
            layer(torch.randn(2, 5, 16))
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=solve, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert len(raised) == 1


def test_wrong_names_and_options() -> None:
    with pytest.raises(ValueError, match=r"newton.*anderson"):
        TorchDEQ("newton")
    with pytest.raises(ValueError, match=r"memory.*lam"):
        TorchDEQ("anderson", memory=3)
    for owned in ("tol", "max_iter"):
        with pytest.raises(ValueError, match=owned):
            TorchDEQ("anderson", **{owned: 1})


@pytest.mark.parametrize("method", METHODS)
def test_padding_weighs_nothing(make_layer: MakeLayer, method: str) -> None:
    layer = make_layer("mamba2", solver=f"torchdeq:{method}", convergence=FixedIterations(5)).eval()
    x, z0 = torch.randn(2, 1, 9, 16)
    padded, guess = torch.randn(2, 1, 30, 16)
    padded[:, :9], guess[:, :9] = x, z0
    mask = (torch.arange(30) < 9).long()[None]
    with torch.no_grad():
        expected = layer(x, z0=z0).z
        torch.testing.assert_close(layer(padded, mask, z0=guess).z[:, :9], expected)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16(make_layer: MakeLayer, method: str) -> None:
    policy = Residual(rtol=0.02, max_iter=50)
    layer = make_layer("mamba2", solver=f"torchdeq:{method}", convergence=policy).bfloat16().eval()
    with torch.no_grad():
        out = layer(torch.randn(2, 9, 16, dtype=torch.bfloat16))
    assert (out.solution.status == Status.CONVERGED).all()
