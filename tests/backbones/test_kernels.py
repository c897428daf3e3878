"""Compares Triton kernels with plain PyTorch, on a GPU if there is one, else in Triton's interpreter."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq import (
    Context,
    ExplicitSequenceLayer,
    FixedIterations,
    ImplicitSequenceLayer,
    Phantom,
    graphs,
    kernels,
)
from deqseq.backbones import LlamaBackbone, Mamba2Backbone, MixerBackbone
from deqseq.ops.add_norm import add_norm
from deqseq.ops.fan_out import fan_out
from deqseq.problem import Problem
from deqseq.regularisation import jacobian_penalty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SIZES: dict[str, dict[str, Any]] = {
    "plain": {"d_state": 16, "headdim": 8},
    "odd": {"d_state": 12, "headdim": 24, "expand": 3, "norm_groups": 3},
    "groups": {"d_state": 8, "headdim": 8, "n_groups": 2, "d_conv": 2},
    "no-conv": {"d_state": 8, "headdim": 16, "d_conv": 1, "weight_norm": False},
    "deep": {"d_state": 8, "headdim": 16, "n_layer": 2, "d_inner": 32},
}


pytestmark = pytest.mark.usefixtures("needs_triton")


def backbone(name: str) -> Mamba2Backbone:
    torch.manual_seed(0)
    made = Mamba2Backbone(**{"d_model": 16, "n_layer": 1, **SIZES[name]}).to(DEVICE)
    for parameter in made.parameters():
        if parameter.dim() == 1:  # ones and zeros would hide a kernel that ignores norms or biases
            nn.init.normal_(parameter, std=0.5)
    return made


def twins(function: Callable[[], list[Tensor]]) -> None:
    with kernels.use("torch"):
        expected = function()
    with kernels.use("triton"):
        found = function()
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if b.numel() == 0:
            assert a.shape == b.shape
            continue
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item() + 1e-6)


@pytest.mark.parametrize(
    ("name", "length"), [*((name, length) for name in SIZES for length in (1, 13)), ("plain", 70)]
)
def test_values_and_gradients(name: str, length: int) -> None:
    body = backbone(name)
    x, z, weight = (torch.randn(2, length, 16, device=DEVICE) for _ in range(3))

    def run() -> list[Tensor]:
        z_in, x_in = z.clone().requires_grad_(), x.clone().requires_grad_()
        out = body(z_in, body.prepare(x_in))
        return [out, *torch.autograd.grad((out * weight).sum(), [z_in, x_in, *body.parameters()])]

    twins(run)


@pytest.mark.parametrize("name", ["plain", "deep"])
def test_one_evaluation_from_zero(name: str) -> None:
    """A token of zeros that stands for all tokens gives the same values and gradients, to the bit."""
    body = backbone(name)
    x = torch.randn(2, 3, 16, device=DEVICE, requires_grad=True)

    def run(zero: Tensor) -> list[Tensor]:
        out = body(zero, body.prepare(x))
        return [out, *torch.autograd.grad(out.square().sum(), [x, *body.parameters()])]

    with kernels.use("triton"):
        for found, expected in zip(run(body.zero(x)), run(torch.zeros_like(x)), strict=True):
            assert torch.equal(found, expected)
    twins(lambda: run(body.zero(x)))


@pytest.mark.parametrize("method", ["enter", "evaluate"])
def test_a_subclass_that_reads_the_shape_of_z(method: str) -> None:
    """If a subclass has a method of its own that gets z, such as f(z + p, x), ``zero`` has the shape of x."""

    def moved(self: Mamba2Backbone, z: Tensor, *inputs: Any) -> Any:
        places = torch.arange(z.shape[1], device=z.device)
        return getattr(Mamba2Backbone, method)(self, z + places[:, None], *inputs)

    torch.manual_seed(0)
    body = type("Positions", (Mamba2Backbone,), {method: moved})(16, 2, d_state=8, headdim=8).to(DEVICE)
    x = torch.randn(2, 3, 16, device=DEVICE)

    def run() -> list[Tensor]:
        found, expected = ExplicitSequenceLayer(body)(x).z, body(torch.zeros_like(x), body.prepare(x))
        assert torch.equal(found, expected)
        return [found]

    twins(run)


def test_gradients_of_many_readers_are_summed_in_float32() -> None:
    coarse = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # Triton's interpreter has no bfloat16
    x = torch.randn(3, 700, device=DEVICE, dtype=coarse, requires_grad=True)
    weights = [torch.randn_like(x).detach() for _ in range(20)]
    readers = fan_out(x, 21, "triton")
    sum((reader * weight).sum() for reader, weight in zip(readers, weights, strict=False)).backward()
    assert all(torch.equal(reader, x) for reader in readers)
    assert torch.equal(x.grad, sum(weight.float() for weight in weights).to(coarse))


@pytest.mark.parametrize("post_norm", [True, False])
def test_values_and_gradients_of_a_mixer(post_norm: bool) -> None:
    body = MixerBackbone(16, 2, tokens=9, post_norm=post_norm).to(DEVICE)
    for parameter in body.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5)
    x, z, weight = torch.randn(3, 2, 9, 16, device=DEVICE)

    def run() -> list[Tensor]:
        z_in, x_in = z.clone().requires_grad_(), x.clone().requires_grad_()
        out = body(z_in, body.prepare(x_in))
        return [out, *torch.autograd.grad((out * weight).sum(), [z_in, x_in, *body.parameters()])]

    twins(run)


@pytest.mark.parametrize(("name", "length"), [*((name, 13) for name in SIZES), ("plain", 1), ("plain", 70)])
@torch.no_grad()
def test_values_without_a_graph(name: str, length: int) -> None:
    body = backbone(name)
    x, z = (torch.randn(2, length, 16, device=DEVICE) for _ in range(2))
    twins(lambda: [body(z, body.prepare(x))])


def test_backward_by_parts_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from deqseq.ops.mixer import triton

    body = backbone("plain")
    x = torch.randn(5, 3, 16, device=DEVICE)
    start = body.initial_state(5).map(lambda t: torch.randn_like(t) if t.is_floating_point() else t)
    monkeypatch.setattr(triton, "PART", 2 * 3 * 4 * body.layers[0].mixer.in_proj.out_features)

    def run() -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        out = body.evaluate(inputs, body.prepare(inputs), start)[0]
        return list(torch.autograd.grad(out.square().sum(), [inputs, *body.parameters()]))

    twins(run)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("counts", [(2, 5), (0, 1), (3, 0)])
@torch.no_grad()
def test_states(name: str, counts: tuple[int, int]) -> None:
    """Triton and PyTorch agree on an evaluation from a state, and on the state ``counts`` tokens later."""
    body = backbone(name)
    x, z = (torch.randn(2, 5, 16, device=DEVICE) for _ in range(2))
    start = body.initial_state(2).map(lambda t: torch.randn_like(t) if t.is_floating_point() else t)

    def run() -> list[Tensor]:
        out, trace = body.evaluate(z, body.prepare(x), start)
        end = body.advance(trace, start.map(torch.clone), torch.tensor(counts, device=DEVICE))
        return [out, end.seen, *(t for layer in end.layers for t in layer)]

    twins(run)


@torch.no_grad()
def test_states_of_many_taps_and_any_strides() -> None:
    """Triton and PyTorch agree for convolutions with more than four taps, and for states with any strides.

    With more than four taps, the mixer always uses PyTorch, but a kernel still advances the state.
    """
    torch.manual_seed(0)
    body = Mamba2Backbone(16, n_layer=1, d_state=8, headdim=8, d_conv=7).to(DEVICE)
    x, z = (torch.randn(2, 3, 16, device=DEVICE) for _ in range(2))
    start = body.initial_state(2).map(lambda t: torch.randn_like(t) if t.is_floating_point() else t)
    turned = start.map(lambda t: t.transpose(0, -1).contiguous().transpose(0, -1))
    layer = ImplicitSequenceLayer(body, convergence=FixedIterations(2)).eval()

    def run() -> list[Tensor]:
        out, trace = body.evaluate(z, body.prepare(x), start)
        end = body.advance(trace, start.copy(), torch.tensor([2, 3], device=DEVICE))
        solved = layer(x, state=turned).state
        return [out, *(t for state in (end, solved) for layer in state.layers for t in layer)]

    twins(run)


@pytest.mark.parametrize("counts", [(2, 9), (0, 1)])
@torch.no_grad()
def test_keys_and_values(counts: tuple[int, int]) -> None:
    torch.manual_seed(0)
    body = LlamaBackbone(48, n_layer=2, n_head=4, n_kv_head=2).to(DEVICE)
    x, z = (torch.randn(2, 9, 48, device=DEVICE) for _ in range(2))
    start = body.reserve(body.initial_state(2), x).map(
        lambda t: torch.randn_like(t) if t.is_floating_point() else torch.tensor([3, 50], device=DEVICE)
    )

    def run() -> list[Tensor]:
        out, trace = body.evaluate(z, body.prepare(x), start)
        end = body.advance(trace, start.map(torch.clone), torch.tensor(counts, device=DEVICE))
        return [out, end.seen, *(t for layer in end.layers for t in layer)]

    twins(run)


def test_gradients_with_a_state() -> None:
    body = backbone("plain")
    x = torch.randn(2, 5, 16, device=DEVICE)
    start = body.initial_state(2).map(lambda t: torch.randn_like(t) if t.is_floating_point() else t)

    def run() -> list[Tensor]:
        out = body.evaluate(x, body.prepare(x), start)[0]
        return list(torch.autograd.grad(out.square().sum(), list(body.parameters())))

    twins(run)


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_training_through_the_layer(name: str) -> None:
    torch.manual_seed(1)
    body = backbone("plain") if name == "mamba2" else LlamaBackbone(16, n_layer=2, n_head=2).to(DEVICE)
    layer = ImplicitSequenceLayer(body, gradient=Phantom(2), convergence=FixedIterations(2))
    x = torch.randn(2, 5, 16, device=DEVICE)

    def run() -> list[Tensor]:
        z = layer(x).z
        return [z, *torch.autograd.grad(z.square().sum(), list(body.parameters()))]

    twins(run)


@pytest.mark.parametrize(
    ("forward", "backward"), [("torch", "triton"), ("triton", "torch"), ("triton", None)]
)
@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_recomputation_uses_the_kernels_of_the_forward_pass(
    name: str, forward: str, backward: str | None
) -> None:
    body = backbone("plain") if name == "mamba2" else LlamaBackbone(16, n_layer=2, n_head=2).to(DEVICE)
    layer = ImplicitSequenceLayer(body, gradient=Phantom(1), convergence=FixedIterations(1))
    x = torch.randn(2, 3, 16, device=DEVICE)

    def run(during_backward: str | None) -> list[Tensor]:
        with kernels.use(during_backward):
            with kernels.use(forward):
                z = layer(x).z
            return [z, *torch.autograd.grad(z.square().sum(), list(body.parameters()))]

    expected = run(forward)
    layer.gradient_checkpointing = True
    for found, stored in zip(run(backward), expected, strict=True):
        torch.testing.assert_close(found, stored, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_the_jacobian_penalty_of_a_context_prepared_for_kernels(name: str) -> None:
    """The Jacobian penalty always uses PyTorch. A context prepared for kernels does not change it."""
    body = backbone("plain") if name == "mamba2" else LlamaBackbone(16, n_layer=1, n_head=2).to(DEVICE)
    x, z = torch.randn(2, 1, 5, 16, device=DEVICE)

    def run() -> list[Tensor]:
        context = body.prepare(x)
        generator = torch.Generator(DEVICE).manual_seed(0)
        penalty = jacobian_penalty(lambda z: body(z, context), z, generator=generator)
        return [penalty.detach(), *torch.autograd.grad(penalty, list(body.layers.parameters()))]

    twins(run)


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_second_derivatives(name: str) -> None:
    """Kernels refuse second derivatives. The Jacobian penalty needs them, so it uses PyTorch instead."""
    body = backbone("plain") if name == "mamba2" else LlamaBackbone(16, n_layer=1, n_head=2).to(DEVICE)
    x, z = (torch.randn(1, 5, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    with kernels.use("triton"), pytest.raises(RuntimeError, match=r"use\('torch'\)"):
        torch.autograd.grad(body(z, body.prepare(x)).sum(), z, create_graph=True)

    def run() -> list[Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(0)
        penalty = jacobian_penalty(lambda z: body(z, body.prepare(x)), z, generator=generator)
        return [penalty.detach(), *torch.autograd.grad(penalty, [x, *body.layers.parameters()])]

    twins(run)


@pytest.mark.parametrize("shape", [(2, 5, 16), (1, 3, 300)])
@pytest.mark.parametrize("with_added", [True, False])
def test_add_norm(shape: tuple[int, ...], with_added: bool) -> None:
    torch.manual_seed(0)
    norm = nn.RMSNorm(shape[-1], eps=1e-5, device=DEVICE)
    nn.init.normal_(norm.weight)
    stream, added, left, right = (torch.randn(shape, device=DEVICE) for _ in range(4))

    def run() -> list[Tensor]:
        inputs = [stream.clone().requires_grad_(), added.clone().requires_grad_()]
        implementation = kernels.choose(stream).others
        total, normed = add_norm(inputs[0], inputs[1] if with_added else None, norm, implementation)
        wanted = [*inputs[: 1 + with_added], norm.weight]
        return [total, normed, *torch.autograd.grad((total * left + normed * right).sum(), wanted)]

    twins(run)


def test_coarse_types_are_summed_in_float32() -> None:
    """In float16 or bfloat16, the kernels' error is at most 1.5 times the error of plain PyTorch.

    Errors are distances to a float64 result. Kernels that summed in the coarse type would have larger errors.
    """
    coarse = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # Triton's interpreter has no bfloat16
    body = backbone("plain")
    x, z = (torch.randn(2, 21, 16, device=DEVICE) for _ in range(2))

    def run(name: str, dtype: torch.dtype) -> Tensor:
        body.to(dtype)
        with kernels.use(name), torch.no_grad():
            return body(z.to(dtype), body.prepare(x.to(dtype))).double()

    truth = run("torch", torch.float64)
    fused, plain = run("triton", coarse), run("torch", coarse)
    assert fused.sub(truth).norm() < 1.5 * plain.sub(truth).norm()
    assert fused.sub(truth).norm() < 0.03 * truth.norm()


def test_what_is_computed_by_what(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(1, device="cpu")
    assert kernels.implementation(x) == "torch"
    with kernels.use("triton"):
        assert kernels.implementation(x.double()) == "torch"
        with kernels.use("torch"):
            assert kernels.implementation(x) == "torch"
    monkeypatch.setenv("DEQSEQ_KERNELS", "cuda")
    with pytest.raises(ValueError, match="triton, mamba_ssm, fla, torch"):
        kernels.implementation(x)
    monkeypatch.setitem(kernels._PACKAGES, "fla", ("a_package_nobody_has",))
    kernels.available.cache_clear()
    with caplog.at_level(logging.INFO, logger="deqseq"):
        for _ in range(2):
            with pytest.raises(ValueError, match="a_package_nobody_has"), kernels.use("fla"):
                pass
    assert sum("a_package_nobody_has" in record.message for record in caplog.records) == 1
    kernels.available.cache_clear()


class OnGPU(Tensor):
    is_cuda = True  # type: ignore[assignment]


def test_amd_gpus_use_kernels_and_graphs_by_name_only(
    monkeypatch: pytest.MonkeyPatch, needs_triton: None
) -> None:
    """On AMD GPUs, ``is_cuda`` is true too, but kernels and graphs need ``use("triton")``."""
    monkeypatch.delenv("DEQSEQ_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    layer = ImplicitSequenceLayer(LlamaBackbone(d_model=16, n_layer=1, n_head=2), solver="picard", window=1)
    half = torch.zeros(1, 1, 16, dtype=torch.bfloat16, device="cpu").as_subclass(OnGPU)
    problem = Problem(layer.backbone, Context(), half, layer.eval_solve)
    with torch.no_grad():
        for hip, name, kernel, graph in (
            (None, None, "triton", True),
            (None, "torch", "torch", True),
            ("7.1", None, "torch", False),
            ("7.1", "torch", "torch", False),
            ("7.1", "triton", "triton", True),
        ):
            monkeypatch.setattr(torch.version, "hip", hip)
            with kernels.use(name):
                assert kernels.choose(half) == (kernel, kernel)
                assert graphs.can_record_passes(problem) == graph
