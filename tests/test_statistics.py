"""Statistics of solves: means over all tokens that are not padding."""

import math

import pytest
import torch
from torch import Tensor

from deqseq.solution import Solution
from deqseq.statistics import SolveStatistics


def solution(nfe: int = 9) -> Solution:
    """Two sequences of three tokens. The second ends with two padding tokens, whose residuals are NaN."""
    status = torch.tensor([[1, 2, 1], [1, 1, 1]])
    iterations = torch.tensor([[3, 9, 5], [4, 0, 0]])
    residual = torch.tensor([[0.1, 0.7, 0.2], [0.3, torch.nan, torch.nan]])
    return Solution(torch.zeros(2, 3, 1), residual, iterations, status, nfe)


def test_padding_does_not_count() -> None:
    statistics = SolveStatistics()
    assert statistics.read() == {}
    statistics.add(solution())
    found = statistics.read()
    assert found == pytest.approx(solution().summary())
    assert found["nfe"] == 9 and found["iterations"] == 21 / 4
    assert found["residual"] == pytest.approx(1.3 / 4)
    assert found["share_converged"] == 3 / 4 and found["share_budget_exhausted"] == 1 / 4


def test_residuals_that_are_not_finite_do_not_count() -> None:
    found, broken = SolveStatistics(tail=True), solution()
    broken.residual = torch.tensor([[0.1, torch.nan, 0.2], [torch.inf, 0.4, 0.5]])
    broken.iterations = torch.ones_like(broken.iterations)
    broken.status = torch.tensor([[1, 3, 1], [3, 1, 1]])
    found.add(broken)
    assert found.read()["residual"] == pytest.approx(0.3) and found.read()["share_non_finite"] == 2 / 6
    assert found.read()["residual_p99"] == pytest.approx(0.497)
    torch.testing.assert_close(found.by_position("residual").float(), torch.tensor([0.1, 0.4, 0.35]))
    assert "residual at most 0.5" in repr(broken)
    broken.residual = broken.residual[:, :2] * torch.nan
    broken.iterations, broken.status = broken.iterations[:, :2], torch.full((2, 2), 3)
    assert "residual" not in repr(broken) and math.isnan(broken.summary()["residual"])


def test_the_caller_may_say_which_tokens_count() -> None:
    valid = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert solution().summary(valid)["iterations"] == 4


def test_tokens_weigh_the_same_and_solves_weigh_the_same_for_nfe() -> None:
    statistics = SolveStatistics()
    statistics.add(solution(nfe=9))
    short = solution(nfe=1)[:1]  # three tokens, with 3, 9 and 5 iterations
    statistics.add(short)
    found = statistics.read()
    assert found["iterations"] == (21 + 17) / 7 and found["nfe"] == 5
    statistics.reset()
    assert statistics.read() == {} and statistics.solves == 0


@pytest.mark.parametrize("longer_first", [True, False])
def test_positions(longer_first: bool) -> None:
    longer, shorter = solution(), solution()
    for name in ("z", "residual", "iterations", "status"):
        setattr(shorter, name, getattr(shorter, name)[:1, :2])
    statistics = SolveStatistics()
    for one in (longer, shorter) if longer_first else (shorter, longer):
        statistics.add(one)
    assert statistics.by_position("iterations").tolist() == [10 / 3, 9, 5]
    assert statistics.by_position("share_converged").tolist() == [1, 0, 1]


def test_processes_are_added_up() -> None:
    """One process has solved four tokens, the other three. The means must cover all seven tokens."""
    mine, other = SolveStatistics(tail=True), SolveStatistics(tail=True)
    mine.add(solution(nfe=4))
    other.add(solution(nfe=8)[:1])
    sent: list[Tensor] = []
    other.read(lambda values: (sent.append(values), values)[1])
    found = mine.read(lambda values: values + sent[0])
    assert found["iterations"] == (21 + 17) / 7 and found["nfe"] == 6


def test_the_tail_is_that_of_the_last_solve() -> None:
    statistics = SolveStatistics(tail=True)
    one = solution()
    for scale in (100.0, 1.0):
        one.residual = scale * torch.linspace(0, 1, 6).view(2, 3)
        statistics.add(one)
    assert statistics.read()["residual_p99"] == pytest.approx(0.99)
