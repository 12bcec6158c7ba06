"""Checks of arguments."""

import math
import numbers
from typing import Any


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as an int.

    Raises:
        ValueError: it is not an integer in ``least … most``. The message has the name.
    """
    integral = not isinstance(value, bool) and hasattr(value, "__index__")
    if not integral or value < least or (most is not None and value > most):
        wanted = f"≥ {least}" if most is None else f"in {least} … {most}"
        raise ValueError(f"{name} must be an integer {wanted}, got {value!r}")
    return int(value)


def is_number(value: Any) -> bool:
    """Whether it is a real number, Python's or NumPy's."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """Whether it is a finite number > 0, Python's or NumPy's."""
    return is_number(value) and 0 < value < math.inf


def positive(name: str, value: Any) -> float:
    """``value`` as a float.

    Raises:
        ValueError: it is not a finite number > 0. The message has the name.
    """
    if not is_positive(value):
        raise ValueError(f"{name} must be a number > 0, got {value!r}")
    return float(value)


def not_negative(name: str, value: Any) -> float:
    """``value`` as a float.

    Raises:
        ValueError: it is not a number ≥ 0. The message has the name.
    """
    if not (is_number(value) and value >= 0):
        raise ValueError(f"{name} must be a number ≥ 0, got {value!r}")
    return float(value)
