"""The solve loop: iteration counts, statuses and frozen tokens, for every solver, policy and backbone."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deqseq import (
    Backbone,
    FixedIterations,
    ImplicitSequenceLayer,
    Phantom,
    Residual,
    Solution,
    Status,
    Unrolled,
)
from deqseq.backbones import ModuleBackbone
from deqseq.solvers import Anderson, BestIterate, Broyden, Picard
from deqseq.tokens import Tokens

MakeLayer = Callable[..., ImplicitSequenceLayer]
CountCalls = Callable[[Backbone], list[tuple[int, ...]]]
Pointwise = Callable[[Tensor], ModuleBackbone]

BACKBONES = ["mamba2", "llama", "module"]
WINDOWS = [None, 8, 3, 1]


def needed(rate: float, rtol: float, damping: float = 1.0) -> int:
    """The number of evaluations of f(z) = rate z + 1 until the relative residual is at most ``rtol``.

    The iteration is damped and starts at z = 0.
    """
    z = 0.0
    for n in range(1, 10_000):
        fz = rate * z + 1
        if abs(fz - z) <= rtol * abs(fz):
            return n
        z += damping * (fz - z)
    raise AssertionError("does not converge")


def known_rates(rates: list[list[float]]) -> Tensor:
    """Inputs x (B, L, 3) for the backbone ``Rates``: token t of sequence b has the rate ``rates[b][t]``."""
    x = torch.rand(len(rates), len(rates[0]), 3, dtype=torch.float64) + 0.5
    x[..., 0] = torch.tensor(rates, dtype=torch.float64)
    return x


RATES = [[0.5, 0.1, 0.8, 0.3, 0.9, 0.2, 0.7], [0.2, 0.2, 0.2, 0.6, 0.1, 0.1, 0.1]]


@pytest.mark.passes_of_a_cpu
@pytest.mark.parametrize("damping", [1.0, 0.6])
def test_iterations_are_those_of_the_slowest_token_so_far(rates: Backbone, damping: float) -> None:
    layer = ImplicitSequenceLayer(
        rates, solver=Picard(damping), convergence=Residual(rtol=1e-3, max_iter=200)
    ).eval()
    with torch.no_grad():
        solution = layer(known_rates(RATES)).solution
    own = [[needed(rate, 1e-3, damping) for rate in row] for row in RATES]
    expected = [[max(row[: t + 1]) for t in range(len(row))] for row in own]
    assert solution.iterations.tolist() == expected
    assert solution.nfe == max(map(max, expected))
    assert (solution.status == Status.CONVERGED).all()
    assert (solution.residual <= 1e-3).all()


@pytest.mark.passes_of_a_cpu
def test_iterations_token_by_token_are_each_tokens_own(rates: Backbone) -> None:
    layer = ImplicitSequenceLayer(rates, convergence=Residual(rtol=1e-3, max_iter=200), window=1)
    with torch.no_grad():
        solution = layer(known_rates(RATES)).solution
    expected = [[needed(rate, 1e-3) for rate in row] for row in RATES]
    assert solution.iterations.tolist() == expected
    assert solution.nfe == max(map(sum, expected))


@pytest.mark.passes_of_a_cpu
def test_a_window_moves_on_as_its_first_tokens_settle(rates: Backbone) -> None:
    """The layer does as many evaluations as a simulation of the window.

    In the simulation, settled tokens leave at the window's start, and as many new tokens enter at its end.
    """
    width, rtol = 3, 1e-3
    layer = ImplicitSequenceLayer(rates, convergence=Residual(rtol=rtol, max_iter=200), window=width)
    with torch.no_grad():
        solution = layer(known_rates(RATES)).solution
    passes = []
    for row, found in zip(RATES, solution.iterations.tolist(), strict=True):
        own = [needed(rate, rtol) for rate in row]
        entered, left, now, first = [0] * len(row), [0] * len(row), 0, 0
        for t in range(min(width, len(row))):
            entered[t] = 0
        while first < len(row):
            now += 1
            leaving = 0
            while (t := first + leaving) < min(first + width, len(row)) and now - entered[t] >= own[t]:
                left[t] = now
                leaving += 1
            for t in range(first + width, min(first + width + leaving, len(row))):
                entered[t] = now
            first += leaving
        assert found == [end - start for start, end in zip(entered, left, strict=True)]
        passes.append(now)
    assert solution.nfe == max(passes)


@pytest.mark.passes_of_a_cpu
@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("gradient", ["phantom", "implicit", {"name": "unrolled", "iterations": 5}])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_evaluations_are_counted_exactly(
    make_layer: MakeLayer, count_calls: CountCalls, backbone: str, gradient: object, window: int | None
) -> None:
    layer = make_layer(backbone, solver="anderson", gradient=gradient, window=window)
    calls = count_calls(layer.backbone)
    x = torch.randn(2, 4, 16)
    mask = torch.ones(2, 4)
    mask[0, :2] = 0
    for options in ({}, {"attention_mask": mask}, {"state": layer.backbone.initial_state(2)}):
        for policy in (Residual(rtol=0.05), FixedIterations(2), Residual(rtol=1e-9, max_iter=2)):
            layer.train_solve = layer.eval_solve = replace(layer.solve, convergence=policy)
            calls.clear()
            assert layer(x, **options).solution.nfe == len(calls)
            calls.clear()
            with torch.no_grad():
                assert layer(x, **options).solution.nfe == len(calls)


def test_a_recomputed_evaluation_is_counted_once(make_layer: MakeLayer, count_calls: CountCalls) -> None:
    layer = make_layer("mamba2", gradient=Unrolled(4, checkpoint=True))
    calls = count_calls(layer.backbone)
    out = layer(torch.randn(2, 6, 16))
    assert out.solution.nfe == len(calls) == 4
    out.z.sum().backward()
    assert out.solution.nfe == 4 and len(calls) == 8


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_what_settles_is_f_at_the_frozen_inputs(make_layer: MakeLayer, backbone: str, solver: str) -> None:
    """Once a token has settled, its z never changes again, and the layer returns f(z) for this z."""
    layer = make_layer(backbone, solver=solver).eval()
    evaluations = []
    evaluate = layer.backbone.evaluate

    def recorded(z: Tensor, *rest: Any) -> Any:
        out = evaluate(z, *rest)
        evaluations.append((z.clone(), out[0].clone()))
        return out

    layer.backbone.evaluate = recorded  # type: ignore[method-assign]
    x = torch.randn(2, 12, 16)
    with torch.no_grad():
        out = layer(x)
    for b in range(2):
        for t in range(12):
            settled = int(out.solution.iterations[b, t]) - 1
            z, fz = evaluations[settled]
            for later_z, later_fz in evaluations[settled:]:
                assert torch.equal(later_z[b, t], z[b, t])
                assert torch.equal(later_fz[b, t], fz[b, t])
            assert torch.equal(out.z[b, t], fz[b, t])
            change = (fz[b, t] - z[b, t]).norm() / fz[b, t].norm()
            torch.testing.assert_close(out.solution.residual[b, t], change, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("solver", ["picard", "anderson"])
def test_padding_is_not_waited_for(make_layer: MakeLayer, backbone: str, solver: str) -> None:
    layer = make_layer(backbone, dtype=torch.float64, solver=solver, convergence=Residual(1e-6, max_iter=200))
    x = torch.randn(3, 12, 16, dtype=torch.float64)
    mask = (torch.arange(12) < torch.tensor([[1], [4], [2]])).long()
    together = layer.eval()(x, attention_mask=mask).solution
    alone = [layer(x[i : i + 1, :n]).solution.nfe for i, n in enumerate((1, 4, 2))]
    assert together.nfe == max(alone)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden", BestIterate("anderson")])
def test_sequences_that_have_settled_leave_the_batch(
    make_layer: MakeLayer, backbone: str, solver: object, count_calls: CountCalls
) -> None:
    """The batch also gets shorter: it is as long as the longest sequence that is left."""
    layer = make_layer(
        backbone,
        dtype=torch.float64,
        solver=solver,
        compact=True,
        convergence=Residual(rtol=1e-6, max_iter=200, check_every=1),
    ).eval()
    x = torch.randn(7, 16, 16, dtype=torch.float64)
    lengths = torch.tensor([2, 16, 1, 3, 16, 2, 4])
    mask = torch.arange(16) < lengths[:, None]
    x[3, 1, 0] = torch.nan
    lengths[3] = 1  # a token that is not finite is not solved
    calls = count_calls(layer.backbone)

    def run() -> Solution:
        calls.clear()
        with torch.no_grad():
            return layer(x, attention_mask=mask).solution

    found, sizes = run(), [tuple(shape[:2]) for shape in calls]
    running = [found.iterations.amax(1) >= count for count in range(1, found.nfe + 1)]
    assert sizes[1:] == [(int(rows.sum()), int(lengths[rows].max())) for rows in running[1:]]
    assert sizes[0] == (7, 16) and sizes[-1][0] < 7
    layer.compact = False
    expected = run()
    assert {shape[0] for shape in calls} == {7}
    assert found.nfe == expected.nfe
    for name in ("iterations", "status"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    for name in ("z", "residual"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), equal_nan=True)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_results_keep_the_length_if_all_sequences_have_padding(make_layer: MakeLayer, backbone: str) -> None:
    policy = Residual(rtol=1e-6, max_iter=200, check_every=1)
    layer = make_layer(backbone, dtype=torch.float64, convergence=policy).eval()
    x = torch.randn(5, 8, 16, dtype=torch.float64)
    mask = torch.arange(8) >= torch.tensor([2, 7, 3, 6, 2])[:, None]  # padding on the left
    with torch.no_grad():
        expected = layer(x, attention_mask=mask)
        layer.compact = True
        found = layer(x, attention_mask=mask)
    torch.testing.assert_close(found.z, expected.z)
    for name in ("iterations", "status"):
        assert torch.equal(getattr(found.solution, name), getattr(expected.solution, name))


@pytest.mark.parametrize(("backbone", "leave"), [("mamba2", True), ("llama", False)])
def test_sequences_leave_with_their_state(
    make_layer: MakeLayer, backbone: str, leave: bool, count_calls: CountCalls
) -> None:
    """Settled sequences leave if their state is recurrent. If it has keys and values, they stay."""
    policy = Residual(rtol=1e-6, max_iter=200, check_every=1)
    layer = make_layer(backbone, dtype=torch.float64, solver="anderson", convergence=policy).eval()
    calls = count_calls(layer.backbone)
    first, x = torch.randn(2, 5, 6, 16, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 2, 6])[:, None]
    before = layer.backbone.initial_state(5, dtype=torch.float64)
    with torch.no_grad():
        state = layer(first, state=before).state
        expected = layer(x, attention_mask=mask, state=state)
        layer.compact = True
        calls.clear()
        found = layer(x, attention_mask=mask, state=state)
    assert (calls[-1][0] < 5) == leave
    torch.testing.assert_close(found.z, expected.z)
    assert found.state is not None and expected.state is not None
    torch.testing.assert_close(found.state.tensors(), expected.state.tensors())
    assert torch.equal(found.solution.iterations, expected.solution.iterations)


@pytest.mark.passes_of_a_cpu
@pytest.mark.parametrize("check_every", [3, 50])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("solver", ["picard", "anderson", BestIterate("broyden")])
def test_how_often_the_host_looks_changes_no_result(
    make_layer: MakeLayer, solver: object, window: int | None, check_every: int
) -> None:
    policy = Residual(rtol=0.01, max_iter=50)
    layer = make_layer("mamba2", solver=solver, convergence=policy, window=window).eval()
    x, mask = torch.randn(3, 10, 16), torch.ones(3, 10)
    mask[1, 6:] = 0
    x[2, 5] = torch.nan
    state = layer.backbone.initial_state(3)
    with torch.no_grad():
        often = layer(x, mask, state=state)
        layer.train_solve = layer.eval_solve = replace(
            layer.solve, convergence=replace(policy, check_every=check_every)
        )
        rarely = layer(x, mask, state=state)
    looks = -(-often.solution.nfe // check_every)
    assert rarely.solution.nfe == looks * check_every
    for name in ("z", "residual", "iterations", "status"):
        old, new = getattr(often.solution, name), getattr(rarely.solution, name)
        assert torch.equal(old[:2], new[:2]), name
    assert torch.equal(often.solution.status, rarely.solution.status)
    for old, new in zip(often.state.layers, rarely.state.layers, strict=True):
        assert all(torch.equal(a[:2], b[:2]) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("window", WINDOWS)
def test_statuses(rates: Backbone, window: int | None) -> None:
    x = known_rates([[0.2] * 5, [0.9] * 5, [1.5] * 5, [0.2] * 5])
    x[3, 2, 1] = torch.nan
    layer = ImplicitSequenceLayer(rates, convergence=Residual(rtol=1e-3, max_iter=12), window=window)
    with torch.no_grad():
        solution = layer(x).solution
        fixed = ImplicitSequenceLayer(rates, convergence=FixedIterations(4), window=window)(x).solution
    assert (solution.status[0] == Status.CONVERGED).all()
    assert (solution.status[1:3] == Status.BUDGET_EXHAUSTED).all()
    assert (solution.iterations[1:3] == 12).all()
    assert (solution.status[3, :2] == Status.CONVERGED).all()
    assert solution.status[3, 2] == Status.NON_FINITE
    assert (fixed.status[:3] == Status.COMPLETED).all()
    assert fixed.status[3, 2] == Status.NON_FINITE
    assert all(Status(code).message for code in range(5))


def test_divergence_to_infinity_is_not_finite(rates: Backbone) -> None:
    x = known_rates([[0.2, 0.2], [1e30, 0.2]]).float()
    for window in (None, 1):
        layer = ImplicitSequenceLayer(rates, convergence=Residual(rtol=1e-3), window=window)
        with torch.no_grad():
            solution = layer(x).solution
        assert solution.status[1, 0] == Status.NON_FINITE
        assert (solution.status[0] == Status.CONVERGED).all()


@pytest.mark.parametrize("window", [None, 2])
def test_a_map_that_vanishes_is_solved(pointwise: Pointwise, window: int | None) -> None:
    """If f(z) is exactly 0, as after a ReLU, the solve converges to 0.

    The relative residual is then 0 / 0. It must count as 0.
    """
    layer = ImplicitSequenceLayer(pointwise(torch.tensor(0.0)), window=window).eval()
    for size in (1.0, 10.0, 1e4):
        x = torch.randn(2, 4, 3)
        with torch.no_grad():
            out = layer(x, z0=torch.full_like(x, size))
        assert not out.z.any()
        assert (out.solution.status == Status.CONVERGED).all()
        assert (out.solution.iterations == 2).all()


def test_a_token_that_was_infinite_on_the_way_may_still_converge() -> None:
    """A token whose f(z) is infinite at first must still converge.

    In this map, f overflows at a token only while the token before it is far from the fixed point.
    """

    class Overflow(torch.nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            before = torch.nn.functional.pad(u, (0, 0, 1, 0))[:, :-1]
            return 0.5 * u + 1 + (before.abs() - 50).clamp_min(0).mul(1e20).exp() - 1

    layer = ImplicitSequenceLayer(ModuleBackbone(Overflow()), convergence=Residual(rtol=1e-3, max_iter=60))
    x, z0 = torch.ones(1, 3, 2), torch.zeros(1, 3, 2)
    z0[0, 0] = 1000.0
    with torch.no_grad():
        for window in (None, 2):
            solution = layer(x, z0=z0, window=window).solution
            assert (solution.status == Status.CONVERGED).all()
            assert torch.isfinite(solution.z).all()


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden", BestIterate("picard")], ids=repr)
@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_smallest_sizes(make_layer: MakeLayer, backbone: str, solver: object, window: int | None) -> None:
    for policy in (Residual(rtol=0.05), Residual(rtol=1e-9, max_iter=1), FixedIterations(1)):
        layer = make_layer(backbone, solver=solver, convergence=policy, window=window)
        for batch, length in ((1, 1), (1, 2), (2, 1)):
            x = torch.randn(batch, length, 16)
            out = layer(x, state=layer.backbone.initial_state(batch))
            assert out.z.shape == x.shape and torch.isfinite(out.z).all()
            assert out.state.seen.tolist() == [length] * batch
            if policy.max_iter == 1:
                assert (out.solution.iterations == 1).all()


def test_a_budget_of_one_returns_one_evaluation(make_layer: MakeLayer) -> None:
    layer = make_layer("mamba2", convergence=Residual(rtol=1e-9, max_iter=1)).eval()
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        out = layer(x)
        assert torch.equal(out.z, layer.backbone(torch.zeros_like(x), layer.backbone.prepare(x)))
    assert out.solution.nfe == 1
    assert (out.solution.status == Status.BUDGET_EXHAUSTED).all()


@pytest.mark.parametrize("solver", [Anderson(memory=30), Broyden(memory=30), BestIterate(Anderson(30))])
def test_more_memory_than_iterations(make_layer: MakeLayer, solver: object) -> None:
    for window in (None, 3):
        layer = make_layer(
            "mamba2", solver=solver, convergence=Residual(rtol=1e-3, max_iter=25), window=window
        ).eval()
        with torch.no_grad():
            assert (layer(torch.randn(2, 8, 16)).solution.status == Status.CONVERGED).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden", BestIterate("anderson")], ids=repr)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_data_types(
    make_layer: MakeLayer, backbone: str, solver: object, window: int | None, dtype: torch.dtype
) -> None:
    for gradient in ("phantom", "implicit", {"name": "unrolled", "iterations": 3}):
        layer = make_layer(backbone, solver=solver, gradient=gradient, window=window, dtype=dtype)
        x = torch.randn(2, 5, 16, dtype=dtype, requires_grad=True)
        out = layer(x, state=layer.backbone.initial_state(2, dtype=dtype))
        assert out.z.dtype == dtype
        assert out.solution.residual.dtype == torch.float32
        assert all(t.dtype == dtype for part in out.state.layers for t in part)
        out.z.square().sum().backward()
        assert x.grad.dtype == dtype and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "solver", ["picard", Picard(0.7), "anderson", "broyden", BestIterate("anderson")], ids=repr
)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_autocast(make_layer: MakeLayer, backbone: str, solver: object, window: int | None) -> None:
    for gradient in ("phantom", "implicit", {"name": "unrolled", "iterations": 3}):
        layer = make_layer(backbone, solver=solver, gradient=gradient, window=window)
        x = torch.randn(2, 5, 16, requires_grad=True)
        state = layer.backbone.initial_state(2)
        with torch.no_grad():
            expected = layer(x)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            for _ in range(2):
                out = layer(x, state=state)
        loss = out.z.float().square().sum()
        loss.backward()
        assert torch.isfinite(out.z).all()
        assert (out.z - expected.z).norm() < 0.3 * expected.z.norm()
        for tensor in (x, *layer.parameters()):
            assert tensor.grad is not None and torch.isfinite(tensor.grad).all()


def test_initial_guess(make_layer: MakeLayer) -> None:
    layer = make_layer("mamba2", convergence=Residual(rtol=1e-4, max_iter=100)).eval()
    x = torch.randn(2, 10, 16)
    with torch.no_grad():
        cold = layer(x)
        for window in (None, 3, 1):
            warm = layer(x, z0=cold.z, window=window)
            assert (warm.solution.iterations == 1).all()
            assert torch.allclose(warm.z, cold.z, atol=1e-3)


def test_summary(rates: Backbone) -> None:
    x = known_rates([[0.2, 0.2], [0.9, 0.9]])
    layer = ImplicitSequenceLayer(rates, convergence=Residual(rtol=1e-3, max_iter=12))
    with torch.no_grad():
        solution = layer(x).solution
    summary = solution.summary()
    own = needed(0.2, 1e-3)
    assert summary["nfe"] == 12 and summary["iterations"] == (own + 12) / 2
    assert summary["share_converged"] == 0.5 and summary["share_budget_exhausted"] == 0.5
    first = solution.summary(torch.tensor([[1, 1], [0, 0]]))
    assert first["share_converged"] == 1 and first["iterations"] == own
    assert math.isclose(first["residual"], float(solution.residual[0].mean()), rel_tol=1e-6)
    assert repr(solution) == (
        f"Solution(2 x 2 tokens: 2 converged, 2 budget exhausted; {own} to 12 iterations, "
        f"residual at most {float(solution.residual.max()):.2g}, nfe=12)"
    )
    assert repr(solution[:0]) == "Solution(0 x 2 tokens, nfe=12)"


def test_search_stores_no_graph(make_layer: MakeLayer) -> None:
    """Autograd saves as many tensors for 30 search iterations as for one: it does not record the search."""

    def saved(policy: object) -> int:
        layer = make_layer("mamba2", gradient=Phantom(2), convergence=policy)
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(torch.randn(2, 6, 16))
        return count

    assert saved(FixedIterations(1)) == saved(FixedIterations(30)) > 0


@pytest.mark.usefixtures("needs_triton")
def test_the_fused_form_settles_and_freezes_as_the_plain_one() -> None:
    """The Triton kernels settle and freeze the same tokens as plain PyTorch, after each of eight evaluations.

    In every sequence, f(z) of one token is NaN or infinite.
    """
    from deqseq import kernels
    from deqseq.ops.residual import freeze

    late = torch.rand(4, 9)  # a token converges at the first step with step / 8 > late
    policy = Residual(rtol=0.5, max_iter=7)
    z, fz = torch.randn(4, 9, 5), torch.randn(4, 9, 5)
    for row, token, value in ((0, 3, torch.nan), (1, 0, torch.inf), (2, 3, torch.nan), (3, 2, torch.inf)):
        fz[row, token, 1], late[row, token] = value, 1.0

    def judged(name: str) -> list[torch.Tensor]:
        tokens = Tokens.enter(torch.arange(9) < torch.tensor([9, 9, 4, 9])[:, None])
        found = []
        with kernels.use(name), torch.no_grad():
            for step in range(1, 9):
                new = torch.lerp(fz, z, 1 - 0.2 * torch.arange(9)[:, None] / 9)
                new = torch.where((late < step / 8)[..., None], z, new)
                tokens = tokens.after_evaluation().judged(z, new, policy)
                found += [tokens.settled, tokens.status, tokens.frozen, tokens.residual]
        return found

    expected = judged("torch")
    for plain, fused in zip(expected, judged("triton"), strict=True):
        torch.testing.assert_close(fused, plain, equal_nan=True)
    assert {Status.CONVERGED, Status.NON_FINITE} <= set(expected[-3].flatten().tolist())
    hold = torch.rand(4, 9) < 0.5
    with kernels.use("triton"):
        held = freeze(hold, z, fz.clone())
    torch.testing.assert_close(held, torch.where(hold[..., None], z, fz), rtol=0, atol=0, equal_nan=True)
