"""Numbers that show whether ranks have the same data set, up to rounding."""

import math
import numbers
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded import _jax_compat
from jaxcoded.transport.leaves import is_key

_OF_EXAMPLE = 1024  # the most numbers of one example that are compared; three examples of each array are compared
_SWING = 16  # the largest change of the likeness by one array
_SCALES = 10.0 ** np.arange(-9, 10, 3)
_LEAST = 0.1  # the smallest scale, as a fraction of the median
_COARSE = 2.5e-5  # arrays whose dtype has a larger eps count less
_KINDS = np.bool_, np.integer, jnp.inexact


def of_data(data: Any) -> tuple[int, np.float32]:
    """Return a checksum of a sample of the data's integers, and a number computed from a sample of its floats.

    The number is a float32, mostly from −16 to 16. It also depends on the checksum. Rounding in the dtype of the data
    changes it little. NaN and infinities are left out, and so are traced arrays and arrays on several hosts.

    Args:
        data: pytree of arrays, all with the same number of examples along the first axis; or the number of examples.
    """
    if isinstance(data, numbers.Integral):
        return 0, np.float32(0)
    checksum, sines = 0, list[float]()
    for leaf in jax.tree.leaves(data):
        if not _is_known(leaf):
            continue
        some = _some(leaf)
        if not jnp.issubdtype(some.dtype, jnp.inexact):
            checksum = zlib.crc32(some.astype(np.int64).tobytes(), checksum)
        elif some.size:
            fineness = min(1, _COARSE / float(jnp.finfo(some.dtype).eps))
            sines.append(fineness * math.sin(2 * _across(some, len(sines))))
    if checksum:  # if two checksums have the same key, the batches differ by this
        sines.append(checksum / 2**31 - 1)
    largest = _SWING / math.sqrt(len(sines) or 1)
    return checksum, np.float32(largest * sum(sines))


def _is_known(leaf: Any) -> bool:
    """Return whether this process has the numbers of an array."""
    if isinstance(leaf, _jax_compat.Tracer):
        return False
    addressable = getattr(leaf, "is_fully_addressable", True)
    return addressable and (
        is_key(leaf.dtype) or any(jnp.issubdtype(leaf.dtype, kind) for kind in _KINDS)
    )


def _some(leaf: Any) -> np.ndarray:
    """Return some numbers of the first, the middle and the last example: ``(numbers,)``."""
    examples = [0, len(leaf) // 2, len(leaf) - 1]
    if isinstance(leaf, jax.Array):
        # inside `jit`, reads of a concrete array would be traced
        with (
            jax.ensure_compile_time_eval(),
            jax.debug_nans(False),
            jax.debug_infs(False),
        ):
            leaf = leaf[np.array(examples)]
            leaf = np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf)
        examples = [0, 1, 2]
    of_example = math.prod(leaf.shape[1:])
    places = np.arange(of_example)
    if of_example > _OF_EXAMPLE:
        # random places, as the numbers at regular distances may be equal, like those at the border of images
        places = np.random.default_rng(0).integers(of_example, size=_OF_EXAMPLE)
    rows, places = np.meshgrid(examples, places, indexing="ij")
    inside = np.unravel_index(places.ravel(), leaf.shape[1:]) if leaf.ndim > 1 else ()
    return np.asarray(leaf[(rows.ravel(), *inside)]).reshape(-1)


def _across(some: np.ndarray, number: int) -> float:
    """Return a combination of numbers in which large and small numbers have about the same effect.

    The combination adds up a term for each of several scales. If the scale is near a number's size, the number's
    value has a large effect on the term. On a much smaller scale only the number's sign has an effect, and on a much
    larger scale the number has almost none. So a fill value hides no other number. No scale is far below the median
    size, where numbers may consist only of rounding errors.
    """
    if jnp.iscomplexobj(some):
        some = np.concatenate([some.real, some.imag])
    some = some.astype(np.float64)
    some = some[np.isfinite(some)]
    size = abs(some)
    out = 0.0
    with np.errstate(over="ignore", under="ignore"):
        least = _LEAST * np.median(size[size > 0]) if size.any() else 0.0
        for place, scale in enumerate(_SCALES):
            signs = np.random.default_rng([number, place]).choice(
                [-1.0, 1.0], some.size
            )
            out += float(signs @ (some / (size + math.hypot(scale, least))))
    return out / math.sqrt(max(some.size, 1))
