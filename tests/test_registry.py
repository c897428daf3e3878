"""Registries find solvers, policies, gradients, guesses and backbones by name, also from other packages."""

import sys
from collections.abc import Callable, Iterator
from keyword import kwlist
from pathlib import Path

import pytest
import torch

from deqseq import (
    FixedIterations,
    ImplicitDifferentiation,
    ImplicitSequenceLayer,
    Phantom,
    Residual,
    Unrolled,
    register,
)
from deqseq.backbone import Backbone, Context, backbones
from deqseq.backbones import LlamaBackbone, Mamba2Backbone, MixerBackbone, ModuleBackbone, RecursionBackbone
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.gradient import gradients
from deqseq.guess import guesses
from deqseq.guesses import Noise, Previous, Zero
from deqseq.policy import policies
from deqseq.registry import Registry
from deqseq.solver import solvers
from deqseq.solvers import Anderson, Broyden, Noisy, Picard, TorchDEQ

SIZES = {"d_model": 16, "n_layer": 1}


@pytest.mark.parametrize(
    ("registry", "name", "options", "kind"),
    [
        (solvers, "picard", {"damping": 0.5}, Picard),
        (solvers, "anderson", {"memory": 3}, Anderson),
        (solvers, "broyden", {"memory": 3}, Broyden),
        (solvers, "torchdeq:anderson", {"m": 3}, TorchDEQ),
        (solvers, "noisy", {"std": 0.1}, Noisy),
        (guesses, "zero", {}, Zero),
        (guesses, "noise", {"std": 0.5, "seed": 3}, Noise),
        (guesses, "previous", {}, Previous),
        (gradients, "phantom", {"steps": 2}, Phantom),
        (gradients, "implicit", {"solver": "anderson"}, ImplicitDifferentiation),
        (gradients, "unrolled", {"iterations": 3}, Unrolled),
        (policies, "residual", {"rtol": 0.1}, Residual),
        (policies, "fixed", {"iterations": 3}, FixedIterations),
        (backbones, "mamba2", {**SIZES, "headdim": 8}, Mamba2Backbone),
        (backbones, "llama", {**SIZES, "n_head": 2}, LlamaBackbone),
        (backbones, "mixer", {**SIZES, "tokens": 9}, MixerBackbone),
        (backbones, "recursion", {"map": {"name": "mixer", **SIZES, "tokens": 9}}, RecursionBackbone),
    ],
)
def test_known_names(registry: Registry[object], name: str, options: dict[str, object], kind: type) -> None:
    part = registry.create({"name": name, **options})
    assert type(part) is kind
    assert registry.create(part) is part
    assert name.partition(":")[0] in registry.names()


def test_options_arrive() -> None:
    assert solvers.create({"name": "anderson", "memory": 3, "damping": 0.5}) == Anderson(3, 0.5)
    assert solvers.create("anderson") == Anderson()
    assert gradients.create({"name": "phantom", "steps": 2}) == Phantom(steps=2)
    assert policies.create({"name": "residual", "rtol": 0.1}) == Residual(rtol=0.1)
    assert solvers.create("picard:0.5") == Picard(0.5) and gradients.create("unrolled:4") == Unrolled(4)


def test_the_callers_mapping_is_left_alone() -> None:
    spec = {"name": "anderson", "memory": 3}
    solvers.create(spec)
    assert spec == {"name": "anderson", "memory": 3}


@pytest.mark.parametrize("registry", [solvers, gradients, policies, guesses, backbones], ids=lambda r: r.kind)
def test_unknown_names_list_the_known(registry: Registry[object]) -> None:
    for spec in ("nonesuch", "nonesuch:anderson", {"name": "nonesuch"}):
        with pytest.raises(ValueError, match="nonesuch") as caught:
            registry.create(spec)
        assert all(name in str(caught.value) for name in registry.names())


@pytest.mark.parametrize(
    ("registry", "spec", "said"),
    [
        (solvers, {"name": "anderson", "memroy": 3}, "memroy"),
        (solvers, {"memory": 3}, "name"),
        (solvers, Anderson, "Anderson"),
        (solvers, "torchdeq", "method"),
        (solvers, "picard:fast", "fast"),
        (solvers, "{name: picard", "neither a name nor a mapping"),
        (guesses, "[noise, zero]", r"a single guess is needed here, got the list \[noise, zero\]"),
        (gradients, "unrolled", "iterations"),
        (gradients, {"name": "phantom", "step": 3}, "step"),
        (solvers, {"name": "noisy", "std": 0}, "std"),
        (guesses, "noise:-1", "std"),
        (guesses, {"name": "noise", "std": float("inf")}, "std"),
        (guesses, {"name": "noise", "seed": -1}, "seed"),
        (guesses, {"name": "noise", "sdt": 1}, "sdt"),
        (guesses, "proposal", "known: .*zero"),
        (guesses, torch.nn.Identity(), "Proposal"),
        (policies, {"name": "fixed"}, "iterations"),
        (backbones, "mamba2", "d_model"),
    ],
)
def test_wrong_specifications(registry: Registry[object], spec: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        registry.create(spec)


class Slow(Picard):
    """Picard with another default."""

    def __init__(self, damping: float = 0.25) -> None:
        super().__init__(damping)


class Both(Picard, Residual):
    """A solver and a policy at once."""


class Half(Backbone):
    """A backbone without ``evaluate``."""

    def prepare(self, x: torch.Tensor, position_ids: torch.Tensor | None = None) -> Context:
        return Context((x,))


class Tanh(ModuleBackbone):
    def __init__(self, d_model: int) -> None:
        super().__init__(
            torch.nn.Sequential(torch.nn.Linear(d_model, d_model), torch.nn.Tanh()), d_model=d_model
        )


@pytest.fixture(autouse=True)
def unregister(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the names of a test when it ends."""
    for registry in (solvers, gradients, policies, guesses, backbones):
        monkeypatch.setattr(registry, "_registered", {})


def test_a_registered_class_works_by_name() -> None:
    for base, registry in ((Picard, solvers), (Zero, guesses), (Phantom, gradients), (Residual, policies)):
        mine = type("Mine", (base,), {})
        register("mine", mine)
        spec = {"name": "mine", **({"rtol": 0.1} if base is Residual else {})}
        assert type(registry.create(spec)) is mine and "mine" in registry.names()
    assert "mine" not in backbones.names()
    register("slow", Slow)
    layer = ImplicitSequenceLayer(LlamaBackbone(16, 1, n_head=2), solver=("slow:0.5", "slow"))
    assert (layer.train_solve.solver.damping, layer.eval_solve.solver.damping) == (0.5, 0.25)
    with pytest.raises(ValueError, match=r"memory.*it takes \(damping: float = 0.25\)"):
        solvers.create({"name": "slow", "memory": 3})
    register("slow", Picard)  # as when a cell of a notebook runs again
    assert type(solvers.create("slow")) is Picard


def test_a_model_of_registered_parts_is_saved_and_loaded(tmp_path: Path) -> None:
    register("tanh", Tanh)
    register("slow", Slow)
    config = ImplicitConfig(vocab_size=20, backbone={"name": "tanh", "d_model": 8}, solver="slow")
    model, ids = ImplicitForCausalLM(config).eval(), torch.randint(0, 20, (2, 5))
    model.save_pretrained(tmp_path)
    loaded = ImplicitForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.model.layer.backbone) is Tanh
    assert type(loaded.model.layer.eval_solve.solver) is Slow
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert torch.equal(*(m.generate(ids, max_new_tokens=3, do_sample=False) for m in (loaded, model)))
    backbones._registered.clear()
    with pytest.raises(ValueError, match=r"unknown backbone 'tanh'; known: .*; deqseq.register adds a name"):
        ImplicitForCausalLM.from_pretrained(tmp_path)


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(
    ("name", "part", "said"),
    [
        ("anderson", Slow, "solver 'anderson' exists already: choose another name"),
        ("mann", Slow, "solver 'mann' exists already"),
        ("slow:1", Slow, "the name of a solver must be a Python identifier and no keyword, got 'slow:1'"),
        (Slow, Slow, "must be a Python identifier and no keyword, got <class"),
        *((word, Slow, f"must be a Python identifier and no keyword, got '{word}'") for word in kwlist),
        ("slow", Slow(), r"must be a subclass of one of .*Solver.*, got Slow\(damping=0.25\)"),
        ("both", Both, r"must be a subclass of one of .*Both'>, which is 2 of them"),
        ("half", Half, "Half cannot be built, because it does not define evaluate"),
        ("slow", torch.nn.Tanh, "got <class 'torch.nn.modules.activation.Tanh'>"),
    ],
)
def test_registrations_that_are_refused(name: str, part: type, said: str) -> None:
    before = [registry.names() for registry in (solvers, policies, backbones)]
    with pytest.raises(ValueError, match=said):
        register(name, part)
    assert [registry.names() for registry in (solvers, policies, backbones)] == before


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package that registers its own solver through an entry point."""
    (tmp_path / "mann_solver.py").write_text(
        "from deqseq.solver import Solver\n"
        "class Mann(Solver):\n"
        "    def __init__(self, start=1.0):\n"
        "        self.start = start\n"
        "    def init(self, z):\n"
        "        return 0\n"
        "    def step(self, z, fz, state, progress):\n"
        "        weight = self.start / (1 + 0.1 * state)\n"
        "        return z + weight * (fz - z), state + 1\n"
    )
    info = tmp_path / "mann_solver-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mann-solver\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[deqseq.solvers]\nmann = mann_solver:Mann\nhalf = mann_solver:Half\ngone = no_such_module:Gone\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("mann_solver", None)


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize("window", [None, 3])
def test_a_solver_of_another_package(
    make_layer: Callable[..., ImplicitSequenceLayer], window: int | None
) -> None:
    assert "mann" in solvers.names()
    with pytest.raises(ValueError, match="mann"):
        solvers.create("nonesuch")
    with pytest.raises(ValueError, match="stop"):
        solvers.create({"name": "mann", "stop": 1})
    layer = make_layer(
        "mamba2",
        solver={"name": "mann", "start": 0.9},
        convergence=Residual(rtol=1e-4, max_iter=200),
        window=window,
    )
    assert layer.solve.solver.start == 0.9
    out = layer(torch.randn(2, 8, 16))
    assert (out.solution.residual <= 1e-4).all()


def test_it_is_unknown_where_it_is_not_installed() -> None:
    assert "mann" not in solvers.names()


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(("name", "value"), [("half", "mann_solver:Half"), ("gone", "no_such_module:Gone")])
def test_what_another_package_announces_and_has_not(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"solver '{name}', registered as {value} by mann-solver, cannot"):
        solvers.create(name)


@pytest.mark.usefixtures("third_party")
def test_a_name_that_two_packages_announce(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deqseq.solvers]\nmann = other:Mann\n")
    with pytest.raises(ValueError, match=r"'mann' is registered more than once: as .*other"):
        solvers.create("mann")
