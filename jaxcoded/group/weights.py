import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded import _require
from jaxcoded.plan import Plan


def _plain(value: Any) -> Any:
    return value.values if isinstance(value, Weights) else value


def _unary(operation: Callable[[Any], Any]) -> Callable[["Weights"], Any]:
    return lambda self: operation(self.values)


def _binary(operation: Callable[[Any, Any], Any]) -> Callable[["Weights", Any], Any]:
    return lambda self, other: operation(self.values, _plain(other))


def _reflected(operation: Callable[[Any, Any], Any]) -> Callable[["Weights", Any], Any]:
    return lambda self, other: operation(_plain(other), self.values)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "examples", "number", "likeness"],
    meta_fields=["batch_size", "plan", "rank"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """The coding weights of the examples of a `Batch`.

    Weights are a pytree. They can be passed to ``jit`` and used in computations like an array: ``weights @
    losses``, ``jnp.sum(weights * losses)``, ``weights.shape``. The results, including slices, are plain arrays.

    Attributes:
        values: the array: a read-only NumPy array or, after a use by JAX, a
            ``jax.Array``.
        examples: int32, the number by which a mean divides: ``batch_size``, or the
            number of present examples in a smaller last batch. It is a leaf of the
            pytree, so that a smaller batch does not compile another program.
        number: int32, a number that identifies the batch, its epoch and its data set;
            the same on all ranks. It is also a leaf of the pytree.
        likeness: float32, a number that shows whether ranks have different data, since it depends on some numbers of
            the data set; see `likeness.of_data`. It is the same on all ranks up to rounding, and also a leaf.
        batch_size: the number of examples in the global batch.
        plan: the fingerprint of the plan; equal plans have equal fingerprints.
        rank: the rank to which these weights belong.

    Example:
        >>> import jax.numpy as jnp, jaxcoded
        >>> from mpi4py import MPI
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
        ...     weights = group.batch(4).weights
        >>> weights.batch_size, float(weights @ jnp.arange(4.0))
        (4, 6.0)
    """

    values: Any
    examples: Any
    number: Any
    likeness: Any
    batch_size: int
    plan: str
    rank: int

    @property
    def counts(self) -> dict[Any, Any] | None:
        """Return the cache of counts of these examples, by plan and rank. Return
        ``None`` if the values may still change, because they are not in a read-only
        NumPy array.
        """
        values = self.values
        fixed = (
            isinstance(values, np.ndarray)
            and values.base is None
            and not values.flags.writeable
        )
        return vars(self).setdefault("_counts", {}) if fixed else None

    def check(self, plan: Plan, rank: int) -> None:
        """Raise a ValueError unless the weights belong to this rank and plan and still
        have their original precision."""
        remedy = "take the batches of this group's epoch, or group.batch"
        if self.plan != plan.fingerprint:
            raise ValueError(
                "this batch belongs to another group's plan, or to the plan before a "
                f"replan: {remedy}"
            )
        if self.rank != rank:
            raise ValueError(
                f"this batch belongs to rank {self.rank}, but this is rank {rank}: "
                f"{remedy} on each rank"
            )
        if not jnp.issubdtype(self.dtype, jnp.floating) or self.dtype.itemsize < 4:
            raise ValueError(
                f"the weights of this batch were converted to {self.dtype}, which leaves too few "
                "digits: convert only batch.data"
            )

    # The methods and operators of an array.

    # With this priority, NumPy leaves operators to this class.
    __array_priority__ = 100

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.values)

    def __getattr__(self, name: str) -> Any:
        # Code that looks for special methods must not get the array's special methods.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.values, name)

    def __getitem__(self, where: Any) -> Any:
        return self.values[where]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)
    __hash__ = None  # type: ignore[assignment]  # not hashable, like an array


def assigned(
    plan: Plan, rank: int, batch_size: int, multiple: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's part of a batch and the values of its weights, in JAX's default
    float dtype; see `Strategy.assignment`.
    """
    multiple = _require.integer("multiple", multiple, 1)
    indices, weights = plan.strategy.assignment(plan, rank, batch_size)
    if multiple > 1:
        if why := plan.strategy.why_not_split(plan):
            raise ValueError(
                f"multiple={multiple} cannot be given, as {why}: leave multiple out"
            )
        padding = -len(indices) % multiple
        indices = np.append(indices, np.repeat(indices[:1], padding))
        weights = np.append(weights, np.zeros(padding))
    weights = weights.astype(jax.dtypes.canonicalize_dtype(np.float64))
    weights.setflags(write=False)  # all batches of an epoch share this array
    return indices, weights
