"""Uncoded all-reduces with mpi4jax, for comparison.

Each function takes a pytree of float arrays and a communicator, and sums over all
ranks. It waits for every rank, so one stuck rank stops all ranks. It can be
differentiated and batched like `jaxcoded.coded_allreduce`. The sum contains every
rank's contribution once; there are no assigned examples and no weights.
"""

import abc
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcoded import _require
from jaxcoded.plan import Uncoded, make_plan
from jaxcoded.plan.tree import Tree, balanced_parents
from jaxcoded.transport import messages, registry
from jaxcoded.transport.agreement import check_communicator
from jaxcoded.transport.kernels import accumulator
from jaxcoded.transport.packing import pack, unpack
from jaxcoded.transport.primitive import run
from jaxcoded.transport.round import Operands, Round
from jaxcoded.transport.traced import Traced


def allreduce(x: Any, comm: MPI.Intracomm) -> Any:
    """Sum by ``mpi4jax.allreduce``, one call per dtype. Arrays of float16 and bfloat16
    are sent as float32.

    Args:
        x: pytree of float arrays or numbers, of the same shapes and dtypes on all
            ranks.
        comm: an mpi4py intra-communicator.

    Returns:
        The sum over the ranks, a pytree like ``x``, on all ranks.

    Example:
        >>> from jaxcoded.collectives import baselines
        >>> from mpi4py import MPI
        >>> baselines.allreduce({"loss": 1.5}, MPI.COMM_SELF)
        {'loss': Array(1.5, dtype=float32)}
    """
    return _sum(x, _Allreduce, comm)


def ring_allreduce(x: Any, comm: MPI.Intracomm) -> Any:
    """Sum in a ring: ``N−1`` steps of reduce-scatter and ``N−1`` steps of all-gather by
    ``sendrecv``. Each step sends ``1/N`` of the data.

    Arguments and results are those of `allreduce`. The algorithm is from Patarasuk and
    Yuan 2009, "Bandwidth optimal all-reduce algorithms".
    """
    return _sum(x, _Ring, comm)


def master_worker_allreduce(x: Any, comm: MPI.Intracomm) -> Any:
    """Sum on rank 0, which receives from all other ranks in turn, adds up, and sends
    the sum to each rank.

    Arguments and results are those of `allreduce`.
    """
    return _sum(x, _Star, comm)


def tree_allreduce(x: Any, comm: MPI.Intracomm, *, fanout: int = 2) -> Any:
    """Sum up and down a balanced tree with ``fanout`` children per parent, without a
    code.

    Arguments and results are those of `allreduce`.

    Raises:
        ValueError: ``fanout < 1``.
    """
    fanout = _require.integer("fanout", fanout, 1)
    return _sum(x, _PlainTree, comm, fanout)


def _sum(x: Any, kind: "type[_Baseline]", comm: MPI.Intracomm, *more: int) -> Any:
    vectors, packing = pack(x)
    round = Round(
        _index(kind, _Communicator(comm), *more),
        f"{kind.__name__[1:]} of {packing}",
        vectors=tuple(packing.vectors),
        transposes=True,
    )
    return unpack(run(round, Operands(vectors))[0], packing)


class _Communicator:
    """A communicator that equals every other object with the same handle, so that
    ``jit`` finds compiled functions in its cache."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        check_communicator(comm)
        self.comm = comm
        # MPI reuses the handle of a freed communicator for a new communicator
        self.key = (MPI._handleof(comm), comm.rank, comm.size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Communicator) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.cache
def _index(kind: "type[_Baseline]", communicator: _Communicator, *more: int) -> int:
    """Return the index of a baseline, which is registered like a group's transport."""
    baseline = kind(communicator.comm, *more)
    registry.add(baseline)
    return baseline.index


class _Baseline(Traced):
    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.index = registry.new_index()
        self.plan, self.rank = make_plan(comm.size, Uncoded()), comm.rank

    def carry(
        self, round: Round, vectors: Sequence[jax.Array], erasures: jax.Array | None
    ) -> Sequence[jax.Array]:
        return [self.sum(vector) for vector in vectors]

    @abc.abstractmethod
    def sum(self, vector: jax.Array) -> jax.Array:
        """Trace the sum of one vector over the ranks."""


class _Allreduce(_Baseline):
    def sum(self, vector: jax.Array) -> jax.Array:
        wide = vector.astype(accumulator(vector.dtype))
        sums = [
            messages.mpi4jax.allreduce(part, op=MPI.SUM, comm=self.comm)
            for part in messages.cut(wide)
        ]
        return messages.joined(sums, vector.shape).astype(vector.dtype)


class _Ring(_Baseline):
    def sum(self, vector: jax.Array) -> jax.Array:
        rank, size = self.comm.rank, self.comm.size
        if size == 1:
            return vector
        length = vector.shape[-1]
        padded = jnp.pad(vector, [(0, 0)] * (vector.ndim - 1) + [(0, -length % size)])
        parts = jnp.split(padded, size, axis=-1)
        before, after = (rank - 1) % size, (rank + 1) % size
        # reduce-scatter: at the end this rank has the sum of part rank + 1
        for step in range(size - 1):
            received = messages.exchange(
                parts[(rank - step) % size], before, after, self.comm
            )
            at = (rank - step - 1) % size
            wide = accumulator(vector.dtype)
            total = parts[at].astype(wide) + received.astype(wide)
            parts[at] = total.astype(vector.dtype)
        # all-gather
        for step in range(size - 1):
            received = messages.exchange(
                parts[(rank - step + 1) % size], before, after, self.comm
            )
            parts[(rank - step) % size] = received
        return jnp.concatenate(parts, axis=-1)[..., :length]


class _PlainTree(_Baseline):
    def __init__(self, comm: MPI.Intracomm, fanout: int) -> None:
        super().__init__(comm)
        self.fanout = fanout

    def sum(self, vector: jax.Array) -> jax.Array:
        rank, size = self.comm.rank, self.comm.size
        tree = Tree(balanced_parents(size, self.fanout, 1))
        children, parent = tree.children[rank], tree.parents[rank]
        total = messages.tree_reduce(
            vector, children, parent, np.ones((1, len(children))), self.comm
        )
        return messages.tree_broadcast(total, children, parent, self.comm)


class _Star(_PlainTree):
    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm, max(1, comm.size - 1))
