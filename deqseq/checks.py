"""Checks of arguments."""

import math
from typing import Literal

Scope = Literal["token", "sequence"]


def check_scope(scope: str) -> None:
    """Raise ``ValueError`` unless ``scope`` is ``"token"`` or ``"sequence"``."""
    if scope not in ("token", "sequence"):
        raise ValueError(f"scope must be 'token' or 'sequence', got {scope!r}")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def check_damping(damping: float) -> None:
    """Raise ``ValueError`` unless ``damping`` is in (0, 1]."""
    if not (math.isfinite(damping) and 0 < damping <= 1):
        raise ValueError(f"damping must be in (0, 1], got {damping}; 1 is undamped")
