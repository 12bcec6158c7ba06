"""Checks of arguments."""

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
