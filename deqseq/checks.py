"""Functions that check arguments. They never make the host wait for a device."""

import math
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn

Scope = Literal["token", "sequence"]

MOST_STEPS = 4096
"""The largest number of past steps that a solver may store. More steps would fill the machine's memory."""

LEAST_TEMPERATURE = 1e-30
"""The lowest temperature for sampling. Logits divided by lower temperatures may overflow to infinity."""


def shown(value: object) -> str:
    """The text for a value in an error message: its ``repr`` in one line, shortened to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _shown_scalar(value: object) -> str:
    """As :func:`shown`. For scalars of NumPy and torch, which look right, also say how to convert them."""
    plain = isinstance(value, (int, float)) or getattr(value, "shape", None) != ()
    kind = type(value)
    return shown(value) if plain else f"{shown(value)}, a {kind.__module__}.{kind.__name__}: use .item()"


def check_scope(scope: str) -> None:
    """Raise ``ValueError`` unless ``scope`` is ``"token"`` or ``"sequence"``."""
    if scope not in ("token", "sequence"):
        raise ValueError(f"scope must be 'token' or 'sequence', got {shown(scope)}")


def check_count(name: str, value: object, least: int = 1, most: float = math.inf) -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        rule = f">= {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {rule}, got {_shown_scalar(value)}")


def check_positive(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number above 0."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {_shown_scalar(value)}")


def check_not_negative(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number of at least 0."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {_shown_scalar(value)}")


def check_share(name: str, value: object, hint: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` is a number in (0, 1]. ``hint``: appended to the message."""
    if not _is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {_shown_scalar(value)}{hint}")


def check_damping(damping: object) -> None:
    """Raise ``ValueError`` unless ``damping`` is in (0, 1]."""
    check_share("damping", damping, "; 1 is undamped")


def check_flag(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {_shown_scalar(value)}")


def check_instance(name: str, value: object, kind: type | UnionType, what: str) -> None:
    """Raise ``ValueError`` unless ``value`` is an instance of ``kind``. ``what``: ``kind`` in words."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {what}, got {shown(value)}")


def check_tensor(name: str, value: object, shape: Sequence[int] | None = None, meaning: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` is a tensor. If ``shape`` is given, also check its shape.

    ``meaning``: words to put before the shape in the message, such as ``"shape (B, L) = "``.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {shown(value)}")
    if shape is not None and value.shape != tuple(shape):
        raise ValueError(f"{name} must have {meaning}{tuple(shape)}, got {tuple(value.shape)}")


def check_floating(name: str, value: Tensor) -> None:
    """Raise ``ValueError`` unless the tensor has a floating-point dtype."""
    if not value.is_floating_point():
        raise ValueError(f"{name} must be of a floating-point type, got {value.dtype}")


def check_integers(name: str, value: Tensor) -> None:
    """Raise ``ValueError`` unless the tensor has the dtype int64 or int32."""
    if value.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, got {value.dtype}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_not_sharded(modules: Iterable[nn.Module]) -> None:
    """Raise ``ValueError`` if one of ``modules`` is a separate FSDP unit.

    FSDP gathers the weights of a unit when the unit is called. Backbones read weights outside such calls.
    """
    for module in modules:
        if "_fsdp_wrapped_module" in module._modules or hasattr(type(module), "set_reshard_after_forward"):
            part = type(module._modules.get("_fsdp_wrapped_module", module)).__name__
            raise ValueError(
                f"FSDP shards a part of a backbone by itself, a {part}, but a forward pass reads all weights "
                "of a backbone at its start: make the whole model one unit, with fully_shard(model), or with "
                "fsdp_auto_wrap_policy: NO_WRAP in accelerate's configuration"
            )
