"""Convert a leaf of a pytree to an array, or raise an error that says why it is not an
array."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded import _arrays, _jax_compat, _require

# For each kind of NumPy dtype that JAX lacks: its name, and what to pass instead.
_NO_NUMBERS = {
    "U": "text: leave it out, or pass numbers such as token ids",
    "O": "Python objects, such as rows of unequal lengths: pad them to one length, or leave it out",
    "M": 'points in time: pass numbers, such as (x - x.min()) / np.timedelta64(1, "s")',
    "m": 'durations: pass numbers, such as x / np.timedelta64(1, "s")',
    "V": "a structured array: pass its fields, {name: x[name] for name in x.dtype.names}",
}
_NO_NUMBERS |= {"S": _NO_NUMBERS["U"], "T": _NO_NUMBERS["U"]}
SUMMED = ("float16", "bfloat16", "float32", "float64")  # the dtypes that sums can have


def named(root: str, path: tuple[Any, ...]) -> str:
    """Return the name of a leaf for messages.

    Example:
        >>> import jax
        >>> from jaxcoded.transport import leaves
        >>> path = (jax.tree_util.DictKey("w"),)
        >>> leaves.named("params", path), leaves.named("leaf", path), leaves.named("leaf", ())
        ("params['w']", "leaf at ['w']", 'leaf')
    """
    where = jax.tree_util.keystr(path)
    return f"{root} at {where}" if root == "leaf" and path else root + where


def held(leaf: Any, name: str) -> np.ndarray | jax.Array:
    """Return the leaf as a NumPy or JAX array in full precision, in this machine's byte
    order. If the leaf is not an array of numbers, raise a TypeError that begins with
    its ``name`` and ends with the remedy.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    if hasattr(leaf, "__jax_array__"):
        return leaf.__jax_array__()
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array of {leaf.dtype}, which JAX does not accept: pass x.filled(0), and "
            "x.mask as a separate array if the loss needs it"
        )
    try:
        array = np.asarray(_arrays.viewed(leaf))
    except Exception:  # noqa: BLE001  # an object's own conversion may raise any error
        array = np.array(None)
    kind = array.dtype.kind
    if kind in _NO_NUMBERS and not hasattr(leaf, "dtype"):
        raise TypeError(
            f"{name} is {_require.kind(leaf)}, which is not an array: leave it out of the tree"
        )
    if array.dtype == jax.dtypes.float0:
        raise TypeError(
            f"{name} has dtype float0, the tangent of an integer, which has no bytes: leave it out of "
            "the tree"
        )
    # dtypes of ml_dtypes, such as bfloat16, also have the kind "V"
    if kind in _NO_NUMBERS and (kind != "V" or array.dtype.type is np.void):
        raise TypeError(f"{name} is {_require.kind(leaf)}, {_NO_NUMBERS[kind]}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def array(leaf: Any, name: str) -> jax.Array:
    """Return the leaf as a JAX array. Raise a TypeError as in `held`, or if JAX does not
    have the leaf's dtype. Raise a ValueError if JAX would cut off digits of the leaf's
    integers.
    """
    try:
        leaf = leaf if is_python_number(leaf) else held(leaf, name)
        out = jnp.asarray(leaf)
    except OverflowError:
        raise ValueError(_too_large(leaf, name)) from None
    except TypeError as error:
        if str(error).startswith(name):
            raise
        raise TypeError(
            f"{name} is {_require.kind(leaf)}, and JAX has no such dtype: pass x.astype(np.float64)"
        ) from None
    if isinstance(leaf, np.ndarray) and leaf.dtype != out.dtype:
        cut = leaf.astype(out.dtype) != leaf if leaf.dtype.kind in "iu" else ()
        if np.any(cut):
            raise ValueError(
                f"{name} has numbers of {leaf.dtype} that do not fit into {out.dtype}, such as {leaf[cut][0]}: set "
                "jax_enable_x64, or pass smaller numbers"
            )
    return out


def converted(
    pytree: Any, root: str, convert: Callable[[Any, str], Any] = array
) -> Any:
    """Return the pytree with every leaf converted by a function of the leaf and its
    name (`named`)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: convert(leaf, named(root, path)), pytree
    )


def summand(leaf: Any, name: str) -> jax.Array:
    """Return the leaf as an `array`. Raise a TypeError if it is not floating point."""
    leaf, dtype = _with_dtype(leaf, name)
    check_real(dtype, name)
    return array(leaf, name)


def sendable(leaf: Any, name: str) -> Any:
    """Return the leaf as an array whose numbers (see `numbers`) MPI can send.

    Outside ``jit``, 64-bit integers in NumPy arrays, and all integers without axes, are
    sent with 64 bits. So a Python counter on one rank matches a JAX counter on another
    rank. Raise the errors of `array`, and a TypeError if the elements are not whole
    bytes.
    """
    leaf, dtype = _with_dtype(leaf, name)
    if not (is_key(dtype) or _has_bytes(dtype)):
        raise TypeError(
            f"{name} has dtype {dtype}, which MPI cannot send: pass x.astype(jnp.int8)"
        )
    if not jnp.issubdtype(dtype, jnp.integer):
        return array(leaf, name)
    wide = np.dtype(np.uint64 if np.dtype(dtype).kind == "u" else np.int64)
    if _jax_compat.tracing() or jax.dtypes.canonicalize_dtype(wide) == wide:
        return array(leaf, name)
    try:
        keeps = dtype == wide or (dtype.itemsize == 4 and not np.ndim(leaf))
        return np.asarray(leaf, wide) if keeps else jnp.asarray(leaf)
    except OverflowError:
        raise ValueError(_too_large(leaf, name, wide)) from None


def check_real(dtype: Any, name: str) -> None:
    """Raise a TypeError with the ``name`` unless coded sums can have this dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} has dtype {dtype}, but coded sums are of real numbers: pass real and imaginary "
            'parts, {"re": x.real, "im": x.imag}, and put them together again, '
            'jax.lax.complex(parts["re"], parts["im"])'
        )
    check_no_key(dtype, name)
    if str(dtype) not in SUMMED:
        raise TypeError(
            f"{name} has dtype {dtype}: coded sums need floating point; cast it to {', '.join(SUMMED[:-1])} or "
            f"{SUMMED[-1]}, or leave it out of the tree"
        )


def check_no_key(dtype: Any, name: str) -> None:
    """Raise a TypeError if these are random keys, which have no sum."""
    if is_key(dtype):
        raise TypeError(
            f"{name} has random keys ({dtype}), which cannot be added up: leave it out of the tree, or pass what is "
            "drawn with them"
        )


def _with_dtype(leaf: Any, name: str) -> tuple[Any, Any]:
    """Return the leaf, as a Python number or as `held` returns it, and its dtype."""
    if is_python_number(leaf):
        return leaf, jnp.result_type(leaf)
    leaf = held(leaf, name)
    return leaf, leaf.dtype


# Some leaves are converted to other numbers and sent: random keys, and 64-bit integers
# if JAX is limited to 32 bits.


def is_key(dtype: Any) -> bool:
    """Return whether elements of this dtype are random keys of JAX, such as
    ``jax.random.key(0)``."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def numbers(leaf: np.ndarray | jax.Array) -> jax.Array:
    """Return the vector that is sent for a leaf, in the dtype of `stored`."""
    if is_key(leaf.dtype):
        return jax.random.key_data(leaf).reshape(-1)
    if isinstance(leaf, np.ndarray) and stored(leaf.dtype)[1] > 1:
        return jnp.asarray(leaf.reshape(-1).view(np.uint32))
    return jnp.asarray(leaf).reshape(-1)


def stored(dtype: Any) -> tuple[np.dtype, int]:
    """Return, for a leaf's dtype, the dtype of its `numbers`, and how many numbers form
    one element."""
    if is_key(dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return data.dtype, math.prod(data.shape)
    if dtype.kind in "iu" and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return np.dtype(np.uint32), 2
    return dtype, 1


def restored(vector: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a leaf of this shape and dtype from its `numbers`. If JAX is limited to 32
    bits, 64-bit integers become a JAX array if they fit into 32 bits, and otherwise a
    NumPy array.
    """
    if is_key(dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return jax.random.wrap_key_data(
            vector.reshape(data.shape), impl=_implementation(dtype)
        )
    if stored(dtype)[1] == 1:
        return vector.reshape(shape)
    whole = np.asarray(vector).view(dtype).reshape(shape)
    fits = whole.astype(jax.dtypes.canonicalize_dtype(dtype))
    return jnp.asarray(fits) if np.all(fits == whole) else whole[()]


@functools.cache
def _implementation(dtype: Any) -> Any:
    """Return the implementation of random keys of this dtype, as `jax.random.wrap_key_data` takes it."""
    implementations: list[Any] = []

    def look(key: jax.Array) -> None:
        implementations.append(jax.random.key_impl(key))

    jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype))
    return implementations[0]


def is_python_number(leaf: Any) -> bool:
    """Return whether the leaf is a number of Python, not of NumPy."""
    return isinstance(leaf, bool | int | float | complex) and not isinstance(
        leaf, np.generic
    )


def _too_large(leaf: Any, name: str, most: Any = None) -> str:
    """Return the text of the error for an integer that does not fit into the dtype
    ``most``, by default JAX's integer dtype."""
    most = most or jax.dtypes.canonicalize_dtype(np.int64)
    remedy = (
        "set jax_enable_x64"
        if most == np.int32 and -(2**63) <= leaf < 2**63
        else "pass a float, or several numbers"
    )
    return f"{name} is {_require.shown(leaf)}, which does not fit into {most}: {remedy}"


def _has_bytes(dtype: Any) -> bool:
    """Return whether elements of this dtype are numbers of whole bytes, unlike
    ``int4``."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.finfo(dtype).bits >= 8
    return dtype == np.bool_
