"""Searches from several initial guesses: ``solve_starts`` and ``solve_many``."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq import (
    ExplicitSequenceLayer,
    FixedIterations,
    Guess,
    ImplicitSequenceLayer,
    Residual,
    SolveOptions,
    Status,
    solve_many,
    solve_starts,
    solve_with_restarts,
)
from deqseq.backbones import LlamaBackbone, ModuleBackbone
from deqseq.guesses import Noise

D = 4


class Bistable(nn.Module):
    """Contracts if the first channel of the first token is positive. Otherwise it never settles.

    The map gets u = z + x, where x is 0 in the first channel. If it contracts, the fixed point is z = 1 + x.
    Otherwise the map cycles, or it returns ``bad`` for every token.
    """

    def __init__(self, bad: float = -3.0) -> None:
        super().__init__()
        self.bad = bad

    def forward(self, u: Tensor) -> Tensor:
        good = u[:, :1, :1] > 0
        cycles = (self.bad - u).clamp(-2.9, -0.1)  # z -> -3 - z has period 2
        return torch.where(good, 0.5 * u + 0.5, cycles if self.bad == -3 else torch.full_like(u, self.bad))


def layer(bad: float = -3.0, **options: Any) -> ImplicitSequenceLayer:
    options = {"guess": Noise(), "convergence": Residual(rtol=1e-5, max_iter=60), **options}
    return ImplicitSequenceLayer(ModuleBackbone(Bistable(bad)), **options).eval()


def inputs(batch: int = 3, length: int = 5) -> Tensor:
    x = 0.1 * torch.randn(batch, length, D)
    x[..., 0] = 0
    return x


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("bad", [-3.0, torch.nan, torch.inf])
def test_the_best_start_wins(bad: float) -> None:
    """Some starts never converge or are not finite. ``solve_many`` must keep a start that converges."""
    solve, x = layer(bad), inputs()
    starts = list(solve_starts(solve, x, 8))
    worked = torch.tensor([bool((out.solution.status == Status.CONVERGED).all()) for out in starts])
    assert worked.any() and not worked.all()
    assert not worked[torch.tensor([bool(out.z.isnan().any()) for out in starts])].any()
    best = solve_many(solve, x, 8)
    assert (best.solution.status == Status.CONVERGED).all()
    least = (
        torch.stack([out.solution.residual.square().mean(1).sqrt() for out in starts]).nan_to_num(1e9).amin(0)
    )
    torch.testing.assert_close(best.solution.residual.square().mean(1).sqrt(), least)
    assert best.state is None and best.z is best.solution.z


def test_each_sequence_keeps_its_own_start() -> None:
    """The first sequence converges to 2 from start 0 only, the second to -2 from start 1 only."""

    class Sides(nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            return torch.where(u.abs() > 10, 2 * u.sign(), -u - u.sign())  # -u - u.sign() has period 2

    class Numbered(Guess):
        varies = True

        def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor:
            assert number is not None
            return torch.full_like(x, [5.0, -5.0, 5.0, -5.0][number])

    x = torch.tensor([10.0, -10.0])[:, None, None]
    tight = Residual(rtol=1e-3, max_iter=20)
    solve = ImplicitSequenceLayer(ModuleBackbone(Sides()), convergence=tight, guess=Numbered()).eval()
    statuses = [out.solution.status.flatten().tolist() for out in solve_starts(solve, x, 2)]
    assert statuses == [
        [Status.CONVERGED, Status.BUDGET_EXHAUSTED],
        [Status.BUDGET_EXHAUSTED, Status.CONVERGED],
    ]
    for starts in (2, 4):
        assert solve_many(solve, x, starts).z.flatten().tolist() == [2, -2]
    assert solve_many(solve, x, 1).z.flatten().tolist() != [2, -2]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 100])
def test_chunks_change_nothing(chunk: int) -> None:
    solve, x, mask = layer(), inputs(), torch.ones(3, 5)
    mask[0, :2] = 0
    mask[2, 3:] = 0
    whole = list(solve_starts(solve, x, 5, attention_mask=mask))
    parts = list(solve_starts(solve, x, 5, attention_mask=mask, chunk=chunk))
    assert len(whole) == len(parts) == 5
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a.z, b.z)
        assert torch.equal(a.solution.iterations, b.solution.iterations)
    best, again = (solve_many(solve, x, 5, attention_mask=mask, chunk=c) for c in (None, chunk))
    torch.testing.assert_close(best.z, again.z)
    torch.testing.assert_close(best.solution.residual, again.solution.residual)


@pytest.mark.parametrize("side", ["left", "right"])
def test_start_0_is_a_plain_call(side: str) -> None:
    x, mask = torch.randn(3, 6, 8), torch.ones(3, 6)
    mask[1, slice(0, 2) if side == "left" else slice(4, 6)] = 0
    solve = ImplicitSequenceLayer(
        LlamaBackbone(d_model=8, n_layer=1, n_head=2), convergence=FixedIterations(5), guess="noise"
    ).eval()
    plain = solve(x, mask)
    first, second = solve_starts(solve, x, 2, attention_mask=mask, chunk=3)
    assert torch.equal(first.z, plain.z) and first.solution.nfe == plain.solution.nfe
    assert not torch.equal(second.z, plain.z)
    for row in range(3):  # the starts of a sequence must not depend on other sequences or on padding
        alone = list(solve_starts(solve, x[row : row + 1, mask[row].bool()], 2))[1]
        torch.testing.assert_close(second.z[row, mask[row].bool()], alone.z[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [-3.0, torch.nan])
def test_restarts_solve_until_a_start_converges(bad: float, count_calls: Any) -> None:
    """Every sequence gets the result of its first start that converges. Later starts are not solved."""
    solve, x, mask = layer(bad), inputs(4), torch.ones(4, 5)
    mask[1, :2] = 0
    mask[2, 3:] = 0
    starts = list(solve_starts(solve, x, 8, attention_mask=mask, chunk=4))
    first = next(n for n, o in enumerate(starts) if bool((o.solution.status == Status.CONVERGED).all()))
    assert 0 < first < 7
    calls = count_calls(solve.backbone)
    out = solve_with_restarts(solve, x, 8, attention_mask=mask)
    torch.testing.assert_close(out.z, starts[first].z)
    torch.testing.assert_close(out.solution.residual, starts[first].solution.residual)
    assert torch.equal(out.solution.iterations, sum(o.solution.iterations for o in starts[: first + 1]))
    assert out.solution.nfe == len(calls) == sum(o.solution.nfe for o in starts[: first + 1])


def test_restarts_are_for_sequences_that_have_not_converged() -> None:
    """Sequence 0 converges from start 0. Sequence 1 converges from start 1. Sequence 2 never converges."""

    class Sides(nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            near = 4 * u.sign()
            return torch.where(u.abs() > 10, near, torch.where(u.abs() < 1, 2 * u, -u - u.sign()))

    class Numbered(Guess):
        varies = True

        def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor:
            assert number is not None
            return torch.full_like(x, [7.0, -7.0, 5.0][number])

    x = torch.tensor([8.0, -8.0, 0.0])[:, None, None]
    tight = Residual(rtol=1e-3, max_iter=20)
    solve = ImplicitSequenceLayer(ModuleBackbone(Sides()), convergence=tight, guess=Numbered()).eval()
    out, many = solve_with_restarts(solve, x, 3), solve_many(solve, x, 3)
    expected = [Status.CONVERGED, Status.CONVERGED, Status.BUDGET_EXHAUSTED]
    assert out.solution.status.flatten().tolist() == expected
    assert torch.equal(out.z, many.z) and torch.equal(out.solution.residual, many.solution.residual)
    first, second, last = out.solution.iterations.flatten().tolist()
    assert first < 20 < second < 40 and last == 60
    for row in range(3):
        alone = solve_with_restarts(solve, x[row : row + 1], 3)
        assert torch.equal(alone.z[0], out.z[row])
        assert torch.equal(alone.solution.iterations[0], out.solution.iterations[row])
    with pytest.raises(ValueError, match="policy with a tolerance, got FixedIterations"):
        solve_with_restarts(solve, x, 3, solve=replace(solve.eval_solve, convergence=FixedIterations(3)))


def test_restarts_leave_out_what_they_cannot_help() -> None:
    """No start solves a non-finite input. In a group, processes would wait for each other in later starts."""
    solve, x = layer(), inputs()
    x[1, 3] = torch.nan
    solution = solve_with_restarts(solve, x, 8).solution
    assert solution.iterations[1].max() == 60 < solution.iterations[0].max()  # 60 is max_iter
    assert (solution.status[[0, 2]] == Status.CONVERGED).all()
    solve.group = object()
    with pytest.raises(ValueError, match="processes of a group"):
        solve_with_restarts(solve, x, 2)


def test_evaluations_are_counted(count_calls: Any) -> None:
    solve, x = layer(), inputs()
    calls = count_calls(solve.backbone)
    for chunk in (None, 2, 3):
        calls.clear()
        assert solve_many(solve, x, 4, chunk=chunk).solution.nfe == len(calls)
        assert all(shape[0] <= (chunk or 12) for shape in calls)
    calls.clear()
    next(solve_starts(solve, x, 4, chunk=3))
    assert all(shape[0] == 3 for shape in calls) and len(calls) <= 60  # no later start was solved


def test_solve_options_of_the_call() -> None:
    solve, x = layer(guess="zero"), inputs()
    options = replace(solve.eval_solve, guess=Noise(seed=5), convergence=FixedIterations(3))
    best = solve_many(solve, x, 2, solve=options)
    assert (best.solution.iterations == 3).all()


def test_wrong_arguments() -> None:
    solve, x = layer(), inputs()
    # Errors are raised at the call, not at the first output.
    for call in (solve_many, solve_starts, solve_with_restarts):
        with pytest.raises(ValueError, match="starts must be a whole number >= 1, got 0"):
            call(solve, x, 0)
        if call is not solve_with_restarts:
            with pytest.raises(ValueError, match="chunk must be a whole number >= 1, got 0"):
                call(solve, x, 2, chunk=0)
        with pytest.raises(ValueError, match="Zero"):
            call(solve, x, 2, solve=SolveOptions())
        with pytest.raises(ValueError, match="solve must be SolveOptions, got 'picard'"):
            call(solve, x, 2, solve="picard")
        with pytest.raises(ValueError, match="attention_mask"):
            call(solve, x, 2, attention_mask=torch.ones(2, 5))
        with pytest.raises(ValueError, match="eval"):
            call(layer().train(), x, 2)
        with pytest.raises(ValueError, match="implicit layers, got ExplicitSequenceLayer"):
            call(ExplicitSequenceLayer(LlamaBackbone(4, 1, 2, injection=False)), x, 2)
