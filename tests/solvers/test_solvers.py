"""Solvers: speed on linear maps, restarts of the history, non-finite values, best iterates."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deqseq import (
    Backbone,
    FixedIterations,
    ImplicitSequenceLayer,
    LayerOutput,
    Progress,
    Residual,
    Solver,
    Status,
)
from deqseq.backbones import ModuleBackbone
from deqseq.solvers import Anderson, BestIterate, Broyden, Picard

Pointwise = Callable[[Tensor], ModuleBackbone]
MakeProgress = Callable[..., Progress]

D = 6
WITH_MEMORY: dict[str, Solver] = {
    "anderson": Anderson(memory=D, regularisation=1e-12),
    "broyden": Broyden(memory=30),
    "sequence-anderson": Anderson(memory=D, regularisation=1e-12, scope="sequence"),
    "sequence-broyden": Broyden(memory=20, scope="sequence"),
}


def slow_matrix(largest: float = 0.95) -> Tensor:
    """A symmetric matrix (D, D) with eigenvalues from -0.5 to ``largest``."""
    basis, _ = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))
    return basis @ torch.diag(torch.linspace(-0.5, largest, D, dtype=torch.float64)) @ basis.T


def solve(
    f: Backbone, solver: Solver, x: Tensor, rtol: float = 1e-8, window: int | None = None
) -> LayerOutput:
    layer = ImplicitSequenceLayer(
        f, solver=solver, convergence=Residual(rtol=rtol, max_iter=2000), window=window
    ).eval()
    with torch.no_grad():
        return layer(x)


@pytest.mark.parametrize("solver", ["anderson", "broyden"])
@pytest.mark.parametrize("window", [None, 1])
def test_linear_maps_take_about_as_many_evaluations_as_dimensions(
    pointwise: Pointwise, solver: str, window: int | None
) -> None:
    matrix = slow_matrix()
    x = torch.randn(2, 1 if window is None else 5, D, dtype=torch.float64)
    out = solve(pointwise(matrix), WITH_MEMORY[solver], x, window=window)
    plain = solve(pointwise(matrix), Picard(), x, window=window)
    assert (out.solution.status == Status.CONVERGED).all()
    limit = D + 3 if solver == "anderson" else 4 * D
    assert out.solution.iterations.max() <= limit
    assert plain.solution.iterations.min() > 10 * limit
    # the exact solution of z = A (z + x)
    expected = torch.linalg.solve(torch.eye(D, dtype=torch.float64) - matrix, matrix @ x.mT).mT
    torch.testing.assert_close(out.z, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("solver", ["anderson", "broyden"])
def test_many_tokens_at_once_are_faster_than_picard(pointwise: Pointwise, solver: str) -> None:
    """Solvers with a history need fewer evaluations than Picard for a whole sequence.

    This is true although a token uses its history only once the tokens before it have nearly settled.
    """
    matrix, x = slow_matrix(), torch.randn(2, 8, D, dtype=torch.float64)
    fast = solve(pointwise(matrix), WITH_MEMORY[solver], x).solution.nfe
    slow = solve(pointwise(matrix), Picard(), x).solution.nfe
    assert fast < slow


@pytest.mark.parametrize("solver", ["sequence-anderson", "sequence-broyden"])
def test_sequence_scope_solves_a_whole_sequence(pointwise: Pointwise, solver: str) -> None:
    matrix, x = slow_matrix(), torch.randn(2, 5, D, dtype=torch.float64)
    out = solve(pointwise(matrix), WITH_MEMORY[solver], x, rtol=1e-6)
    plain = solve(pointwise(matrix), Picard(), x, rtol=1e-6)
    assert (out.solution.status == Status.CONVERGED).all()
    assert out.solution.nfe < plain.solution.nfe / 2
    torch.testing.assert_close(out.z, plain.z, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["anderson", "broyden"])
def test_token_scope_solves_every_token_as_if_alone(pointwise: Pointwise, name: str) -> None:
    f, solver = pointwise(slow_matrix()), WITH_MEMORY[name]
    x = torch.randn(3, 1, D, dtype=torch.float64)
    together = solve(f, solver, x)
    for i in range(3):
        alone = solve(f, solver, x[i : i + 1])
        torch.testing.assert_close(together.z[i : i + 1], alone.z)
        assert together.solution.iterations[i] == alone.solution.iterations[0]


@pytest.mark.parametrize(("solver", "first"), [(Anderson(damping=0.5), 0.5), (Broyden(), 1.0)])
def test_the_first_step_is_picards(make_progress: MakeProgress, solver: Solver, first: float) -> None:
    z, fz = torch.randn(2, 3, D), torch.randn(2, 3, D)
    proposal, _ = solver.step(z, fz, solver.init(z), make_progress(z, 0))
    torch.testing.assert_close(proposal, z + first * (fz - z))


def iterate_by_hand(
    solver: Solver, matrix: Tensor, x: Tensor, progress: Callable[[int], Progress], steps: int
) -> list[Tensor]:
    z, state, iterates = torch.zeros_like(x), solver.init(x), []
    for step in range(steps):
        z, state = solver.step(z, z @ matrix.T + x, state, progress(step))
        iterates.append(z)
    return iterates


def nonlinear(z: Tensor) -> Tensor:
    return torch.tanh(z @ torch.linspace(-0.4, 0.5, D * D, dtype=z.dtype).view(D, D)) + 0.3


@pytest.mark.parametrize("memory", [1, 2, 5])
def test_broyden_against_dense_matrices(make_progress: MakeProgress, memory: int) -> None:
    """The iterates equal those of Broyden's good method with a dense inverse Jacobian.

    After every ``memory`` updates, the inverse Jacobian is reset.
    """
    solver, start = Broyden(memory=memory), torch.randn(1, 1, D, dtype=torch.float64)
    z, state = start, solver.init(start)
    inverse, updates, before = -torch.eye(D, dtype=torch.float64), 0, None
    for step in range(9):
        fz = nonlinear(z)
        here, g = z.flatten(), (fz - z).flatten()
        if before is not None:
            if updates == memory:
                inverse, updates = -torch.eye(D, dtype=torch.float64), 0
            moved, changed = here - before[0], g - before[1]
            left = moved @ inverse
            inverse = inverse + torch.outer(moved - inverse @ changed, left) / (left @ changed)
            updates += 1
        before = here, g
        z, state = solver.step(z, fz, state, make_progress(z, step))
        torch.testing.assert_close(z.flatten(), here - inverse @ g, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("memory", [1, 3])
def test_anderson_against_least_squares(make_progress: MakeProgress, memory: int, damping: float) -> None:
    solver = Anderson(memory=memory, damping=damping, regularisation=0.0)
    z = torch.randn(1, 1, D, dtype=torch.float64)
    state, points, residuals = solver.init(z), [], []
    for step in range(7):
        fz = nonlinear(z)
        points.append(z.flatten())
        residuals.append((fz - z).flatten())
        recent = range(max(1, step - memory + 1), step + 1)
        expected = points[-1] + damping * residuals[-1]
        if recent:
            dz = torch.stack([points[i] - points[i - 1] for i in recent], 1)
            dr = torch.stack([residuals[i] - residuals[i - 1] for i in recent], 1)
            weights = torch.linalg.lstsq(dr, residuals[-1][:, None]).solution[:, 0]
            expected = expected - (dz + damping * dr) @ weights
        z, state = solver.step(z, fz, state, make_progress(z, step))
        torch.testing.assert_close(z.flatten(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["anderson", "broyden"])
@pytest.mark.parametrize("why", ["residual", "entered"])
def test_a_token_whose_map_shifts_takes_picard_steps(
    make_progress: MakeProgress, name: str, why: str
) -> None:
    matrix, x = slow_matrix(), torch.randn(1, 2, D, dtype=torch.float64)
    solver, second = WITH_MEMORY[name], torch.tensor([[False, True]])

    def until_third(step: int) -> Progress:
        told = make_progress(x, step)
        if step <= 3 and why == "entered":
            told.entered = told.entered | second
        elif step <= 3:
            # The second token restarts: the first token's residual exceeds STEADY_SHARE of the second's.
            told.residual = torch.tensor([[0.5, 1.0]])
        return told

    iterates = iterate_by_hand(solver, matrix, x, until_third, 6)
    plain = iterate_by_hand(Picard(), matrix, x, until_third, 6)
    for step in range(4):
        torch.testing.assert_close(iterates[step][:, 1], plain[step][:, 1])
    for step in range(1, 4):
        assert not torch.allclose(iterates[step][:, 0], plain[step][:, 0], rtol=1e-3)
    # The second token's next step equals the second step of a fresh solver that starts at plain[2].
    start = plain[3][:, 1:]
    z, state = start, solver.init(start)
    fresh = []
    for step in range(2):
        source = plain[2][:, 1:] if step == 0 else z
        z, state = solver.step(source, source @ matrix.T + x[:, 1:], state, make_progress(start, step))
        fresh.append(z)
    torch.testing.assert_close(iterates[4][:, 1:], fresh[1])


def test_history_counts_after_tokens_that_are_steady_or_settled() -> None:
    residual = torch.tensor([[0.2, 1.0, 0.5, 1.0, float("nan"), 1.0]])
    no = torch.zeros(1, 6, dtype=torch.bool)
    told = Progress(residual, ~no, torch.full((1, 6), 3), no, max_iter=9)
    assert Anderson().restarted(told).tolist() == [[False, False, True, True, True, True]]
    told.settled = torch.tensor([[True, True, False, False, False, False]])
    assert Anderson().restarted(told).tolist() == [[False, False, False, True, True, True]]


@pytest.mark.parametrize("name", ["anderson", "broyden"])
def test_history_counts_once_the_earlier_tokens_are_steady(name: str) -> None:
    """If each token depends on the token before it, a solver with a history is about as fast as Picard.

    The sum of the tokens' iterations must be at most Picard's. The number of evaluations of the whole
    sequence (``nfe``) may be up to 1.4 times Picard's.
    """

    class Chain(torch.nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            before = torch.nn.functional.pad(u, (0, 0, 1, 0))[:, :-1]
            return 0.5 * torch.tanh(u + before)

    x = torch.randn(4, 24, D, dtype=torch.float64)
    fast = solve(ModuleBackbone(Chain()), WITH_MEMORY[name], x, rtol=1e-4)
    plain = solve(ModuleBackbone(Chain()), Picard(), x, rtol=1e-4)
    assert fast.solution.nfe <= 1.4 * plain.solution.nfe
    assert fast.solution.iterations.sum() <= plain.solution.iterations.sum()


@pytest.mark.parametrize("name", ["anderson", "broyden"])
@pytest.mark.parametrize("window", [None, 4])
def test_history_is_used_in_a_fixed_number_of_iterations(
    pointwise: Pointwise, name: str, window: int | None
) -> None:
    """With ``FixedIterations``, a solver with a history gets much closer to the solution than Picard.

    Solvers drop a token's history while an earlier token has a large residual. With ``FixedIterations``, they
    get no residuals, so they keep the history.
    """
    matrix, x = slow_matrix(), torch.randn(2, 4, D, dtype=torch.float64)
    exact = torch.linalg.solve(torch.eye(D, dtype=torch.float64) - matrix, matrix @ x.mT).mT
    error = {}
    for solver in (WITH_MEMORY[name], Picard()):
        layer = ImplicitSequenceLayer(
            pointwise(matrix), solver=solver, convergence=FixedIterations(2 * D + 2), window=window
        ).eval()
        with torch.no_grad():
            error[type(solver)] = (layer(x).z - exact).norm() / exact.norm()
    assert error[type(WITH_MEMORY[name])] < 1e-4 < 1e-2 < error[Picard]


@pytest.mark.parametrize("name", ["sequence-anderson", "sequence-broyden"])
def test_sequence_history_is_used_up_to_the_last_fixed_iteration(
    pointwise: Pointwise, make_progress: MakeProgress, name: str
) -> None:
    """The layer gives the same result as iterating the solver by hand. Both use history in every step."""
    matrix, x = slow_matrix(), torch.randn(2, 3, D, dtype=torch.float64)
    steps = 5
    layer = ImplicitSequenceLayer(
        pointwise(matrix), solver=WITH_MEMORY[name], convergence=FixedIterations(steps)
    ).eval()
    with torch.no_grad():
        actual = layer(x).z
    expected = iterate_by_hand(
        WITH_MEMORY[name], matrix, x @ matrix.T, lambda step: make_progress(x, step), steps
    )[-1]
    torch.testing.assert_close(actual, expected)


AWKWARD = {
    "solved already": lambda z, step: z.clone(),
    "constant": lambda z, step: torch.ones_like(z),
    "minus": lambda z, step: -z,
    "expanding": lambda z, step: 3 * z + 1,
    "huge": lambda z, step: (0.5 * z + 1) * 1e18,
    "tiny": lambda z, step: 0.5 * z + 1e-30,
    "jumping": lambda z, step: torch.full_like(z, 10.0 ** (-1) ** step),
    "same difference": lambda z, step: z + 1,
}


@pytest.mark.parametrize("f", AWKWARD.values(), ids=AWKWARD)
@pytest.mark.parametrize("scope", ["token", "sequence"])
@pytest.mark.parametrize("make", [Anderson, Broyden])
def test_steps_are_finite_for_finite_evaluations(
    make_progress: MakeProgress,
    make: Callable[..., Solver],
    scope: str,
    f: Callable[[Tensor, int], Tensor],
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        solver = make(scope=scope)
        z = torch.zeros(2, 3, D, dtype=dtype)
        state = solver.init(z)
        for step in range(20):
            fz = f(z, step)
            if not torch.isfinite(fz).all():
                break
            z, state = solver.step(z, fz, state, make_progress(z, step))
            assert torch.isfinite(z).all() and z.dtype == dtype
        assert step >= 2


@pytest.mark.parametrize(
    ("slope", "shift", "dtype"),
    [(-1, 0, torch.float32), (0.5, 1e-30, torch.float32), (0.5, 1e-3, torch.float16)],
)
@pytest.mark.parametrize("scope", ["token", "sequence"])
@pytest.mark.parametrize("make", [Anderson, Broyden])
def test_gradients_through_small_steps_are_finite(
    make_progress: MakeProgress, make: Callable[..., Solver], scope: str, slope: float, shift: float,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """The inverse of a product of two small steps overflows. Infinity in the graph makes gradients NaN."""
    solver = make(scope=scope)
    start = torch.linspace(-0.1, 0.1, 6 * D, dtype=dtype).view(2, 3, D).requires_grad_()
    z, state = start, solver.init(start)
    for step in range(12):
        z, state = solver.step(z, slope * z + shift, state, make_progress(z, step))
    z.float().sum().backward()
    assert start.grad is not None and torch.isfinite(start.grad).all()


@pytest.mark.parametrize("make", [Anderson, Broyden])
def test_recovers_after_a_non_finite_evaluation(
    make_progress: MakeProgress, make: Callable[..., Solver]
) -> None:
    """f returns NaN once; z keeps its value. The solver must drop the NaN from its history and converge."""
    solver, matrix = make(memory=3), slow_matrix(0.8)
    x = torch.randn(1, 2, D, dtype=torch.float64)
    z, state = torch.zeros_like(x), solver.init(x)
    for step in range(60):
        fz = z @ matrix.T + x
        if step == 4:
            fz = fz * torch.nan
        proposal, state = solver.step(z, fz, state, make_progress(x, step))
        z = torch.where(torch.isfinite(proposal), proposal, z)
    exact = torch.linalg.solve(torch.eye(D, dtype=torch.float64) - matrix, x.mT).mT
    torch.testing.assert_close(z, exact, rtol=1e-4, atol=1e-5)


def test_damping(pointwise: Pointwise) -> None:
    """For a map with eigenvalue -1.5, plain Picard oscillates and diverges; damped Picard converges."""
    f, x = pointwise(torch.tensor(-1.5)), torch.randn(2, 3, 4)
    policy = Residual(rtol=1e-4, max_iter=60)
    with torch.no_grad():
        plain = ImplicitSequenceLayer(f, convergence=policy)(x).solution
        damped = ImplicitSequenceLayer(f, solver=Picard(0.6), convergence=policy)(x).solution
    assert not (plain.status == Status.CONVERGED).any()
    assert (damped.status == Status.CONVERGED).all()
    torch.testing.assert_close(damped.z, -1.5 / 2.5 * x, rtol=1e-3, atol=1e-3)


def test_picard_step(make_progress: MakeProgress) -> None:
    z, fz = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    for damping in (1.0, 0.3):
        proposal, state = Picard(damping).step(z, fz, (), make_progress(z, 0))
        torch.testing.assert_close(proposal, z + damping * (fz - z))
        assert state == ()


def test_best_iterate_returns_the_best_it_saw(make_progress: MakeProgress) -> None:
    """The residual falls and rises again. The solver must use the best iterate for the last evaluation."""
    solver = BestIterate("picard")
    z = torch.zeros(1, 2, 1)
    state = solver.init(z)
    visited, sizes = [], [5.0, 3.0, 0.5, 4.0, 2.0]
    for step, size in enumerate(sizes):
        last = torch.full((1, 2), step == len(sizes) - 1)
        visited.append(z)
        # From the second step on, |f(z) - z| = size. In every step, |f(z)| is between 10 and 20.
        fz = torch.full_like(z, 10.0) if step == 0 else z + size
        told = make_progress(z, step, last=last)
        z, state = solver.step(z, fz, state, told)
    assert torch.equal(z, visited[2])


def test_best_iterate_of_a_sequence_with_padding(make_progress: MakeProgress) -> None:
    """The result is the iterate with the smallest residual. Padding must not reset this best iterate."""
    solver = BestIterate("picard", scope="sequence")
    z = torch.zeros(1, 3, 1)
    real = torch.tensor([[True, True, False]])
    state = solver.init(z)
    visited, sizes = [], [1.0, 2.0, 3.0, 4.0]
    for step, size in enumerate(sizes):
        visited.append(z)
        told = make_progress(
            z, step, active=real, settled=~real, iterations=(step + 1) * real, max_iter=len(sizes) + 1
        )
        fz = torch.full_like(z, 10.0) if step == 0 else z + size
        z, state = solver.step(z, fz, state, told)
    assert torch.equal(z[real], visited[1][real])


@pytest.mark.parametrize("window", [None, 1])
def test_best_iterate_of_a_map_that_drifts_away(rates: Backbone, window: int | None) -> None:
    """With a rate below -1, the residual grows, so an early iterate is the best. The layer must return it."""
    x = torch.ones(2, 1 if window is None else 3, 4)
    x[..., 0] = -1.3
    policy = Residual(rtol=1e-6, max_iter=9)
    with torch.no_grad():
        plain = ImplicitSequenceLayer(rates, convergence=policy, window=window)(x).solution
        best = ImplicitSequenceLayer(rates, solver=BestIterate("picard"), convergence=policy, window=window)(
            x
        ).solution
    assert (best.residual < plain.residual).all()
    assert best.nfe == plain.nfe


def test_best_iterate_costs_tokens_behind_an_unsettled_one_nothing(rates: Backbone) -> None:
    """Tokens after an unsettled token must end with residuals that are not larger than plain Picard's.

    They have no best iterate yet, so they take the same steps as with plain Picard.
    """
    x = torch.ones(1, 3, 4)
    x[0, :, 0] = torch.tensor([0.999, 0.5, 0.5])
    policy = Residual(rtol=1e-4, max_iter=9)
    with torch.no_grad():
        plain = ImplicitSequenceLayer(rates, convergence=policy)(x).solution
        best = ImplicitSequenceLayer(rates, solver=BestIterate("picard"), convergence=policy)(x)
    assert (best.solution.residual[:, 1:] <= plain.residual[:, 1:]).all()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Picard(damping=0.0), r"0\.0"),
        (lambda: Picard(damping=1.01), r"1\.01"),
        (lambda: Picard(damping=float("nan")), "nan"),
        (lambda: Anderson(memory=0), "0"),
        (lambda: Anderson(memory=2.0), r"2\.0"),
        (lambda: Anderson(damping=-0.5), r"-0\.5"),
        (lambda: Anderson(regularisation=-1e-3), r"-0\.001"),
        (lambda: Anderson(scope="tokens"), "tokens"),
        (lambda: Broyden(memory=0), "0"),
        (lambda: Broyden(scope="all"), "all"),
        (lambda: BestIterate("picard", scope="all"), "all"),
        (lambda: BestIterate("steepest"), "steepest"),
    ],
)
def test_wrong_options(wrong: Callable[[], Solver], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()
