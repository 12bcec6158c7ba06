"""The examples of a batch that a rank reads, with their coding weights."""

import dataclasses
import functools
import numbers
from typing import Any

import jax
import numpy as np

from jaxcoded import _require
from jaxcoded.group.weights import Weights
from jaxcoded.transport.leaves import held, named

_LOADER = (
    "with your own loader, take part = group.batch(n), or the parts of group.epoch(n, batch_size=...), "
    "and call part.of(load(part.indices))"
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "indices", "weights"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A rank's part of a batch, for `coded_value_and_grad`. `CodedGroup.epoch` and `CodedGroup.batch` make it.

    A batch is a pytree of arrays, which can be passed to ``jit`` as one argument. The leading axis of every array is
    the axis of examples. The batch size, the plan and the rank are static, and everything else is data. So a batch
    of another seed or epoch, or a smaller last batch, needs no new compilation.

    Attributes:
        data: pytree of the examples; each leaf has shape ``(length, …)``. If the batch was made from a number of
            examples, ``None``: `of` returns a batch with data.
        indices: int64 ``(length,)``, the examples' places in the data set. Padding
            repeats an example.
        weights: the `Weights` of these examples, 0 for padding.

    Example:
        >>> import numpy as np, jaxcoded
        >>> from mpi4py import MPI
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
        ...     batch = group.batch({"x": np.arange(3.0)})
        ...     part = group.batch(3)
        >>> batch.data["x"].tolist(), part.indices.tolist(), part.of(np.ones(3)).data.shape
        ([0.0, 1.0, 2.0], [0, 1, 2], (3,))
    """

    data: Any
    indices: Any
    weights: Weights

    def of(self, data: Any) -> "Batch":
        """Return a copy of this batch with these examples, which the program has loaded
        by the batch's `indices`.

        Args:
            data: pytree of arrays whose first axis has the ``len(indices)`` examples.

        Raises:
            TypeError: a leaf is not an array of numbers. The message names the leaf.
            ValueError: a leaf has a different number of examples.
        """
        check_length(data, len(self.indices))
        return dataclasses.replace(self, data=data)

    def __repr__(self) -> str:
        return (
            f"Batch({self.data!r}, indices={self.indices!r}, weights={self.weights!r})"
        )


def check_length(data: Any, length: int) -> None:
    """Raise an error that names the leaf unless every leaf has this many examples."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        name = named("data", path)
        described = isinstance(leaf, jax.ShapeDtypeStruct)
        shape = leaf.shape if described else held(leaf, name).shape
        if shape[:1] != (length,):
            raise ValueError(
                f"{name} has shape {shape}, but the batch has {length} examples on "
                "this rank: load the examples that batch.indices name, with a leading axis of examples"
                + ", and convert a list to one array"
                * (not shape)
            )


def number_of_examples(data: Any) -> int:
    """Return the number of examples of a data set. ``data`` may also be this number.
    Raise a TypeError or ValueError that names the leaf if a leaf is not an array, or if
    the first axes of two leaves have different lengths.
    """
    if isinstance(data, numbers.Integral):
        return _require.integer(
            "n, the number of examples,", data, 1, np.iinfo(np.int64).max
        )
    leaves = jax.tree_util.tree_leaves_with_path(data)
    names = [f"data{jax.tree_util.keystr(path)}" for path, _ in leaves]
    for name, (_, leaf) in zip(names, leaves):
        if isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim:
            continue
        if isinstance(leaf, np.ndarray | jax.Array) or np.isscalar(leaf):
            raise ValueError(
                f"{name} is {_require.kind(leaf)}, which has no leading axis of examples: data are arrays of all "
                "examples, such as (x, y); convert lists with numpy.asarray"
            )
        raise TypeError(
            f"{name} is {_require.kind(leaf)}, not an array of NumPy or JAX: convert it with numpy.asarray; {_LOADER}"
        )
    if not leaves:
        raise ValueError(f"data is {_require.kind(data)} without arrays: {_LOADER}")
    lengths = [len(leaf) for _, leaf in leaves]
    for name, length in zip(names, lengths):
        if length != lengths[0]:
            raise ValueError(
                f"{name} has {length} examples, but {names[0]} has {lengths[0]}: all arrays need the same leading axis"
            )
    return _require.integer(f"the number of examples of {names[0]}", lengths[0], 1)


def read(data: Any, indices: np.ndarray) -> Any:
    """Return examples of a data set, or ``None`` if ``data`` is only a number of
    examples."""
    if isinstance(data, numbers.Integral):
        return None
    return jax.tree.map(lambda leaf: leaf[indices], data)


def check_batch(batch: Any) -> None:
    """Raise a TypeError, with the remedy, unless ``batch`` is a `Batch` with examples."""
    if not isinstance(batch, Batch):
        raise TypeError(
            f"batch must come from this group, got {_require.kind(batch)}: make it with batch = group.batch((x, y)), "
            f"or take the batches of group.epoch((x, y), batch_size=..., seed=0); {_LOADER}"
        )
    if not isinstance(batch.weights, Weights):
        raise TypeError(
            f"batch.weights is {_require.kind(batch.weights)}, not the weights that the group has made: pass the "
            "batch as it is; to weigh examples yourself, multiply their losses"
        )
    if batch.data is None:
        raise TypeError(
            "this batch has no data, as it was made from a number of examples: pass "
            "batch.of(load(batch.indices))"
        )
