import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from fractions import Fraction

from mpi4py import MPI

from jaxcoded.errors import CodedError
from jaxcoded.group.membership.change import Change, let_go
from jaxcoded.group.membership.pending import pending
from jaxcoded.group.membership.roll import Roll
from jaxcoded.group.opening import has_died
from jaxcoded.group.session import Session
from jaxcoded.plan import Plan, Strategy
from jaxcoded.transport.agreement import gathered
from jaxcoded.transport.options import Options


class Recovering(Change):
    """Replace a group by a group without its dead ranks."""

    died = (
        "one more rank died, or did not take part, while the ranks made a new group: this group "
        "continues unchanged; call recovered again"
    )

    def __init__(self, old: Session, roll: Roll) -> None:
        super().__init__(old, roll)
        self._shrinking = pending(lambda: shrunk(old.comm))

    def make(
        self,
        rounds: int,
        strategy: Strategy | None,
        options: Options | None,
        timeout: float,
        put_out: bool,
    ) -> None:
        """Make the new group together with the other ranks, and wait until all ranks
        agree whether they have it. Raise a CodedError if the ranks do not agree in
        time. ``rounds`` is the number of the old group's decided rounds that this rank
        knows.
        """
        patience = 2 * timeout + 1
        self._roll.wait(self._shrinking, patience, timeout, put_out)
        self._agreement = self._agreement or self._make(rounds, strategy, options)
        self._roll.wait(self._agreement, patience, timeout, put_out)

    def _end(self) -> None:
        self._roll.next_attempt()

    def _make(
        self, rounds: int, strategy: Strategy | None, options: Options | None
    ) -> Future[bool]:
        old, self._rounds = self._old, rounds
        smaller = self._shrinking.result(0.0)
        comms: list[MPI.Comm] = [smaller]
        with self._failing(), let_go(comms):
            known = True, rounds
            if old.ahead is not None and not old.alike:
                known = False, old.ahead
            survivors, best, ahead = successors(
                *(smaller, old.comm, old.plan.root, known),
                0 if strategy is None else strategy.root % smaller.size,
            )
            if survivors != sorted(survivors):
                comms.append(smaller.Split(0, survivors.index(old.rank)))
            own = comms[-1]
            assert isinstance(own, MPI.Intracomm)
            # Some ranks may have missed the last `replan`.
            known_speeds = gathered(own, [str(speed) for speed in old.plan.speeds])
            speeds = list(map(Fraction, known_speeds[survivors.index(best)]))
            surviving_speeds = [speeds[rank] for rank in survivors if speeds]

            def planned(hosts: Sequence[str]) -> Plan:
                return old.plan_for(
                    hosts, surviving_speeds, strategy, "recovered", "that live"
                )

            # Make no other communicator: a death during its construction crashes Open
            # MPI 5.0.11.
            self._new = Session.taking_over(
                *(own, old.wanted if options is None else options),
                {"recovered": survivors},
                planned,
                ahead,
            )
        failure = self._failure
        died = failure is not None and has_died(failure)
        if died or not isinstance(failure, Exception | None):
            smaller.Revoke()  # free ranks that wait in `smaller`; MPI can still agree on a revoked communicator
        return pending(lambda: agreed(smaller, failure))


def shrunk(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the live ranks, or raise a CodedError. Collective."""
    try:
        smaller: MPI.Comm = comm.Shrink()
    except MPI.Exception as error:
        raise CodedError(
            f"MPI could not make a communicator of the living ranks ({error}): start the job again "
            "from a checkpoint"
        ) from error
    assert isinstance(smaller, MPI.Intracomm)
    # No rank continues before all ranks have left Shrink: Open MPI 5.0.11 crashes ranks
    # in Shrink when other ranks revoke the communicator.
    with contextlib.suppress(MPI.Exception):
        smaller.Agree(1)
    return smaller


def successors(
    smaller: MPI.Intracomm,
    comm: MPI.Intracomm,
    root: int,
    known: tuple[bool, int],
    place: int = 0,
) -> tuple[list[int], int, int | None]:
    """Return which ranks form the new group. Collective on the live ranks. The ranks keep
    their order, with one exception: if their results differ, a rank with the most results
    becomes the root of the new group.

    Args:
        known: a tuple that orders ranks by their results; more results give a greater
            tuple.
        place: the root's place in the new group.

    Returns:
        Three values. The first is the new group's ranks, in the old group's numbering.
        The second is a rank with the most results: the old root if no other rank has
        more. The third is None if all ranks have the same results. Otherwise it is the
        number of different values of ``known``, among all ranks, that are smaller than
        this rank's value.
    """
    of_each = [
        (tuple(each), int(place)) for each, place in gathered(smaller, (known, place))
    ]
    levels = sorted({amount for amount, _ in of_each})
    group = comm.Get_group()
    alive = list(MPI.Group.Translate_ranks(smaller.Get_group(), None, group))
    most = [rank for rank, (amount, _) in zip(alive, of_each) if amount == levels[-1]]
    best = root if root in most else most[0]
    if len(levels) == 1:
        return alive, best, None
    ranks = [rank for rank in alive if rank != best]
    ranks.insert(of_each[0][1], best)
    return ranks, best, levels.index(known)


def agreed(comm: MPI.Intracomm, failure: BaseException | None) -> bool:
    """Return whether a step succeeded on all ranks, and all ranks live. The answer is
    the same on all ranks. ``failure`` is this rank's error, if any. Collective on the
    live ranks: MPI waits forever for a stopped rank.

    The function frees the communicator if the same error occurred on all ranks, but not
    if a rank may have died. If it freed the communicator after a death, MPI would reuse
    the communicator's number, and deliver its late messages to the next communicator.
    """
    try:
        done = bool(comm.Agree(int(failure is None)))
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_PROC_FAILED:
            raise
        return False
    if isinstance(failure, Exception) and not has_died(failure):
        comm.Free()
    return done
