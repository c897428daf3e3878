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
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, float32, float64

logger = logging.getLogger(__name__)

_PACKAGES = {
    "triton": ("triton",),
    "mamba_ssm": ("mamba_ssm.ops.triton.ssd_combined", "causal_conv1d"),
    "fla": ("fla.ops.simple_gla", "fla.modules.conv"),
    "torch": (),
}
NAMES = tuple(_PACKAGES)
_named: str | None = None


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
    global _named
    if name is not None:
        _check(name)
    before, _named = _named, name
    try:
        yield
    finally:
        _named = before


def implementation(x: Tensor, products: bool = False) -> str:
    """What computes on ``x``; ``products``: with matrix products."""
    if x.dtype == float64:
        return "torch"
    name = _named or os.environ.get("DEQSEQ_KERNELS") or None
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
