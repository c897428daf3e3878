"""The adaptive budget of searches in training."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deqseq import (
    ConvergencePolicy,
    ExplicitSequenceLayer,
    FixedIterations,
    ImplicitSequenceLayer,
    Residual,
)
from deqseq.backbones import LlamaBackbone
from deqseq.budget import AdaptiveBudget
from deqseq.curriculum import Curriculum, Stage


@dataclass
class Solved:
    """The fields of a solution that a budget reads."""

    residual: Tensor
    iterations: Tensor


def solved(*residuals: float, padding: int = 0) -> Solved:
    residual = torch.tensor([[*residuals, *[0.0] * padding]])
    iterations = torch.ones_like(residual, dtype=torch.int64)
    iterations[:, len(residuals) :] = 0
    return Solved(residual, iterations)


def made(max_iter: int = 8, **options: float) -> AdaptiveBudget:
    torch.manual_seed(0)
    layer = ImplicitSequenceLayer(
        LlamaBackbone(d_model=8, n_layer=1, n_head=2), convergence=Residual(rtol=1e-3, max_iter=max_iter)
    )
    return AdaptiveBudget(layer, **{"residual": 0.1, **options})


def test_the_budget_follows_the_mean_residual_of_a_step() -> None:
    budget = made()
    evaluation = budget.layer.eval_solve
    for residuals, after in (
        ((0.09, 0.1), 7),
        ((0.0, 0.19), 6),
        ((0.0, 0.3), 7),
        ((0.2, 0.2), 8),
        ((9.0,), 8),
    ):
        budget.add(solved(*residuals))
        budget.step()
        assert budget.max_iter == budget.layer.train_solve.convergence.max_iter == after
    assert budget.layer.train_solve.convergence == Residual(rtol=1e-3, max_iter=8)
    assert budget.layer.eval_solve is evaluation
    for _ in range(20):
        budget.add(solved(0.0))
        budget.step()
    assert budget.max_iter == 1
    budget.step()  # a step without solves
    assert budget.max_iter == 1


def test_all_solves_of_a_step_count_and_padding_does_not() -> None:
    budget = made()
    budget.set(4)
    budget.add(solved(0.12, 0.12, 0.12, padding=5))
    budget.add(solved(0.05))
    budget.step()
    assert budget.max_iter == 5  # the mean is 0.1025; with the padding, it would be below 0.1


def test_tokens_that_are_not_finite_do_not_count() -> None:
    budget = made()
    budget.set(4)
    for residuals, after in (((0.3, torch.nan), 5), ((0.0, torch.inf), 4), ((torch.nan,), 4)):
        budget.add(solved(*residuals))
        budget.step()
        assert budget.max_iter == after


def test_processes_add_their_sums() -> None:
    budget = made()
    budget.add(solved(0.0, 0.0))
    budget.step(lambda sums: sums + torch.tensor([1.0, 2.0]))  # another process has a mean of 0.5
    assert budget.max_iter == 8


def test_real_searches_reach_the_mean_residual() -> None:
    """The budget ends where one evaluation less would leave the mean residual above the target."""
    budget = made(max_iter=32, residual=0.02)
    x = torch.randn(4, 16, 8)
    means = {}
    for _ in range(40):
        solution = budget.layer(x).solution
        means[budget.max_iter] = solution.residual.mean().item()
        budget.add(solution)
        budget.step()
    last = {budget.max_iter}
    budget.add(budget.layer(x).solution)
    budget.step()
    low, high = sorted({*last, budget.max_iter})
    assert 1 < high < 32 and means[high] <= 0.02 < means[low]


@pytest.mark.parametrize("residual", [0, -1.0, float("nan"), float("inf"), "0.1", True])
def test_a_target_is_a_positive_number(residual: float) -> None:
    with pytest.raises(ValueError, match="adaptive_budget"):
        made(residual=residual)
    with pytest.raises(ValueError, match="adaptive_budget"):
        Curriculum([Stage(1.0, "phantom", {"name": "residual", "rtol": 0.1}, adaptive_budget=residual)])


def test_policies_without_max_iter_are_refused() -> None:
    layer = ImplicitSequenceLayer(
        LlamaBackbone(d_model=8, n_layer=1, n_head=2), convergence=FixedIterations(3)
    )
    with pytest.raises(ValueError, match=r"max_iter can change, such as residual, got FixedIterations"):
        AdaptiveBudget(layer, 0.1)
    with pytest.raises(ValueError, match="max_iter can change"):
        Curriculum([Stage(1.0, "phantom", {"name": "fixed", "iterations": 4}, adaptive_budget=0.1)])


@pytest.mark.parametrize(
    ("policy", "least"),
    [
        (Residual(0.1) & Residual(0.2), 1),
        (Residual(0.1) | FixedIterations(8), 1),
        (Residual(0.1) & FixedIterations(3), 3),
        (Residual(0.2) & (FixedIterations(3) & Residual(0.1)), 3),
    ],
)
def test_the_budget_keeps_the_minimum_of_a_policy(policy: ConvergencePolicy, least: int) -> None:
    layer = ImplicitSequenceLayer(LlamaBackbone(8, n_layer=1, n_head=2), convergence=policy)
    AdaptiveBudget(layer, 0.1).set(0)
    assert (layer(torch.randn(2, 4, 8)).solution.iterations == least).all()
    assert f"max_iter={least}" in repr(layer.train_solve.convergence)


def test_layers_that_do_not_search_are_refused() -> None:
    layer = ExplicitSequenceLayer(LlamaBackbone(16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="layer must be an ImplicitSequenceLayer, got Explicit"):
        AdaptiveBudget(layer, residual=0.1)  # type: ignore[arg-type]
