"""A number that tells whether ranks have the same arrays, up to rounding.

Each function works on NumPy or JAX arrays; ``xp`` is ``numpy`` or ``jax.numpy``.
"""

import functools
import math
import numbers
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_OF_EACH = 256  # how many numbers of an array are used
# log2 of the sizes below which a number may be only a rounding error
_SMALL, _SMALLER = math.log2(0.01), -20
_SWING = 16  # the largest change of the result by one array's numbers


def of_arrays(xp: Any, arrays: Sequence[Any], *, scaled: bool = False) -> Any:
    """Return a float32, mostly from −16 to 16, that depends on the finite numbers of
    each floating-point array. It depends on a few numbers of each array, or with
    ``scaled`` on all numbers.

    If an array's numbers change by a small relative amount, the result changes by
    little more than 16 times this amount. An array counts less if all its numbers are
    small: below 0.01, or with ``scaled`` below a millionth of the largest number of all
    arrays.
    """
    parts = [
        _finite(xp, array if scaled else _corner(array))
        for array in arrays
        if jnp.issubdtype(array.dtype, jnp.inexact) and array.size
    ]
    if not parts:
        return xp.float32(0)
    # one array after the other, so that arrays on several devices are not gathered
    with np.errstate(divide="ignore"):
        largest = [xp.log2(xp.max(abs(x))).astype(np.float32) for x in parts]
    least = xp.float32(_SMALL)
    if scaled:
        least = functools.reduce(xp.maximum, largest) + _SMALLER
        least = xp.where(xp.isfinite(least), least, 0)  # all numbers are 0
    out = xp.float32(0)
    for number, (x, log) in enumerate(zip(parts, largest)):
        log = xp.maximum(log, least)
        # the square of this root may be beyond the range of the dtype
        root = xp.exp2((-log / 2).astype(x.dtype))
        x = (x * root * root).astype(np.float32)  # at most about 1
        size = xp.sqrt(xp.sum(x * x) + xp.exp2(2 * (least - log)))
        out += xp.sin(xp.log2(size) + log + 2 * _across(xp, x, number) / size)
    return _SWING / math.sqrt(len(parts)) * out


def of_data(data: Any) -> tuple[int, np.float32]:
    """Return two numbers that depend on three examples of a data set: a checksum of the integers, and `of_arrays` of
    the other numbers.

    Traced arrays, and arrays on several hosts, are left out.
    """
    if isinstance(data, numbers.Integral):
        return 0, np.float32(0)
    whole, rounded = 0, []
    for leaf in jax.tree.leaves(data):
        if isinstance(leaf, jax.core.Tracer) or not getattr(
            leaf, "is_fully_addressable", True
        ):
            continue
        known = np.bool_, np.integer, jnp.inexact
        if not any(jnp.issubdtype(leaf.dtype, kind) for kind in known):
            continue
        some = np.asarray(leaf[np.array([0, len(leaf) // 2, len(leaf) - 1])])
        if jnp.issubdtype(some.dtype, jnp.inexact):
            each = -(-some.size // _OF_EACH) or 1
            rounded.append(some.reshape(-1)[::each])
        else:
            whole = zlib.crc32(some.tobytes(), whole)
    return whole, np.float32(of_arrays(np, rounded))


def mixed(x: Any) -> Any:
    """Return a hash of each number, made by the last steps of MurmurHash3."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _across(xp: Any, x: Any, number: int) -> Any:
    """Return the sum of an array's numbers, each with a sign that depends on its place."""
    place = xp.full(x.shape, number, np.uint32)
    for axis, length in enumerate(x.shape):
        along = [1] * x.ndim
        along[axis] = length
        place = 31 * place + xp.arange(length, dtype=np.uint32).reshape(along)
    return xp.sum(xp.where(mixed(place) & 1 == 1, -x, x))


def _finite(xp: Any, array: Any) -> Any:
    """Return an array as real numbers, float32 or wider, with 0 in place of NaN and
    infinities."""
    if jnp.iscomplexobj(array):
        array = xp.stack([array.real, array.imag], axis=-1)
    if jnp.finfo(array.dtype).bits < 32:
        array = array.astype(np.float32)
    return xp.where(xp.isfinite(array), array, 0)


def _corner(array: Any) -> Any:
    """Return only the numbers in one corner of an array, since a whole array may be
    large."""
    last = min(array.ndim, 2)
    ends = (
        [1] * (array.ndim - last) + [round(_OF_EACH ** (1 / last))] * last
        if last
        else []
    )
    return array[tuple(slice(end) for end in ends)]
