"""Processes that a running group starts and takes in, where MPI is fault-tolerant (ULFM).

One rank, the starter, starts them (`MPI_Comm_spawn`), on a thread: where one of them ends before it is in MPI, this
never returns. They run on its host: the daemons of Open MPI 5.0 break as they connect processes of several hosts, with
`MPI_Comm_spawn` as with `MPI_Comm_connect`. Once all of them say that they are there, both sides meet by the starter
(`MPI_Intercomm_create`), which lets every old rank reach every new one without the daemons. What is said before goes
as JSON in messages of two ranks, for which nobody waits in MPI.
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
from jaxcoded.transport.agreement import told
from jaxcoded.transport.options import Options

# 1 where the launcher goes on where such a process dies (`jaxcoded.tools.launch.rank`)
FORGIVES = "JAXCODED_TAKES_IN"
_HAN = "OMPI_MCA_coll_han_priority"
# of messages between the starter and those that it has started, and in the communicator of all
TAG_NEW, TAG_ALL = 32_011, 32_012
_SERVES = 20e-3  # seconds between two looks, while MPI is at work
LATER = 10.0  # seconds that others wait longer than the rank that decides
_LEAST = 30.0  # seconds for making the group, and more
MOST = 2**15  # ranks that join at once
LONGEST = 1e6  # seconds for which others wait: more counts as forever, and exceeds the range of clocks


def why_not(hosts: int) -> str:
    """Return why no ranks can be taken in by a group on so many hosts, in words; empty
    if they can."""
    if os.environ.get(FORGIVES) != "1":
        return (
            "extended needs a launcher that goes on where a rank dies that was started later: start the job with "
            f"jaxcoded run --ft, or set {FORGIVES}=1 and PRTE_MCA_state_base_recoverable=1 for mpirun --with-ft ulfm"
        )
    if hosts > 1 and os.environ.get(_HAN) != "-1":
        return (
            "Open MPI's collectives for several hosts give wrong values to ranks that have joined: start the job with "
            f"jaxcoded run --ft, or set {_HAN}=-1"
        )
    return ""


def opening_seconds(timeout: float) -> float:
    """In which ranks make the group together, or give up."""
    return max(timeout / 2, _LEAST)


def tolerant(comm: Any) -> Any:
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


@dataclasses.dataclass(frozen=True)
class Invitation:
    """The data about the group that joining ranks need. All old ranks have the same.

    Attributes:
        size: ranks of the old group.
        ranks: that join.
        root: of the old group.
        place: its rank in the new one.
        options: of the new group.
    """

    size: int
    ranks: int
    root: int
    place: int
    options: Options

    def check(self) -> None:
        """Raise a ValueError that names the value unless a group can be made so."""
        _require.integer("size", self.size, 1)
        _require.integer("ranks", self.ranks, 1, MOST)
        _require.integer("root", self.root, 0, self.size - 1)
        _require.integer("place", self.place, 0, self.size + self.ranks - 1)
        self.options.complete().validate()

    @property
    def request(self) -> dict[str, Any]:
        """The arguments with which the new group is requested."""
        return {"extended": [self.size, self.ranks]}

    def own(self, both: MPI.Intracomm) -> MPI.Intracomm:
        """Return the new group's communicator, in which the old root has its place, of
        all old and then new ranks. Collective. A CodedError if these are not as many as
        were invited."""
        if both.size != self.size + self.ranks:
            raise CodedError(
                f"{self.ranks} ranks were to join {self.size}, but there are {both.size} of both"
            )
        order = [rank for rank in range(both.size) if rank != self.root]
        order.insert(self.place, self.root)
        if order == sorted(order):
            return both
        own: MPI.Intracomm = tolerant(both.Split(0, order.index(both.rank)))
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
    """Return all ranks, in one communicator. Collective of the old ranks (``first``) and the new ones.

    Args:
        comm: of this side.
        leader: the one of them that both sides meet by.
        between: of the starter and those that it has started; None on all others.
        until: when it is to be made; a CodedError if it has not been by then.
        look: called meanwhile, may raise.
    """
    made: list[MPI.Comm] = []

    def kept(comm: Any) -> Any:
        made.append(tolerant(comm))
        return comm

    def make() -> MPI.Intracomm:
        bridge = comm  # which counts on the leader alone
        if between is not None:
            bridge = kept(between.Merge(high=not first))
        # there the starter is the first
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
                    raise CodedError("connecting them took too long") from None
            look()
    except BaseException:
        for each in made:
            each.Revoke()
        raise


def plan_of_root(
    comm: MPI.Intracomm, root: int, make: Callable[[], Plan] | None = None
) -> Plan:
    """Return the plan of the root, on ranks that cannot make it themselves, too.
    Collective. ``make`` makes this rank's; None on those that cannot."""
    plan, failure = None, None
    try:
        plan = make and make()
    except Exception as error:  # noqa: BLE001  # the others wait for an answer
        failure = error
    said = told(comm, [plan and plan.to_json(), failure and str(failure)], root)
    if failure is not None:
        raise failure
    if plan is None:
        if said[0] is None:
            raise ValueError(said[1])
        plan = Plan.from_json(said[0])
    return plan
