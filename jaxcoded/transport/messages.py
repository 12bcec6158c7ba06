"""Send arrays as mpi4jax messages, and sum and broadcast arrays over a tree."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

try:
    import mpi4jax as mpi4jax  # noqa: PLC0414  # other modules import it from here
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mpi4jax is not installed: pip install mpi4jax, with a C compiler and the MPI's mpicc on the PATH"
    ) from error

from jaxcoded.transport.kernels import accumulator, decode_vector

# MPI counts elements in a C int: longer vectors need several messages.
MAX_ELEMENTS = 2**31 - 1
# MPI has no float16 and bfloat16; they are sent as integers with the same bits.
_BITS = {1: jnp.uint8, 2: jnp.uint16}


def send(vector: jax.Array, rank: int, comm: MPI.Intracomm) -> None:
    """Send an array of numbers or bools. The call blocks until the array's buffer may
    be reused."""
    for message in cut(_to_wire(vector)):
        mpi4jax.send(message, dest=rank, comm=comm)


def receive(
    like: jax.Array | jax.ShapeDtypeStruct, rank: int, comm: MPI.Intracomm
) -> jax.Array:
    """Receive an array of this shape and dtype."""
    empty = jnp.empty(like.shape, _wire_dtype(like.dtype))
    received = [mpi4jax.recv(part, source=rank, comm=comm) for part in cut(empty)]
    return _with_bits_of(joined(received, like.shape), like.dtype)


def exchange(
    vector: jax.Array, source: int, target: int, comm: MPI.Intracomm
) -> jax.Array:
    """Send an array to ``target``, and at the same time receive an array of the same
    shape and dtype from ``source``."""
    received = [
        mpi4jax.sendrecv(
            message, jnp.empty_like(message), source=source, dest=target, comm=comm
        )
        for message in cut(_to_wire(vector))
    ]
    return _with_bits_of(joined(received, vector.shape), vector.dtype)


def cut(array: jax.Array) -> list[jax.Array]:
    """Cut an array into runs of at most `MAX_ELEMENTS` elements."""
    if array.size <= MAX_ELEMENTS:
        return [array]
    flat = array.reshape(-1)
    return [
        jax.lax.slice_in_dim(flat, start, min(start + MAX_ELEMENTS, array.size))
        for start in range(0, array.size, MAX_ELEMENTS)
    ]


def joined(arrays: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Return an array of this shape, joined from the runs that `cut` returned."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays).reshape(shape)


def tree_reduce(
    own: jax.Array,
    children: Sequence[int],
    parent: int,
    coefficients: jax.Array | np.ndarray,
    comm: MPI.Intracomm,
    *,
    parts: int = 1,
) -> jax.Array:
    """Receive messages from the children, decode them, add this rank's own message, and
    send the sum to the parent. ``parent`` is negative on the root. Return the coded sum
    over this rank's subtree. The sum has the shape ``(..., P·l)`` of the rank's own
    message, with ``P = parts``. The children's messages have shape ``(..., P·P'·l/m)``,
    and are received in the order of the code's rows. ``coefficients`` has shape ``(m,
    n·P')``.
    """
    total = own
    if children:
        slices, rows = coefficients.shape
        length, rest = divmod(own.shape[-1], parts * slices)
        assert not rest, (
            "messages are padded to a length that every layer's slices divide"
        )
        batch, child_parts = own.shape[:-1], rows // len(children)
        like = jax.ShapeDtypeStruct((*batch, parts * child_parts * length), own.dtype)
        messages = [
            part
            for child in children
            for part in jnp.unstack(
                receive(like, child, comm).reshape(*batch, parts, child_parts, length),
                axis=-2,
            )
        ]
        decoded = decode_vector(
            messages, jnp.asarray(coefficients, accumulator(own.dtype))
        ).reshape(own.shape)
        total = (decoded + own.astype(decoded.dtype)).astype(own.dtype)
    if parent >= 0:
        send(total, parent, comm)
    return total


def tree_broadcast(
    vector: jax.Array, children: Sequence[int], parent: int, comm: MPI.Intracomm
) -> jax.Array:
    """Receive a message from the parent, if any, and send it to the children."""
    if parent >= 0:
        vector = receive(vector, parent, comm)
    for child in children:
        send(vector, child, comm)
    return vector


def _wire_dtype(dtype: np.dtype) -> np.dtype:
    floating = jnp.issubdtype(dtype, jnp.floating)
    return np.dtype(_BITS.get(np.dtype(dtype).itemsize, dtype) if floating else dtype)


def _to_wire(vector: jax.Array) -> jax.Array:
    return _with_bits_of(vector, _wire_dtype(vector.dtype))


def _with_bits_of(vector: jax.Array, dtype: np.dtype) -> jax.Array:
    if vector.dtype == dtype:
        return vector
    return jax.lax.bitcast_convert_type(vector, dtype)
