"""The Triton kernels for one token per sequence must agree with the plain PyTorch code."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq import Backbone, Context, State, kernels
from deqseq.backbones import LlamaBackbone, Mamba2Backbone

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D_MODEL = 24

MAMBA2: dict[str, dict[str, Any]] = {
    "plain": {"d_state": 16, "headdim": 8},
    "odd": {"d_state": 12, "headdim": 24, "expand": 3},
    "groups": {"d_state": 8, "headdim": 6, "n_groups": 2, "d_conv": 2},
    "no-conv": {"d_state": 8, "headdim": 16, "d_conv": 1, "weight_norm": False},
    "deep": {"d_state": 8, "headdim": 16, "n_layer": 2, "d_inner": 32, "input_skip": True},
}

LLAMA: dict[str, dict[str, Any]] = {
    "plain": {"n_head": 2},
    "grouped": {"n_head": 4, "n_kv_head": 2, "d_inner": 20, "weight_norm": False},
    "deep": {"n_head": 2, "n_layer": 2, "n_kv_head": 1, "input_skip": True},
    "explicit": {"n_head": 6, "n_kv_head": 3, "injection": False},
}

pytestmark = pytest.mark.usefixtures("needs_triton")


def backbone(kind: str, name: str) -> Backbone:
    torch.manual_seed(0)
    body, sizes = (Mamba2Backbone, MAMBA2) if kind == "mamba2" else (LlamaBackbone, LLAMA)
    made = body(**{"d_model": D_MODEL, "n_layer": 1, **sizes[name]})
    for parameter in made.parameters():  # random values reveal more errors than the initial ones and zeros
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5)
    return made.to(DEVICE)


def random_state(body: Backbone, batch: int, slots: int = 0) -> State:
    """A random state.

    ``slots`` is the size of the attention cache. Each sequence fills the cache to a different length.
    """
    state = body.initial_state(batch)
    if slots:
        layers = [tuple(nn.functional.pad(t, (0, 0, 0, slots)) for t in layer) for layer in state.layers]
        state = State(torch.arange(batch, device=DEVICE) * 37 % slots, tuple(layers))
    return state.map(lambda t: torch.randn_like(t) if t.is_floating_point() else t)


def token(batch: int, width: int = D_MODEL) -> Tensor:
    """Random values (batch, 1, width). The tensor is not contiguous: it is a slice of a longer tensor."""
    return torch.randn(batch, 3, width, device=DEVICE)[:, 1:2]


def twins(body: Backbone, z: Tensor, x: Tensor, state: State) -> None:
    """Compare Triton with plain PyTorch: the output, and the state after 0 tokens and after 1 token."""

    @torch.no_grad()
    def run(name: str) -> list[Tensor]:
        with kernels.use(name):
            context = body.prepare(x)
            tokens = tuple(t[:, -1:] for t in context.tokens)
            out, trace = body.evaluate(z, Context(tokens, context.shared), state)
        counts = (torch.full((z.shape[0],), count, device=DEVICE) for count in (0, 1))
        ends = [body.advance(trace, state.map(torch.clone), count) for count in counts]
        return [out, *(t for end in ends for layer in end.layers for t in layer)]

    for found, expected in zip(run("triton"), run("torch"), strict=True):
        assert found.shape == expected.shape
        if expected.numel():
            scale = expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * scale + 1e-6)


@pytest.mark.parametrize(("name", "batch"), [*product(MAMBA2, (1, 3)), ("plain", 17)])
def test_mamba2(name: str, batch: int) -> None:
    body = backbone("mamba2", name)
    twins(body, token(batch), torch.randn(batch, 3, D_MODEL, device=DEVICE), random_state(body, batch))


@pytest.mark.parametrize(
    ("name", "batch", "slots"),
    [(name, *size) for name in LLAMA for size in ((1, 0), (1, 300), (3, 0), (3, 70))] + [("plain", 17, 5)],
)
def test_llama(name: str, batch: int, slots: int) -> None:
    body = backbone("llama", name)
    x = torch.randn(batch, 3, D_MODEL, device=DEVICE)
    twins(body, token(batch), x, random_state(body, batch, slots))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 33, 64])
@torch.no_grad()
def test_projections(batch: int, gated: bool, dtype: torch.dtype) -> None:
    """A projection of up to 64 sequences must agree with float64. The width needs several steps of the loop.

    A large input must not overflow in float16.
    """
    from deqseq.ops.one_token.triton import project

    torch.manual_seed(0)
    width, columns = 600, 40
    x, added = 300 * token(batch, width).to(dtype), token(batch, width).to(dtype)
    plus = token(batch, columns).to(dtype)
    first, second = (torch.randn(2, columns, width, device=DEVICE) / width**0.5).to(dtype)
    norm = torch.randn(width, device=DEVICE)
    total, out = project(x, first, (norm, 1e-5), added, plus, second if gated else None)
    assert torch.equal(total, x + added) and out.dtype == dtype
    normed = nn.functional.rms_norm(total.double(), (width,), norm.double(), 1e-5)
    expected = normed @ first.double().T
    if gated:
        expected = nn.functional.silu(expected) * (normed @ second.double().T)
    error = (out - expected - plus.double()).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("kind", "each"), [("mamba2", 3 + 2), ("llama", 5)])
def test_few_kernels(kind: str, each: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two blocks starts five kernels, and the last norm starts one kernel.

    In Mamba2, two of the five kernels compute the MLP. With several sequences, each norm has a kernel of its
    own. With gradients, no kernel for one token may start.
    """
    from deqseq.ops.add_norm import triton as norm
    from deqseq.ops.one_token import triton as token_kernels

    launched: list[Any] = []

    def count(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel)
        kernels.launch(kernel, *args, **options)

    for module in (norm, token_kernels):
        monkeypatch.setattr(module, "launch", count)
    body = backbone(kind, "deep")
    state = random_state(body, batch, 5 if kind == "llama" else 0)
    x = torch.randn(batch, 1, D_MODEL, device=DEVICE)
    with kernels.use("triton"):
        with torch.no_grad():
            body(x, body.prepare(x), state)
        norms = 0 if batch == 1 else 3 if kind == "mamba2" else 2
        assert len(launched) == 2 * (each + norms) + 1
        launched.clear()
        body(x, body.prepare(x), state)
        assert not {token_kernels._row_kernel, token_kernels._rows_kernel} & set(launched)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["mamba2", "llama"])
@torch.no_grad()
def test_coarse_types_are_summed_in_float32(kind: str, batch: int) -> None:
    """In half precision, the kernels' error must be less than 1.5 times the error of plain PyTorch.

    Both errors are measured against float64. To meet this bound, the kernels must sum in float32.
    """
    coarse = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # Triton's interpreter has no bfloat16
    body = backbone(kind, "deep")
    state = random_state(body, batch, 20 if kind == "llama" else 0)
    tokens = 2 if DEVICE == "cpu" else 16  # on the CPU, Triton's interpreter takes about a second per token
    inputs = torch.randn(tokens, 2, batch, 1, D_MODEL, device=DEVICE)

    def run(name: str, dtype: torch.dtype) -> Tensor:
        body.to(dtype)
        start = state.map(lambda t: t.to(dtype) if t.is_floating_point() else t)
        with kernels.use(name):
            outs = [body(z, body.prepare(x), start) for z, x in inputs.to(dtype)]
        return torch.stack(outs).double()

    truth = run("torch", torch.float64)
    fused, plain = run("triton", coarse), run("torch", coarse)
    assert fused.sub(truth).norm() < 1.5 * plain.sub(truth).norm()
    assert fused.sub(truth).norm() < 0.03 * truth.norm()


@pytest.mark.parametrize("kind", ["mamba2", "llama"])
@torch.no_grad()
def test_autocast(kind: str) -> None:
    """Under autocast, projections use half precision, but the output and the state stay in float32."""
    coarse = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    body = backbone(kind, "deep")
    state = random_state(body, 3, 20 if kind == "llama" else 0)
    z, x = (torch.randn(3, 1, D_MODEL, device=DEVICE) for _ in range(2))
    with kernels.use("torch"):
        exact = body(z, body.prepare(x), state)
    with kernels.use("triton"), torch.autocast(DEVICE, coarse):
        found, trace = body.evaluate(z, body.prepare(x), state)
    assert found.dtype == torch.float32
    assert found.sub(exact).norm() < 0.03 * exact.norm()
    end = body.advance(trace, state.map(torch.clone), torch.ones(3, dtype=torch.int64, device=DEVICE))
    assert all(t.dtype == torch.float32 for layer in end.layers for t in layer)
