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

OPENS = 120.0  # seconds, longer than ranks need to make a group


class Change:
    """Replace an old group by a new group once all live ranks take part. If a call
    gives up, the change continues, and the next call waits for it."""

    died: ClassVar[str]  # the error if a rank dies during the change

    def __init__(self, old: Session, roll: Roll) -> None:
        self._old, self._roll = old, roll
        self._rounds = 0  # number of the old group's rounds decided before the change
        self._new: Session | None = None
        self._failure: BaseException | None = None  # this rank's error
        # whether all ranks have the session
        self._agreement: Future[bool] | None = None

    def session(self, rounds: int) -> Session:
        """Return the new session after all ranks have agreed. ``rounds`` is the number
        of decided rounds of the old group that this rank knows. Raise a CodedError if
        some ranks lack the session, or if more rounds of the old group were decided
        during the change. If all ranks have the same error, raise that error.
        """
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
            f"rank {self._old.rank} gave up while the ranks made a new group, and rounds of the old group "
            "were decided since then: call recovered again"
        )
        new.withdraw(overtaken)
        raise overtaken

    def _tell(self) -> None:
        """Do what must follow once all ranks have the new group."""

    def _end(self) -> None:
        """Clean up if some ranks lack the new group."""

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Catch and store an error in this block, as other ranks wait for an answer."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001
            self._failure = self._failure or error


@contextlib.contextmanager
def let_go(comms: Sequence[MPI.Comm], seconds: float | None = None) -> Iterator[None]:
    """Limit how long a rank waits for other ranks in this block. After this time, every
    wait in ``comms`` ends with an error, also in communicators added to ``comms``
    inside the block. Without the limit, a rank's death at the wrong moment can block
    other ranks forever in ``MPI_Comm_dup`` of Open MPI 5.0.
    """

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
        timer.join()  # its function may be running
