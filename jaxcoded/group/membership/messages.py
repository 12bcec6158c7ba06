"""Messages that ranks exchange to agree which ranks of a group remain and which ranks
join."""

import enum
from dataclasses import dataclass

from jaxcoded import _parse, _require
from jaxcoded.group.membership.channel import Message, OfEach, Ranks
from jaxcoded.group.membership.joining import Invitation


class State(enum.IntEnum):
    """The state of a rank: it takes part, is missing, is dead according to MPI, or has closed the group."""

    HERE = 0
    MISSING = 1
    DEAD = 2
    LEFT = 3


# Messages from the rank that calls the roll. ``visit`` is the number of the receiver's
# latest call of `Roll.call` or `Roll.wait` that the sender knows of.


@dataclass(frozen=True)
class Call(Message):
    """Ask a rank to answer. The caller may be silent for ``seconds``, and then once more for the same time.
    ``put_out`` tells whether late ranks are then killed."""

    number: int
    seconds: float
    put_out: bool
    visit: int


@dataclass(frozen=True)
class Kill(Call):
    """Ask a rank to kill the processes of the late ranks, if it can."""

    late: Ranks


@dataclass(frozen=True)
class Stay(Message):
    """Report that all ranks take part, and that no rank is dead."""

    visit: int


@dataclass(frozen=True)
class Late(Message):
    """Report that some ranks did not take part. ``put_out`` tells whether they should be killed, and
    ``known`` is the `State` of each rank. ``hindered`` has for each rank the number of the error
    (``errno``) that prevented its process from being killed, or 0."""

    put_out: bool
    known: OfEach
    hindered: OfEach
    visit: int

    def check(self, ranks: int) -> None:
        super().check(ranks)
        for state in self.known:
            _require.integer("a state", state, 0, max(State))


@dataclass(frozen=True)
class Regroup(Message):
    """Tell a rank that the group must be made again. This decision is never taken
    back."""

    attempt: int


# Messages to the rank that calls the roll.


@dataclass(frozen=True)
class Answer(Message):
    """Tell the caller that this rank takes part, in its visit with this number.
    ``broken`` tells whether the group must be made again in any case, and ``extends``
    whether ranks will join. ``left`` contains the ranks that have closed the group."""

    number: int
    visit: int
    broken: bool
    extends: bool
    hindered: OfEach
    left: Ranks


@dataclass(frozen=True)
class GivesUp(Message):
    """Withdraw this rank's answer."""


# Messages among the old ranks: the starter asks each rank, each rank answers with its
# arguments, and all ranks receive the verdict. Every message identifies a visit: the
# visit of its sender or receiver, whichever is not the starter.


@dataclass(frozen=True)
class Verdict:
    """The starter's verdict on the ranks that should join. All old ranks receive the same
    verdict."""

    # why the new ranks do not join; empty if all of them are present, and wait to be connected
    why_not: str = ""
    same: bool = True  # whether the arguments of all ranks were the same
    token: str = ""  # the token that identifies the new processes, if any


@dataclass(frozen=True)
class Asks(Message):
    """Ask a rank for its arguments; only the starter asks."""

    visit: str


@dataclass(frozen=True)
class Wants(Message):
    """Answer the starter with this rank's arguments as text."""

    asked: str
    visit: str
    words: str


@dataclass(frozen=True)
class Tells(Message):
    """Send the starter's verdict, for this visit of a rank."""

    visit: str
    verdict: Verdict


# Messages between the old and the new ranks.


@dataclass(frozen=True)
class Invites(Message):
    """Invite a new rank to connect. ``command`` is the command that starts further
    ranks."""

    invitation: Invitation
    command: list[str]

    def check(self, ranks: int) -> None:
        self.invitation.check()
        if not self.command:
            raise ValueError("command has no words")
        for word in self.command:
            _parse.of_kind("a word of command", word, str)


@dataclass(frozen=True)
class Ready(Message):
    """Report that a new rank has reached the next step, or why it cannot continue."""

    why_not: str


@dataclass(frozen=True)
class TakenIn(Message):
    """Report that all ranks have made the group."""
