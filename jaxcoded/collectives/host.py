"""Collectives on NumPy arrays and on objects with the buffer protocol or DLPack,
without JAX arrays or compilation.

They serve programs that compute with other libraries. If JAX has only the CPU, as with
``JAX_PLATFORMS=cpu``, they do not start JAX. They are ordinary rounds of the group: one
rank may call them while other ranks run a compiled step, if shapes and dtypes are
equal. For bools, the compiled step must then use ``jax_enable_x64``, since NumPy counts
bools in int64. They need a group with the engine.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcoded import _arrays, _require
from jaxcoded.collectives import floats
from jaxcoded.collectives.allreduce import sum_round
from jaxcoded.collectives.arguments import checked_erasures
from jaxcoded.collectives.counting import NOT_COUNTED, Count, counted
from jaxcoded.group.group import CodedGroup, check_open
from jaxcoded.transport.engine import Engine
from jaxcoded.transport.leaves import check_real, held
from jaxcoded.transport.packing import Packing, checked_wire_dtype
from jaxcoded.transport.round import Round

_NAME = "coded_allreduce"  # the name of these rounds, which is the same in `jit`


def allreduce(
    array: np.ndarray,
    group: CodedGroup,
    weights: Any = None,
    *,
    out: np.ndarray | None = None,
    skip: bool = False,
    erasures: Sequence[bool] | np.ndarray | None = None,
    wire_dtype: Any = None,
) -> np.ndarray:
    """Return the result of `jaxcoded.coded_allreduce` for one array in this process's
    memory. The call blocks until the result is complete.

    Pending compiled calls that this thread has made come first. JAX does not know the order of calls with a token,
    or of calls from other threads: wait for their results yourself before you call this function.

    Args:
        array: this rank's contribution: a contiguous NumPy array, or an object with the buffer protocol or DLPack,
            such as a tensor of PyTorch. Shape and dtype are equal on all ranks. Complex numbers, integers and bools
            are summed as in `jaxcoded.coded_allreduce`, but the sum of bools is int64. The result has this
            machine's byte order.
        group: an open group without slices and parts, with ``transport="engine"``.
        weights: as for `jaxcoded.coded_allreduce`.
        out: an array with the result's shape and dtype, to which the result is written;
            it may be ``array`` itself. Default: a new array.
        skip: whether this rank contributes nothing, as when it is late
            (`CodedGroup.lag`). Then only the shape and dtype of ``array`` are used.
        erasures, wire_dtype: as for `jaxcoded.coded_allreduce`.

    Returns:
        The sum, a NumPy array. If ``out`` is given, the array uses its memory.

    Raises:
        ValueError: an array is not contiguous; ``out`` has another shape or dtype than
            the result, is read-only, or overlaps ``array`` in part; ``erasures`` has a
            wrong shape; or ``wire_dtype`` is another dtype.
        TypeError: ``array`` is not an array of numbers, or has integers that the code would round; or the group has
            slices or parts.
        CodedError: an error during the round, as in `jaxcoded.coded_allreduce`. It is
            raised as its own class: `GroupMismatch`, `TooManyErasures`,
            `Desynchronized` or `GroupClosed`.

    Example:
        >>> import numpy as np, jaxcoded
        >>> from mpi4py import MPI
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
        ...     jaxcoded.host.allreduce(np.arange(3.0), group, group.batch(4).weights)
        array([0., 1., 2.])
    """
    check_open(group)
    count = counted(weights, group, "host.allreduce")
    return summed(array, group, count, out, skip, erasures, wire_dtype)


def summed(
    array: np.ndarray,
    group: CodedGroup,
    count: Count = NOT_COUNTED,
    out: np.ndarray | None = None,
    skip: bool = False,
    erasures: Sequence[bool] | np.ndarray | None = None,
    wire_dtype: Any = None,
) -> np.ndarray:
    """Sum an array, with a given count."""
    check_open(group)
    group._session.check_alike()
    with group._session.failing(_NAME):
        array = _arrays.viewed(array)
        if not hasattr(array, "__array__") and not _require.is_number(array):
            raise TypeError(
                f"host.allreduce sums one numpy array, got {_require.kind(array)}: "
                "jaxcoded.coded_allreduce sums lists and other pytrees of arrays"
            )
        array = np.asarray(held(array, "the array"))
        wire_dtype = checked_wire_dtype(wire_dtype)
        parts = floats.on_host(array, group, wire_dtype)
        vector = count.vector
        round = _sum_of(
            *(weakref.ref(group), array.shape, array.dtype, wire_dtype),
            *(count.words, count.examples, None if vector is None else vector.dtype),
        )
        dtype = floats.sum_on_host(array.dtype)
        result = np.empty(array.shape, dtype) if out is None else _memory_of(out)
        if (result.shape, result.dtype) != (array.shape, dtype):
            raise ValueError(
                f"out must be like the sum, {dtype}{list(array.shape)}, "
                f"got {result.dtype}{list(result.shape)}"
            )
        if not result.flags.writeable:
            raise ValueError("out is read-only")
        if not (array.flags.c_contiguous and result.flags.c_contiguous):
            raise ValueError("arrays must be contiguous: use numpy.ascontiguousarray")
        if result is not array:
            # this function is exact for contiguous arrays
            overlap = np.may_share_memory(array, result)
            if overlap and array.ctypes.data != result.ctypes.data:
                raise ValueError(
                    "out overlaps the array in part: give the array itself, or other "
                    "memory"
                )
        mask = None if erasures is None else checked_erasures(erasures, group.size)
    # copy the vector, since the round sums in place
    counts = [] if vector is None else [np.array(vector)]
    vectors, results = [*counts], [*counts]
    for kind in round.vectors[len(counts) :]:  # one vector, or none for an empty array
        sent = parts
        if floats.is_summands(parts):
            sent = np.concatenate([x.ravel() for x in parts.arrays])
        vectors.append(sent.astype(kind.wire, copy=False))
        results.append(result if kind.wire == result.dtype else vectors[-1])
    transport = Engine.of(group._session.transport, "rounds on numpy arrays need")
    transport.host_round(round, vectors, results, skip, mask)
    for received in results[len(counts) :]:
        if received is not result:
            floats.restore_on_host(received, result)
    return result


def _memory_of(out: Any) -> np.ndarray:
    """Return a NumPy array in the memory of ``out``, never a copy."""
    viewed = out
    try:
        if not isinstance(out, np.ndarray):
            dlpack = hasattr(out, "__dlpack__")
            viewed = np.from_dlpack(out) if dlpack else _arrays.viewed(out)
            if dlpack and not viewed.flags.writeable and hasattr(out, "__array__"):
                # NumPy makes read-only arrays from an older DLPack; PyTorch's __array__ shares the memory
                other = np.asarray(out)
                if other.ctypes.data == viewed.ctypes.data:
                    viewed = other
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"out cannot be written here: {error}") from None
    if not isinstance(viewed, np.ndarray):
        raise TypeError(
            f"out must be a numpy array, or have the buffer protocol or DLPack, got {_require.kind(out)}"
        )
    return viewed


# A weak reference, so that the cache does not keep the group alive.
@functools.lru_cache(maxsize=1024)
def _sum_of(
    group: "weakref.ref[CodedGroup]",
    shape: tuple[int, ...],
    dtype: np.dtype,
    wire_dtype: np.dtype | None,
    words: str,
    examples: tuple[float, float] | None,
    counts: np.dtype | None,
) -> Round:
    """Return the round that sums such arrays. ``counts`` is the count's dtype, if any."""
    live_group = group()
    assert live_group is not None  # the caller keeps the group alive
    like = jax.tree.map(
        lambda part: jax.ShapeDtypeStruct(shape, part.dtype),
        floats.on_host(np.empty(0, dtype), live_group, wire_dtype),
    )
    for each in jax.tree.leaves(like):
        check_real(each.dtype, "the array")
    if live_group.plan.encoded:
        raise TypeError(
            "collectives on numpy arrays need a group without slices and parts"
        )
    packing = Packing.of(like, wire_dtype)
    vector = None if counts is None else np.empty(0, counts)
    return sum_round(packing, live_group, Count(vector, examples, words))
