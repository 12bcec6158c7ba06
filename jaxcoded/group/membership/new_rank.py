import time
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from jaxcoded import _own_process
from jaxcoded.errors import CodedError
from jaxcoded.group.membership import joining
from jaxcoded.group.membership.change import let_go
from jaxcoded.group.membership.channel import Channel, Gone, looks
from jaxcoded.group.membership.joining import (
    LATER,
    TAG_ALL,
    TAG_NEW,
    Invitation,
    opening_seconds,
    plan_of_root,
    tolerant,
)
from jaxcoded.group.membership.messages import Invites, Ready, TakenIn
from jaxcoded.group.membership.started import awaited, tries_to_join
from jaxcoded.group.session import Session
from jaxcoded.transport import engine

T = TypeVar("T")
_WHO = "the rank that started this process"


class NewRank:
    """This process, which was started to join a group. The rank that started it waits
    ``seconds`` for it."""

    def __init__(self, parent: MPI.Intercomm, seconds: float) -> None:
        self._parent = parent
        self._line = Channel(tolerant(parent), TAG_NEW, (Invites,), who=lambda _: _WHO)
        self.seconds = seconds

    def invited(self) -> tuple[MPI.Intracomm, Invitation]:
        """Connect with the old ranks. Return the communicator of all ranks, and the
        invitation. Raise a CodedError if the other ranks no longer wait for this rank,
        or if one of their messages cannot be read.
        """
        why = engine.missing()
        if not why and not engine.fault_tolerant():
            why = "its MPI is not fault-tolerant"
        self._line.say(0, Ready(why))
        if why:
            raise CodedError(f"this process cannot join: {why}")
        engine.join()
        until = time.monotonic() + self.seconds + LATER
        try:
            invites = self._heard(lambda: self._line.heard(0), until)
            _own_process.command = invites.command
            until = time.monotonic() + opening_seconds(self.seconds)
            world = tolerant(MPI.COMM_WORLD)
            arguments = self._parent, until, lambda: None
            return joining.joined(world, 0, *arguments, first=False), invites.invitation
        except BaseException as error:
            self.ready(error)
            raise

    def ready(self, failure: BaseException | None) -> None:
        """Tell the starter that this rank has made the group, or why it has not."""
        words = failure and f"{type(failure).__name__}: {failure}"
        self._line.say(0, Ready(words or ""))

    def enter(self, all_ranks: MPI.Intracomm, old: int) -> None:
        """Wait until the old ranks agree on the group. Raise a CodedError if they do
        not agree."""
        line, left = Channel(all_ranks, TAG_ALL, (TakenIn,)), set(range(old))

        def taken_in() -> TakenIn | None:
            for rank in list(left):
                try:
                    if message := line.heard(rank):
                        return message
                except Gone:
                    left.discard(rank)
            if not left:
                raise Gone
            return None

        until = time.monotonic() + 2 * opening_seconds(self.seconds) + LATER
        self._heard(taken_in, until)

    @staticmethod
    def _heard(ask: Callable[[], T | None], until: float) -> T:
        try:
            for _ in looks(until):
                if (message := ask()) is not None:
                    return message
        except Gone:
            raise CodedError(
                f"{_WHO} has died, or has not accepted this process: see the errors on the ranks of the group"
            ) from None
        raise CodedError(f"{_WHO} has not accepted this process in time")


def joined() -> Session | None:
    """Return the session of the group that this process joins, or None if it was not
    started to join a group. Raise a CodedError if the group has not accepted this
    process, or the process has called this before.
    """
    if not tries_to_join():
        return None
    new_rank = NewRank(MPI.Comm.Get_parent(), awaited())
    try:
        session = _taken_by(new_rank)
    except MPI.Exception as error:
        raise CodedError(
            f"this process has not joined, as a rank died meanwhile ({error}): see the errors on the ranks of the group"
        ) from None
    session.transport.enter()
    return session


def _taken_by(new_rank: NewRank) -> Session:
    all_ranks, invitation = new_rank.invited()
    comms: list[MPI.Comm] = [all_ranks]
    try:
        with let_go(comms, opening_seconds(new_rank.seconds)):
            own = invitation.own(all_ranks)
            comms.append(own)
            session = Session.taking_over(
                *(own, invitation.options, invitation.request),
                lambda _: plan_of_root(own, invitation.place),
                0,
            )
    except BaseException as error:
        new_rank.ready(error)  # other ranks wait for an answer
        all_ranks.Revoke()
        raise
    new_rank.ready(None)
    try:
        new_rank.enter(all_ranks, invitation.size)
    except BaseException:
        session.withdraw()
        raise
    return session
