"""A reference implementation of Mamba2's recurrence, and a backend that counts runs of compiled graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def recurrence(
    x: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h_t = exp(a_t) h_{t-1} + x_t b_t^T and y_t = h_t c_t, token by token. Returns y and the last h."""
    batch, length, heads, width = x.shape
    repeat = heads // b.shape[2]
    b, c = b.repeat_interleave(repeat, 2), c.repeat_interleave(repeat, 2)
    h = x.new_zeros(batch, heads, width, b.shape[-1]) if state is None else state
    y = []
    for t in range(length):
        h = h * a[:, t].exp()[..., None, None] + x[:, t, ..., None] * b[:, t, :, None]
        y.append((h * c[:, t, :, None]).sum(-1))
    return torch.stack(y, 1), h


@pytest.fixture
def ssd_naive() -> Callable[..., tuple[Tensor, Tensor]]:
    """The function :func:`recurrence`. Its arguments are those of :func:`deqseq.ops.mixer.ssd.ssd`."""
    return recurrence


class Counting:
    """A backend of torch.compile that runs graphs without compiling them, and counts the runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


@pytest.fixture
def counting() -> Counting:
    torch._dynamo.reset()
    return Counting()
