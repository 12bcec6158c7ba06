"""A group that takes the place of another, with other ranks, as far as it is made."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import ClassVar

from mpi4py import MPI

from jaxcoded.errors import CodedError
from jaxcoded.group.membership.roll import Roll
from jaxcoded.group.opening import has_died
from jaxcoded.group.session import Session

OPENS = 120.0  # seconds in which ranks have made a group, and more


class Change:
    """What is made in the place of a group, of which all ranks that live have come. What has been begun is waited
    for again by the next call, where one has given up.

    Attributes:
        died: what to say where a rank has died on the way.
    """

    died: ClassVar[str]

    def __init__(self, old: Session, roll: Roll) -> None:
        self._old, self._roll = old, roll
        self._rounds = 0  # of the old one that were decided before
        self._new: Session | None = None
        self._failure: BaseException | None = None  # here
        self._agreement: Future[bool] | None = None  # whether all have it

    def session(self, rounds: int) -> Session:
        """Return the new one, once they agree. ``rounds``: of the old group, that this
        rank knows now. A CodedError if not all have it, or it is not what follows on
        those rounds; or what has failed on all."""
        assert self._agreement is not None
        new, failure = self._new, self._failure
        if not self._agreement.result(0.0):
            if new is not None:
                new.withdraw()
            self._end()
            if failure is not None and not has_died(failure):
                raise failure
            raise CodedError(self.died) from failure
        assert new is not None
        self._tell()
        if rounds == self._rounds:
            return new
        self._roll.next_attempt()
        overtaken = CodedError(
            f"rank {self._old.rank} had given up while the group was made anew, and rounds of the old one were "
            "decided since then: call recovered again"
        )
        new.withdraw(overtaken)
        raise overtaken

    def _tell(self) -> None:
        """All have it."""

    def _end(self) -> None:
        """Not all have it."""

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Inside, an error is kept, as the others wait for an answer."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001
            self._failure = self._failure or error


@contextlib.contextmanager
def let_go(comms: Sequence[MPI.Comm], seconds: float | None = None) -> Iterator[None]:
    """Inside, a rank that waits this long for others in these communicators, or in added ones, gets an error
    instead. Without it, the death of a rank at the wrong moment may leave ranks of Open MPI 5.0 in ``MPI_Comm_dup``
    forever."""

    def revoke() -> None:
        for comm in comms:
            comm.Revoke()

    timer = threading.Timer(OPENS if seconds is None else seconds, revoke)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be at work
