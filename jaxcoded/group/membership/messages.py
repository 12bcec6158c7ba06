"""The messages by which ranks agree which ranks of a group remain, and which ranks join."""

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


# Messages from the rank that calls the roll. ``visit``: the receiver's visit, as far as
# the caller knows.


@dataclass(frozen=True)
class Call(Message):
    """Ask a rank to answer. The caller may be silent for ``seconds``, and then once more for the same time.
    ``put_out``: whether late ranks are killed after that."""

    number: int
    seconds: float
    put_out: bool
    visit: int


@dataclass(frozen=True)
class Kill(Call):
    """Ask every rank to kill the processes of the late ranks, if it can."""

    late: Ranks


@dataclass(frozen=True)
class Stay(Message):
    """All ranks take part, and none is dead."""

    visit: int


@dataclass(frozen=True)
class Late(Message):
    """Some ranks did not take part. ``put_out``: whether to kill them. ``known``: the `State` of each rank.
    ``hindered``: for each rank the number of the error that prevented its killing, or 0."""

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
    """The group must be made again. This decision is never taken back."""

    attempt: int


# Messages to the rank that calls the roll.


@dataclass(frozen=True)
class Answer(Message):
    """This rank takes part, in its visit with this number. ``broken``: the group must
    be made again in any case. ``extends``: ranks will join. ``left``: the ranks that
    have closed the group."""

    number: int
    visit: int
    broken: bool
    extends: bool
    hindered: OfEach
    left: Ranks


@dataclass(frozen=True)
class GivesUp(Message):
    """This rank's answer is no longer valid."""


# Messages among the old ranks: the starter asks each rank, each rank answers with its
# arguments, and all receive the verdict. Every message names the visit of its sender or
# receiver.


@dataclass(frozen=True)
class Verdict:
    """The starter's verdict on the ranks that should join. It is the same on all old ranks."""

    # why the new ranks do not join; empty if all of them are present, and wait to be connected
    why_not: str = ""
    same: bool = True  # whether the arguments of all ranks were the same
    token: str = ""  # the token that identifies their processes, if any


@dataclass(frozen=True)
class Asks(Message):
    """The starter asks a rank for its arguments."""

    visit: str


@dataclass(frozen=True)
class Wants(Message):
    """The answer of a rank: its arguments as text."""

    asked: str
    visit: str
    words: str


@dataclass(frozen=True)
class Tells(Message):
    """The starter's verdict, for this visit of a rank."""

    visit: str
    verdict: Verdict


# Messages between the old and the new ranks.


@dataclass(frozen=True)
class Invites(Message):
    """An invitation to connect. ``command`` starts more new ranks."""

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
    """A new rank has reached the next step, or cannot continue and gives the reason."""

    why_not: str


@dataclass(frozen=True)
class TakenIn(Message):
    """All ranks have made the group."""
