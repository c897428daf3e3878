"""Tests of the mixer, a backbone whose blocks mix tokens, then channels."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqseq import Backbone, ExplicitSequenceLayer, ImplicitSequenceLayer, Residual, SolveOptions, Status
from deqseq.backbone import backbones
from deqseq.backbones import MixerBackbone, RecursionBackbone
from deqseq.solvers import Anderson

D, L = 8, 6


def mixer(**options: Any) -> MixerBackbone:
    return MixerBackbone(**{"d_model": D, "n_layer": 2, "tokens": L, **options})


def contraction() -> MixerBackbone:
    """A mixer whose map is a contraction: small RMSNorm weights and a large injection."""
    made = mixer(n_layer=1)
    with torch.no_grad():
        for norm in (made.layers[0].norm, made.layers[0].norm2):
            norm.weight.mul_(0.1)
        made.layers[0].mlp.fc2.weight = 3 * made.layers[0].mlp.fc2.weight
        made.injection.linear.weight = 3 * made.injection.linear.weight
    return made


def rms(u: Tensor, norm: nn.RMSNorm) -> Tensor:
    return u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


def swiglu(u: Tensor, mlp: Any) -> Tensor:
    return mlp.fc2(F.silu(mlp.w1(u)) * mlp.w3(u))


def mixed(u: Tensor, mlp: Any) -> Tensor:
    out = swiglu(u.mT, mlp).mT
    return out / (out.square().mean(-1, keepdim=True) + 1).sqrt()


@pytest.mark.parametrize("post_norm", [True, False])
@pytest.mark.parametrize("options", [{}, {"injection": False}, {"input_skip": True}], ids=str)
@torch.no_grad()
def test_against_the_equations(post_norm: bool, options: dict[str, bool]) -> None:
    f = mixer(post_norm=post_norm, weight_norm=False, **options).double()
    for parameter in f.parameters():  # add noise, because a weight of exactly 1 or 0 hides errors
        parameter.add_(0.3 * torch.randn_like(parameter))
    z, x = torch.randn(2, 3, L, D, dtype=torch.float64)
    u = f.input_skip.gain * z + x if f.input_skip else z
    injection = f.injection.linear(rms(x, f.injection.norm)) if f.injection else 0
    for block in f.layers:
        if post_norm:
            u = rms(u + mixed(u + injection, block.mixer), block.norm)
            u = rms(u + swiglu(u, block.mlp), block.norm2)
        else:
            u = u + mixed(rms(u, block.norm) + injection, block.mixer)
            u = u + swiglu(rms(u, block.norm2), block.mlp)
    expected = u if post_norm else rms(u, f.norm_f)
    torch.testing.assert_close(f(z, f.prepare(x)), expected, rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_a_convolution_against_the_equations() -> None:
    side, reach = 4, 1
    f = mixer(tokens=side * side, kernel=2 * reach + 1, n_layer=1, weight_norm=False).double()
    (block,) = f.layers
    z, x = torch.randn(2, 1, side * side, D, dtype=torch.float64)
    board = (z + f.injection.linear(rms(x, f.injection.norm))).view(side, side, D)
    weights = block.mixer.window.movedim(-1, 0)
    sums = torch.zeros(side, side, D, 2, dtype=torch.float64)
    for i, j, di, dj in itertools.product(range(side), range(side), (-1, 0, 1), (-1, 0, 1)):
        if 0 <= i + di < side and 0 <= j + dj < side:
            sums[i, j] += board[i + di, j + dj, :, None] * weights[:, di + reach, dj + reach]
    out = (sums[..., 0] * F.silu(sums[..., 1])).view(1, side * side, D)
    u = rms(z + out / (out.square().mean(-1, keepdim=True) + 1).sqrt(), block.norm)
    expected = rms(u + swiglu(u, block.mlp), block.norm2)
    torch.testing.assert_close(f(z, f.prepare(x)), expected, rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_a_convolution_sees_neighbours_only() -> None:
    f = mixer(tokens=49, kernel=3, n_layer=1)
    z, x = torch.randn(2, 1, 49, D)
    before = f(z, f.prepare(x))
    z[0, 24] += 1  # the cell in the middle
    changed = (f(z, f.prepare(x)) != before).any(-1).view(7, 7)
    expected = torch.zeros(7, 7, dtype=torch.bool)
    expected[2:5, 2:5] = True
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("options", [{}, {"kernel": 3}], ids=str)
@torch.no_grad()
def test_equal_tokens_are_no_fixed_point_even_with_large_weights(options: dict[str, int]) -> None:
    map_ = mixer(n_layer=1, tokens=9, weight_norm=False, injection=False, **options)
    f = RecursionBackbone(map_, updates=2)
    for weight in f.map.layers[0].mixer.parameters():  # trained weights have large outputs for equal tokens
        weight.abs_().mul_(100)
    x = torch.randn(1, 9, 2 * D)
    z = torch.randn(1, 1, 2 * D).expand(1, 9, -1)
    for _ in range(8):
        z = f(z, f.prepare(x))
    assert z.std(1).mean() > 0.2


def test_norms_without_gains_keep_the_size_of_tokens() -> None:
    layer = ImplicitSequenceLayer(mixer(norm_gain=False), convergence=Residual(0.05, max_iter=4))
    optimiser = torch.optim.SGD(layer.parameters(), 0.5)
    before = layer.backbone.layers[0].mlp.fc2.weight.detach().clone()
    layer(torch.randn(3, L, D)).z[..., 0].sum().backward()
    optimiser.step()
    assert not torch.equal(layer.backbone.layers[0].mlp.fc2.weight, before)
    f, (z, x) = layer.backbone, torch.randn(2, 3, L, D)
    sizes = f(z, f.prepare(x)).square().mean(-1)
    torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "options",
    [{"tokens_inner": 2}, {"tokens_inner": 2, "post_norm": False}, {"kernel": 3}],
    ids=str,
)
def test_gradients_of_one_evaluation(fold_on_gpu: Callable[[Backbone], Backbone], options: Any) -> None:
    f = mixer(d_model=3, tokens=4, n_layer=1, d_inner=3, **options).double()
    fold_on_gpu(f)
    z, x = torch.randn(2, 1, 4, 3, dtype=torch.float64)
    tensors = (z.requires_grad_(), x.requires_grad_(), *f.parameters())
    assert torch.autograd.gradcheck(lambda *_: f(z, f.prepare(x)), tensors)


@torch.no_grad()
def test_sequences_are_independent_and_tokens_are_not() -> None:
    f = mixer()
    z, x = torch.randn(2, 3, L, D)
    before = f(z, f.prepare(x))
    torch.testing.assert_close(f(z[1:2], f.prepare(x[1:2])), before[1:2])
    z[0, L - 1] += 1
    after = f(z, f.prepare(x))
    assert torch.equal(after[1:], before[1:])
    assert not torch.isclose(after[0], before[0]).all(-1).any()


@pytest.mark.parametrize("solver", ["picard", "anderson", Anderson(scope="sequence")], ids=str)
def test_the_layer_finds_the_fixed_point(solver: Any) -> None:
    f = contraction()
    layer = ImplicitSequenceLayer(f, solver=solver, convergence=Residual(rtol=1e-5, max_iter=100))
    x = torch.randn(2, L, D)
    out = layer(x)
    assert (out.solution.status == Status.CONVERGED).all()
    torch.testing.assert_close(out.z, f(out.z, f.prepare(x)), rtol=1e-3, atol=1e-5)
    out.z.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in f.parameters())


@torch.no_grad()
def test_initial_weights_and_widths() -> None:
    f = mixer(d_model=64, tokens=81)
    for name, module in f.named_modules():
        if isinstance(module, nn.Linear):
            size = 0.1 if name.endswith("fc2") else 1.0
            assert module.weight.std().item() == pytest.approx(size * module.in_features**-0.5, rel=0.1), name
    convolution = mixer(d_model=512, tokens=81, kernel=3).layers[0].mixer
    assert convolution.window.std().item() == pytest.approx(0.3 / 3, rel=0.1)
    assert f.layers[0].mixer.w1.out_features == 216  # 2/3 of 4 * 81
    assert f.layers[0].mlp.w1.out_features == 170  # 2/3 of 4 * 64, rounded down
    assert mixer(tokens_inner=2).layers[0].mixer.w1.out_features == 8
    torch.manual_seed(3)
    normalised = mixer()
    torch.manual_seed(3)
    plain = mixer(weight_norm=False)
    z, x = torch.randn(2, 2, L, D)
    torch.testing.assert_close(normalised(z, normalised.prepare(x)), plain(z, plain.prepare(x)))


def test_adapters_in_the_token_mixer_are_found() -> None:
    f = mixer(weight_norm=False)
    assert f.capturable
    adapter = nn.Module()
    adapter.base_layer = f.layers[1].mixer.w3
    f.layers[1].mixer.w3 = adapter
    assert not f.capturable


def test_autocast_casts_the_weights_once() -> None:
    f = mixer()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        weights = f.prepare(torch.randn(1, L, D)).shared.weights
    assert {t.dtype for block in weights for part in block for t in part} == {torch.bfloat16}


def test_the_explicit_twin() -> None:
    f = mixer(injection=False)
    x = torch.randn(2, L, D)
    torch.testing.assert_close(ExplicitSequenceLayer(f)(x).z, f(x, f.prepare(x)))


def test_wrong_inputs() -> None:
    f = mixer()
    layer = ImplicitSequenceLayer(f)
    with pytest.raises(ValueError, match="x must have the mixer's 6 tokens, got 5"):
        layer(torch.randn(1, 5, D))
    x = torch.randn(2, L, D)
    with pytest.raises(ValueError, match="MixerBackbone is not causal and cannot hide padding"):
        layer(x, attention_mask=torch.tensor([[1] * L, [1] * 4 + [0] * 2]))
    with pytest.raises(ValueError, match="a window needs a causal backbone"):
        layer(x, solve=SolveOptions(window=2))
    assert not f.keeps_state
    with pytest.raises(ValueError, match="MixerBackbone keeps no state"):
        f.initial_state(2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokens": 0}, "tokens must be a whole number >= 1, got 0"),
        ({"n_layer": 0}, "n_layer must be a whole number >= 1, got 0"),
        ({"d_inner": 1}, "d_inner must be at least 2, got 1"),
        ({"tokens_inner": 1}, "tokens_inner must be at least 2, got 1"),
        ({"post_norm": "no"}, "post_norm must be true or false, got 'no'"),
        ({"norm_gain": 2}, "norm_gain must be true or false, got 2"),
        ({"norm_eps": 0.0}, "norm_eps must be a finite number above 0, got 0.0"),
        ({"input_skip": True, "injection": False}, "input_skip needs injection=True"),
        ({"kernel": 2, "tokens": 9}, "kernel must be an odd number >= 3, got 2"),
        ({"kernel": 1, "tokens": 9}, "kernel must be an odd number >= 3, got 1"),
        ({"kernel": 3}, "a mixer with a kernel needs a square number of tokens, got 6"),
        ({"kernel": 0}, "kernel must be a whole number >= 1, got 0"),
        ({"kernel": 3, "tokens": 9, "tokens_inner": 8}, "a mixer with a kernel has no tokens_inner, got 8"),
    ],
)
def test_wrong_options(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        backbones.create({"name": "mixer", "d_model": D, "n_layer": 1, "tokens": L, **options})
