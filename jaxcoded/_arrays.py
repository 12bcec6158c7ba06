"""Arrays of other libraries, seen as NumPy's."""

from typing import Any

import numpy as np


def viewed(value: Any) -> Any:
    """Return an array of NumPy in the same memory where ``value`` has the buffer protocol or DLPack, as
    tensors of PyTorch have; otherwise ``value`` itself.

    Example:
        >>> import array
        >>> from jaxcoded import _arrays
        >>> _arrays.viewed(array.array("d", [1, 2]))
        array([1., 2.])
    """
    if hasattr(value, "__array__") or isinstance(value, bytes):
        return value
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    try:
        return np.asarray(memoryview(value))
    except TypeError:
        return value
