"""Convert complex numbers and integers to floating-point numbers whose sums give the
exact sums of the original numbers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded.group.group import CodedGroup
from jaxcoded.plan import Plan
from jaxcoded.transport.leaves import array, check_no_key, converted
from jaxcoded.transport.packing import Summands

_BYTE = 256
# Sums of at most this number of bytes are exact in float32.
_MOST = 2**24 // (_BYTE - 1)


def of(
    pytree: Any,
    group: CodedGroup,
    root: str,
    wire_dtype: Any = None,
    counted: bool = True,
) -> Any:
    """Return the pytree with `Summands` in place of each leaf that is not floating point:
    the real and imaginary parts of complex numbers, or the bytes of integers, each as a
    float32.

    Raises:
        TypeError: a leaf has integers that this group cannot sum exactly, because the sum may be approximate, or
            because the plan's codes would multiply integers. Also if ``counted`` and the transport reports a
            wrong count of examples as NaN, since integers have no NaN. The message names the leaf.
        ValueError: integers would be rounded to the ``wire_dtype``.
    """

    def floats(leaf: Any, name: str) -> Any:
        if not hasattr(leaf, "dtype"):
            leaf = array(leaf, name)
        dtype = leaf.dtype
        check_no_key(dtype, name)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            leaf = array(leaf, name)
            return Summands((leaf.real, leaf.imag), leaf.dtype, leaf.dtype)
        if not _counts(dtype):
            return leaf  # This includes leaves that are not numbers, for which packing raises an error.
        _check(group, name, dtype, wire_dtype)
        if counted and not group._session.transport.refuses_miscounts:
            raise TypeError(
                f"{name} has dtype {dtype}. Without the engine a sum of wrong examples becomes NaN, which integers "
                "cannot represent: install jaxcoded with its engine, or cast it to floating point"
            )
        leaf = array(leaf, name)
        total = leaf.dtype
        if total == bool:
            total = np.dtype(jax.dtypes.canonicalize_dtype(np.int64))
        return Summands(_bytes(leaf, total), leaf.dtype, total)

    return converted(pytree, root, floats)


def on_host(array: np.ndarray, group: CodedGroup, wire_dtype: Any) -> Any:
    """Return `of` one NumPy array, always with all bytes of 64-bit integers."""
    dtype = array.dtype
    if dtype.kind == "c":
        return Summands((array.real, array.imag), dtype, dtype)
    if not _counts(dtype):
        return array
    _check(group, "the array", dtype, wire_dtype)
    total = sum_on_host(dtype)
    return Summands(_bytes(array, total), dtype, total)


def sum_on_host(dtype: np.dtype) -> np.dtype:
    """Return the dtype of a sum of NumPy arrays of this dtype."""
    return np.dtype(np.int64) if dtype == bool else dtype


def restore_on_host(total: np.ndarray, out: np.ndarray) -> None:
    """Write the sum to ``out``, from the joined sums of the arrays of `on_host`."""
    total = total.reshape(-1, *out.shape)
    if out.dtype.kind == "c":
        out.real, out.imag = total
    elif _counts(out.dtype):
        out[...] = _integers(total, out.dtype, np)
    else:
        out[...] = total[0]


def restored(total: Any) -> Any:
    """Return the sum of pytrees from the sum of the results of `of`."""
    return jax.tree.map(_restored, total, is_leaf=is_summands)


def is_summands(node: Any) -> bool:
    """Return whether a node of a pytree is `Summands`."""
    return isinstance(node, Summands)


def _restored(total: Any) -> Any:
    if not is_summands(total):
        return total
    if jnp.issubdtype(total.dtype, jnp.complexfloating):
        return jax.lax.complex(*total.arrays)
    return _integers(total.arrays, total.total, jnp)


def _integers(total: Any, dtype: np.dtype, xp: Any) -> Any:
    """Return the sums of integers, from the sums of their bytes."""
    wide = xp.uint64 if dtype.itemsize == 8 else xp.uint32
    out = xp.zeros((), wide)
    for k, each in enumerate(total):
        out = out + (each.astype(wide) << wide(8 * k))
    return out.astype(dtype)


def _counts(dtype: Any) -> bool:
    """Return whether a dtype has integers or bools, but not durations."""
    return dtype == bool or (
        jnp.issubdtype(dtype, jnp.integer) and np.dtype(dtype).kind != "m"
    )


def _bytes(leaf: Any, dtype: np.dtype) -> tuple[Any, ...]:
    """Return the bytes of integers of this dtype, each as a float32."""
    unsigned = leaf.astype(dtype).astype(f"uint{8 * dtype.itemsize}")
    return tuple(
        (
            unsigned >> unsigned.dtype.type(8 * k) & unsigned.dtype.type(_BYTE - 1)
        ).astype(np.float32)
        for k in range(dtype.itemsize)
    )


def _check(group: CodedGroup, name: str, dtype: Any, wire_dtype: Any) -> None:
    plan = group.plan
    if group.approximate:
        raise TypeError(
            f"{name} has dtype {dtype}, and sums of this group may be approximate, which integers cannot be: cast it to "
            "floating point"
        )
    if not _exact(plan):
        raise TypeError(
            f"{name} has dtype {dtype}, and the code of {plan.strategy!r} multiplies summands by fractions, which "
            'would round integers: take Shared(), Uncoded() or Coded(code="fractional_repetition"), or cast it to '
            "floating point"
        )
    if wire_dtype is not None:
        raise ValueError(
            f"{name} has dtype {dtype}, which wire_dtype={np.dtype(wire_dtype).name!r} would round: sum it in a "
            "separate call without wire_dtype"
        )
    terms = max(plan.size, len(plan.placement.holders))
    if terms > _MOST:
        raise ValueError(
            f"{name} has dtype {dtype}, whose sums are exact for at most {_MOST} terms, but the plan sums {terms}: cast "
            "it to floating point"
        )


@functools.lru_cache(maxsize=64)
def _exact(plan: Plan) -> bool:
    """Return whether all coefficients for encoding and decoding are 0 or 1."""
    codes = [coding.code.B for _, coding in plan.coded_parents]
    whole = all(np.isin(B, (0, 1)).all() for B in codes)
    return whole and plan.amplification == 1 and not plan.encoded
