"""A group without its dead ranks, made by those that live."""

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
    """A group without the dead."""

    died = (
        "one more rank died while the group was made anew, or did not come: this one "
        "goes on as it is; call recovered again"
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
        """Make it with the others, and wait until all agree that they have it, or that they do not.
        A CodedError if they have not come to that yet. ``rounds``: of the old group, that this rank
        knows."""
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
            # others may not have heard of the last `replan`
            known_speeds = gathered(own, [str(it) for it in old.plan.speeds])
            speeds = list(map(Fraction, known_speeds[survivors.index(best)]))
            of_those = [speeds[rank] for rank in survivors if speeds]

            def planned(hosts: Sequence[str]) -> Plan:
                return old.plan_for(hosts, of_those, strategy, "recovered", "that live")

            # No other is made: a death meanwhile crashes Open MPI 5.0.11 where one is being made.
            self._new = Session.taking_over(
                *(own, old.wanted if options is None else options),
                {"recovered": survivors},
                planned,
                ahead,
            )
        failure = self._failure
        died = failure is not None and has_died(failure)
        if died or not isinstance(failure, Exception | None):
            smaller.Revoke()  # in which others may wait; not those who agree
        return pending(lambda: agreed(smaller, failure))


def shrunk(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks that live; a CodedError if MPI could not make
    it. Collective of these."""
    try:
        smaller: MPI.Comm = comm.Shrink()
    except MPI.Exception as error:
        raise CodedError(
            f"MPI could not make a communicator of the ranks that live ({error}): start the job again "
            "from a checkpoint"
        ) from error
    assert isinstance(smaller, MPI.Intracomm)
    # Nobody leaves before all are out of Shrink. Open MPI 5.0.11 crashes ranks that are not when others revoke it.
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
    """Return which ranks form a group that is made again. Collective of those that live. They keep their order; but
    where they do not know the same, the best becomes the root of the new group.

    Args:
        known: what this rank knows; who knows more has the greater tuple.
        place: of the root in the new group.

    Returns:
        Its ranks, as the old group numbers them, and the one with the most results: the old root if it is one of
        them. The third is None if all have the same results, or else how many different smaller amounts other ranks
        have.
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
    """Return whether something was done on all ranks and all of them live, the same on all; ``failure``:
    why it was not on this one. Collective of the ranks that live: MPI waits for a stopped one without
    end.

    Frees the communicator where the same has failed on all, but not where a rank may have died: MPI would
    use its number again, and take what was sent in it and comes later for messages of the next one."""
    try:
        done = bool(comm.Agree(int(failure is None)))
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_PROC_FAILED:
            raise
        return False
    if isinstance(failure, Exception) and not has_died(failure):
        comm.Free()
    return done
