"""Which implementation computes the inner parts of the backbones and of the loop.

``"torch"``
    plain PyTorch, anywhere: the twin by which all others are tested.
``"triton"``
    our own fused kernels, forward and backward; on NVIDIA GPUs, and on the CPU under Triton's interpreter
    (``TRITON_INTERPRET=1``).
``"mamba_ssm"``
    the recurrence of ``mamba_ssm`` and the convolution of ``causal_conv1d``.
``"fla"``
    the recurrence of ``fla-core``, flash-linear-attention's pure Python package.

On a GPU the first of triton, mamba_ssm and fla that imports is taken, elsewhere torch. The environment
variable ``DEQSEQ_KERNELS``, or :func:`use`, names another. Float64, and what an implementation cannot do, is
computed by torch; and so are matrix products in float32 unless another is named, because exact ones are slow
in Triton, to compile too, and other packages' are not exact.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, float32, float64

logger = logging.getLogger(__name__)

_PACKAGES = {
    "triton": ("triton",),
    "mamba_ssm": ("mamba_ssm.ops.triton.ssd_combined", "causal_conv1d"),
    "fla": ("fla.ops.simple_gla", "fla.modules.conv"),
    "torch": (),
}
NAMES = tuple(_PACKAGES)
_named: dict[object, str | None] = {}  # by block, the innermost last


@functools.cache
def available(name: str) -> bool:
    """Whether the packages of an implementation import; what does not is named in the log, once."""
    for package in _PACKAGES[name]:
        try:
            importlib.import_module(package)
        except Exception as error:  # extensions built for another torch fail in many ways
            logger.info("kernels %r are not available: %s does not import (%s)", name, package, error)
            return False
    return True


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Within the block, compute by the implementation ``name``; ``None``: choose by itself.

    Raises:
        ValueError: no implementation of that name, or its packages do not import.
    """
    if name is not None:
        _check(name)
    block = object()
    _named[block] = name
    try:
        yield
    finally:  # this one, not the last: those of several threads end in any order
        del _named[block]


def chosen() -> str | None:
    """The implementation that :func:`use` or the environment names."""
    return next(reversed(_named.values()), None) or os.environ.get("DEQSEQ_KERNELS") or None


def implementation(x: Tensor, products: bool = False) -> str:
    """What computes on ``x``; ``products``: with matrix products."""
    if x.dtype == float64:
        return "torch"
    name = chosen()
    if name is not None:
        _check(name)
        return name if x.is_cuda or _interpreted(name) else "torch"
    if not x.is_cuda or (products and x.dtype == float32):
        return "torch"
    return next(name for name in NAMES if available(name))


def _interpreted(name: str) -> bool:
    return name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def _check(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"unknown kernels {name!r}; known: {', '.join(NAMES)}")
    if not available(name):
        raise ValueError(f"kernels {name!r} need {' and '.join(_PACKAGES[name])}, which do not import here")


def first_derivative_only() -> None:
    """For backward passes in kernels, which leave no graph of what they do.

    Raises:
        RuntimeError: a graph of the backward pass is asked for.
    """
    if torch.is_grad_enabled():  # inside a backward pass, exactly then
        raise RuntimeError(
            "fused kernels have no second derivative: compute what is differentiated twice under "
            "deqseq.kernels.use('torch')"
        )


_compiled: dict[Hashable, Any] = {}


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Within it, kernels and CUDA graphs go to the device of ``x``, whichever was current."""
    if not x.is_cuda or torch.compiler.is_compiling():  # whose code names its devices
        return nullcontext()
    return torch.cuda.device(x.device)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> None:
    """Run a Triton kernel, at half of what Triton's own look-up costs the host from the second time on.

    Small models are bound by launches, and Triton takes longer to find out which of a kernel's compiled forms
    is meant than to launch it.

    Args:
        kernel: made by ``triton.jit``.
        grid: programs, one to three dimensions.
        args: tensors and numbers, in the order of the kernel's parameters.
        constants: the parameters behind them, in their order too.
    """
    if not any(isinstance(a, Tensor) and a.is_cuda for a in args):
        kernel[grid](*args, **constants)  # Triton's interpreter
        return
    # What Triton compiles for: types, alignment and values that it takes for constants.
    kinds = [(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else (type(a), a) for a in args]
    key = (id(kernel), torch.cuda.current_device(), num_warps, num_stages, *kinds, *constants.values())
    compiled = _compiled.get(key)
    if compiled is None:
        order = kernel.arg_names[len(args) :]
        if list(constants) != order:
            raise TypeError(f"constants of {kernel.__name__} must be {order} in this order")
        made = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
        if made is not None:  # as it is where the interpreter works on a GPU's tensors
            _compiled[key] = made
        return
    compiled[(*grid, 1, 1)[:3]](*args, *constants.values())
