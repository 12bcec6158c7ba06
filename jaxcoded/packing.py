"""Pytrees as one vector per dtype, so that a round is one message per dtype."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MOST_WORDS = 300  # characters of a packing's description


@dataclasses.dataclass(frozen=True)
class Packing:
    """What it takes to rebuild a pytree from its vectors: structure, shapes and dtypes
    of the leaves.

    Hashable and comparable, so that it can be static under ``jit``.
    """

    structure: Any  # jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, tree: Any) -> "Packing":
        """The packing of a pytree of arrays or ``jax.ShapeDtypeStruct``."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(
            structure,
            tuple(leaf.shape for leaf in leaves),
            tuple(np.dtype(leaf.dtype) for leaf in leaves),
        )

    def __str__(self) -> str:
        """The leaves in words, with a digest where there are too many to list.

        Two packings with equal words are equal but for the types of their containers.
        """
        places = jax.tree.unflatten(self.structure, range(len(self.shapes)))
        leaves = [
            f"{jax.tree_util.keystr(path)} {dtype}{list(shape)}".lstrip()
            for (path, _), shape, dtype in zip(
                jax.tree_util.tree_leaves_with_path(places), self.shapes, self.dtypes
            )
        ]
        words = ", ".join(leaves) or "no leaves"
        if len(words) <= _MOST_WORDS:
            return words
        digest = hashlib.sha256(words.encode()).hexdigest()[:12]
        return f"{words[:_MOST_WORDS]}… ({len(leaves)} leaves, {digest})"

    @property
    def vectors(self) -> dict[np.dtype, int]:
        """The dtypes that need a vector, in the order of their first leaf, with its
        length."""
        lengths: dict[np.dtype, int] = {}
        for shape, dtype in zip(self.shapes, self.dtypes):
            lengths[dtype] = lengths.get(dtype, 0) + math.prod(shape)
        return {dtype: length for dtype, length in lengths.items() if length}


def pack(
    tree: Any, *, floats_only: bool = True
) -> tuple[tuple[jax.Array, ...], Packing]:
    """Fuse the leaves of a pytree into one vector per dtype.

    Args:
        tree: pytree of arrays and Python numbers. Empty leaves take part with no
            element.
        floats_only: refuse leaves that are not floating point.

    Returns:
        The vectors, one for each dtype with at least one element, and the `Packing`
        that `unpack` needs.

    Raises:
        TypeError: a leaf is not an array of numbers, or not floating point. The message
            names its place in the tree.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcoded.packing import pack, unpack
        >>> vectors, packing = pack({"a": jnp.ones((2, 2)), "b": jnp.zeros(3)})
        >>> [v.shape for v in vectors], jnp.shape(unpack(vectors, packing)["a"])
        ([(7,)], (2, 2))
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [_array(leaf, _place(path), floats_only) for path, leaf in paths]
    packing = Packing.of(jax.tree.unflatten(structure, leaves))
    vectors = []
    for dtype in packing.vectors:
        flat = [
            leaf.reshape(-1) for leaf in leaves if leaf.dtype == dtype and leaf.size
        ]
        vectors.append(flat[0] if len(flat) == 1 else jnp.concatenate(flat))
    return tuple(vectors), packing


def unpack(vectors: Sequence[jax.Array], packing: Packing) -> Any:
    """Inverse of `pack`. Vectors may be longer than needed: padding at their end is
    dropped."""
    sources = dict(zip(packing.vectors, vectors, strict=True))
    taken = dict.fromkeys(sources, 0)
    leaves = []
    for shape, dtype in zip(packing.shapes, packing.dtypes):
        size = math.prod(shape)
        if not size:
            leaves.append(jnp.zeros(shape, dtype))
            continue
        start = taken[dtype]
        leaves.append(sources[dtype][start : start + size].reshape(shape))
        taken[dtype] = start + size
    return jax.tree.unflatten(packing.structure, leaves)


def _array(leaf: Any, place: str, floats_only: bool) -> jax.Array:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and not _has_bytes(dtype):
        raise TypeError(f"leaf{place} has dtype {dtype}, which MPI cannot send")
    try:
        array = jnp.asarray(leaf)
    except (TypeError, ValueError):
        raise TypeError(
            f"leaf{place} is a {type(leaf).__name__}, which is not an array"
        ) from None
    if floats_only and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"leaf{place} has dtype {array.dtype}: coded sums need floating point; "
            "cast it or leave it out of the tree"
        )
    return array


def _has_bytes(dtype: Any) -> bool:
    """Whether elements are numbers of whole bytes: no keys, ``float0`` or ``int4``."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.finfo(dtype).bits >= 8
    return dtype == np.bool_


def _place(path: tuple[Any, ...]) -> str:
    return f" at {jax.tree_util.keystr(path)}" if path else ""
