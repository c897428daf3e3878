"""Tests of convergence policies: tolerances, maximum numbers of iterations, and combinations of policies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deqseq import (
    Backbone,
    Both,
    ConvergencePolicy,
    Either,
    FixedIterations,
    ImplicitSequenceLayer,
    Phantom,
    Quantile,
    Residual,
    SolveOptions,
    Status,
    Unrolled,
)
from deqseq.backbones import ModuleBackbone
from deqseq.policy import Judgement


def judge(
    policy: ConvergencePolicy, z: Tensor, fz: Tensor, iterations: int = 1, active: Tensor | None = None
) -> Judgement:
    count = torch.full(z.shape[:2], iterations)
    return policy.judge(z, fz, count, torch.ones_like(count).bool() if active is None else active)


def pair(change: list[float], size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Make z and f(z) of one sequence. At token t, ||f(z)|| is ``size`` and ||f(z) - z|| is ``change[t]``."""
    fz = torch.zeros(1, len(change), 3)
    fz[..., 0] = size
    z = fz.clone()
    z[..., 1] = torch.tensor(change)
    return z, fz


def test_relative_and_absolute_tolerances() -> None:
    z, fz = pair([0.1, 0.3, 0.5], size=2.0)
    assert judge(Residual(rtol=0.1), z, fz).converged.tolist() == [[True, False, False]]
    assert judge(Residual(atol=0.4), z, fz).converged.tolist() == [[True, True, False]]
    assert judge(Residual(rtol=0.1, atol=0.4), z, fz).converged.tolist() == [[True, True, True]]
    residual = judge(Residual(rtol=0.1), z, fz).residual
    torch.testing.assert_close(residual, torch.tensor([[0.05, 0.15, 0.25]]))


def test_a_residual_is_finite_wherever_z_and_f_are() -> None:
    z = torch.tensor([[[0.0], [1.0], [0.0], [1e-30], [1e30]]])
    fz = torch.tensor([[[0.0], [0.0], [1.0], [0.0], [1e-30]]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        judgement = judge(Residual(rtol=0.1), z.to(dtype), fz.to(dtype))
        assert torch.isfinite(judgement.residual).all()
        assert judgement.residual.dtype == torch.float32
        assert judgement.residual[0, 0] == 0
        assert judgement.converged.tolist() == [[True, False, False, False, False]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_residuals_of_non_finite_values_are_not_finite(value: float) -> None:
    z, fz = pair([0.0, 0.0])
    fz[0, 0, 0] = value
    judgement = judge(Residual(rtol=0.1, atol=0.1), z, fz)
    assert torch.isfinite(judgement.residual).tolist() == [[False, True]]


def test_low_precision_norms_are_taken_in_single_precision() -> None:
    z = torch.full((1, 1, 4096), 1.0, dtype=torch.bfloat16)
    fz = z + 0.0078125
    residual = judge(Residual(rtol=0.1), z, fz).residual
    torch.testing.assert_close(residual, torch.tensor([[0.0078125 / 1.0078125]]), rtol=1e-4, atol=0)


def test_sequence_scope_has_one_norm_over_active_tokens() -> None:
    z, fz = pair([0.3, 0.4, 9.0])
    active = torch.tensor([[True, True, False]])
    judgement = judge(Residual(rtol=0.36, scope="sequence"), z, fz, active=active)
    torch.testing.assert_close(judgement.residual, torch.full((1, 3), 0.5 / 2**0.5))
    assert judgement.converged.all()
    assert not judge(Residual(rtol=0.35, scope="sequence"), z, fz, active=active).converged.any()


def test_fixed_iterations() -> None:
    z, fz = pair([0.5, 0.0])
    assert not judge(FixedIterations(3), z, fz, iterations=2).may_settle.any()
    after = judge(FixedIterations(3), z, fz, iterations=3)
    assert after.may_settle.all() and not after.converged.any()
    assert FixedIterations(3).max_iter == 3


def test_combinations() -> None:
    z, fz = pair([0.0, 0.5])
    loose, fixed = Residual(rtol=0.1, max_iter=9), FixedIterations(3)
    both, either = loose & fixed, loose | fixed
    assert isinstance(both, Both) and isinstance(either, Either)
    assert both.max_iter == 9 and either.max_iter == 3
    assert judge(both, z, fz, iterations=2).may_settle.tolist() == [[False, False]]
    assert judge(both, z, fz, iterations=3).may_settle.tolist() == [[True, False]]
    assert judge(either, z, fz, iterations=2).may_settle.tolist() == [[True, False]]
    assert judge(either, z, fz, iterations=3).may_settle.tolist() == [[True, True]]
    for policy in (both, either):  # token 1 stops above the tolerance, so it has not converged
        assert judge(policy, z, fz, iterations=3).converged.tolist() == [[True, False]]
    assert both.causal
    assert not (loose & Residual(rtol=0.1, scope="sequence")).causal
    assert (loose & Residual(rtol=0.1, check_every=7) & Residual(rtol=0.1, check_every=5)).check_every == 5


def test_policies_combine_with_policies_only() -> None:
    for other in ("fixed", 3):
        with pytest.raises(ValueError, match=f"combines only with another policy, got {other!r}"):
            Residual(rtol=0.1) & other  # type: ignore[operator]
        with pytest.raises(ValueError, match=f"combines only with another policy, got {other!r}"):
            Residual(rtol=0.1) | other  # type: ignore[operator]


def test_at_least_and_at_most(rates: Backbone) -> None:
    x = torch.ones(1, 2, 2)
    x[0, :, 0] = torch.tensor([0.01, 0.9])

    def iterations(policy: ConvergencePolicy) -> list[int]:
        layer = ImplicitSequenceLayer(rates, convergence=policy)
        with torch.no_grad():
            return layer(x).solution.iterations[0].tolist()

    residual = Residual(rtol=0.05, max_iter=30)
    alone = iterations(residual)
    assert alone[0] < 4 < 9 < alone[1] < 30
    assert iterations(residual & FixedIterations(4)) == [4, alone[1]]
    assert iterations(residual | FixedIterations(9)) == [alone[0], 9]


@pytest.mark.parametrize("window", [None, 1])
def test_status_says_converged_only_where_a_tolerance_was_met(rates: Backbone, window: int | None) -> None:
    """A token that stops after a fixed number of iterations, above the tolerance, has not converged."""
    x = torch.ones(1, 2, 2)
    x[0, :, 0] = torch.tensor([0.01, 0.9])
    policy = Residual(rtol=0.05) | FixedIterations(9)
    layer = ImplicitSequenceLayer(rates, convergence=policy, window=window)
    with torch.no_grad():
        solution = layer(x).solution
    assert solution.residual[0, 1] > 0.05
    assert solution.status[0, 0] == Status.CONVERGED
    assert solution.status[0, 1] != Status.CONVERGED


def quantile_iterations(rates: Backbone, values: list[float], share: float) -> list[int]:
    x = torch.ones(1, len(values), 2)
    x[0, :, 0] = torch.tensor(values)
    policy = Quantile(Residual(rtol=1e-3, max_iter=60), share=share)
    layer = ImplicitSequenceLayer(rates, convergence=policy, causal=False)
    with torch.no_grad():
        return layer(x).solution.iterations[0].tolist()


def test_a_map_without_a_fixed_point_can_meet_a_relative_tolerance() -> None:
    """For f(z) = z + x, the relative residual is 1/n. An absolute tolerance in addition detects this."""
    relative, absolute = Residual(rtol=0.0505, max_iter=64), Residual(atol=0.1, max_iter=64)
    layer = ImplicitSequenceLayer(ModuleBackbone(torch.nn.Identity())).eval()
    for policy, status, iterations in (
        (relative, Status.CONVERGED, 20),
        (relative & absolute, Status.BUDGET_EXHAUSTED, 64),
    ):
        with torch.no_grad():
            found = layer(torch.ones(2, 3, 4), solve=SolveOptions(convergence=policy)).solution
        assert (found.status == status).all() and (found.iterations == iterations).all()
        torch.testing.assert_close(found.residual, torch.full((2, 3), 1 / iterations))


ENDLESS = Residual(rtol=1e-9, max_iter=5)


@pytest.mark.passes_of_a_cpu
@pytest.mark.filterwarnings("ignore:the backward system of ImplicitDifferentiation")
@pytest.mark.parametrize(
    ("options", "training", "evaluation"),
    [
        ({}, 5 + 4, 5 + 4),  # four steps with gradients
        ({"gradient": Phantom(steps=1)}, 5 + 1, 5 + 1),
        ({"gradient": "implicit"}, 5 + 1, 5 + 1),
        ({"gradient": Unrolled(2, before=3)}, 3 + 2, 3 + 2),
        ({"window": 3}, 3 * 5 + 4, 3 * 5 + 4),
        ({"window": 1}, 8 * 5 + 4, 8 * 5 + 4),
        ({"convergence": (ENDLESS, Residual(rtol=1e-9, max_iter=7))}, 5 + 4, 7 + 4),
        ({"convergence": ENDLESS & FixedIterations(6)}, 6 + 4, 6 + 4),
        ({"convergence": ENDLESS | FixedIterations(2)}, 2 + 4, 2 + 4),
    ],
)
def test_the_limits_in_the_guide(
    pointwise: Callable[[Tensor], Backbone],
    count_calls: Callable[[Backbone], list[tuple[int, ...]]],
    options: dict[str, Any],
    training: int,
    evaluation: int,
) -> None:
    """A search that never converges makes as many evaluations as docs/guide/convergence.md allows."""
    layer = ImplicitSequenceLayer(pointwise(torch.tensor(-1.0)), **{"convergence": ENDLESS, **options})
    x = torch.randn(2, 8, 3, requires_grad=True)
    calls = count_calls(layer.backbone)
    for mode, expected in ((True, training), (False, evaluation)):
        calls.clear()
        out = layer.train(mode)(x)
        assert out.solution.nfe == len(calls) == expected
        if options.get("gradient") == "implicit":
            out.z.sum().backward()
            assert out.solution.adjoint is not None and out.solution.adjoint.nfe == 64


def test_quantile_does_not_wait_for_the_slow(rates: Backbone) -> None:
    everyone = quantile_iterations(rates, [0.5] * 9 + [0.95], share=1.0)
    most = quantile_iterations(rates, [0.5] * 9 + [0.95], share=0.9)
    assert everyone[-1] == 60
    assert most == [*everyone[:9], everyone[0]]


def test_quantile_counts_all_tokens_of_the_sequence(rates: Backbone) -> None:
    """Tokens that settled early still count: five early and four later tokens of ten reach the share 0.9."""
    values = [0.3] * 5 + [0.5] * 4 + [0.95]
    everyone = quantile_iterations(rates, values, share=1.0)
    most = quantile_iterations(rates, values, share=0.9)
    assert most == [*everyone[:9], everyone[8]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Residual(), "0"),
        (lambda: Residual(rtol=0.0), "0"),
        (lambda: Residual(rtol=-0.1), r"-0\.1"),
        (lambda: Residual(atol=-1), "-1"),
        (lambda: Residual(rtol=float("nan")), "nan"),
        (lambda: Residual(rtol=float("inf")), "inf"),
        (lambda: Residual(rtol=True), "True"),
        (lambda: Residual(rtol=0.1, max_iter=0), "0"),
        (lambda: Residual(rtol=0.1, max_iter=-3), "-3"),
        (lambda: Residual(rtol=0.1, max_iter=2.5), r"2\.5"),
        (lambda: Residual(rtol=0.1, max_iter=True), "True"),
        (lambda: Residual(rtol=0.1, check_every=0), "0"),
        (lambda: Residual(rtol=0.1, scope="batch"), "batch"),
        (lambda: FixedIterations(0), "0"),
        (lambda: FixedIterations(1.5), r"1\.5"),
        (lambda: Quantile(Residual(rtol=0.1), share=0.0), r"0\.0"),
        (lambda: Quantile(Residual(rtol=0.1), share=1.2), r"1\.2"),
    ],
)
def test_wrong_options(wrong: Callable[[], ConvergencePolicy], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()
