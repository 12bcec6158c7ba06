"""Checks of arguments."""

from typing import Any


def integer(name: str, value: Any, least: int) -> int:
    """``value`` as an int.

    Raises:
        ValueError: it is not an integer, or below ``least``. The message has the name.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise ValueError(f"{name} must be an integer ≥ {least}, got {value!r}")
    return int(value)
