"""Processes that a running group starts as new ranks, with a fault-tolerant MPI (ULFM).

One rank, the starter, starts the new processes with `MPI_Comm_spawn`. It calls
`MPI_Comm_spawn` in a thread, since the call never returns if a process ends before it
has initialized MPI. The new processes run on the starter's host, because the daemons of
Open MPI 5.0 cannot connect processes of several hosts, neither in `MPI_Comm_spawn` nor
in `MPI_Comm_connect`. Once all new ranks have reported, old and new ranks connect
through the starter (`MPI_Intercomm_create`). So every old rank reaches every new rank
without the daemons. Until then, each new rank and the starter exchange messages as
JSON, and no rank waits in MPI for a message.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from jaxcoded import _require
from jaxcoded.errors import CodedError
from jaxcoded.group.membership.pending import pending
from jaxcoded.plan import Plan
from jaxcoded.transport.agreement import broadcast
from jaxcoded.transport.options import Options

# The variable is 1 if the launcher continues after the death of a process that joins
# (`jaxcoded.tools.launch.rank`).
FORGIVES = "JAXCODED_TAKES_IN"
_HAN = "OMPI_MCA_coll_han_priority"
# tags of messages between the starter and the started ranks, and of messages in the
# communicator of all ranks
TAG_NEW, TAG_ALL = 32_011, 32_012
_SERVES = 20e-3  # seconds between two polls while MPI connects the ranks
LATER = 10.0  # how many seconds longer than the deciding rank the other ranks wait
_LEAST = 30.0  # the least time for making the group, in seconds
MOST = 2**15  # the most ranks that join at once
LONGEST = 1e6  # the longest wait in seconds, as clocks have a limited range


def why_not(hosts: int) -> str:
    """Return why a group on this many hosts cannot be extended, or an empty text."""
    if os.environ.get(FORGIVES) != "1":
        return (
            "extended needs a launcher that continues after the death of a rank started later: start the job with "
            f"jaxcoded run --ft, or set {FORGIVES}=1 and PRTE_MCA_state_base_recoverable=1 for mpirun --with-ft ulfm"
        )
    if hosts > 1 and os.environ.get(_HAN) != "-1":
        return (
            "Open MPI's collectives for several hosts give wrong values to ranks that have joined: start the job with "
            f"jaxcoded run --ft, or set {_HAN}=-1"
        )
    return ""


def opening_seconds(timeout: float) -> float:
    """Return the seconds after which ranks that make the group together give up."""
    return max(timeout / 2, _LEAST)


def tolerant(comm: Any) -> Any:
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


@dataclasses.dataclass(frozen=True)
class Invitation:
    """The data about the group that joining ranks need. It is the same on all old ranks."""

    size: int  # ranks of the old group
    ranks: int  # number of ranks that join
    root: int  # the root of the old group
    place: int  # the root's rank in the new group
    options: Options  # the new group's options

    def check(self) -> None:
        """Raise a ValueError that names a value with which no group can be made."""
        _require.integer("size", self.size, 1)
        _require.integer("ranks", self.ranks, 1, MOST)
        _require.integer("root", self.root, 0, self.size - 1)
        _require.integer("place", self.place, 0, self.size + self.ranks - 1)
        self.options.complete().validate()

    @property
    def request(self) -> dict[str, Any]:
        """Return the arguments that request the new group."""
        return {"extended": [self.size, self.ranks]}

    def own(self, all_ranks: MPI.Intracomm) -> MPI.Intracomm:
        """Return the new group's communicator. It has the old ranks, then the new ranks,
        except that the old root has rank ``place``. Collective. Raise a CodedError if the
        number of ranks differs from the invitation.
        """
        if all_ranks.size != self.size + self.ranks:
            raise CodedError(
                f"{self.ranks} ranks should join {self.size} ranks, but together there are {all_ranks.size} ranks"
            )
        order = [rank for rank in range(all_ranks.size) if rank != self.root]
        order.insert(self.place, self.root)
        if order == sorted(order):
            return all_ranks
        own: MPI.Intracomm = tolerant(all_ranks.Split(0, order.index(all_ranks.rank)))
        return own


def joined(
    comm: MPI.Intracomm,
    leader: int,
    between: MPI.Intercomm | None,
    until: float,
    look: Callable[[], object],
    *,
    first: bool,
) -> MPI.Intracomm:
    """Return one communicator of all ranks. Collective on the old ranks, which set ``first``, and the
    new ranks.

    Args:
        comm: the communicator of the old ranks or of the new ranks, whichever includes
            this rank.
        leader: the rank in ``comm`` through which the old and the new ranks connect.
        between: the intercommunicator of the starter and the started ranks; None on all
            other ranks.
        until: the time by which the communicator must be made. If it is not, a
            CodedError is raised.
        look: a function that is called during the wait, and may raise an error.
    """
    made: list[MPI.Comm] = []

    def kept(comm: Any) -> Any:
        made.append(tolerant(comm))
        return comm

    def make() -> MPI.Intracomm:
        bridge = comm  # MPI uses the bridge only on the leader
        if between is not None:
            bridge = kept(between.Merge(high=not first))
        # the starter is the first rank of the bridge
        other = 1 if first else 0
        apart = kept(comm.Create_intercomm(leader, bridge, other, TAG_ALL))
        return kept(apart.Merge(high=not first))

    making = pending(make)
    try:
        while True:
            try:
                return making.result(_SERVES)
            except TimeoutError:
                if time.monotonic() > until:
                    raise CodedError("connecting the ranks took too long") from None
            look()
    except BaseException:
        for each in made:
            each.Revoke()
        raise


def plan_of_root(
    comm: MPI.Intracomm, root: int, make: Callable[[], Plan] | None = None
) -> Plan:
    """Return the root's plan on all ranks. Collective. ``make`` returns this rank's
    plan; it is None on ranks that lack the data to make a plan.
    """
    plan, failure = None, None
    try:
        plan = make and make()
    except Exception as error:  # noqa: BLE001  # other ranks wait for an answer
        failure = error
    answer = broadcast(comm, [plan and plan.to_json(), failure and str(failure)], root)
    if failure is not None:
        raise failure
    if plan is None:
        if answer[0] is None:
            raise ValueError(answer[1])
        plan = Plan.from_json(answer[0])
    return plan
