"""Encoding and decoding as jitted JAX functions.

Both are sums of vectors, each multiplied by a coefficient. Sums of float16 and bfloat16
are accumulated in float32. A vector whose coefficient is 0 is not read, so it may hold
any values, even NaN.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded.transport.leaves import converted, named, summand
from jaxcoded.transport.packing import Packing, pack, unpack


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["vectors"],
    meta_fields=["packing", "slices", "multiple", "parts"],
)
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A child's coded message. Each part is ``1/slices`` as long as the gradient.

    `encode` makes it. It is a pytree whose only leaves are its vectors.

    Attributes:
        vectors: one array for each `jaxcoded.transport.packing.Kind` of leaves, ``(..., parts · ⌈q/multiple⌉
            · multiple / slices)`` for ``q`` elements, one part after the other.
        packing: structure, shapes and dtypes of the gradient, and the dtypes in which
            the gradient is sent.
        slices: ``M``, the number of slices of the gradient.
        multiple: gradients are padded with zeros to a multiple of this many elements
            before they are cut.
        parts: ``P``, the number of parts, each a separate coded gradient.
    """

    vectors: tuple[jax.Array, ...]
    packing: Packing
    slices: int
    multiple: int
    parts: int = 1


def accumulator(dtype: Any) -> np.dtype:
    """Return the dtype in which sums are formed: the given dtype, but at least float32."""
    return np.dtype(np.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def divided(pytree: Any, number: Any) -> Any:
    """Return each leaf divided by a number, in the leaf's accumulator dtype."""

    def divide(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf / number
        wide = accumulator(leaf.dtype)
        return (leaf.astype(wide) / jnp.asarray(number, wide)).astype(leaf.dtype)

    return jax.tree.map(divide, pytree)


def counts(found: jax.Array, number: Any, allowed: float) -> jax.Array:
    """Return whether counts differ from a number by at most the fraction ``allowed`` of
    the number."""
    return jnp.abs(found - number) <= allowed * number


@jax.jit
def weighted_sum(
    coefficients: jax.Array, vectors: jax.Array | Sequence[jax.Array]
) -> jax.Array:
    """Return ``Σ_i coefficients[i] · vectors[i]``, computed in one pass in the vectors'
    accumulator dtype. If ``coefficients[i] == 0``, vector ``i`` is ignored.

    Args:
        coefficients: float ``(n,)``.
        vectors: ``(n, ...)``, or a sequence of ``n`` arrays of one shape and dtype.
    """
    dtype = accumulator(vectors[0].dtype)
    total = jnp.zeros(vectors[0].shape, dtype)
    for i in range(len(vectors)):
        coefficient = coefficients[i].astype(dtype)
        total += jnp.where(coefficient != 0, coefficient * vectors[i].astype(dtype), 0)
    return total


@functools.partial(jax.jit, static_argnames="multiple")
def encode_vector(
    partials: jax.Array, coefficients: jax.Array, multiple: int
) -> jax.Array:
    """Return ``Σ_j Σ_u coefficients[j, u] · partials[j][slice u]`` for one vector per
    partition.

    Args:
        partials: ``(k, q)``.
        coefficients: ``(k, m)``.
        multiple: ``q`` is padded with zeros to a multiple of this number. ``m`` must
            divide this number.

    Returns:
        ``(⌈q/multiple⌉ · multiple / m,)`` in the accumulator dtype.
    """
    k, m = coefficients.shape
    padded = jnp.pad(partials, ((0, 0), (0, -partials.shape[1] % multiple)))
    return weighted_sum(
        coefficients.reshape(-1), padded.reshape(k * m, padded.shape[1] // m)
    )


@jax.jit
def decode_vector(
    messages: jax.Array | Sequence[jax.Array], coefficients: jax.Array
) -> jax.Array:
    """Return the slices ``Σ_i coefficients[u, i] · messages[i]``, one after the other
    along the last axis.

    Args:
        messages: ``(n, ..., l)`` or a sequence of ``n`` arrays ``(..., l)``.
        coefficients: ``(m, n)``.

    Returns:
        ``(..., m·l)`` in the accumulator dtype.
    """
    return jnp.concatenate(
        [weighted_sum(row, messages) for row in coefficients], axis=-1
    )


def encode(
    partials: Any,
    coefficients: jax.Array | np.ndarray,
    *,
    multiple: int | None = None,
    wire_dtype: Any = None,
) -> Any:
    """Return one child's message, ``Σ_j Σ_u B[i, j, u] · g_j[slice u]``. It may consist
    of several parts.

    Composable with ``jit``, ``vmap``, ``grad`` and ``scan``; linear in ``partials``.

    Args:
        partials: pytree of float arrays ``(k, ...)``: the ``k`` partition gradients,
            stacked.
        coefficients: for codes without slices ``(k,)``; the result then has the
            structure of one gradient. Or ``(k, m)``, such as ``code.B[i]``, or
            ``(parts, k, m)``; the result is then an `Encoded`.
        multiple: gradients are padded to a multiple of this many elements, which must
            itself be a multiple of ``m``. Pass ``group.plan.padding_multiple`` for
            every message of a group. Not used with ``(k,)``. Default: ``m``.
        wire_dtype: the dtype in which the message will be sent.
            `jaxcoded.coded_allreduce` rounds the message to this dtype. Not used with
            ``(k,)``.

    Returns:
        The message, in the dtypes of ``partials``.

    Raises:
        ValueError: a leaf's leading axis is not ``k``, ``m`` does not divide
            ``multiple``, or ``wire_dtype`` is not bfloat16, float16 or ``None``.
        TypeError: a leaf is not floating point.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxcoded import codes
        >>> from jaxcoded.transport import kernels
        >>> code = codes.random_generator(4, 1, 2)
        >>> gradients = {"w": jnp.arange(20.0).reshape(4, 5)}  # for 4 partitions
        >>> messages = jax.vmap(lambda row: kernels.encode(gradients, row))(code.B)  # from 4 children
        >>> messages.vectors[0].shape  # 5 elements, padded to 6, in 2 slices
        (4, 3)
        >>> A = code.decode([0, 1, 3]).coefficients
        >>> kernels.decode(messages, A)["w"].round(3).astype(int).tolist()
        [30, 34, 38, 42, 46]
    """
    coefficients = jnp.asarray(coefficients)
    if coefficients.ndim not in (1, 2, 3):
        raise ValueError(
            "coefficients must have shape (k,), (k, m) or (parts, k, m), got "
            f"{coefficients.shape}"
        )
    k = coefficients.shape[max(0, coefficients.ndim - 2)]
    partials = converted(partials, "leaf", summand)
    _check_leading_axis(partials, k, "partitions")
    if coefficients.ndim == 1:
        return jax.tree.map(
            lambda leaf: weighted_sum(coefficients, leaf).astype(leaf.dtype), partials
        )
    m = coefficients.shape[-1]
    rows = coefficients.reshape(-1, k, m)
    multiple = m if multiple is None else multiple
    if multiple < 1 or multiple % m:
        raise ValueError(
            f"the number of slices m = {m} does not divide multiple = {multiple}"
        )
    packed = functools.partial(pack, wire_dtype=wire_dtype, multiple=multiple)
    packing = packed(jax.tree.map(lambda leaf: leaf[0], partials))[1]
    vectors = jax.vmap(lambda gradient: packed(gradient)[0])(partials)
    return Encoded(
        tuple(
            jax.vmap(lambda row, v=vector: encode_vector(v, row, multiple))(rows)
            .astype(vector.dtype)
            .reshape(-1)
            for vector in vectors
        ),
        packing,
        m,
        multiple,
        len(rows),
    )


def decode(messages: Any, coefficients: jax.Array | np.ndarray) -> Any:
    """Return the sum of the partition gradients from the children's messages.

    Composable with ``jit``, ``vmap``, ``grad`` and ``scan``; linear in ``messages``.

    Args:
        messages: the messages that `encode` made for each of ``n`` children, stacked
            along a new leading axis. Messages of children that did not answer may hold
            any values.
        coefficients: ``(m, n · parts)``, from `GradientCode.decode`. For ``m = 1`` a
            one-dimensional array suffices.

    Returns:
        A pytree with the structure, shapes and dtypes of one gradient.

    Raises:
        ValueError: a leaf's leading axis is not ``n``, or the messages have a different
            number of slices or parts.

    Example: see `encode`.
    """
    coefficients = jnp.atleast_2d(jnp.asarray(coefficients))
    if coefficients.ndim != 2:
        raise ValueError(
            f"coefficients must have shape (m, n) or (n,), got {coefficients.shape}"
        )
    m, rows = coefficients.shape
    parts = messages.parts if isinstance(messages, Encoded) else 1
    if rows % parts:
        raise ValueError(
            f"the messages have {parts} parts but there are {rows} coefficients"
        )
    _check_leading_axis(messages, rows // parts, "children")
    if isinstance(messages, Encoded):
        if messages.slices != m:
            raise ValueError(
                f"the messages have {messages.slices} slices but the coefficients decode {m}"
            )
        decoded = [
            decode_vector(_rows(vector, parts), coefficients).astype(vector.dtype)
            for vector in messages.vectors
        ]
        return unpack(decoded, messages.packing)
    if m != 1:
        raise ValueError(f"the messages have no slices but the coefficients decode {m}")
    return jax.tree.map(
        lambda leaf: weighted_sum(coefficients[0], leaf).astype(leaf.dtype), messages
    )


def _rows(vector: jax.Array, parts: int) -> jax.Array:
    """Reshape ``(n, ..., parts · l)`` to ``(n · parts, ..., l)``."""
    apart = vector.reshape(*vector.shape[:-1], parts, vector.shape[-1] // parts)
    together = jnp.moveaxis(apart, -2, 1)
    return together.reshape(-1, *together.shape[2:])


def _check_leading_axis(pytree: Any, length: int, what: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(pytree):
        if not jnp.ndim(leaf) or jnp.shape(leaf)[0] != length:
            raise ValueError(
                f"{named('leaf', path)} has shape {jnp.shape(leaf)}; "
                f"its leading axis must stack the {length} {what}"
            )
