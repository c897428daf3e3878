"""The recursion backbone: z consists of two latents (high and low), which one map updates in turn."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deqseq import Backbone, FixedIterations, ImplicitSequenceLayer, Residual, SolveOptions, Status
from deqseq.backbone import backbones
from deqseq.backbones import LlamaBackbone, ModuleBackbone, RecursionBackbone
from deqseq.gradients import ImplicitDifferentiation, Phantom, Unrolled

D, L = 8, 6
MIXER = {"name": "mixer", "d_model": D, "n_layer": 1, "tokens": L}
LLAMA = {"name": "llama", "d_model": D, "n_layer": 1, "n_head": 2, "causal": False, "post_norm": True}
TIGHT = Residual(rtol=1e-5, max_iter=100)


def recursion(map: Any = MIXER, contractive: bool = False, **options: Any) -> RecursionBackbone:
    """A small recursion. ``contractive``: shrink the map's norm weights; the iteration then converges."""
    made = RecursionBackbone(map, **{"updates": 2, **options})
    if contractive:
        with torch.no_grad():
            for block in made.map.layers:
                block.norm.weight.mul_(0.3)
                block.norm2.weight.mul_(0.1)
    return made


@pytest.mark.parametrize("map", [MIXER, LLAMA, {**LLAMA, "causal": True, "post_norm": False}])
@torch.no_grad()
def test_against_a_hand_written_round(map: dict[str, Any]) -> None:
    f = recursion(map, updates=3, damping=0.7).double()
    assert f.d_model == 2 * D
    z, x = torch.randn(2, 2, L, 2 * D, dtype=torch.float64)
    context = f.map.prepare(x[..., :D])
    (high, low), (x_high, x_low) = z.split(D, -1), x.split(D, -1)
    for _ in range(3):
        low = 0.3 * low + 0.7 * f.map(low + high + x_low, context)
    high = 0.3 * high + 0.7 * f.map(high + low + x_high, context)
    found, trace = f.evaluate(z, f.prepare(x))
    assert trace is None
    torch.testing.assert_close(found, torch.cat([high, low], -1), rtol=1e-9, atol=1e-9)


def test_gradients_of_one_evaluation(fold_on_gpu: Callable[[Backbone], Backbone]) -> None:
    map = {**MIXER, "d_model": 2, "tokens": 2, "d_inner": 3, "tokens_inner": 2}
    f = fold_on_gpu(recursion(map).double())
    z, x = torch.randn(2, 1, 2, 4, dtype=torch.float64)
    tensors = (z.requires_grad_(), x.requires_grad_(), *f.parameters())
    assert torch.autograd.gradcheck(lambda *_: f(z, f.prepare(x)), tensors)


def test_a_new_wide_mixer_is_not_chaotic() -> None:
    """Nearby iterates come closer in a round, and the round's gradients stay of the size of its output's."""
    torch.manual_seed(0)
    mixer = {"name": "mixer", "d_model": 256, "n_layer": 2, "tokens": 81, "weight_norm": False}
    f = RecursionBackbone(mixer, updates=6, damping=0.95)
    x, z, step, direction = torch.randn(4, 1, 81, 512)
    context = f.prepare(x)
    z.requires_grad_()
    near = f(z.detach() + 1e-3 * step, context)
    out = f(z, context)
    assert (near - out).norm() < (1e-3 * step).norm()
    (out * direction).sum().backward()
    assert z.grad is not None and z.grad.norm() < direction.norm()


@pytest.mark.parametrize("solver", ["picard", "anderson", {"name": "anderson", "scope": "sequence"}], ids=str)
@pytest.mark.parametrize("map", [MIXER, LLAMA], ids=["mixer", "llama"])
def test_the_layer_finds_the_fixed_point(solver: Any, map: dict[str, Any]) -> None:
    f = recursion(map, contractive=True)
    layer = ImplicitSequenceLayer(f, solver=solver, convergence=TIGHT)
    x = torch.randn(2, L, 2 * D)
    out = layer(x)
    assert (out.solution.status == Status.CONVERGED).all()
    torch.testing.assert_close(out.z, f(out.z, f.prepare(x)), rtol=1e-3, atol=1e-5)
    (high, low), (x_high, x_low) = out.z.split(D, -1), x.split(D, -1)
    context = f.map.prepare(x_low)
    torch.testing.assert_close(low, f.map(low + high + x_low, context), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(high, f.map(high + low + x_high, context), rtol=1e-3, atol=1e-4)


def test_implicit_gradients_equal_finite_differences() -> None:
    layer = ImplicitSequenceLayer(
        recursion(contractive=True), gradient=ImplicitDifferentiation(convergence=Residual(rtol=1e-9)),
        convergence=Residual(rtol=1e-10, max_iter=200),
    ).double()  # fmt: skip
    x, weight, direction = torch.randn(3, 1, L, 2 * D, dtype=torch.float64)
    (found,) = torch.autograd.grad((layer(x.requires_grad_()).z * weight).sum(), [x])
    with torch.no_grad():
        ahead, behind = (layer(x + step * direction).z for step in (1e-5, -1e-5))
    expected = ((ahead - behind) * weight).sum() / 2e-5
    torch.testing.assert_close((found * direction).sum(), expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_noise_only_in_training() -> None:
    f = recursion(updates=1, noise=0.1)
    z, x = torch.randn(2, 2, L, 2 * D)
    quiet = f.eval()(z, f.prepare(x))
    assert torch.equal(quiet, f(z, f.prepare(x)))
    torch.manual_seed(7)
    noisy = f.train()(z, f.prepare(x))
    torch.manual_seed(7)
    torch.testing.assert_close(noisy[..., D:], quiet[..., D:] + 0.1 * torch.randn(2, L, D))
    assert not torch.isclose(noisy[..., :D], quiet[..., :D]).all(-1).any()
    f.noise = 0.0
    assert torch.equal(f(z, f.prepare(x)), quiet)


@torch.no_grad()
def test_padding_and_other_sequences_change_nothing() -> None:
    layer = ImplicitSequenceLayer(recursion(LLAMA, contractive=True), convergence=TIGHT).eval()
    x, mask = torch.randn(3, L, 2 * D), torch.ones(3, L, dtype=torch.bool)
    mask[1, 4:] = False
    mask[2, :3] = False
    out = layer(x, attention_mask=mask).z
    for row in range(3):
        alone = layer(x[row : row + 1, mask[row]]).z[0]
        torch.testing.assert_close(out[row, mask[row]], alone, rtol=1e-4, atol=1e-5)
    other = x.clone()
    other[0] = torch.randn(L, 2 * D)
    assert torch.equal(layer(other, attention_mask=mask).z[1:], out[1:])


@torch.no_grad()
def test_positions_reach_the_map_which_is_prepared_once() -> None:
    f = recursion(LLAMA, updates=4)
    seen = []
    prepare = f.map.prepare
    f.map.prepare = lambda x, positions=None: seen.append(positions) or prepare(x, positions)
    layer = ImplicitSequenceLayer(f, convergence=FixedIterations(3)).eval()
    positions = 2 * torch.arange(L).expand(1, L)
    x = torch.randn(1, L, 2 * D)
    stretched = layer(x, position_ids=positions).z
    assert len(seen) == 1 and torch.equal(seen[0], positions)
    assert not torch.allclose(layer(x).z, stretched)


@torch.no_grad()
def test_settled_sequences_can_leave_the_batch() -> None:
    f = recursion(LLAMA, contractive=True)
    x, mask = torch.randn(3, L, 2 * D), torch.ones(3, L, dtype=torch.bool)
    mask[1, 2:] = False
    z0 = torch.randn(3, L, 2 * D)
    z0[:2] = ImplicitSequenceLayer(f, convergence=TIGHT).eval()(x, mask).z[:2]  # two start at their solution
    whole, compact = (
        ImplicitSequenceLayer(f, convergence=TIGHT, compact=compact).eval()(x, mask, z0=z0).z
        for compact in (False, True)
    )
    torch.testing.assert_close(compact, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("map", [MIXER, LLAMA], ids=["mixer", "llama"])
def test_the_compiled_round_equals_the_plain_one(
    map: dict[str, Any], counting: Any, unset_default_device: Callable[[], None]
) -> None:
    """A compiled backbone gives the same results, and every evaluation runs the compiled code.

    The compilation has no graph breaks. A copy of the layer does not run the compiled code.
    """
    layer = ImplicitSequenceLayer(recursion(map, contractive=True), gradient=Phantom(2), convergence=TIGHT)
    x = torch.randn(2, L, 2 * D, requires_grad=True)
    tensors = [x, *layer.parameters()]

    def run(layer: ImplicitSequenceLayer) -> list[Tensor]:
        out = layer(x)
        return [out.z, *torch.autograd.grad(out.z.square().sum(), tensors)]

    expected = run(layer)
    layer.backbone.compile(backend=counting, fullgraph=True)
    unset_default_device()
    for found, value in zip(run(layer), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
    before = counting.runs
    evaluations = layer(x).solution.nfe
    assert counting.runs == before + evaluations
    copy.deepcopy(layer)(x)
    assert counting.runs == before + evaluations


def test_the_recursion_is_causal_if_its_map_is() -> None:
    causal = recursion({**LLAMA, "causal": True, "post_norm": False}, contractive=True)
    assert causal.causal and not recursion().causal and not causal.keeps_state
    layer = ImplicitSequenceLayer(causal, convergence=FixedIterations(4)).eval()
    x = torch.randn(1, L, 2 * D)
    changed = x.clone()
    changed[0, L - 1] += 1
    with torch.no_grad():
        assert torch.equal(layer(x).z[:, : L - 1], layer(changed).z[:, : L - 1])
        with pytest.raises(ValueError, match="RecursionBackbone keeps no state"):
            layer(x, solve=SolveOptions(window=2))


def test_a_map_is_an_object_or_a_mapping() -> None:
    made = backbones.create({"name": "recursion", "map": MIXER, "updates": 3})
    assert isinstance(made, RecursionBackbone) and not made.map.injects and made.updates == 3
    assert "injection" not in MIXER
    map = LlamaBackbone(d_model=D, n_layer=1, n_head=2, injection=False)
    assert RecursionBackbone(map).map is map
    assert {name.split(".")[0] for name in made.state_dict()} == {"map"}


def test_refusals() -> None:
    injecting = "map must have injection=False, got MixerBackbone with injection"
    for map, said in (
        ({**MIXER, "injection": True}, injecting),
        (ModuleBackbone(torch.nn.Identity()), "got ModuleBackbone with injection"),
        ({"d_model": D}, "a backbone given as a mapping needs a 'name'"),
        (3, "backbone must be a Backbone, a name or a mapping, got 3"),
    ):
        with pytest.raises(ValueError, match=said):
            RecursionBackbone(map)
    for options, said in (
        ({"updates": 0}, "updates must be a whole number >= 1, got 0"),
        ({"damping": 1.5}, r"damping must be in \(0, 1\], got 1.5"),
        ({"damping": 0.0}, r"damping must be in \(0, 1\], got 0.0"),
        ({"noise": -1.0}, "noise must be a finite number >= 0, got -1.0"),
        ({"noise": float("nan")}, "noise must be a finite number >= 0, got nan"),
    ):
        with pytest.raises(ValueError, match=said):
            RecursionBackbone(MIXER, **options)
    layer, x = ImplicitSequenceLayer(recursion()), torch.randn(1, L, 2 * D)
    with pytest.raises(ValueError, match="MixerBackbone is not causal and cannot hide padding"):
        layer(x, attention_mask=torch.tensor([[1] * 5 + [0]]))
    with pytest.raises(ValueError, match="x must have the mixer's 6 tokens, got 5"):
        layer(x[:, :5])
    with pytest.raises(ValueError, match=r"x has width 8, but the backbone's d_model is 16"):
        layer(x[..., :D])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_rounds_as_cuda_graphs() -> None:
    """Later evaluations leave the results of earlier ones as they are. Results and gradients are right."""
    layer = ImplicitSequenceLayer(
        recursion(MIXER, contractive=True), gradient=Unrolled(2), convergence=FixedIterations(3)
    ).cuda()
    x = torch.randn(2, L, 2 * D, device="cuda", requires_grad=True)
    parameters = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def run() -> list[Tensor]:
        found: list[Tensor] = []
        for training in (True, False, True):
            z = layer.train(training)(x).z
            if training:
                found += torch.autograd.grad(z.square().sum(), parameters)
            with torch.no_grad():
                found += [z.detach(), layer(x).z]
        return found

    expected = run()
    layer.backbone.compile(mode="reduce-overhead")
    for found, value in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)
