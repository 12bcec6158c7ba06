from typing import Any

import numpy as np


def viewed(value: Any) -> Any:
    """If ``value`` has the buffer protocol or DLPack, as PyTorch tensors have, return a
    NumPy array in the same memory. Otherwise return ``value`` itself.

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
