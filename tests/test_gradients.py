"""Gradients in double precision, compared with each other and with finite differences."""

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from deqseq import (
    Backbone,
    Context,
    ConvergencePolicy,
    FixedIterations,
    GradientStrategy,
    ImplicitDifferentiation,
    ImplicitSequenceLayer,
    Phantom,
    Problem,
    Residual,
    Solution,
    SolveOptions,
    Status,
    Unrolled,
    search,
    steps,
)
from deqseq.backbones import LlamaBackbone, ModuleBackbone
from deqseq.solvers import Anderson, Broyden, Picard

MakeLayer = Callable[..., ImplicitSequenceLayer]
Close = Callable[..., None]
GradientsOf = Callable[..., list[Tensor]]

BACKBONES = ["mamba2", "llama", "module"]
TIGHT = Residual(rtol=1e-13, max_iter=500)
EXACT = ImplicitDifferentiation(solver="picard", convergence=TIGHT)
B, L, D = 2, 5, 16


class Exponential(nn.Module):
    """A contraction that overflows at large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, u: Tensor) -> Tensor:
        return 0.1 * self.second(self.first(u).exp())


class BrokenAtSix(nn.Module):
    """A contraction whose output is infinite at token 6."""

    def forward(self, u: Tensor) -> Tensor:
        broken = torch.arange(u.shape[1]) == 6
        return (u / 3).tanh().masked_fill(broken[:, None], torch.inf)


class Halved(Backbone):
    """f(z, x) = x / 2."""

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        return Context((x,))

    def evaluate(self, z: Tensor, context: Context, state: object = None) -> tuple[Tensor, None]:
        return context.tokens[0] / 2, None


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(B, L, D, dtype=torch.float64), torch.randn(B, L, D, dtype=torch.float64)


def distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    error = sum((a - b).square().sum() for a, b in zip(actual, expected, strict=True))
    size = sum(b.square().sum() for b in expected)
    return float((error / size).sqrt())


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_implicit_differentiation_equals_unrolling(
    make_layer: MakeLayer,
    gradients_of: GradientsOf,
    assert_close: Close,
    backbone: str,
    solver: str,
    window: int | None,
) -> None:
    layer = make_layer(
        backbone, solver=solver, gradient=EXACT, convergence=TIGHT, window=window, dtype=torch.float64
    )
    x, weight = inputs()
    actual = gradients_of(layer, x, weight)
    layer.gradient, layer.train_solve = Unrolled(80), SolveOptions(Picard())
    for a, b in zip(actual, gradients_of(layer, x, weight), strict=True):
        assert_close(a, b, 1e-8)


@pytest.mark.parametrize("solver", [None, "anderson", "broyden", "torchdeq:anderson"])
def test_solvers_of_the_backward_system(
    make_layer: MakeLayer, gradients_of: GradientsOf, assert_close: Close, solver: str | None
) -> None:
    policy = Residual(rtol=1e-11, max_iter=500)
    layer = make_layer("module", gradient=EXACT, convergence=policy, dtype=torch.float64)
    x, weight = inputs()
    expected = gradients_of(layer, x, weight)
    layer.gradient = ImplicitDifferentiation(solver=solver, convergence=policy)
    for a, b in zip(gradients_of(layer, x, weight), expected, strict=True):
        assert_close(a, b, 1e-8)


@pytest.mark.parametrize("gradient", [EXACT, Unrolled(80)], ids=["implicit", "unrolled"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_finite_differences(
    make_layer: MakeLayer,
    fold_on_gpu: Callable[[Backbone], Backbone],
    gradients_of: GradientsOf,
    backbone: str,
    gradient: GradientStrategy,
) -> None:
    layer = make_layer(backbone, gradient=gradient, convergence=TIGHT, dtype=torch.float64)
    fold_on_gpu(layer.backbone)
    x, weight = inputs()
    gradients = gradients_of(layer, x, weight)
    with torch.no_grad():
        solution = layer(x).z

    @torch.no_grad()
    def loss(x: Tensor) -> float:
        return float((layer(x, z0=solution).z * weight).sum())

    def check(tensor: Tensor, gradient: Tensor) -> None:
        """Compare ``gradient`` along a random direction with central differences."""
        direction = torch.randn_like(tensor)
        direction /= direction.norm()
        step, kept = 1e-5, tensor.detach().clone()
        with torch.no_grad():
            tensor.copy_(kept + step * direction)
            above = loss(x)
            tensor.copy_(kept - step * direction)
            below = loss(x)
            tensor.copy_(kept)
        expected = (above - below) / (2 * step)
        actual = float((gradient * direction).sum())
        assert abs(actual - expected) <= 1e-6 * max(1.0, float(gradient.norm()))

    check(x, gradients[0])
    for parameter, gradient_of_it in zip(layer.parameters(), gradients[1:], strict=True):
        check(parameter, gradient_of_it)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_phantom_tends_to_the_exact_gradient(
    make_layer: MakeLayer, gradients_of: GradientsOf, backbone: str
) -> None:
    layer = make_layer(backbone, gradient=EXACT, convergence=TIGHT, dtype=torch.float64)
    x, weight = inputs()
    exact = gradients_of(layer, x, weight)
    errors = []
    for count in (1, 2, 4, 8, 16, 40):
        layer.gradient = Phantom(steps=count, damping=0.8)
        errors.append(distance(gradients_of(layer, x, weight), exact))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-2 and errors[-1] < 1e-4


def test_one_undamped_phantom_step_is_jacobian_free(
    make_layer: MakeLayer, gradients_of: GradientsOf, assert_close: Close
) -> None:
    layer = make_layer("mamba2", gradient=Phantom(1, damping=1.0), convergence=TIGHT, dtype=torch.float64)
    x, weight = inputs()
    actual = gradients_of(layer, x, weight)
    with torch.no_grad():
        z = layer(x).z
    x.requires_grad_()
    fz = layer.backbone(z, layer.backbone.prepare(x))
    expected = torch.autograd.grad((fz * weight).sum(), [x, *layer.parameters()])
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, 1e-9)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("plain", "checkpointed"),
    [
        (Phantom(3), Phantom(3, checkpoint=True)),
        (Unrolled(5), Unrolled(5, checkpoint=True)),
    ],
    ids=["phantom", "unrolled"],
)
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_checkpointing_changes_nothing(
    make_layer: MakeLayer,
    gradients_of: GradientsOf,
    assert_close: Close,
    backbone: str,
    solver: str,
    plain: GradientStrategy,
    checkpointed: GradientStrategy,
    padded: bool,
) -> None:
    layer = make_layer(backbone, solver=solver, gradient=plain, dtype=torch.float64)
    x, weight = inputs()
    mask = torch.ones(B, L)
    if padded:
        mask[0, :3] = 0
    expected = gradients_of(layer, x, weight, attention_mask=mask)
    layer.gradient = checkpointed
    for a, b in zip(gradients_of(layer, x, weight, attention_mask=mask), expected, strict=True):
        assert_close(a, b, 1e-12)


def test_checkpointing_stores_less(make_layer: MakeLayer) -> None:
    """With checkpointing, each additional step saves only one more iterate, and no activations."""

    def saved(gradient: GradientStrategy) -> int:
        layer = make_layer("mamba2", gradient=gradient)
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(torch.randn(2, 16, 16))
        return total

    assert saved(Unrolled(8, checkpoint=True)) < saved(Unrolled(8)) / 4
    assert saved(Phantom(8, checkpoint=True)) < saved(Phantom(8)) / 4


def second_derivative(layer: ImplicitSequenceLayer, x: Tensor, loss: str) -> Tensor:
    out = layer(x)
    value = out.z.sum() if loss == "linear" else out.z.square().sum()
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return second


@pytest.mark.parametrize("loss", ["linear", "square"])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_second_derivative_of_unrolled_picard(
    make_layer: MakeLayer, backbone: str, checkpoint: bool, loss: str
) -> None:
    layer = make_layer(backbone, gradient=Unrolled(12, checkpoint=checkpoint), dtype=torch.float64)
    x = torch.randn(1, 5, D, dtype=torch.float64, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        second = second_derivative(layer, x, loss)

    def penalty(x: Tensor) -> float:
        x = x.detach().requires_grad_()
        z = layer(x).z
        value = z.sum() if loss == "linear" else z.square().sum()
        return float(torch.autograd.grad(value, x)[0].square().sum())

    direction = torch.randn_like(x)
    step = 1e-5
    expected = (penalty(x + step * direction) - penalty(x - step * direction)) / (2 * step)
    actual = float((second * direction).sum())
    assert abs(actual - expected) <= 1e-5 * max(1.0, abs(expected))


class JacobianFree(GradientStrategy):
    """A gradient strategy as another package would write it: a search, then one step with gradients."""

    def solve(self, problem: Problem) -> Solution:
        return steps(problem, 1, start=search(problem))


class OneEvaluation(GradientStrategy):
    """A gradient strategy of another package that evaluates f itself instead of calling ``steps``."""

    def solve(self, problem: Problem) -> Solution:
        found = search(problem)
        return replace(found, z=problem.map.evaluate(found.z, problem.context)[0])


@pytest.mark.parametrize("loss", ["linear", "square"])
@pytest.mark.parametrize(
    ("solver", "gradient"),
    [
        ("picard", JacobianFree()),
        ("picard", OneEvaluation()),
        ("picard", Phantom(2)),
        ("picard", Phantom(2, checkpoint=True)),
        ("picard", ImplicitDifferentiation()),
        (Anderson(), Unrolled(4)),
        (Broyden(), Unrolled(4)),
    ],
    ids=["other", "evaluation", "phantom", "checkpointed", "implicit", "anderson", "broyden"],
)
def test_second_derivatives_that_would_be_wrong_raise(
    make_layer: MakeLayer, solver: object, gradient: GradientStrategy, loss: str
) -> None:
    layer = make_layer("module", solver=solver, gradient=gradient)
    x = torch.randn(2, 5, D, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        second_derivative(layer, x, loss)


def test_a_strategy_of_another_package_is_phantom_with_one_undamped_step(
    make_layer: MakeLayer, gradients_of: GradientsOf
) -> None:
    x, weight = torch.randn(2, 5, D), torch.randn(2, 5, D)
    theirs, ours = (make_layer("mamba2", gradient=g) for g in (JacobianFree(), Phantom(1, damping=1.0)))
    for a, b in zip(gradients_of(theirs, x, weight), gradients_of(ours, x, weight), strict=True):
        assert torch.equal(a, b)


class TwoLayers(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: Tensor) -> object:
        return self.second(self.first(x).z)


@pytest.mark.parametrize("shared", [False, True])
def test_implicit_differentiation_twice_in_one_graph(
    make_layer: MakeLayer, gradients_of: GradientsOf, assert_close: Close, shared: bool
) -> None:
    def model(gradient: GradientStrategy) -> TwoLayers:
        options = {"gradient": gradient, "convergence": TIGHT, "dtype": torch.float64}
        first = make_layer("module", **options)
        return TwoLayers(first, first if shared else make_layer("llama", **options))

    x, weight = inputs()
    expected = gradients_of(model(Unrolled(80)), x, weight)
    for a, b in zip(gradients_of(model(EXACT), x, weight), expected, strict=True):
        assert_close(a, b, 1e-8)


@pytest.mark.parametrize("gradient", ["phantom", "implicit"])
def test_backward_twice(make_layer: MakeLayer, assert_close: Close, gradient: str) -> None:
    layer = make_layer("mamba2", gradient=gradient)
    x = torch.randn(2, 6, D, requires_grad=True)
    loss = layer(x).z.square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert_close(x.grad, 2 * once, 1e-6)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("backbone", BACKBONES)
def test_adjoint_is_reported(make_layer: MakeLayer, backbone: str) -> None:
    layer = make_layer(backbone, gradient=ImplicitDifferentiation())
    out = layer(torch.randn(2, 6, D))
    assert out.solution.adjoint is None
    out.z.square().sum().backward()
    adjoint = out.solution.adjoint
    assert adjoint is not None and adjoint.nfe >= 1
    assert (adjoint.status == Status.CONVERGED).all() and (adjoint.residual <= 1e-4).all()


def test_the_default_tolerance_of_the_backward_system_can_be_met_under_autocast() -> None:
    torch.manual_seed(0)
    layer = ImplicitSequenceLayer(
        LlamaBackbone(64, n_layer=1, n_head=4), solver="anderson", gradient="implicit",
        convergence=Residual(rtol=1e-2, max_iter=200),
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(2, 32, 64))
    (out.z * torch.randn_like(out.z)).sum().backward()
    assert (out.solution.adjoint.status == Status.CONVERGED).all()


def test_a_token_that_is_not_finite_does_not_delay_the_backward_system() -> None:
    layer = ImplicitSequenceLayer(ModuleBackbone(BrokenAtSix()), gradient="implicit")
    x = torch.randn(1, 16, 4, requires_grad=True)
    found = []
    for length in (6, 16):
        out = layer(x[:, :length])
        out.z.sum().backward()
        assert (out.solution.adjoint.status == Status.CONVERGED).all()
        found.append(out.solution.adjoint.nfe)
    assert found[0] == found[1]


@pytest.mark.parametrize("gradient", ["phantom", "implicit"])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_token_at_which_f_overflows_leaves_the_gradients_of_parameters_correct(
    gradient: str, fixed: bool
) -> None:
    """A fixed number of iterations is checked too if there is a window."""
    convergence, window = (FixedIterations(8), 2) if fixed else (Residual(1e-2), None)
    layer = ImplicitSequenceLayer(
        ModuleBackbone(Exponential()), gradient=gradient, convergence=convergence, window=window
    )
    x = torch.randn(2, 5, 4)
    found = []
    for large in (False, True):
        x[0, 3] = 1e3 if large else 0.0  # finite, but exp overflows
        layer.zero_grad()
        out = layer(x)
        assert (out.solution.status[0, 3] == Status.NON_FINITE) == large
        (out.z[0, :3].square().sum() + out.z[1].square().sum()).backward()
        found.append([p.grad for p in layer.parameters()])
    torch.testing.assert_close(*found)


def test_a_frozen_layer_needs_no_backward_system() -> None:
    exact = ImplicitDifferentiation("picard", Residual(1e-6, max_iter=100))
    backbone, x = ModuleBackbone(Exponential()).requires_grad_(False), torch.randn(1, 4, 4)
    assert not layer_of(backbone, exact)(x).z.requires_grad
    x.requires_grad_()
    found, expected = (
        torch.autograd.grad(layer_of(backbone, gradient)(x).z.square().sum(), x)
        for gradient in (exact, Unrolled(60))
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def layer_of(backbone: Backbone, gradient: GradientStrategy) -> ImplicitSequenceLayer:
    return ImplicitSequenceLayer(backbone, gradient=gradient, convergence=Residual(1e-6, max_iter=100))


class Hidden(nn.Module):
    """A map with a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = (torch.ones(4),)

    def forward(self, u: Tensor) -> Tensor:
        return torch.tanh(u / 3 * self.hidden[0])


def test_a_tensor_that_the_map_hides_gets_its_gradient() -> None:
    module, x = Hidden(), torch.randn(1, 4, 4)
    module.hidden[0].requires_grad_()
    exact = ImplicitDifferentiation("picard", Residual(1e-6, max_iter=100))
    out = layer_of(ModuleBackbone(module), exact)(x)
    found, expected = (
        torch.autograd.grad(z.square().sum(), module.hidden)
        for z in (out.z, layer_of(ModuleBackbone(module), Unrolled(60))(x).z)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("solver", ["anderson", "broyden"])
def test_solvers_whose_coefficients_are_constants_have_no_exact_unrolled_gradient(solver: str) -> None:
    """The guide says so: if this test fails, change the guide."""
    layer = ImplicitSequenceLayer(ModuleBackbone(nn.Linear(4, 4).double()), solver, gradient=Unrolled(3))
    x = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    assert not torch.autograd.gradcheck(lambda x: layer(x).z, (x,), raise_exception=False)
    layer.train_solve = SolveOptions("picard")
    assert torch.autograd.gradcheck(lambda x: layer(x).z, (x,))


def test_a_map_that_ignores_z_has_a_gradient() -> None:
    layer = ImplicitSequenceLayer(Halved(), gradient="implicit")
    x = torch.randn(2, 3, D, requires_grad=True)
    layer(x).z.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.5))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_adjoint_stands_where_its_tokens_do(make_layer: MakeLayer, backbone: str) -> None:
    """If the loss uses only the first three tokens, the adjoint is 0 at later tokens.

    The adjoint is the solution of the backward system. Its summary leaves out padding: the share of converged
    tokens is 0 if no real token has converged.
    """
    out = make_layer(backbone, gradient=ImplicitDifferentiation())(torch.randn(2, 6, D))
    out.z[:, :3].square().sum().backward()
    adjoint = out.solution.adjoint
    assert (adjoint.z[:, 3:] == 0).all() and (adjoint.z[:, :3] != 0).any(-1).all()
    few = ImplicitDifferentiation(convergence=Residual(rtol=1e-9, max_iter=1))
    out = make_layer(backbone, gradient=few)(torch.randn(1, 8, D), torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0]]))
    with pytest.warns(RuntimeWarning, match="did not converge"):
        out.z.square().sum().backward()
    assert out.solution.adjoint.summary()["share_converged"] == 0


def test_backward_has_a_budget_of_its_own(make_layer: MakeLayer) -> None:
    """The backward solve has its own budget, so it may take more iterations than the forward search."""
    for policy in (FixedIterations(2), Residual(rtol=1e-3, max_iter=2)):
        layer = make_layer("module", gradient=ImplicitDifferentiation(), convergence=policy)
        out = layer(torch.randn(2, 6, D))
        out.z.square().sum().backward()
        assert out.solution.adjoint.nfe > 2
        assert (out.solution.adjoint.status == Status.CONVERGED).all()


def test_an_unsolved_backward_system_is_warned_of(make_layer: MakeLayer) -> None:
    few = ImplicitDifferentiation(convergence=Residual(rtol=1e-6, max_iter=2))
    out = make_layer("module", gradient=few)(torch.randn(2, 6, D))
    with pytest.warns(RuntimeWarning, match="did not converge"):
        out.z.square().sum().backward()
    assert (out.solution.adjoint.status == Status.BUDGET_EXHAUSTED).any()
    # These two policies give no warning: the first one converges, and the second one has no tolerance.
    for policy in (Residual(rtol=1e-3, max_iter=200), FixedIterations(2)):
        out = make_layer("module", gradient=ImplicitDifferentiation(convergence=policy))(torch.randn(2, 6, D))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out.z.square().sum().backward()


@pytest.mark.parametrize("gradient", ["phantom", "implicit", {"name": "unrolled", "iterations": 4}])
@pytest.mark.parametrize("backward", [True, False])
def test_memory_is_given_back_at_once(make_layer: MakeLayer, gradient: object, backward: bool) -> None:
    """The graph is freed as soon as its last reference is gone, without the garbage collector."""
    layer = make_layer("module", gradient=gradient)
    gc.collect()
    gc.disable()
    try:
        out = layer(torch.randn(2, 6, D, requires_grad=True))
        if backward:
            out.z.sum().backward()
        left = [weakref.ref(out.solution), weakref.ref(out.z)]
        del out
        assert [ref() for ref in left] == [None, None]
    finally:
        gc.enable()


def test_parameters_without_gradients(make_layer: MakeLayer) -> None:
    """With frozen weights the layer still runs. If x requires a gradient, x still gets a gradient."""
    x = torch.randn(2, 6, D)
    for gradient in ("phantom", "implicit", {"name": "unrolled", "iterations": 3}):
        layer = make_layer("mamba2", gradient=gradient)
        layer.requires_grad_(False)
        assert torch.isfinite(layer(x).z).all()
        y = x.clone().requires_grad_()
        layer(y).z.sum().backward()
        assert y.grad.any()
        assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("gradient", ["phantom", "implicit", {"name": "unrolled", "iterations": 3}])
def test_gradients_reach_an_initial_guess_only_when_unrolled(make_layer: MakeLayer, gradient: object) -> None:
    layer = make_layer("module", gradient=gradient)
    x, z0 = torch.randn(2, 6, D), torch.randn(2, 6, D, requires_grad=True)
    layer(x, z0=z0).z.sum().backward()
    assert (z0.grad is not None) == isinstance(layer.gradient, Unrolled)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_unrolled_is_the_plain_iteration(make_layer: MakeLayer, assert_close: Close, backbone: str) -> None:
    layer = make_layer(backbone, solver=Picard(damping=0.6), gradient=Unrolled(3))
    x = torch.randn(2, 6, D)
    context, z = layer.backbone.prepare(x), torch.zeros_like(x)
    for _ in range(3):
        z = z + 0.6 * (layer.backbone(z, context) - z)
    out = layer(x)
    assert_close(out.z, z, 1e-6)
    assert out.solution.nfe == 3


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_unrolled_before_truncates_the_gradient(
    make_layer: MakeLayer, assert_close: Close, backbone: str, checkpoint: bool
) -> None:
    """The layer returns the result of all five iterations. Gradients flow only through iterations 4 and 5.

    The loop in this test does the same: it detaches the iterate after three iterations.
    """
    gradient = Unrolled(2, before=3, checkpoint=checkpoint)
    layer = make_layer(backbone, solver=Picard(damping=0.6), gradient=gradient)
    x, z0 = torch.randn(2, 6, D, requires_grad=True), torch.randn(2, 6, D, requires_grad=True)
    context, z = layer.backbone.prepare(x), z0
    for step in range(5):
        z = z.detach() if step == 3 else z
        z = z + 0.6 * (layer.backbone(z, context) - z)
    out = layer(x, z0=z0)
    assert_close(out.z, z, 1e-6)
    assert out.solution.nfe == 5 and (out.solution.iterations == 5).all()
    wanted = [x, *layer.parameters()]
    expected = torch.autograd.grad(z.square().sum(), wanted)
    for a, b in zip(torch.autograd.grad(out.z.square().sum(), wanted), expected, strict=True):
        assert_close(a, b, 1e-5)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(layer(x, z0=z0).z.sum(), x, create_graph=True)
    layer(x, z0=z0).z.sum().backward()
    assert z0.grad is None


def test_unrolled_draws_the_number_of_steps_before(make_layer: MakeLayer) -> None:
    """In training, every number of the range occurs, and the result is that of the drawn number."""
    x = torch.randn(2, 6, D)
    layer = make_layer("module", gradient={"name": "unrolled", "iterations": 2, "before": [1, 3]})
    torch.manual_seed(0)
    found = [layer(x) for _ in range(30)]
    assert {out.solution.nfe for out in found} == {3, 4, 5}
    torch.manual_seed(0)
    assert [layer(x).solution.nfe for _ in range(30)] == [out.solution.nfe for out in found]
    for out in found[:5]:
        layer.gradient = Unrolled(2, before=out.solution.nfe - 2)
        assert torch.equal(layer(x).z, out.z)
    layer.gradient = Unrolled(2, before=(0, 3))
    with pytest.raises(RuntimeError, match="second derivative"):  # also if the number happens to be 0
        torch.autograd.grad(layer(x).z.sum(), list(layer.parameters()), create_graph=True)
    layer.eval()
    assert {layer(x).solution.nfe for _ in range(5)} == {5}


def test_ranks_of_a_group_must_not_draw_numbers(make_layer: MakeLayer) -> None:
    layer = make_layer("module", gradient=Unrolled(2, before=(0, 3)))
    layer.group = object()
    with pytest.raises(ValueError, match=r"the same number of iterations, got before=\(0, 3\)"):
        layer(torch.randn(2, 6, D))


@pytest.mark.parametrize("policy", [FixedIterations(3), Residual(rtol=0.05)])
def test_phantom_steps_follow_the_search(make_layer: MakeLayer, assert_close: Close, policy: object) -> None:
    layer = make_layer("mamba2", gradient=Phantom(steps=2, damping=0.8), convergence=policy)
    x = torch.randn(2, 6, D)
    with torch.no_grad():
        found = layer(x)
        z, context = found.z, layer.backbone.prepare(x)
        for _ in range(2):
            z = 0.2 * z + 0.8 * layer.backbone(z, context)
    out = layer(x)
    assert_close(out.z, z, 1e-5)
    assert out.solution.nfe == found.solution.nfe + 2
    assert torch.equal(out.solution.residual, found.solution.residual)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Phantom(steps=0),
        lambda: Phantom(damping=0.0),
        lambda: Phantom(damping=1.5),
        lambda: Unrolled(0),
        lambda: Unrolled(2.5),
        lambda: Unrolled(2, before=-1),
        lambda: ImplicitDifferentiation(solver="newtom"),
        lambda: ImplicitDifferentiation(convergence={"name": "residual", "rtol": -1}),
    ],
)
def test_wrong_options(wrong: Callable[[], GradientStrategy]) -> None:
    with pytest.raises(ValueError, match=r"0|1\.5|2\.5|newtom|-1"):
        wrong()


def test_backbone_hooks_see_gradients(make_layer: MakeLayer) -> None:
    """Every parameter's gradient hook fires once per backward pass, as DDP requires."""
    layer = make_layer("mamba2", gradient="implicit")
    fired: dict[str, int] = {}
    for name, parameter in layer.named_parameters():

        def hook(_: Tensor, name: str = name) -> None:
            fired[name] = fired.get(name, 0) + 1

        parameter.register_post_accumulate_grad_hook(hook)
    layer(torch.randn(2, 6, D)).z.square().sum().backward()
    assert fired == {name: 1 for name, _ in layer.named_parameters()}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_backbones_are_pure(make_layer: MakeLayer, backbone: str) -> None:
    f = make_layer(backbone).backbone
    x, z = torch.randn(2, 6, D), torch.randn(2, 6, D)
    context = f.prepare(x)
    first = f(z, context)
    assert torch.equal(f(z, context), first)


@pytest.mark.parametrize(
    "policy", [Residual(rtol=0.3, max_iter=8), FixedIterations(2)], ids=["residual", "fixed"]
)
@pytest.mark.parametrize("gradient", [Phantom(4, 0.8), ImplicitDifferentiation(solver="anderson")])
def test_evaluation_has_the_value_of_the_search(
    make_layer: MakeLayer, assert_close: Close, gradient: GradientStrategy, policy: ConvergencePolicy
) -> None:
    """In evaluation mode, the strategy changes the gradient only."""
    layer = make_layer("mamba2", gradient=gradient, convergence=policy).eval()
    x = torch.randn(2, 8, 16, requires_grad=True)
    with torch.no_grad():
        expected = layer(x).z
    found = layer(x).z
    assert torch.equal(found, expected)
    trained = layer.train()(x).z
    assert not torch.equal(trained, expected)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((z * weight).sum(), x)[0] for z in (found, trained)]
    assert_close(*gradients, 1e-6)
