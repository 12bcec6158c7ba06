"""Convert pytrees to one vector per dtype, so that a round sends one message per
dtype."""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import FlattenedIndexKey

from jaxcoded import _jax_compat
from jaxcoded.transport.leaves import (
    converted,
    numbers,
    restored,
    sendable,
    stored,
    summand,
)
from jaxcoded.transport.slicing import slices

_MOST_WORDS = 300  # characters of a packing's description
_MAX_INDEX = 2**31 - 1
# If at least `_MANY` leaves have at most `_SMALL` bytes, they are copied out of their
# vector together.
_MANY, _SMALL = 32, 64 << 10
_WIRE_DTYPES = ("bfloat16", "float16")


class Apart(NamedTuple):
    """A run of elements that checks do not compare together with the rest of its vector,
    since gradients may be small compared with a large loss."""

    vector: int  # the index of the vector
    first: int  # the first element of the run, and the number of its elements
    length: int
    # Runs of one kind are compared together. Runs of kind 0 are compared
    # together with the rest of the vector, and the rest is also compared alone.
    kind: int


@dataclasses.dataclass(frozen=True)
class Summand:
    """The key of one array of a leaf's `Summands`."""

    number: int
    leaf: str  # the leaf's dtype, and the dtype of its sum if the two differ

    def __str__(self) -> str:
        return f"[{self.number}]"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Summands:
    """The floating-point arrays that are summed in place of one leaf that is not
    floating point. `Packing` describes the original leaf, so that ranks compare its
    dtype.
    """

    arrays: tuple[Any, ...]
    dtype: Any  # the leaf's dtype
    total: Any  # the dtype of the leaf's sum

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        leaf = f"{self.dtype}" + f" as {self.total}" * (self.total != self.dtype)
        keyed = [(Summand(i, leaf), array) for i, array in enumerate(self.arrays)]
        return keyed, (self.dtype, self.total)

    @classmethod
    def tree_unflatten(cls, dtypes: Any, arrays: Any) -> "Summands":
        return cls(tuple(arrays), *dtypes)


class Kind(NamedTuple):
    """The common properties of the leaves of one vector."""

    dtype: np.dtype  # the vector's dtype: `leaves.stored` of the leaves' dtypes
    wire: np.dtype  # the dtype in which the vector is sent
    # whether the leaves are single numbers; their vector is padded so that all slices except the first are
    # zero
    alone: bool = False
    # the axes of the mesh of this process's devices over which the leaves are split; along other axes the leaves are
    # replicated
    split: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Packing:
    """The data needed to rebuild a pytree from its vectors: its structure, the leaves'
    shapes and dtypes, and the dtypes in which leaves are sent.

    Packings can be hashed and compared, so that they can be static under ``jit``."""

    structure: Any  # ``jax.tree_util.PyTreeDef``
    shapes: tuple[tuple[int, ...], ...]  # the leaves' shapes and dtypes
    dtypes: tuple[Any, ...]
    # The dtype in which float32 leaves are sent. Leaves without axes, such as a loss or a count, are sent unchanged:
    # they need all digits and have few bytes.
    wire_dtype: np.dtype | None = None
    # The number of slices into which vectors can be cut. Codes with slices add up the numbers at place ``j`` of all
    # slices, and an approximate sum does not separate these numbers again. A loss is large compared with gradients.
    # So with more than one slice, the leaves without axes have their own vector.
    multiple: int = 1
    splits: tuple[tuple[str, ...], ...] = ()  # for each leaf, `Kind.split`

    @classmethod
    def of(cls, pytree: Any, wire_dtype: Any = None, multiple: int = 1) -> "Packing":
        """Return the packing of a pytree of arrays or ``jax.ShapeDtypeStruct``."""
        leaves, structure = jax.tree.flatten(pytree)
        return cls(
            structure,
            tuple(leaf.shape for leaf in leaves),
            tuple(leaf.dtype for leaf in leaves),
            checked_wire_dtype(wire_dtype),
            multiple,
            tuple(_jax_compat.varying(leaf) for leaf in leaves),
        )

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of the leaves."""
        wire = self.wire_dtype
        return tuple(
            Kind(
                dtype,
                wire if wire and shape and dtype == np.float32 else dtype,
                self.multiple > 1 and not shape,
                split,
            )
            for shape, (dtype, _), split in zip(
                self.shapes, map(stored, self.dtypes), self.splits
            )
        )

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Return each leaf's number of elements in its vector."""
        return tuple(
            math.prod(shape) * stored(dtype)[1]
            for shape, dtype in zip(self.shapes, self.dtypes)
        )

    def __str__(self) -> str:
        """Return the leaves as text, with a digest if there are too many leaves to
        list.

        Two packings with equal texts are equal up to the types of their containers.
        """
        places = jax.tree.unflatten(self.structure, range(len(self.shapes)))
        paths = jax.tree_util.tree_leaves_with_path(places)
        leaves = []
        for (path, _), shape, dtype, kind in zip(
            paths, self.shapes, self.dtypes, self.kinds
        ):
            shown: Any = dtype
            if path and isinstance(last := path[-1], Summand):
                if last.number:
                    continue
                path, shown = path[:-1], last.leaf
            leaves.append(
                f"{jax.tree_util.keystr(path)} {shown}{list(shape)}".lstrip()
                + f" as {kind.wire}" * (kind.wire != kind.dtype)
                + f" split over {' and '.join(kind.split)}" * bool(kind.split)
            )
        count = len(leaves)
        if any(isinstance(key, FlattenedIndexKey) for path, _ in paths for key in path):
            leaves += _unkeyed(self.structure)
        words = ", ".join(leaves) or "no leaves"
        if len(words) <= _MOST_WORDS:
            return words
        digest = hashlib.sha256(words.encode()).hexdigest()[:12]
        ends = itertools.accumulate(len(leaf) + 2 for leaf in leaves)
        first = [leaf for leaf, end in zip(leaves, ends) if end <= _MOST_WORDS]
        return ", ".join([*first, f"... ({count} leaves, {digest})"])

    @functools.cached_property
    def vectors(self) -> dict[Kind, int]:
        """Return the kinds that need a vector, in the order of their first leaves, with
        the lengths of the vectors."""
        lengths: dict[Kind, int] = {}
        for count, kind in zip(self.counts, self.kinds):
            lengths[kind] = lengths.get(kind, 0) + (
                self.multiple if kind.alone else count
            )
        return {kind: length for kind, length in lengths.items() if length}

    def apart(self, keys: Sequence[str] = ()) -> tuple[Apart, ...]:
        """Return the runs of elements that checks compare separately. Without ``keys``,
        these are the leaves without axes, with kind 0, since they may be losses or
        gradients. With ``keys``, they are the entries of a dict at these keys, each
        with a different kind.
        """
        places = jax.tree.unflatten(self.structure, range(len(self.shapes)))
        paths = jax.tree_util.tree_leaves_with_path(places)
        vectors = list(self.vectors)
        ends = dict.fromkeys(vectors, 0)
        out = []
        for (path, _), shape, kind in zip(paths, self.shapes, self.kinds):
            count = math.prod(shape)
            if not count:
                continue
            first = ends[kind]
            ends[kind] += count
            if not keys and not shape:
                out.append(Apart(vectors.index(kind), first, count, 0))
            elif keys and path[0].key in keys:
                number = 1 + keys.index(path[0].key)
                out.append(Apart(vectors.index(kind), first, count, number))
        return tuple(out)

    @property
    def wires(self) -> tuple[np.dtype, ...]:
        """Return the dtype in which each vector is sent."""
        return tuple(kind.wire for kind in self.vectors)


def pack(
    pytree: Any, *, floats_only: bool = True, wire_dtype: Any = None, multiple: int = 1
) -> tuple[tuple[jax.Array, ...], Packing]:
    """Join the leaves of a pytree, arrays and Python numbers, to one vector for each
    `Kind` with at least one element, in the leaves' dtypes. Return the vectors, and the
    `Packing` that `unpack` needs. With ``floats_only``, accept the leaves that
    `leaves.summand` accepts; otherwise accept the leaves that `leaves.sendable`
    accepts.
    """
    pytree = converted(pytree, "leaf", summand if floats_only else sendable)
    leaves = jax.tree.leaves(pytree)
    packing = Packing.of(pytree, wire_dtype, multiple)
    vectors = []
    for kind, length in packing.vectors.items():
        flat = [
            numbers(leaf)
            for leaf, leaf_kind in zip(leaves, packing.kinds)
            if leaf_kind == kind and leaf.size
        ]
        if kind.alone:
            flat.append(jnp.zeros(length - len(flat), kind.dtype))
        vectors.append(flat[0] if len(flat) == 1 else jnp.concatenate(flat))
    return tuple(vectors), packing


def unpack(vectors: Sequence[jax.Array], packing: Packing) -> Any:
    """Restore the pytree from `pack`. Padding at the end of vectors is dropped."""
    counts, kinds = packing.counts, packing.kinds
    leaves: list[Any] = [
        None if count else restored(jnp.zeros(0, kind.dtype), shape, dtype)
        for count, shape, dtype, kind in zip(
            counts, packing.shapes, packing.dtypes, kinds
        )
    ]
    for kind, vector in zip(packing.vectors, vectors, strict=True):
        indices = [i for i, each in enumerate(kinds) if each == kind and counts[i]]
        sizes = [counts[i] for i in indices]
        starts = [0, *itertools.accumulate(sizes)]
        for i, run in zip(indices, _runs(vector, starts, sizes)):
            leaves[i] = restored(run, packing.shapes[i], packing.dtypes[i])
    return jax.tree.unflatten(packing.structure, leaves)


def _unkeyed(structure: Any) -> Iterator[str]:
    """Yield a text such as ``Model of a and b`` for each node that has names for its
    children, but gives JAX no keys. Ranks may order the children of these nodes
    differently.
    """
    if (data := structure.node_data()) is None:
        return
    kind, about = data
    children = structure.children()
    for names in (about, *(about if isinstance(about, tuple) else ())):
        if (
            not issubclass(kind, dict)
            and isinstance(names, tuple | list)
            and len(names) == len(children) > 1
            and all(isinstance(name, str) for name in names)
        ):
            yield f"{kind.__name__} of {' and '.join(names)}"
    for child in children:
        yield from _unkeyed(child)


def _runs(
    vector: jax.Array, starts: Sequence[int], sizes: Sequence[int]
) -> list[jax.Array]:
    """Return consecutive leaves, cut from one vector. XLA fuses a slice with the
    operation that uses it, but must compile each slice."""
    small = [
        i for i, size in enumerate(sizes) if size * vector.dtype.itemsize <= _SMALL
    ]
    copied: dict[int, jax.Array] = {}
    if len(small) >= _MANY and isinstance(vector, _jax_compat.Tracer):
        runs = slices(vector, [starts[i] for i in small], [sizes[i] for i in small])
        copied = dict(zip(small, runs))
    return [
        copied[i] if i in copied else _run(vector, start, size)
        for i, (start, size) in enumerate(zip(starts, sizes))
    ]


def _run(vector: jax.Array, start: int, size: int) -> jax.Array:
    """Return ``size`` elements of the vector, beginning at ``start``."""
    if size == vector.shape[0]:
        return vector
    if start + size > _MAX_INDEX:
        return jax.lax.slice_in_dim(vector, start, start + size)
    # Outside `jit` one program serves all starts, which are then int32.
    return vector[start : start + size]


def checked_wire_dtype(wire_dtype: Any) -> np.dtype | None:
    """Return the dtype in which float32 will be sent, or None. Raise a ValueError if
    float32 cannot be sent in this dtype."""
    if wire_dtype is None:
        return None
    try:
        dtype = np.dtype(wire_dtype)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in _WIRE_DTYPES or not dtype.isnative:
        raise ValueError(
            f"wire_dtype must be {' or '.join(_WIRE_DTYPES)}, or None to send arrays as "
            f"they are, got {wire_dtype!r}"
        )
    return dtype
