"""The state-space recurrence in chunks gives the same outputs and states as the recurrence token by token."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deqseq.ops.mixer.ssd import ssd, ssd_advance

Recurrence = Callable[..., tuple[Tensor, Tensor]]


def random_inputs(
    length: int, groups: int = 1, dtype: torch.dtype = torch.float64, heads: int = 4
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random x, a, b, c and state for 2 sequences, head dim 3 and state dim 5."""
    x = torch.randn(2, length, heads, 3, dtype=dtype)
    a = -torch.rand(2, length, heads, dtype=dtype) * 2
    b, c = torch.randn(2, 2, length, groups, 5, dtype=dtype)
    return x, a, b, c, torch.randn(2, heads, 3, 5, dtype=dtype)


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 17])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("with_state", [False, True])
def test_chunked_equals_naive(
    length: int, groups: int, chunk: int, with_state: bool, ssd_naive: Recurrence
) -> None:
    x, a, b, c, state = random_inputs(length, groups)
    before = state if with_state else None
    expected, _ = ssd_naive(x, a, b, c, before)
    torch.testing.assert_close(ssd(x, a, b, c, before, chunk), expected)


def test_naive_is_the_recurrence_as_written(ssd_naive: Recurrence) -> None:
    x, a, b, c, state = random_inputs(3, groups=2)
    y, end = ssd_naive(x, a, b, c, state)
    h = state[1, 3].clone()  # sequence 1, head 3; this head uses b and c of group 1
    for t in range(3):
        h = a[1, t, 3].exp() * h + torch.outer(x[1, t, 3], b[1, t, 1])
        torch.testing.assert_close(y[1, t, 3], h @ c[1, t, 1])
    torch.testing.assert_close(end[1, 3], h)


@pytest.mark.parametrize("groups", [1, 2])
def test_state_after_any_number_of_tokens(groups: int, ssd_naive: Recurrence) -> None:
    length = 6
    x, a, b, c, state = random_inputs(length, groups)
    for first in range(length + 1):
        count = torch.tensor([first, length - first])
        advanced = ssd_advance(x, a, b, state, count)
        for i, n in enumerate(count.tolist()):
            row = slice(i, i + 1)
            parts = (t[row, :n] for t in (x, a, b, c))
            expected = ssd_naive(*parts, state[row])[1] if n else state[row]
            torch.testing.assert_close(advanced[row], expected)


def test_state_does_not_see_tokens_that_are_not_consumed() -> None:
    x, a, b, _, state = random_inputs(5)
    count = torch.tensor([2, 3])
    expected = ssd_advance(x, a, b, state, count)
    for t in (x, a, b):
        t[0, 2:] = torch.nan
        t[1, 3:] = torch.nan
    torch.testing.assert_close(ssd_advance(x, a, b, state, count), expected)


def test_split_anywhere() -> None:
    x, a, b, c, state = random_inputs(11)
    whole = ssd(x, a, b, c, state, 4)
    first = ssd(x[:, :5], a[:, :5], b[:, :5], c[:, :5], state, 4)
    middle = ssd_advance(x[:, :5], a[:, :5], b[:, :5], state, torch.tensor([5, 5]))
    second = ssd(x[:, 5:], a[:, 5:], b[:, 5:], c[:, 5:], middle, 4)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


@pytest.mark.parametrize("chunk", [3, 8])
def test_gradients(chunk: int) -> None:
    x, a, b, c, state = (t[:1] for t in random_inputs(5, groups=2))
    inputs = [t.clone().requires_grad_() for t in (x, a, b[..., :2], c[..., :2], state[..., :2])]
    assert torch.autograd.gradcheck(lambda *t: ssd(*t, chunk), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: ssd(*t, chunk), inputs)


def test_strong_decay_does_not_overflow() -> None:
    """Results and gradients stay finite with strong decays.

    ``ssd`` computes exp of the log decay between two tokens. From a later to an earlier token, exp would
    overflow. So ``ssd`` must mask these pairs of tokens before exp.
    """
    x, a, b, c, state = (t.float().requires_grad_() for t in random_inputs(16))
    y = ssd(x, a * 200, b, c, state, 16)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(t.grad).all() for t in (x, a, b, c, state))
