"""Solves of vLLM's flat batches (T, D), and folded checkpoints. These tests do not need vLLM."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from deqseq import FixedIterations, Residual, SolveOptions
from deqseq.vllm.batch import packing_of, solve
from deqseq.vllm.weights import folded

LENGTHS = (3, 1, 5)
OPTIONS = [
    SolveOptions("picard", Residual(rtol=0.3)),
    SolveOptions("anderson", Residual(rtol=1e-2, scope="sequence"), guess="noise"),
    SolveOptions("broyden", FixedIterations(3)),
]


def starts_of(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@dataclass
class Means:
    """f(z)_t = tanh(x_t + 0.7 mean(z_1, ..., z_t)), for each request on its own. x and z are (T, D).

    ``sizes``: the number of tokens of every evaluation.
    """

    x: Tensor
    lengths: tuple[int, ...]
    sizes: list[int] = field(default_factory=list)

    def __call__(self, z: Tensor) -> Tensor:
        self.sizes.append(len(z))
        tokens = sum(self.lengths)
        means = [
            part.cumsum(0) / torch.arange(1, len(part) + 1)[:, None]
            for part in z[:tokens].split(self.lengths)
        ]
        out = torch.full_like(z, torch.nan)  # padding may hold anything
        out[:tokens] = torch.tanh(self.x[:tokens] + 0.7 * torch.cat(means))
        return out

    def select(self, rows: Tensor, tokens: Tensor, starts: Tensor) -> "Means":
        lengths = tuple(self.lengths[row] for row in rows.tolist())
        assert starts.tolist() == starts_of(*lengths).tolist()
        return Means(self.x[tokens], lengths, self.sizes)


@pytest.mark.parametrize("options", OPTIONS, ids=["loose", "sequence", "fixed"])
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("compact", [False, True])
def test_requests_are_solved_as_if_alone(
    options: SolveOptions, padding: int, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deqseq.compact.SHARE", 1e-9)  # every request leaves at once
    x = torch.randn(sum(LENGTHS) + padding, 6)
    x[3] *= 20  # one request needs other numbers of evaluations than the others
    together, starts = Means(x, LENGTHS), starts_of(*LENGTHS)
    found = solve(together, x, starts, options, None, compact)[0]
    parts = [Means(part, (len(part),)) for part in x[: sum(LENGTHS)].split(LENGTHS)]
    alone = [solve(f, f.x, starts_of(*f.lengths), options, None, compact)[0] for f in parts]
    torch.testing.assert_close(found[: sum(LENGTHS)], torch.cat(alone), rtol=1e-5, atol=1e-6)
    assert not found[sum(LENGTHS) :].any()
    if compact and not isinstance(options.convergence, FixedIterations):
        # Each request takes as many evaluations as alone. Padding stays until the first request leaves.
        assert sum(together.sizes) < len(x) * len(together.sizes)
        first, needed = len(x) - sum(LENGTHS), sum(sum(f.sizes) for f in parts)
        still = min(count for count in range(len(together.sizes)) if together.sizes[count] < len(x))
        assert sum(together.sizes) == needed + still * first


def test_the_request_that_needs_most_leaves_last() -> None:
    """A long request that has settled leaves even if all the others still run."""
    lengths = (40, 1, 1)
    x = torch.randn(sum(lengths), 6)
    x[:40] *= 50
    f = Means(x, lengths)
    solve(f, x, starts_of(*lengths), SolveOptions("picard", Residual(rtol=1e-5, max_iter=99)), None, True)
    assert f.sizes[-1] <= 2 and f.sizes == sorted(f.sizes, reverse=True)


def test_a_request_that_is_not_finite_leaves_the_others_alone() -> None:
    x = torch.randn(sum(LENGTHS), 6)
    good = solve(Means(x, LENGTHS), x, starts_of(*LENGTHS), OPTIONS[0], None, True)[0]
    x[3] = torch.nan
    found = solve(Means(x, LENGTHS), x, starts_of(*LENGTHS), OPTIONS[0], None, True)[0]
    assert found[3].isnan().all()
    torch.testing.assert_close(found[:3], good[:3])
    torch.testing.assert_close(found[4:], good[4:])


def test_rows() -> None:
    """``packing_of`` makes a row for each request that has tokens. vLLM may list requests without tokens."""
    rows = packing_of(torch.tensor([0, 2, 2, 5]), 7)
    assert rows.lengths.tolist() == [2, 3]
    assert rows.real.tolist() == [[True] * 5 + [False] * 2]
    values = torch.arange(7.0)[None]
    assert rows.unpack(rows.pack(values)).tolist() == [[0, 1, 2, 3, 4, 0, 0]]


def test_folded_weights_equal_the_normalised_ones() -> None:
    linear, convolution = nn.Linear(4, 3), nn.Conv1d(4, 4, 2, groups=4)
    model = nn.ModuleDict({"linear": linear, "convolution": convolution, "norm": nn.RMSNorm(4)})
    for part in linear, convolution:
        parametrizations.weight_norm(part)
        with torch.no_grad():
            part.parametrizations["weight"].original0.mul_(2)
    plain = dict(folded(model.state_dict().items()))
    assert plain.keys() == {
        "linear.weight", "linear.bias", "convolution.weight", "convolution.bias", "norm.weight"
    }  # fmt: skip
    for name in "linear", "convolution":
        torch.testing.assert_close(plain[f"{name}.weight"], model[name].weight)


def test_half_of_a_normalised_weight() -> None:
    with pytest.raises(ValueError, match=r"only one half of weight-normalised weights: \['a'\]"):
        list(folded([("a.parametrizations.weight.original0", torch.ones(1))]))
