"""Check arguments."""

import functools
import math
import numbers
import operator
import reprlib
import sys
import types
from typing import Any

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: Any) -> str:
    """Return a value as text for a message, shortened if it is long.

    Example:
        >>> from jaxcoded import _require
        >>> _require.shown("a" * 1000)
        "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"
    """
    return _short.repr(value)


def kind(value: Any) -> str:
    """Return what a value is, as a noun with an article.

    Example:
        >>> import numpy as np
        >>> from jaxcoded import _require
        >>> _require.kind(3), _require.kind(np.zeros((2, 3)))
        ('an int', 'a numpy array of shape (2, 3) and dtype float64')
    """
    for library, name in (("numpy", "ndarray"), ("jax", "Array")):
        # A library's array can exist only if the library has been imported.
        array: Any = getattr(sys.modules.get(library), name, ())
        if isinstance(value, array):
            return f"a {library} array of shape {value.shape} and dtype {value.dtype}"
    class_name = type(value).__name__
    return f"{'an' if class_name[0] in 'aeiouAEIOU' else 'a'} {class_name}"


def function(name: str, value: Any) -> None:
    """Raise a TypeError that contains ``name`` unless ``value`` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {kind(value)}")


def named(function: Any) -> str:
    """Return the name of a function. The name of a lambda also has its line in the
    source.

    Example:
        >>> import functools
        >>> from jaxcoded import _require
        >>> _require.named(functools.partial(len, [])), _require.named(float.hex)
        ('len', 'hex')
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    return f"{name}, line {code.co_firstlineno}" if name == "<lambda>" else name


def identity(function: Any) -> Any:
    """Return a value that identifies a function among all existing functions, even
    among equal functions."""
    # each access to a method makes a new object
    if isinstance(function, types.MethodType):
        return id(function.__self__), id(function.__func__)
    return id(function)


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return ``value``, an integer in ``least … most``. Otherwise raise a ValueError
    that contains ``name``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if (
        isinstance(value, bool)
        or number < least
        or (most is not None and number > most)
    ):
        wanted = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be an integer {wanted}, got {shown(value)}")
    return number


def boolean(name: str, value: Any) -> bool:
    """Return ``value``. Raise a TypeError that contains ``name`` unless ``value`` is
    True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def is_number(value: Any) -> bool:
    """Return whether the value is a real number of Python or NumPy that fits into a
    float."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_positive(value: Any) -> bool:
    """Return whether the value is a finite number > 0 of Python or NumPy."""
    return is_number(value) and 0 < value < math.inf


def positive(name: str, value: Any) -> float:
    """Return a finite number > 0 as a float. Otherwise raise a ValueError that contains
    ``name``."""
    if not is_positive(value):
        raise ValueError(f"{name} must be a number > 0, got {shown(value)}")
    return float(value)


def not_negative(name: str, value: Any) -> float:
    """Return a number ≥ 0 as a float. Otherwise raise a ValueError that contains
    ``name``."""
    if not (is_number(value) and value >= 0):
        raise ValueError(f"{name} must be a number >= 0, got {shown(value)}")
    return float(value)
