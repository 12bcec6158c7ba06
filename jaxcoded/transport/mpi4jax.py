"""The transport that uses unmodified mpi4jax: blocking messages between static ranks.

Every rank takes part in every round, and a parent waits for all its children. So this
transport is never faster than the slowest rank. It is a readable reference, and tests
compare the engine with it. It needs no compiler.
"""

from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcoded.errors import TooManyErasures
from jaxcoded.plan import Plan
from jaxcoded.transport import primitive, registry
from jaxcoded.transport.agreement import check_same, wait
from jaxcoded.transport.base import Transport
from jaxcoded.transport.kernels import accumulator, counts
from jaxcoded.transport.messages import tree_broadcast, tree_reduce
from jaxcoded.transport.round import Round
from jaxcoded.transport.traced import Traced

# To copy this many bytes takes less time than to send one more message.
SHORT = 1 << 16


class Mpi4jax(Traced, Transport):
    """The transport of one group, registered under an index that no later group
    gets."""

    name = "mpi4jax"

    def __init__(self, index: int, comm: MPI.Intracomm, plan: Plan) -> None:
        self._comm = comm
        self.index, self.plan, self.rank = index, plan, comm.rank
        self._round = 0
        self._failure = ""
        registry.add(self)

    def carry(
        self, round: Round, vectors: Sequence[jax.Array], erasures: jax.Array | None
    ) -> Sequence[jax.Array]:
        plan, comm, rank = self.plan, self._comm, self.rank
        children, parent = plan.coded_children(rank), plan.tree.parents[rank]
        coefficients = self._begin(round, vectors, erasures)
        out: list[jax.Array] = []
        ends = np.cumsum([vector.shape[-1] for vector in vectors])
        together = self._fit_together(vectors)
        if together:
            vectors = [jnp.concatenate(vectors, axis=-1)]
        for vector in vectors:
            if round.up:
                length = plan.result_length(rank, vector.shape[-1])
                total = tree_reduce(
                    vector,
                    children,
                    parent,
                    coefficients,
                    comm,
                    parts=plan.parts_above[rank],
                )
                # On other ranks than the root this value only gives the shape of the
                # result, or the zeros of a reduce.
                shape = (*vector.shape[:-1], length)
                vector = total if parent < 0 else jnp.zeros(shape, vector.dtype)
                if round.examples is not None and parent < 0:
                    # Check only on the root, where XLA fuses the check with the
                    # decoding.
                    if not out:  # the first vector is the count
                        right = counts(vector[..., :1], *round.examples)
                    vector = jnp.where(right, vector, jnp.nan)
            if round.down:
                vector = tree_broadcast(vector, children, parent, comm)
            out.append(vector)
        return jnp.split(out[0], ends[:-1], axis=-1) if together else out

    def rounds(self) -> int:
        return self._round

    def note_failure(self, words: str) -> None:
        self._failure = words

    def broadcast(self, words: str, array: np.ndarray) -> np.ndarray:
        self._agree(words)
        out = np.array(array)
        wait(self._comm.Ibcast(out, self.plan.root))
        return out

    def replanned(self, index: int, plan: Plan) -> Self:
        registry.remove(self.index)
        other = type(self)(index, self._comm, plan)
        other._round = self._round
        return other

    def close(self, seconds: float) -> list[int]:
        self._agree("close")
        return []

    def _fit_together(self, vectors: Sequence[jax.Array]) -> bool:
        """Return whether several vectors, such as a count and a sum, are sent as one
        message."""
        kinds = {(vector.dtype, vector.shape[:-1]) for vector in vectors}
        short = sum(vector.nbytes for vector in vectors) <= SHORT
        return len(vectors) > 1 and len(kinds) == 1 and short and not self.plan.encoded

    def _begin(
        self, round: Round, vectors: Sequence[jax.Array], erased: jax.Array | None
    ) -> jax.Array | np.ndarray:
        """Agree on this round; return the coefficients of the children, ``(m, n)``."""
        index, plan, rank = self.index, self.plan, self.rank
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
            transport = registry.find(index)  # compiled code holds only the index
            assert isinstance(transport, Mpi4jax)
            transport._agree(str(round), *masks)
            return tuple(
                plan.coefficients(rank, mask).astype(out.dtype)
                for mask, out in zip(masks, like)
            )

        looked_up = primitive.on_host(begin, like, *masks)
        return looked_up[0] if masks else coefficients

    def _agree(self, call: str, erased: np.ndarray | None = None) -> None:
        """Begin a round, possibly inside a compiled step: check that all ranks make the
        same call. Collective. Raise a `GroupMismatch` on every rank if the calls differ,
        and `TooManyErasures` if the plan does not tolerate the erased ranks.
        """
        self._round += 1
        words = f"round {self._round}, {call}{self._failure}"
        self._failure = ""
        if erased is not None:
            words += f", erasures of ranks {np.flatnonzero(erased).tolist()}"
        what = (
            "ranks called different things in the same round, "
            "but all ranks must make the same calls in the same order"
        )
        check_same(self._comm, words, what)
        if erased is not None and (why_not := self.plan.why_not(erased)):
            raise TooManyErasures(why_not)
