"""A state as bytes, and back."""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded.packing import Packing

_DIGEST = 32  # bytes


def to_bytes(state: Any) -> np.ndarray:
    """The leaves of a pytree one after the other, behind a digest of its structure,
    shapes and dtypes: uint8 ``(bytes,)``. Waits until they are computed."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(state)]
    parts = [_digest(state), *(leaf.reshape(-1).view(np.uint8) for leaf in leaves)]
    return np.concatenate(parts)


def from_bytes(data: bytes, like: Any) -> Any:
    """The pytree that `to_bytes` was given.

    Args:
        data: what it returned.
        like: a pytree of the same structure, shapes and dtypes.

    Raises:
        ValueError: ``like`` is not.
    """
    if data[:_DIGEST] != _digest(like).tobytes():
        raise ValueError(
            f"the snapshot is not of this state: {Packing.of(_abstract(like))}"
        )
    leaves, structure = jax.tree.flatten(like)
    start, out = _DIGEST, []
    for leaf in map(_aval, leaves):
        values = np.frombuffer(data, leaf.dtype, leaf.size, start).reshape(leaf.shape)
        start += values.nbytes
        out.append(jnp.array(values))
    return jax.tree.unflatten(structure, out)


def _digest(tree: Any) -> np.ndarray:
    leaves, structure = jax.tree.flatten(tree)
    table = [(leaf.shape, leaf.dtype.name) for leaf in map(_aval, leaves)]
    digest = hashlib.sha256(f"{structure} {json.dumps(table)}".encode()).digest()
    return np.frombuffer(digest, np.uint8)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(_aval, tree)


def _aval(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
