"""Chooses the implementation that computes the operations in :mod:`deqseq.ops`.

``"torch"``
    plain PyTorch; runs on every device. Tests compare all other implementations with this one.
``"triton"``
    our own fused kernels for the forward and backward pass. They run on NVIDIA GPUs, and on the CPU with
    Triton's interpreter (``TRITON_INTERPRET=1``).
``"mamba_ssm"``
    the recurrence of ``mamba_ssm`` and the convolution of ``causal_conv1d``.
``"fla"``
    the recurrence and the convolution of ``fla-core`` (flash-linear-attention).

On an NVIDIA GPU, the default is the first of triton, mamba_ssm and fla that can be imported. On all other
devices, the default is torch, also on AMD GPUs (ROCm), because the kernels are not tested there. The
environment variable ``DEQSEQ_KERNELS``, or :func:`use`, selects another implementation. Torch always computes
float64 operations, and operations that the selected implementation lacks. By default torch also computes
float32 matrix products. Exact float32 products are slow in Triton, and the other packages round to TF32.

A backbone's ``prepare`` calls :func:`choose` once per forward pass and stores the result in the context. All
evaluations with this context use the stored choice. Gradient checkpointing repeats evaluations in the
backward pass. It therefore uses the same kernels again.
"""

import functools
import importlib
import logging
import os
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

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
_named: dict[object, str | None] = {}  # the name of every active ``use`` block, in the order of entry
_twice: ContextVar[bool] = ContextVar("second derivatives are wanted", default=False)


class Choice(NamedTuple):
    """The implementations of a forward pass: one for matrix products, one for all other operations."""

    products: str
    others: str


@functools.cache
def available(name: str) -> bool:
    """Whether the packages of an implementation can be imported. If not, logs the failed package once."""
    for package in _PACKAGES[name]:
        try:
            importlib.import_module(package)
        except Exception as error:  # an extension built for another torch may raise any error
            logger.info("kernels %r are not available: %s does not import (%s)", name, package, error)
            return False
    return True


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Within the block, use the implementation ``name``. ``None`` means ``DEQSEQ_KERNELS`` or the default.

    This holds for all threads of the process.

    A backbone chooses its kernels in ``prepare``, so call ``prepare`` (or the whole layer) inside the block.

    Raises:
        ValueError: no implementation has this name, or its packages cannot be imported.
    """
    if name is not None:
        _check(name)
    block = object()
    _named[block] = name
    try:
        yield
    finally:  # delete this block's entry, not the last entry: threads may leave blocks in any order
        del _named[block]


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Within the block, compute with plain PyTorch, because it supports second derivatives.

    Contexts that were prepared for other kernels also use plain PyTorch within the block.
    """
    token = _twice.set(True)
    try:
        with use("torch"):
            yield
    finally:
        _twice.reset(token)


def chosen() -> str | None:
    """The name given to :func:`use`, else the value of ``DEQSEQ_KERNELS``, else ``None``."""
    names = list(_named.values())  # next(reversed(...), None) fails in torch.compile of torch 2.11
    return (names[-1] if names else None) or os.environ.get("DEQSEQ_KERNELS") or None


def implementation(x: Tensor, products: bool = False) -> str:
    """The implementation to use for an operation on ``x``.

    Set ``products`` if the operation is a matrix product: autocast may then change the type of its inputs.
    """
    dtype = autocast_dtype(x) if products else x.dtype
    if dtype == float64:
        return "torch"
    name = chosen()
    if name is not None:
        _check(name)
        interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        return name if x.is_cuda or interpreted else "torch"
    if not on_tested_gpu(x) or (products and dtype == float32):
        return "torch"
    return next(name for name in NAMES if available(name))


def on_tested_gpu(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU where kernels and CUDA graphs are tested, or ``"triton"`` is chosen by name.

    AMD GPUs (ROCm) are not tested, although ``is_cuda`` is true for tensors on them.
    """
    return x.is_cuda and (torch.version.hip is None or chosen() == "triton")


def choose(x: Tensor) -> Choice:
    """The implementations for a forward pass on ``x``."""
    return Choice(implementation(x, products=True), implementation(x))


def effective(choice: Choice) -> Choice:
    """The implementations to use now: ``choice``, or torch inside :func:`twice_differentiable`."""
    if torch.compiler.is_compiling():  # torch.compile cannot read context variables
        return choice
    return Choice("torch", "torch") if _twice.get() else choice


def fused(x: Tensor) -> bool:
    """Whether to use Triton kernels that have no backward pass; false while gradients are enabled."""
    return implementation(x) == "triton" and not torch.is_grad_enabled()


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The type to which autocast converts ``x`` in a linear map. Autocast leaves float64 unchanged."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == float64:
        return x.dtype
    return torch.get_autocast_dtype(device)


def _check(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"unknown kernels {name!r}; known: {', '.join(NAMES)}")
    if not available(name):
        packages = " and ".join(_PACKAGES[name])
        raise ValueError(f"kernels {name!r} need {packages}, which cannot be imported here")


def first_derivative_only() -> None:
    """Raise ``RuntimeError`` in a backward pass with ``create_graph=True``.

    Fused kernels call this function in their backward pass, because they have no second derivative.
    """
    if torch.is_grad_enabled():  # in a backward pass, true only with create_graph=True
        raise RuntimeError(
            "fused kernels have no second derivative: run the forward pass inside deqseq.kernels.use('torch')"
        )


_compiled: dict[Hashable, Any] = {}


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Within the block, make the device of ``x`` current: kernels and graphs run on the current device."""
    if not x.is_cuda or torch.compiler.is_compiling():  # compiled code sets the device itself
        return nullcontext()
    return torch.cuda.device(x.device)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> None:
    """Run a Triton kernel, and keep the compiled kernel for later calls.

    Later calls take half the host time of Triton's own launch, because they find the compiled kernel faster.
    Small models spend most of their time on launches.

    ``args``: tensors and numbers, in the order of the kernel's parameters; ``constants``: the remaining
    parameters, in the kernel's order.

    Raises:
        TypeError: ``constants`` differ from the kernel's remaining parameters, or have another order.
    """
    if not any(isinstance(a, Tensor) and a.is_cuda for a in args):
        kernel[grid](*args, **constants)  # runs in Triton's interpreter
        return
    # A compiled kernel may be valid only for the dtypes and alignments of these tensors and for the values of
    # these numbers, so the key has all of them.
    kinds = [(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else (type(a), a) for a in args]
    key = (id(kernel), torch.cuda.current_device(), num_warps, num_stages, *kinds, *constants.values())
    compiled = _compiled.get(key)
    if compiled is None:
        order = kernel.arg_names[len(args) :]
        if list(constants) != order:
            raise TypeError(f"constants of {kernel.__name__} must be {order} in this order")
        made = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
        if made is not None:  # None if Triton's interpreter ran the kernel on GPU tensors
            _compiled[key] = made
        return
    compiled[(*grid, 1, 1)[:3]](*args, *constants.values())
