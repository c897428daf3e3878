"""One tensor for many readers. The backward pass sums the gradients of all readers."""

import torch
from torch import Tensor


def fan_out(x: Tensor | None, count: int, implementation: str) -> tuple[Tensor | None, ...]:
    """``x`` for each of ``count`` readers. ``implementation`` is a name in :mod:`deqseq.kernels`.

    If all readers get ``x`` itself, autograd adds their gradients one by one. Each addition reads two tensors
    and writes one. The implementation in Triton keeps all gradients in memory until the last one is there.
    Then it reads each of them once, and sums them in float32. Compiled code does not need it, because the
    compiler fuses the additions.
    """
    recorded = x is not None and torch.is_grad_enabled() and x.requires_grad
    if x is None or not recorded or implementation != "triton" or torch.compiler.is_compiling():
        return (x,) * count
    from deqseq.ops.fan_out import triton

    return triton.fan_out(x, count)
