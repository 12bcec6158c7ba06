"""The tree on stock mpi4jax: blocking messages between static ranks.

Every rank must turn up in every round, and a parent hears all its children before it
goes on. So this transport does not outrun stragglers; it is the readable reference, the
oracle of the tests, and what runs where no compiler is at hand.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
from mpi4py import MPI

from jaxcoded.errors import GroupMismatch, TooManyErasures, use_after_close
from jaxcoded.plan import Plan
from jaxcoded.transport import primitive
from jaxcoded.transport.agreement import disagreement
from jaxcoded.transport.base import Collective, Transport
from jaxcoded.transport.kernels import accumulator, decode_vector
from jaxcoded.transport.primitive import NO_EXTRAS, Extras

# MPI counts elements in a C int: longer vectors go in several messages.
MAX_ELEMENTS = 2**31 - 1
# MPI has no float16 and bfloat16; they travel as the integers with the same bits.
_BITS = {1: jnp.uint8, 2: jnp.uint16}


class Mpi4jax(Transport):
    """The transport of one group.

    Args:
        index: of the group; never used again.
        comm: the group's communicator.
        plan: the group's plan.
    """

    def __init__(self, index: int, comm: MPI.Intracomm, plan: Plan) -> None:
        self._comm = comm
        self._plan = plan
        self._index = index
        self._round = 0
        self._failure = ""
        _open[self._index] = self

    def carry(
        self,
        collective: Collective,
        vectors: Sequence[jax.Array],
        extras: Extras = NO_EXTRAS,
        token: jax.Array | None = None,
        *,
        last_part: bool = False,
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        assert token is None and not last_part
        plan, comm, rank = self._plan, self._comm, self._comm.rank
        children, parent = plan.coded_children(rank), plan.tree.parents[rank]
        coefficients = self._begin(collective, vectors, extras.erasures)
        out = []
        for vector in vectors:
            if collective.up:
                length = plan.result_length(rank, vector.shape[-1])
                total = tree_reduce(
                    vector,
                    children,
                    parent,
                    coefficients,
                    comm,
                    parts=plan.parts_above[rank],
                )
                # below the root this only gives the shape of what comes down, or the
                # zeros of a reduce
                shape = (*vector.shape[:-1], length)
                vector = total if parent < 0 else jnp.zeros(shape, vector.dtype)
            if collective.down:
                vector = tree_broadcast(vector, children, parent, comm)
            out.append(vector)
        return out, None

    def lag(self, token: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        return jnp.int32(0), token

    def host_lag(self) -> int:
        return 0

    def rounds(self) -> int:
        return self._round

    def note_failure(self, words: str) -> None:
        self._failure = words

    def broadcast(self, words: str, array: np.ndarray) -> np.ndarray:
        self._agree(words)
        return self._comm.bcast(array, self._plan.root)

    def replanned(self, index: int, plan: Plan) -> "Mpi4jax":
        del _open[self._index]
        other = Mpi4jax(index, self._comm, plan)
        other._round = self._round
        return other

    def close(self, seconds: float) -> list[int]:
        try:
            self._agree("close")
        finally:
            del _open[self._index]
        return []

    def abandon(self, error: BaseException) -> None:
        _open.pop(self._index, None)

    def _begin(
        self,
        collective: Collective,
        vectors: Sequence[jax.Array],
        erased: jax.Array | None,
    ) -> jax.Array | np.ndarray:
        """Agree with the other ranks on this round, and look up the coefficients of
        this rank's children, ``(m, n)``."""
        index, plan, rank = self._index, self._plan, self._comm.rank
        coefficients = plan.coefficients(rank)
        masks = [] if erased is None else [erased]
        like = [
            jax.ShapeDtypeStruct(
                coefficients.shape,
                np.result_type(np.float32, *(accumulator(v.dtype) for v in vectors)),
            )
            for _ in masks
        ]

        def begin(*masks: np.ndarray) -> tuple[np.ndarray, ...]:
            if index not in _open:
                raise use_after_close(index)
            _open[index]._agree(collective.signature, *masks)
            return tuple(
                plan.coefficients(rank, mask).astype(out.dtype)
                for mask, out in zip(masks, like)
            )

        looked_up = primitive.on_host(begin, like, *masks)
        return looked_up[0] if masks else coefficients

    def _agree(self, call: str, erased: np.ndarray | None = None) -> None:
        """Begin a round: make sure that all ranks are about to do the same. Collective.

        Called from the middle of compiled steps.

        Raises:
            GroupMismatch: on every rank if they differ.
            TooManyErasures: on every rank if the plan cannot do without the erased
                ones.
        """
        self._round += 1
        words = f"round {self._round}, {call}{self._failure}"
        self._failure = ""
        if erased is not None:
            words += f", erasures of ranks {np.flatnonzero(erased).tolist()}"
        said = disagreement(self._comm, words)
        if said is not None:
            raise GroupMismatch(
                f"ranks called different things in the same round; {said}"
            )
        if erased is not None and (why_not := self._plan.why_not(erased)):
            raise TooManyErasures(why_not)


# Compiled code holds the index, not the transport.
_open: dict[int, Mpi4jax] = {}


def send(vector: jax.Array, rank: int, comm: MPI.Intracomm) -> None:
    """Send an array of any float, integer or bool dtype; blocks until its buffer may be
    reused."""
    for message in cut(_to_wire(vector)):
        mpi4jax.send(message, dest=rank, comm=comm)


def receive(
    like: jax.Array | jax.ShapeDtypeStruct, rank: int, comm: MPI.Intracomm
) -> jax.Array:
    """Receive an array of this shape and dtype."""
    templates = cut(jax.ShapeDtypeStruct(like.shape, _wire_dtype(like.dtype)))
    received = [
        mpi4jax.recv(jnp.empty(each.shape, each.dtype), source=rank, comm=comm)
        for each in templates
    ]
    return _from_wire(joined(received, like.shape), like.dtype)


def exchange(
    vector: jax.Array, source: int, target: int, comm: MPI.Intracomm
) -> jax.Array:
    """Send an array to ``target`` and receive one of the same shape and dtype from
    ``source`` at the same time."""
    received = [
        mpi4jax.sendrecv(
            message, jnp.empty_like(message), source=source, dest=target, comm=comm
        )
        for message in cut(_to_wire(vector))
    ]
    return _from_wire(joined(received, vector.shape), vector.dtype)


def cut(array: Any) -> list[Any]:
    """An array, or ``jax.ShapeDtypeStruct``, as such of at most `MAX_ELEMENTS` elements
    each: itself, or consecutive runs of its elements."""
    if array.size <= MAX_ELEMENTS:
        return [array]
    starts = range(0, array.size, MAX_ELEMENTS)
    ends = [min(start + MAX_ELEMENTS, array.size) for start in starts]
    if isinstance(array, jax.ShapeDtypeStruct):
        return [
            jax.ShapeDtypeStruct((end - start,), array.dtype)
            for start, end in zip(starts, ends)
        ]
    flat = array.reshape(-1)
    return [jax.lax.slice_in_dim(flat, start, end) for start, end in zip(starts, ends)]


def joined(arrays: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `cut`."""
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
    """The way up at one rank: hear the children, decode, add one's own, tell the
    parent.

    Args:
        own: this rank's message ``(..., P·l)``.
        children: ranks in the order of the code's rows; their messages are ``(..., P·P'
            ·l/m)``.
        parent: whom to send to; negative at the root.
        coefficients: ``(m, n·P')``.
        comm: the communicator.
        parts: ``P``.

    Returns:
        ``(..., P·l)``, the coded sum over this rank's subtree.
    """
    total = own
    if children:
        slices, rows = coefficients.shape
        length, rest = divmod(own.shape[-1], parts * slices)
        assert not rest, (
            "messages are padded to a length that every layer's slices divide"
        )
        batch, theirs = own.shape[:-1], rows // len(children)
        like = jax.ShapeDtypeStruct((*batch, parts * theirs * length), own.dtype)
        messages = [
            part
            for child in children
            for part in jnp.unstack(
                receive(like, child, comm).reshape(*batch, parts, theirs, length),
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
    """The way down at one rank: hear the parent (at the root, take ``vector``), tell
    the children."""
    if parent >= 0:
        vector = receive(vector, parent, comm)
    for child in children:
        send(vector, child, comm)
    return vector


def _wire_dtype(dtype: np.dtype) -> np.dtype:
    itemsize = np.dtype(dtype).itemsize
    return (
        np.dtype(_BITS[itemsize])
        if jnp.issubdtype(dtype, jnp.floating) and itemsize in _BITS
        else np.dtype(dtype)
    )


def _to_wire(vector: jax.Array) -> jax.Array:
    wire = _wire_dtype(vector.dtype)
    return (
        vector if vector.dtype == wire else jax.lax.bitcast_convert_type(vector, wire)
    )


def _from_wire(vector: jax.Array, dtype: np.dtype) -> jax.Array:
    return (
        vector if vector.dtype == dtype else jax.lax.bitcast_convert_type(vector, dtype)
    )
