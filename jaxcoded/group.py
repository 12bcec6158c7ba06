"""A group: a plan on a communicator."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from mpi4py import MPI

from jaxcoded.agreement import check_communicator, disagreement
from jaxcoded.allocation import assignment
from jaxcoded.errors import GroupClosed, GroupMismatch, TooManyErasures
from jaxcoded.plan import Plan, make_plan

TRANSPORTS = ("auto", "mpi4jax")


class CodedGroup:
    """The ranks of a communicator with a plan: what every collective of this library
    works on.

    Collective: all ranks of ``comm`` make the group with the same arguments, and call
    its collectives in one order. The group works on a duplicate of ``comm``, so that
    its messages meet no others. Two groups are never equal, and never share a compiled
    function.

    The root, rank 0 unless the plan says otherwise, is the one rank that must live.

    Args:
        comm: an mpi4py intra-communicator.
        stragglers: ``s``, the number of children of every parent that may be missing.
        fanout: the largest number of children of a parent; see `make_plan`.
        code: kind of gradient code; see `make_plan`.
        slices: ``m``, messages shrink by this in every layer; see `make_plan`.
        root_computes: whether the root holds data.
        transport: ``"mpi4jax"`` or ``"auto"``, which is the same for now.
        seed: of random codes.

    Raises:
        TypeError: ``comm`` is not an intra-communicator.
        ValueError: no such plan. Raised on every rank.
        GroupMismatch: ranks gave different arguments. Raised on every rank; the message
            names them.

    Example:
        >>> from mpi4py import MPI
        >>> import jaxcoded
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
        ...     group.rank, group.size, group.assignment(4)[0].tolist()
        (0, 1, [0, 1, 2, 3])
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        stragglers: int = 1,
        fanout: int | None = None,
        code: str = "auto",
        slices: int = 1,
        root_computes: bool = False,
        transport: str = "auto",
        seed: int = 0,
    ) -> None:
        request: dict[str, Any] = {
            "stragglers": stragglers,
            "fanout": fanout,
            "code": code,
            "slices": slices,
            "root_computes": root_computes,
            "seed": seed,
        }
        self._open(comm, transport, request, lambda size: make_plan(size, **request))

    @classmethod
    def from_plan(
        cls, comm: MPI.Intracomm, plan: Plan, *, transport: str = "auto"
    ) -> "CodedGroup":
        """A group with a plan made before, such as one with an explicit tree.
        Collective.

        Args:
            comm: as for the constructor.
            plan: for as many ranks as ``comm`` has.
            transport: as for the constructor.

        Raises:
            ValueError: the plan is for another number of ranks.
            TypeError: it is not a plan, or ``comm`` not an intra-communicator.
            GroupMismatch: ranks gave different plans. Raised on every rank.

        Example:
            >>> from mpi4py import MPI
            >>> import jaxcoded
            >>> plan = jaxcoded.make_plan(1)
            >>> with jaxcoded.CodedGroup.from_plan(MPI.COMM_SELF, plan) as group:
            ...     group.plan == plan
            True
        """

        def fitting(size: int) -> Plan:
            if not isinstance(plan, Plan):
                raise TypeError(
                    f"plan must be a jaxcoded.Plan, got {type(plan).__name__}"
                )
            if plan.size != size:
                raise ValueError(
                    f"the plan is for {plan.size} ranks, but the communicator has {size}"
                )
            return plan

        group = cls.__new__(cls)
        group._open(comm, transport, {"plan": plan}, fitting)
        return group

    def _open(
        self,
        comm: MPI.Intracomm,
        transport: str,
        request: dict[str, Any],
        planner: Callable[[int], Plan],
    ) -> None:
        check_communicator(comm)
        self._comm = comm.Dup()
        try:
            self.plan = self._agreed_plan(transport, request, planner)
        except Exception:
            self._comm.Free()
            raise
        self._rank = self._comm.rank
        self._round = 0
        self._failure = ""
        self.index = next(_indices)
        _groups[self.index] = self

    def _agreed_plan(
        self, transport: str, request: dict[str, Any], planner: Callable[[int], Plan]
    ) -> Plan:
        """This rank's plan, once all ranks are known to have the same one. Otherwise
        the same error on all of them."""
        plan: Plan | None = None
        failure: Exception | None = None
        try:
            if transport not in TRANSPORTS:
                raise ValueError(
                    f"transport must be one of {', '.join(TRANSPORTS)}, "
                    f"got {transport!r}"
                )
            plan = planner(self._comm.size)
        except Exception as error:  # noqa: BLE001  # the others wait for a word
            failure = error
        outcome = f"error: {failure}" if plan is None else f"plan {plan.fingerprint}"
        words = ", ".join(f"{key}={value}" for key, value in request.items())
        said = disagreement(
            self._comm, f"{words}, transport={transport} ({outcome[:200]})"
        )
        if said is not None:
            raise GroupMismatch(
                f"ranks made a group with different arguments; {said}"
            ) from failure
        if plan is None:
            assert failure is not None
            raise failure
        return plan

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.plan.size

    @property
    def comm(self) -> MPI.Intracomm:
        """The group's own duplicate of the communicator it was made with."""
        return self._comm

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.index not in _groups

    def assignment(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """What this rank reads of a global batch, and its coding weights.

        Args:
            batch_size: number of examples in the global batch.

        Returns:
            indices: int64 ``(length,)`` into the global batch, of one length ≥ 1 on all
                ranks. Padding repeats one of the rank's own examples (example 0 where
                it has none) with weight 0.
            weights: of JAX's default float dtype; ``(length,)`` loss weights, or, with
                slices, the coefficients ``(chunks, length // chunks, M)`` for
                `coded_value_and_grad`.

        Raises:
            ValueError: ``batch_size < 1``.
        """
        indices, weights = assignment(self.plan, self.rank, batch_size)
        return indices, weights.astype(jax.dtypes.canonicalize_dtype(np.float64))

    def close(self) -> None:
        """Finish pending rounds and give the communicator back. Collective; does
        nothing the second time.

        A later call of a collective on this group, compiled or not, raises
        `GroupClosed`.

        Raises:
            GroupMismatch: other ranks called a collective instead. Raised on all.
        """
        if not self.closed:
            try:
                jax.effects_barrier()
                self.agree("close")
            finally:
                del _groups[self.index]
            self._comm.Free()

    @contextlib.contextmanager
    def failing(self, call: str) -> Iterator[None]:
        """Remember an error in this rank's arguments, which keeps it from a round.

        Other ranks may be in that round already. They hear of the error when this rank
        begins its next one; if all ranks erred, all go on.
        """
        try:
            yield
        except Exception as error:
            self._failure = f" after a {type(error).__name__} in {call}"
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # the other ranks may be anywhere: wait for nobody, and leave them a
            # communicator to fail on
            _groups.pop(self.index, None)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.rank}"
        return f"<CodedGroup {self.index} of {self.size} ranks, {state}>"

    def agree(self, call: str, erased: np.ndarray | None = None) -> None:
        """Begin a round: make sure that all ranks are about to do the same. Collective.

        Called from the middle of compiled steps.

        Args:
            call: what this rank is about to do, in words: collective, shapes, dtypes.
            erased: bool ``(size,)``, the ranks left out. Default none.

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
        if erased is not None and (failed := self.plan.unrecoverable(erased)):
            raise TooManyErasures(_too_many(self.plan, failed[0], erased))


def _too_many(plan: Plan, parent: int, erased: np.ndarray) -> str:
    if erased[plan.root]:
        return f"rank {plan.root} is the root, the one rank that cannot be left out"
    children = plan.coded_children(parent)
    return (
        f"rank {parent} cannot rebuild its sum without its children "
        f"{[child for child in children if erased[child]]}: any "
        f"{plan.tolerates(parent)} of its {len(children)} children may be left out; "
        "make the group with more stragglers"
    )


# What compiled code holds of a group is its index. Indices are never used again.
_groups: dict[int, CodedGroup] = {}
_indices = itertools.count()


def check_open(group: object) -> None:
    """Raise unless ``group`` is a group that can be used.

    Raises:
        TypeError: it is not a group.
        GroupClosed: it was closed.
    """
    if not isinstance(group, CodedGroup):
        raise TypeError(
            f"group must be a jaxcoded.CodedGroup, got a {type(group).__name__}"
        )
    find(group.index)


def find(index: int) -> CodedGroup:
    """The group with this index.

    Raises:
        GroupClosed: it was closed.
    """
    try:
        return _groups[index]
    except KeyError:
        raise GroupClosed(
            f"use after close: group {index} was closed; make a new CodedGroup, and "
            "compile with it what used the old one"
        ) from None
