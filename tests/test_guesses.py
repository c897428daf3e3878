"""Tests of guesses: where the search starts, and what a guess may depend on."""

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq import FixedIterations, Guess, ImplicitSequenceLayer, Phantom, Residual, SolveOptions, Unrolled
from deqseq.backbones import ModuleBackbone
from deqseq.curriculum import Curriculum, Stage
from deqseq.guesses import Noise, Previous, Proposal, Zero
from deqseq.solvers import Anderson, Picard

D = 16
MakeLayer = Callable[..., ImplicitSequenceLayer]
GradientsOf = Callable[..., list[Tensor]]


def start(guess: Any, x: Tensor, train: bool = False, **options: Any) -> Tensor:
    """The initial iterate of a call of a layer.

    The layer's map is f(z) = z + x. It is evaluated once, so the output is the initial iterate plus x.
    """
    once = FixedIterations(1)
    layer = ImplicitSequenceLayer(ModuleBackbone(nn.Identity()), convergence=once, guess=guess).train(train)
    with torch.no_grad():
        return layer(x, **options).z - x


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class Given(Guess):
    """A guess that proposes ``value``, or ``value(x)`` if it is a function. The value may be invalid."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor | None:
        return self.value(x) if callable(self.value) else self.value


@pytest.mark.parametrize("window", [None, 3])
def test_zero_is_the_default(make_layer: MakeLayer, window: int | None) -> None:
    x = torch.randn(2, 7, D)
    layers = [make_layer("mamba2", window=window, **options).eval() for options in ({}, {"guess": "zero"})]
    with torch.no_grad():
        expected = layers[0](x, z0=torch.zeros_like(x)).z
        for layer in layers:
            assert isinstance(layer.eval_solve.guess, Zero)
            assert torch.equal(layer(x).z, expected)
    assert not any("guess" in name for name in layers[0].state_dict())


def test_a_given_z0_wins() -> None:
    x, z0 = torch.randn(2, 2, 5, D)
    close(start("noise", x, z0=z0), z0)


def test_noise_in_evaluation_depends_on_the_place_of_the_token_only() -> None:
    """A token's noise in evaluation depends only on the place of the token among the tokens of its sequence.

    It does not depend on the length of the sequence, on other sequences, on padding before, inside or after
    the sequence, or on how sequences are packed into rows.
    """
    guess, x = Noise(0.5, seed=3), torch.randn(1, 150, D)
    expected = start(guess, x)
    assert 0.45 < expected.std() < 0.55 and expected.mean().abs() < 0.05
    for length in (1, 63, 64, 65):
        close(start(guess, x[:, :length]), expected[:, :length])
    torch.manual_seed(7)
    batch, mask = torch.randn(3, 100, D), torch.ones(3, 100)
    mask[0, :30] = 0
    mask[1, 40:] = 0
    mask[2, 10:20] = 0
    found = start(guess, batch, attention_mask=mask)
    for row, real in zip(found, mask.bool(), strict=True):
        close(row[real], expected[0, : int(real.sum())])
    position_ids = torch.cat([torch.arange(n) for n in (70, 2, 28)])[None]
    packed = start(guess, batch[:1], position_ids=position_ids)
    close(packed[0], torch.cat([expected[0, :n] for n in (70, 2, 28)]))


def test_noise_in_evaluation_repeats() -> None:
    """The noise stays equal in a second call, for a copy of the guess, and in another dtype.

    Drawing other random numbers in between does not change the noise. Another start or another seed does.
    """
    x = torch.randn(1, 9, D)
    with torch.inference_mode():
        first = Noise().propose(x, 0, None)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again = pickle.loads(pickle.dumps(Noise())).propose(x.double(), 0, None)
    assert torch.equal(again.float(), first) and again.dtype == torch.float64
    assert torch.equal(torch.get_rng_state(), state)
    for other in (Noise().propose(x, 1, None), Noise(seed=1).propose(x, 0, None)):
        assert (other - first).abs().mean() > 0.5
    layer = ImplicitSequenceLayer(ModuleBackbone(nn.Linear(D, D)), gradient=Unrolled(2), guess="noise").eval()
    layer(x.requires_grad_()).z.sum().backward()  # works with noise that was first made in inference mode
    assert x.grad.any()


def test_blocks_of_noise_are_independent() -> None:
    noise = torch.cat([Noise().propose(torch.zeros(1, 256, D), n, None) for n in range(8)])
    blocks = noise.view(8 * 4, 64 * D)
    correlation = torch.corrcoef(blocks) - torch.eye(len(blocks))
    assert correlation.abs().max() < 0.2


def test_noise_in_training_is_new_for_every_sequence() -> None:
    x = torch.randn(1, 6, D).expand(4, 6, D)
    torch.manual_seed(0)
    first, second = (start(Noise(2.0), x, train=True) for _ in range(2))
    torch.manual_seed(0)
    close(start(Noise(2.0), x, train=True), first)
    rows = torch.cat([first, second])
    distance = torch.cdist(rows.flatten(1), rows.flatten(1)) + 100 * torch.eye(8)
    assert distance.min() > 10
    assert 1.8 < rows.std() < 2.2


def test_previous_is_the_same_start_for_every_token() -> None:
    x, previous = torch.randn(3, 4, D), torch.randn(3, D)
    mask = torch.ones(3, 4)
    mask[1, :2] = 0
    previous[2, 3] = torch.nan  # a previous equilibrium that is not finite becomes zero
    found = start("previous", x, attention_mask=mask, previous=previous)
    expected = previous[:, None].expand(3, 4, D).clone()
    expected[2] = 0
    close(found[mask.bool()], expected[mask.bool()])
    close(start("previous", x), torch.zeros_like(x))
    close(start("zero", x, previous=previous), torch.zeros_like(x))


def test_previous_continues_a_state(make_layer: MakeLayer) -> None:
    layer = make_layer("mamba2", guess="previous", convergence=Residual(rtol=1e-4, max_iter=100)).eval()
    x = torch.randn(2, 6, D)
    with torch.no_grad():
        first = layer(x[:, :4], state=layer.backbone.initial_state(2))
        last = first.z[:, -1]
        for length in (1, 2):
            rest = x[:, 4 : 4 + length]
            found = layer(rest, state=first.state, previous=last)
            expected = layer(rest, state=first.state, z0=last[:, None].expand_as(rest).contiguous())
            assert torch.equal(found.z, expected.z)
            assert torch.equal(found.solution.residual, expected.solution.residual)


def test_wrong_previous(make_layer: MakeLayer) -> None:
    layer, x = make_layer("mamba2", guess="previous"), torch.randn(2, 4, D)
    with pytest.raises(ValueError, match=r"previous must have shape \(B, D\) = \(2, 16\), got \(1, 16\)"):
        layer(x, previous=torch.zeros(1, D))
    with pytest.raises(ValueError, match="cannot share previous"):
        layer(x, previous=torch.zeros(2, D), position_ids=torch.tensor([[0, 1, 0, 1]] * 2))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda x: x[:, :-1], r"Given.*\(2, 4, 16\).*\(2, 3, 16\)"),
        (lambda x: x[:1], r"Given.*\(2, 4, 16\).*\(1, 4, 16\)"),
        (lambda x: x.long(), "Given.*int64"),
        (3, "Given.*3"),
    ],
)
def test_wrong_results_of_a_guess(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        start(Given(value), torch.randn(2, 4, D))


def test_padding_of_a_guess_is_ignored(make_layer: MakeLayer) -> None:
    layer = make_layer("mamba2", guess=Given(lambda x: torch.full_like(x, torch.nan))).eval()
    x = torch.randn(2, 5, D)
    with torch.no_grad():
        assert torch.equal(layer(x).z, make_layer("mamba2").eval()(x).z)


def test_a_proposal_is_part_of_the_layer(make_layer: MakeLayer) -> None:
    module = nn.Linear(D, D)
    layer = make_layer("module", guess=Proposal(module), gradient=Unrolled(2))
    assert sum(p is module.weight for p in layer.parameters()) == 1
    names = [name for name in layer.state_dict() if "guess" in name]
    assert names == ["guess_modules.0.weight", "guess_modules.0.bias"]
    x = torch.randn(2, 5, D)
    with torch.no_grad():
        expected = make_layer("module", convergence=FixedIterations(2))(x, z0=module(x)).z
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for copy in (layer, deepcopy(layer), torch.load(file, weights_only=False)):
        (own,) = copy.guess_modules
        assert copy.train_solve.guess.module is own and copy.eval_solve.guess is copy.train_solve.guess
        assert copy is layer or own is not module
        close(copy(x).z.detach(), expected)
        assert copy.double().train_solve.guess.module.weight.dtype == torch.float64
        copy.float()


def test_replaced_options_register_their_proposal(make_layer: MakeLayer) -> None:
    one, two = nn.Linear(D, D), nn.Linear(D, D)
    layer = make_layer("module", guess=(Proposal(one), "zero"))
    assert list(layer.guess_modules) == [one]
    layer.eval_solve = SolveOptions(guess=Proposal(two))
    assert list(layer.guess_modules) == [one, two]
    layer.train_solve = SolveOptions()
    assert list(layer.guess_modules) == [two]
    layer.eval_solve = SolveOptions()
    assert layer.guess_modules is None and len(list(layer.children())) == 1


def test_a_replaced_module_of_a_proposal_is_used(make_layer: MakeLayer) -> None:
    """PEFT and other tools replace submodules. Copies of the layer use the modules of the copy."""
    plain = make_layer("module", guess=(Proposal(nn.Linear(D, D)), "zero"), convergence=FixedIterations(1))
    x, old = torch.randn(2, 5, D), plain.guess_modules[0]
    for layer in (plain, deepcopy(plain)):
        layer.eval_solve = replace(layer.eval_solve, guess=layer.train_solve.guess)
        layer.guess_modules[0] = new = nn.Linear(D, D)
        assert layer.train_solve.guess.module is new and layer.eval_solve.guess.module is new
        with torch.no_grad():
            expected = make_layer("module", convergence=FixedIterations(1))(x, z0=new(x)).z
            close(layer(x).z, expected)
    assert plain.guess_modules[0] not in (old, new)


def test_peft_adapts_a_proposal(make_layer: MakeLayer) -> None:
    peft: Any = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'deqseq[dev]'")
    layer = make_layer("module", guess=Proposal(nn.Linear(D, D)), gradient=Unrolled(2))
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, layer.guess_modules)
    layer(torch.randn(1, 4, D)).z.sum().backward()
    adapters = [p for name, p in layer.named_parameters() if "lora_" in name]
    assert len(adapters) == 2 and all(p.grad.abs().max() > 0 for p in adapters)


@pytest.mark.parametrize("gradient", [Unrolled(3), Unrolled(3, before=1), Phantom(2)], ids=repr)
def test_gradients_reach_a_proposal_only_when_unrolled(make_layer: MakeLayer, gradient: Any) -> None:
    module = nn.Linear(D, D)
    layer = make_layer("module", guess=Proposal(module), gradient=gradient)
    layer(torch.randn(2, 5, D)).z.sum().backward()
    assert (module.weight.grad is not None) == (gradient == Unrolled(3))
    assert all(p.grad is not None for p in layer.backbone.parameters())


def test_causal_training_refuses_a_proposal_that_is_not_causal(make_layer: MakeLayer) -> None:
    guess, x = Proposal(nn.Identity(), causal=False), torch.randn(2, 4, D)
    layer = make_layer("mamba2", guess=guess)
    with pytest.raises(ValueError, match="Proposal"):
        layer(x)
    layer.eval()(x)
    make_layer("mamba2", guess=guess, causal=False)(x)


def test_proposals_take_modules() -> None:
    with pytest.raises(ValueError, match="module"):
        Proposal(3)  # type: ignore[arg-type]


def test_pairs(make_layer: MakeLayer) -> None:
    layer = make_layer(
        "module",
        solver=("anderson", Picard(0.5)),
        convergence=[FixedIterations(2), FixedIterations(3)],
        guess=("noise", {"name": "noise", "std": 0.5}),
    )
    assert layer.train_solve == SolveOptions(Anderson(), FixedIterations(2), None, Noise())
    assert layer.eval_solve == SolveOptions(Picard(0.5), FixedIterations(3), None, Noise(0.5))
    for wrong in ({"solver": ("picard",) * 3}, {"convergence": (None,)}, {"guess": []}):
        with pytest.raises(ValueError, match=r"a pair \(training, evaluation\), got a list of [013]"):
            make_layer("module", **wrong)


def test_a_curriculum_keeps_the_guess(make_layer: MakeLayer) -> None:
    layer = make_layer("module", guess=("noise", "previous"))
    Curriculum.apply(Stage(1.0, "phantom", "fixed:3", eval_convergence="fixed:4"), layer)
    assert layer.train_solve.guess == Noise() and layer.eval_solve.guess == Previous()
