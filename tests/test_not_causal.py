"""Tests of maps that are not causal. In such a map, every token may depend on all tokens of its sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqseq import Context, ImplicitSequenceLayer, Residual, SolveOptions
from deqseq.backbone import State, Trace
from deqseq.backbones import LlamaBackbone, Mamba2Backbone, ModuleBackbone
from deqseq.backbones.llama import rotate
from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.gradients import ImplicitDifferentiation, Phantom
from deqseq.iteration import search
from deqseq.layer import ExplicitSequenceLayer
from deqseq.policies import Quantile
from deqseq.problem import Problem
from deqseq.solvers import Anderson
from deqseq.status import Status

D = 8
TIGHT = Residual(rtol=1e-5, max_iter=300)


class Mixing(nn.Module):
    """A contraction that mixes all tokens: 0.6 tanh(A u W) with matrices A and W of spectral norm 1."""

    def __init__(self, length: int) -> None:
        super().__init__()
        tokens, channels = torch.randn(length, length), torch.randn(D, D)
        self.tokens = nn.Parameter(tokens / torch.linalg.matrix_norm(tokens, 2))
        self.channels = nn.Parameter(channels / torch.linalg.matrix_norm(channels, 2))

    def forward(self, u: Tensor) -> Tensor:
        return 0.6 * torch.tanh(self.tokens @ u @ self.channels)


def llama(**options: Any) -> LlamaBackbone:
    made = LlamaBackbone(**{"d_model": D, "n_layer": 1, "n_head": 2, "causal": False, **options})
    with torch.no_grad():
        for norm in (made.norm_f, made.layers[0].norm, made.layers[0].norm2):
            if norm is not None:
                norm.weight.mul_(0.3)
    return made


def layer(backbone: Any, **options: Any) -> ImplicitSequenceLayer:
    return ImplicitSequenceLayer(backbone, **{"convergence": TIGHT, **options})


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_tokens_settle_with_their_sequence() -> None:
    """All tokens of a sequence settle after the same number of iterations.

    The second sequence needs fewer iterations than the first sequence, because it starts at its solution.
    """
    solve = layer(ModuleBackbone(Mixing(5), causal=False)).eval()
    x = torch.randn(2, 5, D)
    z0 = solve(x).z.detach() * torch.tensor([0.0, 1.0])[:, None, None]
    with torch.no_grad():
        out = solve(x, z0=z0)
    iterations = out.solution.iterations
    assert (iterations == iterations[:, :1]).all()
    assert iterations[0, 0] > iterations[1, 0]
    assert (out.solution.status == Status.CONVERGED).all()
    torch.testing.assert_close(out.z, solve.backbone(out.z, solve.backbone.prepare(x)), rtol=1e-4, atol=1e-5)


class Alternating(nn.Module):
    """-1.5 tanh of the mean of all tokens: at its fixed point near 0, the derivative is below -1."""

    def forward(self, u: Tensor) -> Tensor:
        return -1.5 * torch.tanh(u.mean(1, keepdim=True)).expand_as(u)


def test_anderson_with_one_difference_ends_searches_that_alternate() -> None:
    """Each step of Picard is the opposite of the step before. Anderson meets a tight tolerance."""
    solve = layer(ModuleBackbone(Alternating(), causal=False), convergence=Residual(rtol=1e-5, max_iter=64))
    x = 0.1 * torch.randn(2, 5, D)
    with torch.no_grad():
        picard, anderson = (
            solve.eval()(x, solve=SolveOptions(solver, solve.eval_solve.convergence)).solution
            for solver in ("picard", Anderson(memory=1, scope="sequence"))
        )
        z = picard.z
        fz = solve.backbone(z, solve.backbone.prepare(x))
        ffz = solve.backbone(fz, solve.backbone.prepare(x))
    assert (picard.status == Status.BUDGET_EXHAUSTED).all()
    assert ((fz - z) * (ffz - fz) < 0).all()
    assert (anderson.status == Status.CONVERGED).all() and anderson.iterations.max() < 20


def test_an_earlier_token_depends_on_a_later_one() -> None:
    """If the last token changes, earlier tokens change too, except with a causal backbone."""
    x = torch.randn(1, 6, D)
    changed = x.clone()
    changed[0, 5] += 1
    for causal in (False, True):
        torch.manual_seed(0)
        solve = layer(LlamaBackbone(d_model=D, n_layer=1, n_head=2, causal=causal)).eval()
        with torch.no_grad():
            same = torch.equal(solve(x).z[0, :5], solve(changed).z[0, :5])
        assert same == causal


@pytest.mark.parametrize("options", [{}, {"board": 3}, {"post_norm": True}])
def test_padding_and_other_sequences_change_nothing(options: dict[str, int]) -> None:
    """Each row has the same result as in a call with this row alone and without its padding.

    One row has padding at its start, another row at its end.
    """
    solve = layer(llama(**options)).eval()
    x, mask = torch.randn(3, 7, D), torch.ones(3, 7, dtype=torch.bool)
    mask[1, 5:] = False
    mask[2, :3] = False
    with torch.no_grad():
        out = solve(x, attention_mask=mask)
        for row in range(3):
            alone = solve(x[row : row + 1, mask[row]])
            torch.testing.assert_close(out.z[row, mask[row]], alone.z[0], rtol=1e-4, atol=1e-5)
    assert (out.z[~mask] == 0).all()


def test_packed_sequences_are_separate() -> None:
    solve = layer(llama()).eval()
    x = torch.randn(1, 7, D)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with torch.no_grad():
        out = solve(x, position_ids=positions).z
        for part in (slice(0, 3), slice(3, 7)):
            torch.testing.assert_close(out[:, part], solve(x[:, part]).z, rtol=1e-4, atol=1e-5)


def test_one_token_that_is_not_finite_spoils_its_sequence_only() -> None:
    solve = layer(ModuleBackbone(Mixing(5), causal=False)).eval()
    x = torch.randn(2, 5, D)
    with torch.no_grad():
        expected = solve(x).z
        x[1, 3, 0] = torch.nan
        out = solve(x)
    torch.testing.assert_close(out.z[0], expected[0])
    assert out.z[1].isnan().all()
    assert (out.solution.status[1] == Status.NON_FINITE).all()


def test_a_sequence_that_overflows_ends_at_once() -> None:
    class Overflow(nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            return u.sum(1, keepdim=True).square().expand_as(u) * 1e30

    solve = layer(ModuleBackbone(Overflow(), causal=False)).eval()
    x = torch.zeros(2, 4, D)
    x[1] = 1.0
    with torch.no_grad():
        found = solve(x).solution
    assert (found.status[0] == Status.CONVERGED).all()
    assert (found.status[1] == Status.NON_FINITE).all()
    assert found.iterations[1].max() < 5


@pytest.mark.parametrize(
    "solver", ["picard", "anderson", "broyden", {"name": "anderson", "scope": "sequence"}]
)
@pytest.mark.parametrize("gradient", [Phantom(40), ImplicitDifferentiation(convergence=TIGHT)])
def test_gradients_equal_finite_differences(solver: Any, gradient: Any) -> None:
    """The gradients with respect to x equal finite differences, in float64.

    If the map is not causal, training also accepts solvers with sequence scope.
    """
    solve = layer(
        ModuleBackbone(Mixing(4), causal=False), solver=solver, gradient=gradient,
        convergence=Residual(rtol=1e-9, max_iter=400),
    ).double()  # fmt: skip
    x, v = torch.randn(1, 4, D, dtype=torch.float64), torch.randn(1, 4, D, dtype=torch.float64)
    x.requires_grad_()
    (found,) = torch.autograd.grad((solve(x).z * v).sum(), x)
    step, direction = 1e-5, torch.randn_like(x)
    with torch.no_grad():
        ahead, behind = (solve(x + sign * step * direction).z for sign in (1, -1))
    expected = ((ahead - behind) * v).sum() / (2 * step)
    torch.testing.assert_close((found * direction).sum(), expected, rtol=1e-4, atol=1e-6)


def test_a_quantile_of_the_tokens_may_stop_a_sequence() -> None:
    """A sequence stops when 95 % of its tokens meet the tolerance. The other tokens have not converged."""

    class Slow(nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            rate = torch.tensor([0.3] * 19 + [0.97])[:, None]
            return rate * u + 1e-6 * u.mean(1, keepdim=True)

    policy = Quantile(Residual(rtol=1e-4, max_iter=64), 0.95)
    with torch.no_grad():
        found = layer(ModuleBackbone(Slow(), causal=False), convergence=policy).eval()(torch.ones(1, 20, D))
    status = found.solution.status[0]
    assert (status[:19] == Status.CONVERGED).all() and status[19] != Status.CONVERGED
    assert found.solution.iterations.max() < 20


def test_a_map_that_does_not_say_is_causal() -> None:
    class Half:
        def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
            return 0.5 * z + 1, None

    found = search(Problem(Half(), Context(), torch.zeros(1, 3, D), SolveOptions(convergence=TIGHT)))
    torch.testing.assert_close(found.z, torch.full((1, 3, D), 2.0), rtol=1e-3, atol=1e-3)


def test_positions_on_a_board_have_two_dimensions() -> None:
    """On a board, an attention score depends on the differences in row and in column of query and key.

    Without a board, the score depends on the difference of their positions in the sequence.
    """
    q, k = torch.randn(2, 1, 1, 1, 4)

    def score(backbone: LlamaBackbone, query: int, key: int) -> float:
        cos, sin = backbone._rotary(torch.tensor([[query, key]]))
        turned = [rotate(v, cos[:, i : i + 1], sin[:, i : i + 1]) for i, v in enumerate((q, k))]
        return (turned[0] * turned[1]).sum().item()

    flat, board = (llama(board=size) for size in (None, 3))
    for backbone in (flat, board):  # on the board, the key is one row and one column after the query
        assert score(backbone, 0, 4) == pytest.approx(score(backbone, 4, 8), abs=1e-5)
    assert score(flat, 0, 1) == pytest.approx(score(flat, 2, 3), abs=1e-5)
    assert score(board, 0, 1) != pytest.approx(score(board, 2, 3), abs=1e-2)  # position 3 is in the next row


def test_an_explicit_layer_hides_padding_too() -> None:
    explicit = ExplicitSequenceLayer(llama(injection=False)).eval()
    x, mask = torch.randn(1, 6, D), torch.tensor([[1, 1, 1, 1, 0, 0]])
    torch.testing.assert_close(explicit(x, attention_mask=mask).z[:, :4], explicit(x[:, :4]).z)


def test_what_needs_a_causal_map_is_refused() -> None:
    solve, x = layer(llama()), torch.randn(1, 4, D)
    with pytest.raises(ValueError, match="needs a causal backbone, but this LlamaBackbone uses later"):
        solve(x, window=2)
    with pytest.raises(ValueError, match="a window needs a causal backbone"):
        solve(x, solve=SolveOptions(window=9))
    with pytest.raises(ValueError, match="a state needs a causal backbone"):
        solve(x, state=solve.backbone.initial_state(1))
    with pytest.raises(ValueError, match="causal=True needs a causal backbone, got LlamaBackbone"):
        layer(llama(), causal=True)
    with pytest.raises(ValueError, match="ModuleBackbone is not causal and cannot hide padding"):
        layer(ModuleBackbone(Mixing(4), causal=False))(x, attention_mask=torch.tensor([[1, 1, 1, 0]]))
    with pytest.raises(ValueError, match="attention must be 'sdpa' with causal=False"):
        llama(attention="eager")
    with pytest.raises(ValueError, match="a board needs a head dim that 4 divides, got 2"):
        llama(board=3, n_head=4)
    with pytest.raises(ValueError, match="a board needs causal=False, got board=3 with causal=True"):
        LlamaBackbone(d_model=D, n_layer=1, n_head=2, board=3)
    with pytest.raises(ValueError, match="causal must be true or false, got 'no'"):
        LlamaBackbone(d_model=D, n_layer=1, n_head=2, causal="no")
    with pytest.raises(ValueError, match="a map that is not causal needs all tokens at once"):
        search(Problem(llama(), llama().prepare(x), x, SolveOptions(window=2)))
    shape = {"name": "llama", "d_model": D, "n_layer": 1, "n_head": 2, "causal": False}
    for causal in (True, False):
        with pytest.raises(ValueError, match="needs a causal backbone"):
            ImplicitForCausalLM(ImplicitConfig(vocab_size=9, backbone=shape, causal=causal))
    assert layer(Mamba2Backbone(d_model=D, n_layer=1, headdim=8)).causal and not solve.causal


def test_a_replaced_backbone_and_a_new_causal_agree() -> None:
    """The flag ``causal`` of a layer depends on its backbone."""
    for before, after in ((True, False), (False, True)):
        solve, other = layer(llama(causal=before)), llama(causal=after)
        with pytest.raises(ValueError, match=f"must have causal={before}, as its old.*got causal={after}"):
            solve.backbone = other
        solve.backbone = llama(causal=before)
        assert solve.causal is before is solve.backbone.causal
    with pytest.raises(ValueError, match="causal must be true or false, got None"):
        solve.causal = None
    with pytest.raises(ValueError, match="causal=True needs a causal backbone, got LlamaBackbone"):
        solve.causal = True
    freed = layer(llama(causal=True))
    freed.causal = False
    assert not freed.causal
