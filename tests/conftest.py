"""Fixtures that several test modules share: small contractive maps and helpers."""

import gc
import importlib.util
import os
import random
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq import Backbone, Context, ImplicitSequenceLayer, State
from deqseq.backbone import Trace
from deqseq.backbones import LlamaBackbone, Mamba2Backbone, ModuleBackbone, fold_weight_norm
from deqseq.solver import Progress
from deqseq.tasks.common.command_line import quiet_packages

quiet_packages()  # here, because tests call commands after they have imported transformers
if not torch.cuda.is_available():  # set it early: Triton reads it when a kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")
if device := os.environ.get("DEQSEQ_TEST_DEVICE"):
    torch.set_default_device(device)
data = os.environ.get("DEQSEQ_TEST_DATA")
TEST_DATA = Path(data).resolve() if data else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest file first: a worker that starts this file last would finish long after the others.

    On a device other than the CPU, skip the tests marked ``passes_of_a_cpu``.
    """
    items.sort(key=lambda item: item.path.name != "test_pretrain_scale.py")
    if device not in (None, "", "cpu"):
        reason = f"counts the passes on a CPU; on {device}, the search may make more passes"
        for item in items:
            if item.get_closest_marker("passes_of_a_cpu"):
                item.add_marker(pytest.mark.skip(reason))


def pytest_collection_finish() -> None:
    """Exclude from later garbage collections what the imports made: transformers' Trainer runs many."""
    gc.collect()
    gc.freeze()


D_MODEL = 16
EXTENSIONS = Path(__file__).parent / "extensions"
PNG = b"\x89PNG\r\n\x1a\n"  # the first bytes of a PNG file

MakeBackbone = Callable[..., Backbone]
MakeLayer = Callable[..., ImplicitSequenceLayer]


class PrefixMean(nn.Module):
    """Maps u_t to tanh(U u_t + b + V mean(u_1, ..., u_t)). Tokens after t never change the result at t."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.here = nn.Linear(d_model, d_model)
        self.past = nn.Linear(d_model, d_model, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        number = torch.arange(1, u.shape[1] + 1, device=u.device, dtype=u.dtype)
        return torch.tanh(self.here(u) + self.past(u.cumsum(1) / number[:, None]))


class Pointwise(nn.Module):
    """Maps every token u_t to A u_t. A is a matrix (D, D) or a number."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, u: Tensor) -> Tensor:
        return u @ self.matrix.T if self.matrix.dim() else u * self.matrix


class Rates(Backbone):
    """The map f(z)_t = a_t z_t + x_t. Token t converges at the rate a_t, the first channel of x_t."""

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        return Context((x, x[..., :1]))

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        x, rate = context.tokens
        return rate * z + x, None

    def initial_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        return State(torch.zeros(batch_size, dtype=torch.int64, device=device), ())

    def advance(self, trace: Trace, state: State, count: Tensor) -> State:
        return State(state.seen + count, ())


def contract(backbone: Backbone) -> Backbone:
    """Make f depend less on z. Each Picard iteration then roughly halves the residual.

    Smaller norm weights shrink the z that enters a mixer or MLP. The residual stream also carries z. Larger
    mixer outputs reduce the share of z in the stream. Making the whole stream smaller would not help, because
    the final norm cancels its scale.
    """
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if "out_proj" in name and name.endswith("original0"):
                parameter.mul_(3)
            if name.endswith(("norm.weight", "norm2.weight")) and "mixer" not in name:
                parameter.mul_(1 if name.startswith("injection") else 0.1)
    return backbone


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="module")
def quick_figures() -> Iterator[Any]:
    """Figures are drawn, but their files hold only the first bytes of a PNG file. Rendering takes 0.4 s each.

    The fixture's value is matplotlib's function that renders figures, or None without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        yield None
        return
    from matplotlib.figure import Figure

    def save(figure: Any, path: Path, **_: Any) -> None:
        path.write_bytes(PNG)

    original = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        yield original


@pytest.fixture
def rendered_figures(quick_figures: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Figures are rendered, in modules with ``quick_figures`` too.

    ``rendered_figures(path)``: whether the file holds a whole figure. True without matplotlib.
    """
    if quick_figures is None:
        return lambda path: True
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", quick_figures)
    return lambda path: path.read_bytes().startswith(PNG) and path.stat().st_size > len(PNG)


@pytest.fixture
def unset_default_device() -> Iterator[Callable[[], None]]:
    """``unset_default_device()``: unset torch's default device until the test ends.

    Call it before compiled code runs: :func:`torch.compile` cannot trace calls that go through the default
    device. Make the model and its inputs before the call.
    """
    yield lambda: torch.set_default_device(None)
    torch.set_default_device(device or None)


@pytest.fixture
def fold_on_gpu() -> Callable[[Backbone], Backbone]:
    """``fold_on_gpu(backbone)``: on a GPU, replace weight-normalised maps by plain ones, in place.

    Call it before comparing gradients with finite differences of the weights. On a GPU, torch computes weight
    norm only to 1e-7, even in float64. The differences would not be exact enough.
    """

    def fold(backbone: Backbone) -> Backbone:
        on_gpu = torch.get_default_device().type == "cuda"
        has_weight_norm = not isinstance(backbone, ModuleBackbone)
        return fold_weight_norm(backbone) if on_gpu and has_weight_norm else backbone

    return fold


@pytest.fixture(scope="session")
def optional_data() -> Callable[[str], Path]:
    """``optional_data(name)``: the folder ``name`` in ``DEQSEQ_TEST_DATA``.

    If this folder does not exist, the test is skipped.
    """

    def folder(name: str) -> Path:
        if TEST_DATA is None:
            pytest.skip(
                f"optional data: set DEQSEQ_TEST_DATA to a folder that contains {name}/ (CONTRIBUTING.md)"
            )
        if not (TEST_DATA / name).is_dir():
            pytest.skip(f"optional data: DEQSEQ_TEST_DATA={TEST_DATA} does not contain {name}/")
        return TEST_DATA / name

    return folder


@pytest.fixture
def needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the test if Triton is missing, or if there is no GPU and Triton is older than 3.7.

    The fixture leaves out half of the work of Triton's interpreter:

    - It replaces the functions of ``triton.language`` before every kernel, and again at every call of a
      function from a kernel. The fixture leaves out the second.
    - It computes whether integers overflow, but uses the result with ``debug`` only.
    - It builds a table of dtypes at every operation. The fixture keeps what it found there.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed; it exists for Linux only")
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if not torch.cuda.is_available() and version < (3, 7):
        pytest.skip(
            "without a GPU, this test needs Triton 3.7 or newer: older interpreters fail with NumPy 2"
        )
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch, core = interpreter._patch_lang, triton.language.core

    def replace_once(function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values()}
        both = [module for module in (triton.language, core) if id(module) in modules]
        replaced = not any(core.is_builtin(module.load) for module in both)
        return interpreter._LangPatchScope() if replaced else patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", replace_once)
    builder, find, found = interpreter.interpreter_builder, interpreter._get_np_dtype, {}

    def find_once(dtype: Any) -> Any:
        return found[dtype.name] if dtype.name in found else found.setdefault(dtype.name, find(dtype))

    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    monkeypatch.setattr(interpreter, "_get_np_dtype", find_once)


@pytest.fixture
def contractive() -> Callable[[Backbone], Backbone]:
    """``contractive(backbone)``: change the backbone's weights in place to make it a contraction."""
    return contract


@pytest.fixture
def make_backbone() -> MakeBackbone:
    """``make_backbone(name, seed=0, dtype=None, **options)``: a small contractive map of width 16."""

    def make(name: str, seed: int = 0, dtype: torch.dtype | None = None, **options: Any) -> Backbone:
        torch.manual_seed(seed)
        backbone: Backbone
        if name == "mamba2":
            sizes = {"n_layer": 1, "d_state": 8, "headdim": 8, "chunk_size": 4}
            backbone = contract(Mamba2Backbone(D_MODEL, **{**sizes, **options}))
        elif name == "llama":
            sizes = {"n_layer": 1, "n_head": 2, "d_inner": 24}
            backbone = contract(LlamaBackbone(D_MODEL, **{**sizes, **options}))
        elif name == "module":
            module = PrefixMean(D_MODEL)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.6)
            backbone = ModuleBackbone(module, **options)
        else:
            raise AssertionError(name)
        return backbone.to(dtype)

    return make


@pytest.fixture
def make_layer(make_backbone: MakeBackbone) -> MakeLayer:
    """``make_layer(name, **layer options)``: a layer over a small contractive map."""

    def make(name: str, dtype: torch.dtype | None = None, **options: Any) -> ImplicitSequenceLayer:
        return ImplicitSequenceLayer(make_backbone(name, dtype=dtype), **options)

    return make


@pytest.fixture
def rates() -> Backbone:
    """The map f(z)_t = a_t z_t + x_t. Token t converges at the rate a_t, the first channel of x_t."""
    return Rates()


@pytest.fixture
def pointwise() -> Callable[[Tensor], ModuleBackbone]:
    """``pointwise(A)``: the map f(z)_t = A (z_t + x_t). A token does not depend on other tokens."""
    return lambda matrix: ModuleBackbone(Pointwise(matrix))


@pytest.fixture
def count_calls() -> Callable[[Backbone], list[tuple[int, ...]]]:
    """``count_calls(backbone)``: a list to which every evaluation appends the shape of z."""

    def count(backbone: Backbone) -> list[tuple[int, ...]]:
        calls: list[tuple[int, ...]] = []
        evaluate = backbone.evaluate

        def counted(z: Tensor, *args: Any) -> tuple[Tensor, Trace]:
            calls.append(tuple(z.shape))
            return evaluate(z, *args)

        backbone.evaluate = counted  # type: ignore[method-assign]
        return calls

    return count


@pytest.fixture
def make_progress() -> Callable[..., Progress]:
    """``make_progress(z, step)``: a ``Progress`` for ``Solver.step`` in which no token has settled."""

    def make(z: Tensor, step: int, **changes: Any) -> Progress:
        no = torch.zeros(z.shape[:2], dtype=torch.bool)
        progress = Progress(None, ~no, torch.full(z.shape[:2], step + 1), no, max_iter=1000)
        for name, value in changes.items():
            setattr(progress, name, value)
        return progress

    return make


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """``assert_close(a, b, tolerance)``: asserts max abs(a - b) <= tolerance * max abs(b)."""

    def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
        assert actual.shape == expected.shape
        scale = expected.abs().max().clamp_min(1e-30)
        error = ((actual - expected).abs().max() / scale).item()
        assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"

    return close


@pytest.fixture
def gradients_of() -> Callable[..., list[Tensor]]:
    """``gradients_of(layer, x, weight)``: gradients of (z * weight).sum() w.r.t. x and all parameters."""

    def gradients(layer: nn.Module, x: Tensor, weight: Tensor, **options: Any) -> list[Tensor]:
        x = x.detach().requires_grad_()
        out = layer(x, **options)
        wanted = [x, *layer.parameters()]
        return list(torch.autograd.grad((out.z * weight).sum(), wanted))

    return gradients


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared data folder with one token per byte. Half of the lines repeat a letter, half are random."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from deqseq.tasks import prepare

    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(0)
    lines = ["a" * 39 if i % 2 else "".join(chance.choices("bcdefgh jklmn", k=39)) for i in range(80)]
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytes_only = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([], bytes_only)
    tokenizer.save(str(folder / "tokenizer.json"))
    made = ["--output", str(folder / "data"), "--tokenizer", str(folder / "tokenizer.json")]
    options = ["--documents", "line", "--validation-share", "0.1", "--workers", "1"]
    assert prepare.main([str(folder / "text.txt"), *made, *options]) == 0
    return folder / "data"


def install(package: Path, site: Path) -> None:
    """Install a package as pip would: copy its only module, and write metadata from pyproject.toml."""
    (source,) = package.glob("*.py")
    shutil.copy(source, site)
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata)
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def extensions(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install all packages of extensions/."""
    site = tmp_path_factory.mktemp("site-packages")
    packages = sorted(path for path in EXTENSIONS.iterdir() if path.is_dir())
    for package in packages:
        install(package, site)
    monkeypatch.syspath_prepend(str(site))
    yield
    for package in packages:
        sys.modules.pop(package.name, None)
