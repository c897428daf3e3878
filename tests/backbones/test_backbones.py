"""Tests of the rules that hold for all backbones, then tests of each backbone."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqseq import (
    Backbone,
    Context,
    ExplicitSequenceLayer,
    FixedIterations,
    ImplicitSequenceLayer,
    Phantom,
    State,
    kernels,
)
from deqseq.backbone import backbones
from deqseq.backbones import LlamaBackbone, Mamba2Backbone, ModuleBackbone
from deqseq.ops.mixer.naive import convolve

MakeBackbone = Callable[..., Backbone]

CASES = {
    "mamba2": ("mamba2", {}),
    "mamba2-deep": ("mamba2", {"n_layer": 2, "d_inner": 24, "n_groups": 2, "chunk_size": 3}),
    "mamba2-no-conv": ("mamba2", {"d_conv": 1}),
    "mamba2-plain": ("mamba2", {"weight_norm": False}),
    "mamba2-skip": ("mamba2", {"input_skip": True, "norm_groups": 2}),
    "llama": ("llama", {}),
    "llama-deep": ("llama", {"n_layer": 2, "n_head": 4, "n_kv_head": 2}),
    "llama-plain": ("llama", {"weight_norm": False}),
    "llama-skip": ("llama", {"input_skip": True}),
    "module": ("module", {}),
}
EXPLICIT = {
    "mamba2-explicit": ("mamba2", {"injection": False, "n_layer": 2}),
    "llama-explicit": ("llama", {"injection": False, "n_layer": 2}),
}


def test_choices_of_kernels_may_end_in_any_order() -> None:
    """A ``use`` block may end before a block that began later. The choice of the later block stays in force.

    This happens if two threads use blocks at the same time.
    """
    one, other = kernels.use("torch"), kernels.use("torch")
    before = kernels.chosen()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert kernels.chosen() == "torch"
    with kernels.use(None):
        assert kernels.chosen() == before
    other.__exit__(None, None, None)
    assert kernels.chosen() == before


def layers_close(actual: State, expected: State) -> None:
    assert torch.equal(actual.seen, expected.seen)
    for a, b in zip(actual.layers, expected.layers, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize(("name", "options"), [*CASES.values(), *EXPLICIT.values()],
                         ids=[*CASES, *EXPLICIT])  # fmt: skip
def test_states_advance_as_token_by_token(
    make_backbone: MakeBackbone, name: str, options: dict[str, object]
) -> None:
    """Advancing by several tokens gives the same state as advancing token by token.

    Tests every number of tokens up to the window. The two sequences advance by different numbers.
    """
    width = 5
    f = make_backbone(name, dtype=torch.float64, **options)
    z, x = torch.randn(2, 2, 3 + width, 16, dtype=torch.float64)
    context = f.prepare(x)

    def consume(state: State, start: Tensor, count: Tensor, tokens: int) -> tuple[Tensor, State]:
        """Evaluate ``tokens`` tokens from position ``start`` on, then advance by ``count`` tokens."""
        index = start[:, None] + torch.arange(tokens)
        window = torch.stack([z[i, row] for i, row in enumerate(index)])
        value, trace = f.evaluate(window, context.take(index), state)
        return value, f.advance(trace, state.map(torch.clone), count)

    with torch.no_grad():
        whole = f(z, context)
        empty = f.reserve(f.initial_state(2, dtype=torch.float64), z)
        ones, none = torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        by_one, values = [empty], []
        for t in range(3 + width):
            value, state = consume(by_one[-1], t * ones, ones, 1)
            by_one.append(state)
            values.append(value)
        torch.testing.assert_close(torch.cat(values, 1), whole)
        for first in range(width + 1):
            count = torch.tensor([first, width - first])
            value, state = consume(by_one[3], 3 * ones, count, width)
            torch.testing.assert_close(value, whole[:, 3:])
            for i, n in enumerate(count.tolist()):
                row = torch.tensor([i])
                if name == "module":  # compare seen tokens only: later values are arbitrary
                    kept = by_one[3 + n].layers[0][0][i, : 3 + n]
                    torch.testing.assert_close(state.layers[0][0][i, : 3 + n], kept)
                    assert state.seen[i] == 3 + n
                else:
                    layers_close(state.select(row), by_one[3 + n].select(row))
        _, state = consume(by_one[3], 3 * ones, none, width)
        assert torch.equal(state.seen, 3 * ones)


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
def test_causal(make_backbone: MakeBackbone, name: str, options: dict[str, object]) -> None:
    f = make_backbone(name, **options)
    z, x = torch.randn(2, 2, 12, 16)
    with torch.no_grad():
        before = f(z, f.prepare(x))
        z[:, 7], x[:, 7] = torch.randn(2, 2, 16)
        after = f(z, f.prepare(x))
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7], after[:, 7]).all(-1).any()


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
def test_gradients_of_one_evaluation(
    make_backbone: MakeBackbone,
    fold_on_gpu: Callable[[Backbone], Backbone],
    name: str,
    options: dict[str, object],
) -> None:
    f = fold_on_gpu(make_backbone(name, dtype=torch.float64, **options))
    z, x = (torch.randn(1, 3, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    parameters = list(f.parameters())
    with torch.no_grad():  # change all weights, so that no weight is exactly 1 or 0
        for parameter in parameters:
            parameter.add_(0.05 * torch.randn_like(parameter))
    weight = torch.randn(1, 3, 16, dtype=torch.float64)

    def loss() -> Tensor:
        return (f(z, f.prepare(x)) * weight).sum()

    tensors = [z, x, *parameters]
    found = torch.autograd.grad(loss(), tensors)
    for tensor, gradient in zip(tensors, found, strict=True):
        direction = torch.randn_like(tensor)
        direction /= direction.norm()
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                tensor.add_(step * direction)
                values.append(float(loss()))
                tensor.sub_(step * direction)
        expected = (values[0] - values[1]) / 2e-6
        assert abs(float((gradient * direction).sum()) - expected) < 1e-6 * max(1, abs(expected))


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_weight_norm_does_not_change_the_function(make_backbone: MakeBackbone, name: str) -> None:
    torch.manual_seed(3)
    cls = {"mamba2": Mamba2Backbone, "llama": LlamaBackbone}[name]
    sizes = {"mamba2": {"headdim": 8, "d_state": 8}, "llama": {"n_head": 2}}[name]
    normalised = cls(16, 2, **sizes)
    torch.manual_seed(3)
    plain = cls(16, 2, **sizes, weight_norm=False)
    names = {n for n, _ in normalised.named_parameters()}
    assert names > {n for n, _ in plain.named_parameters() if "weight" not in n}
    assert any("original0" in n for n in names)
    for module in normalised.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            assert hasattr(module, "parametrizations")
    z, x = torch.randn(2, 2, 7, 16)
    with torch.no_grad():
        torch.testing.assert_close(normalised(z, normalised.prepare(x)), plain(z, plain.prepare(x)))


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_without_injection_the_map_depends_on_z_only(make_backbone: MakeBackbone, name: str) -> None:
    f = make_backbone(name, injection=False)
    assert not any("injection" in key for key in f.state_dict())
    z, x, y = torch.randn(3, 2, 7, 16)
    with torch.no_grad():
        assert torch.equal(f(z, f.prepare(x)), f(z, f.prepare(y)))


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_a_deep_copy_is_independent(make_backbone: MakeBackbone, name: str) -> None:
    f = make_backbone(name)
    twin = copy.deepcopy(f)
    z, x = torch.randn(2, 2, 7, 16)
    with torch.no_grad():
        before = f(z, f.prepare(x))
        assert torch.equal(twin(z, twin.prepare(x)), before)
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(f(z, f.prepare(x)), before)


def test_a_backbone_without_state_refuses_a_window() -> None:
    class Memoryless(Backbone):
        def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
            return Context((x,))

        def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, None]:
            return 0.5 * z + context.tokens[0], None

    layer = ImplicitSequenceLayer(Memoryless())
    x = torch.randn(2, 6, 4)
    assert torch.isfinite(layer(x).z).all()
    with pytest.raises(ValueError, match="window=None"):
        layer(x, window=2)


# --- Mamba2 ---


def test_mamba2_against_the_equations(ssd_naive: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """The backbone gives the result of Mamba2's equations, computed here without the library's kernels."""
    torch.manual_seed(5)
    f = Mamba2Backbone(16, 1, d_state=4, headdim=8, n_groups=2, d_conv=3, weight_norm=False).double()
    m = f.layers[0].mixer
    z, x = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    with torch.no_grad():
        projected = m.in_proj(f.layers[0].norm(z)) + f.injection(x)
        gate, xbc, dt = projected.split([32, 32 + 2 * 2 * 4, 4], -1)
        xbc = F.silu(m.conv1d(xbc.mT)[..., :9].mT)
        u, b, c = xbc.split([32, 8, 8], -1)
        u, b, c = u.unflatten(-1, (4, 8)), b.unflatten(-1, (2, 4)), c.unflatten(-1, (2, 4))
        step = F.softplus(dt + m.dt_bias)
        y, _ = ssd_naive(u * step[..., None], -m.A_log.exp() * step, b, c)
        y = (y + u * m.D[:, None]).flatten(-2) * F.silu(gate)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m.norm.weight
        expected = f.norm_f(z + m.out_proj(y))
        torch.testing.assert_close(f(z, f.prepare(x)), expected, rtol=1e-6, atol=1e-7)


def test_mamba2_chunk_size_is_speed_only() -> None:
    values = []
    z, x = torch.randn(2, 2, 13, 16)
    for chunk_size in (1, 4, 5, 64):
        torch.manual_seed(5)
        f = Mamba2Backbone(16, 2, d_state=8, headdim=8, chunk_size=chunk_size)
        with torch.no_grad():
            values.append(f(z, f.prepare(x)))
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-4, atol=1e-5)


def test_causal_convolution() -> None:
    x, weight, bias = torch.randn(2, 9, 5), torch.randn(5, 4), torch.randn(5)
    expected = F.silu(F.conv1d(x.mT, weight[:, None], bias, padding=3, groups=5)[..., :9].mT)
    torch.testing.assert_close(convolve(x, weight, bias, None), expected)
    continued = convolve(x[:, 5:], weight, bias, x[:, 2:5])
    torch.testing.assert_close(continued, expected[:, 5:])


def test_mamba2_mlp_width_is_rounded_up() -> None:
    f = Mamba2Backbone(16, 1, d_state=8, headdim=8, d_inner=130)
    assert f.layers[0].mlp.fc2.in_features == 256
    assert Mamba2Backbone(16, 1, d_state=8, headdim=8).layers[0].mlp is None


def test_mamba2_initial_decay_rates_and_steps() -> None:
    m = Mamba2Backbone(64, 1, headdim=2).layers[0].mixer
    step, rate = F.softplus(m.dt_bias), m.A_log.exp()
    assert step.min() >= 0.99e-3 and step.max() <= 1.01e-1 and step.max() > 10 * step.min()
    assert rate.min() >= 1 and rate.max() <= 16.01 and rate.max() > 2 * rate.min()


# --- Llama ---


def test_llama_grouped_heads_are_repeated_heads() -> None:
    torch.manual_seed(5)
    grouped = LlamaBackbone(16, 1, n_head=4, n_kv_head=2, weight_norm=False)
    full = LlamaBackbone(16, 1, n_head=4, weight_norm=False)
    weights = grouped.state_dict()

    def repeat(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)

    for name in ("wk", "wv"):
        key = f"layers.0.mixer.{name}.weight"
        weights[key] = repeat(weights[key])
    for key in ("injection.linear.weight", "injection.linear.bias"):
        q, k, v = weights[key].split([16, 8, 8])
        weights[key] = torch.cat([q, repeat(k), repeat(v)])
    full.load_state_dict(weights)
    z, x = torch.randn(2, 2, 9, 16)
    with torch.no_grad():
        torch.testing.assert_close(grouped(z, grouped.prepare(x)), full(z, full.prepare(x)))


def test_llama_against_the_equations() -> None:
    torch.manual_seed(5)
    f = LlamaBackbone(16, 1, n_head=2, d_inner=30, rope_theta=100.0, weight_norm=False).double()
    block, z, x = f.layers[0], *torch.randn(2, 1, 6, 16, dtype=torch.float64)
    assert block.mlp.w1.out_features == 20
    with torch.no_grad():
        u, injected = block.norm(z), f.injection(x)
        m = block.mixer
        q, k, v = (p(u) + i for p, i in zip((m.wq, m.wk, m.wv), injected.split(16, -1), strict=True))
        mixed = torch.zeros_like(z)
        for head in range(2):
            part = slice(8 * head, 8 * head + 8)

            def turned(row: Tensor, t: int, part: slice = part) -> Tensor:
                pairs = torch.complex(row[part][:4], row[part][4:])
                angle = t * 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
                turned = pairs * torch.polar(torch.ones_like(angle), angle)
                return torch.cat([turned.real, turned.imag])

            for t in range(6):
                score = torch.stack([turned(q[0, t], t) @ turned(k[0, s], s) / 8**0.5 for s in range(t + 1)])
                mixed[0, t, part] = score.softmax(0) @ v[0, : t + 1, part]
        y = z + m.out_proj(mixed)
        h = block.norm2(y)
        y = y + block.mlp.fc2(F.silu(block.mlp.w1(h)) * block.mlp.w3(h))
        torch.testing.assert_close(f(z, f.prepare(x)), f.norm_f(y), rtol=1e-5, atol=1e-6)


def test_llama_positions_are_relative(make_backbone: MakeBackbone) -> None:
    f = make_backbone("llama", n_layer=2)
    z, x = torch.randn(2, 2, 9, 16)
    position = torch.arange(9).expand(2, 9)
    with torch.no_grad():
        expected = f(z, f.prepare(x))
        assert torch.equal(f(z, f.prepare(x, position)), expected)
        torch.testing.assert_close(f(z, f.prepare(x, position + 37)), expected, rtol=1e-4, atol=1e-4)
        stretched = f(z, f.prepare(x, 3 * position))
    assert not torch.allclose(stretched, expected, atol=1e-3)


def test_llama_default_sizes() -> None:
    f = LlamaBackbone(24, 1, n_head=2)
    assert f.layers[0].mlp.w1.out_features == 2 * 4 * 24 // 3
    state = LlamaBackbone(24, 3, n_head=4, n_kv_head=2).initial_state(5)
    assert len(state.layers) == 3 and state.layers[0][0].shape == (5, 2, 0, 6)


# --- Module ---


def test_module_adds_the_injection() -> None:
    module, injection = nn.Linear(4, 4), nn.Linear(3, 4)
    f = ModuleBackbone(module, injection)
    z, x = torch.randn(2, 5, 4), torch.randn(2, 5, 3)
    with torch.no_grad():
        torch.testing.assert_close(f(z, f.prepare(x)), module(z + injection(x)))


@pytest.mark.parametrize("window", [None, 3])
def test_every_evaluation_runs_the_compiled_module(
    make_backbone: MakeBackbone, counting: Any, unset_default_device: Callable[[], None], window: int | None
) -> None:
    layer = ImplicitSequenceLayer(
        make_backbone("module"), gradient=Phantom(2), convergence=FixedIterations(3), window=window
    )
    x = torch.randn(2, 6, 16, requires_grad=True)
    tensors = [x, *layer.parameters()]

    def run() -> tuple[list[Tensor], int]:
        out = layer(x)
        gradients = torch.autograd.grad(out.z.square().sum(), tensors)
        return [out.z, *gradients], out.solution.nfe

    expected, evaluations = run()
    layer.backbone.compile(backend=counting, fullgraph=True)
    unset_default_device()
    found, _ = run()
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)
    assert counting.runs == evaluations


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_module_as_a_cuda_graph(make_backbone: MakeBackbone) -> None:
    """Later evaluations leave the results of earlier ones as they are."""
    layer = ImplicitSequenceLayer(make_backbone("module"), convergence=FixedIterations(3)).eval().cuda()
    x = torch.randn(2, 6, 16, device="cuda")
    with torch.no_grad():
        expected = [layer(x).z, layer(-x).z]
        layer.backbone.compile(mode="reduce-overhead")
        found = [layer(sign * x).z for sign in (1, -1) for _ in range(3)]
    for index, z in enumerate(found):
        torch.testing.assert_close(z, expected[index // 3], rtol=1e-3, atol=1e-4)


WRONG = [
    ("mamba2", {"d_model": 0}, "0"),
    ("mamba2", {"n_layer": 0}, "0"),
    ("mamba2", {"n_layer": 1.5}, r"1\.5"),
    ("mamba2", {"headdim": 5}, "5"),
    ("mamba2", {"n_groups": 3}, "3"),
    ("mamba2", {"d_conv": 0}, "0"),
    ("mamba2", {"d_state": -8}, "-8"),
    ("mamba2", {"d_inner": -1}, "-1"),
    ("mamba2", {"d_inner": 1.5}, r"1\.5"),
    ("mamba2", {"chunk_size": 0}, "0"),
    ("mamba2", {"d_stat": 8}, "d_stat"),
    ("mamba2", {"norm_groups": 3}, "norm_groups.*3"),
    ("mamba2", {"dt_min": 0.2}, "dt_max < inf, got 0.2"),
    ("mamba2", {"norm_eps": 0.0}, r"norm_eps.*0\.0"),
    ("mamba2", {"input_skip": True, "injection": False}, "input_skip"),
    ("llama", {"norm_eps": float("nan")}, "norm_eps.*nan"),
    ("llama", {"input_skip": True, "injection": False}, "input_skip"),
    ("llama", {"n_head": 3}, "3"),
    ("llama", {"n_head": 16}, "16"),
    ("llama", {"n_head": 0}, "0"),
    ("llama", {"n_kv_head": 3}, "3"),
    ("llama", {"n_kv_head": 0}, "0"),
    ("llama", {"d_inner": 1}, "1"),
    ("llama", {"rope_theta": -1.0}, r"-1\.0"),
    ("llama", {"rope_theta": float("nan")}, "nan"),
]


@pytest.mark.parametrize(("name", "options", "said"), WRONG)
def test_wrong_options(name: str, options: dict[str, object], said: str) -> None:
    sizes = {
        "mamba2": {"d_model": 16, "n_layer": 1, "d_state": 8, "headdim": 8},
        "llama": {"d_model": 16, "n_layer": 1, "n_head": 4},
    }[name]
    with pytest.raises(ValueError, match=said):
        backbones.create({"name": name, **sizes, **options})


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_an_adapter_in_place_of_a_linear_map_is_refused(make_backbone: MakeBackbone, name: str) -> None:
    """``prepare`` refuses a linear map that is wrapped in an adapter, such as a LoRA adapter.

    Backbones read only the ``weight`` of a linear map. They do not call ``forward``, where the adapter acts.
    The adapter would silently have no effect.
    """

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.extra = nn.Linear(base.in_features, base.out_features)

        @property
        def weight(self) -> Tensor:
            return self.base.weight

    backbone = make_backbone(name)
    mixer = backbone.layers[0].mixer
    mixer.out_proj = Adapter(mixer.out_proj)
    with pytest.raises(ValueError, match="Adapter"):
        backbone.prepare(torch.randn(1, 3, 16))


@torch.no_grad()
@pytest.mark.parametrize("body", ["llama", "module"])
def test_keeping_the_last_tokens_is_as_if_they_had_come_first(make_backbone: MakeBackbone, body: str) -> None:
    layer: ExplicitSequenceLayer | ImplicitSequenceLayer
    if body == "llama":  # in a single explicit layer, a token's keys and values depend only on this token
        layer = ExplicitSequenceLayer(LlamaBackbone(d_model=16, n_layer=1, n_head=2, injection=False))
    else:
        layer = ImplicitSequenceLayer(make_backbone(body), convergence=FixedIterations(1)).eval()
    x, y = torch.randn(2, 6, 16), torch.randn(2, 3, 16)
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    state = layer(x, mask, state=layer.backbone.initial_state(2)).state
    kept = layer.backbone.keep_last(state, 4)
    assert kept.seen.tolist() == [4, 3] and kept.layers[0][0].shape[-2] == 4
    found = layer(y, state=kept).z
    for row, before in ((0, x[:1, 2:]), (1, x[1:, :3])):
        alone = layer(torch.cat([before, y[row : row + 1]], 1)).z[0, -3:]
        torch.testing.assert_close(found[row], alone)
    first = layer.backbone.initial_state(2)
    assert layer.backbone.keep_last(first, 4) is first
    with pytest.raises(ValueError, match="tokens must be a whole number >= 1, got 0"):
        layer.backbone.keep_last(state, 0)
