"""A sequence's result does not depend on the other sequences in its batch or on padding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deqseq import Backbone, ExplicitSequenceLayer, ImplicitSequenceLayer, Residual, Status
from deqseq.inputs import Packing, sequence_starts

MakeLayer = Callable[..., ImplicitSequenceLayer]
MakeBackbone = Callable[..., Backbone]
Close = Callable[..., None]

BACKBONES = ["mamba2", "llama", "module"]
WINDOWS = [None, 3, 1]
MASKS = {
    "left": [0, 0, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 0, 0],
    "middle": [1, 0, 1, 0, 1, 0],
}


def test_packing_moves_real_tokens_to_the_front_and_back() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    packing = Packing.of(mask)
    values = torch.arange(15.0).view(3, 5, 1)
    packed = packing.pack(values)
    assert packing.lengths.tolist() == [3, 5, 0]
    assert packed[0, :3, 0].tolist() == [1, 3, 4] and torch.equal(packed[1], values[1])
    assert torch.equal(packing.unpack(packed), values * mask[..., None])
    assert packing.unpack(packed, padding=-1)[2].eq(-1).all()


def test_packing_takes_several_sequences_of_a_row_apart() -> None:
    real = torch.tensor([[0, 1, 1, 1, 1], [1, 0, 1, 1, 0]]).bool()
    position = torch.tensor([[7, 0, 1, 0, 1], [4, 9, 5, 0, 0]])
    starts = sequence_starts(position, real)
    assert starts is not None
    assert starts.nonzero().tolist() == [[0, 1], [0, 3], [1, 0], [1, 3]]
    packing = Packing.of_packed(real, starts)
    values = torch.arange(10.0).view(2, 5, 1)
    packed = packing.pack(values)[..., 0]
    assert packing.lengths.tolist() == [2, 2, 2, 1]
    assert packed[:, 0].tolist() == [1, 3, 5, 8] and packed[:3, 1].tolist() == [2, 4, 7]
    assert torch.equal(packing.unpack(packing.pack(values)), values * real[..., None])
    assert sequence_starts(position[:, :3], real[:, :3]) is None


@pytest.mark.parametrize("wrong", [-1e9, float("nan"), -10000])
def test_additive_masks_are_refused(make_layer: MakeLayer, wrong: float) -> None:
    mask = torch.zeros(2, 5, dtype=torch.int64 if isinstance(wrong, int) else torch.float32)
    mask[0, :2] = wrong
    with pytest.raises(ValueError, match="additive"):
        make_layer("llama")(torch.randn(2, 5, 16), attention_mask=mask)


def padded_batch(mask: str, fill: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a batch x (3, 6, 16), its attention mask, and sequence 1 of x without padding.

    Only sequence 1 has padding; all its padding values are ``fill``.
    """
    x = torch.randn(3, 6, 16)
    attention_mask = torch.ones(3, 6, dtype=torch.int64)
    attention_mask[1] = torch.tensor(MASKS[mask])
    real = attention_mask[1].bool()
    alone = x[1:2, real].clone()
    x[1, ~real] = fill
    return x, attention_mask, alone


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_padded_in_a_batch_equals_alone(
    make_layer: MakeLayer, assert_close: Close, backbone: str, solver: str, window: int | None, mask: str
) -> None:
    layer = make_layer(backbone, solver=solver, window=window).eval()
    x, attention_mask, alone = padded_batch(mask, fill=100.0)
    real = attention_mask[1].bool()
    with torch.no_grad():
        out = layer(x, attention_mask)
        expected = layer(alone)
        others = layer(x[[0, 2]])
    assert_close(out.z[1:2, real], expected.z, 1e-5)
    assert_close(out.z[[0, 2]], others.z, 1e-5)
    for name in ("iterations", "status"):
        actual = getattr(out.solution, name)
        assert torch.equal(actual[1:2, real], getattr(expected.solution, name))
        assert torch.equal(actual[[0, 2]], getattr(others.solution, name))
    assert_close(out.solution.residual[1:2, real], expected.solution.residual, 1e-4)
    assert not out.z[1, ~real].any()
    assert not out.solution.residual[1, ~real].any()
    assert not out.solution.iterations[1, ~real].any()


@pytest.mark.parametrize("mask", ["left", "middle"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_padding_with_carried_state(
    make_layer: MakeLayer, assert_close: Close, backbone: str, window: int | None, mask: str
) -> None:
    layer = make_layer(backbone, window=window, convergence=Residual(rtol=1e-6, max_iter=200)).eval()
    x, attention_mask, alone = padded_batch(mask, fill=100.0)
    real = attention_mask[1].bool()
    then = torch.randn(3, 2, 16)
    with torch.no_grad():
        first = layer(x, attention_mask, state=layer.backbone.initial_state(3))
        second = layer(then, state=first.state)
        whole = layer(torch.cat([alone, then[1:2]], 1))
        whole_other = layer(torch.cat([x, then], 1)[[0, 2]])
    assert first.state.seen.tolist() == [6, int(real.sum()), 6]
    assert_close(first.z[1:2, real], whole.z[:, :-2], 1e-5)
    assert_close(second.z[1:2], whole.z[:, -2:], 1e-5)
    assert_close(second.z[[0, 2]], whole_other.z[:, -2:], 1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("gradient", ["phantom", "implicit", {"name": "unrolled", "iterations": 6}])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_gradients_with_padding(
    make_layer: MakeLayer,
    assert_close: Close,
    gradients_of: Callable[..., list[Tensor]],
    backbone: str,
    gradient: object,
    mask: str,
) -> None:
    layer = make_layer(
        backbone, gradient=gradient, convergence=Residual(rtol=1e-7, max_iter=100), dtype=torch.float64
    )
    x, attention_mask, alone = padded_batch(mask, fill=100.0)
    x, alone = x.double(), alone.double()
    real = attention_mask[1].bool()
    weight = torch.randn_like(x)
    # The loss includes padding tokens. They add nothing, because their z is always 0.
    together = gradients_of(layer, x, weight, attention_mask=attention_mask)
    parts = [
        gradients_of(layer, x[[0, 2]], weight[[0, 2]]),
        gradients_of(layer, alone, weight[1:2, real]),
    ]
    assert not together[0][1, ~real].any()
    assert_close(together[0][[0, 2]], parts[0][0], 1e-3)
    assert_close(together[0][1:2, real], parts[1][0], 1e-3)
    for actual, a, b in zip(together[1:], parts[0][1:], parts[1][1:], strict=True):
        assert_close(actual, a + b, 1e-3)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_nan_at_padding_does_not_matter(
    make_layer: MakeLayer, assert_close: Close, backbone: str, window: int | None
) -> None:
    """NaN at padding must not change the results: an uninitialised buffer may contain NaN."""
    layer = make_layer(backbone, window=window).eval()
    x, attention_mask, alone = padded_batch("left", fill=torch.nan)
    real = attention_mask[1].bool()
    with torch.no_grad():
        out = layer(x, attention_mask)
        assert_close(out.z[1:2, real], layer(alone).z, 1e-5)
    assert (out.solution.status == Status.CONVERGED).all()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_only_padding(make_layer: MakeLayer, backbone: str, window: int | None) -> None:
    layer = make_layer(backbone, solver="anderson", window=window)
    x = torch.randn(2, 6, 16)
    attention_mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    state = layer.backbone.initial_state(2)
    out = layer(x, attention_mask, state=state)
    assert not out.z[1].any() and torch.isfinite(out.z).all()
    assert out.state.seen.tolist() == [6, 0]
    out.z.sum().backward()
    nothing = layer.eval()(x, torch.zeros(2, 6))
    assert not nothing.z.any() and not nothing.solution.iterations.any()
    assert nothing.solution.nfe >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 2, 1])
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_slow_batch_mates(
    make_layer: MakeLayer,
    assert_close: Close,
    backbone: str,
    solver: str,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    exact = dtype is torch.float64
    convergence = Residual(rtol=0.05 if exact else 1e-6, max_iter=200)
    layer = make_layer(backbone, solver=solver, window=window, dtype=dtype, convergence=convergence).eval()
    x = torch.randn(2, 3, 16, dtype=dtype)
    z0 = torch.randn(2, 3, 16, dtype=dtype)
    with torch.no_grad():
        z0[0] = layer(x[:1], window=1).z[0]  # sequence 0 starts at its solution
        z0[1] *= 10 if exact else 1000
        out = layer(x, z0=z0)
        for i in range(2):
            alone = layer(x[i : i + 1], z0=z0[i : i + 1])
            assert_close(out.z[i : i + 1], alone.z, 1e-5)
            if exact:  # in float32, rounding depends on the batch size and can change iterations
                assert torch.equal(out.solution.iterations[i : i + 1], alone.solution.iterations)
    assert out.solution.iterations[0].sum() < out.solution.iterations[1].sum()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_non_finite_sequence_leaves_the_others_right(
    make_layer: MakeLayer, assert_close: Close, backbone: str, solver: str, window: int | None, value: float
) -> None:
    layer = make_layer(backbone, solver=solver, window=window).eval()
    x = torch.randn(3, 5, 16)
    x[1, 3] = value
    with torch.no_grad():
        out = layer(x)
        others = layer(x[[0, 2]])
    assert torch.isfinite(out.z[[0, 2]]).all()
    assert_close(out.z[[0, 2]], others.z, 1e-5)
    assert (out.solution.status[[0, 2]] == Status.CONVERGED).all()
    assert torch.equal(out.solution.iterations[[0, 2]], others.solution.iterations)
    assert (out.solution.status[1, 3:] == Status.NON_FINITE).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_explicit_layer_with_padding(
    make_backbone: MakeBackbone, assert_close: Close, name: str, mask: str
) -> None:
    layer = ExplicitSequenceLayer(make_backbone(name, injection=False))
    x, attention_mask, alone = padded_batch(mask, fill=100.0)
    real = attention_mask[1].bool()
    with torch.no_grad():
        out = layer(x, attention_mask, state=layer.backbone.initial_state(3))
        assert_close(out.z[1:2, real], layer(alone).z, 1e-5)
        assert not out.z[1, ~real].any()
        then = torch.randn(3, 3, 16)
        whole = layer(torch.cat([alone, then[1:2]], 1)).z[:, -3:]
        assert_close(layer(then, state=out.state).z[1:2], whole, 1e-5)
