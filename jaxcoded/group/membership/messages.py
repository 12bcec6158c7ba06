"""What ranks say to each other of who is left of a group, and of ranks that join."""

import enum
from dataclasses import dataclass

from jaxcoded import _parse, _require
from jaxcoded.group.membership.channel import Message, OfEach, Ranks
from jaxcoded.group.membership.joining import Invitation


class State(enum.IntEnum):
    """What is known of a rank: it has come, or not, MPI reports it dead, or it has closed the group."""

    HERE = 0
    MISSING = 1
    DEAD = 2
    LEFT = 3


# Of the rank that calls the roll. ``visit``: of whom it is said to, as far as the caller knows.


@dataclass(frozen=True)
class Call(Message):
    """Who is here? The caller may say nothing for so many seconds, and as many again; ``put_out``: then whoever is late
    is put out."""

    number: int
    seconds: float
    put_out: bool
    visit: int


@dataclass(frozen=True)
class Kill(Call):
    """Kill the processes of those who are late, whoever can."""

    late: Ranks


@dataclass(frozen=True)
class Stay(Message):
    """All are here, and nobody is dead."""

    visit: int


@dataclass(frozen=True)
class Late(Message):
    """Some have not come, and were to be put out, or not. ``known``: the `State` of each rank; ``hindered``: the number
    of the error of killing it, or 0."""

    put_out: bool
    known: OfEach
    hindered: OfEach
    visit: int

    def check(self, ranks: int) -> None:
        super().check(ranks)
        for state in self.known:
            _require.integer("a state", state, 0, max(State))


@dataclass(frozen=True)
class Anew(Message):
    """The group is to be made anew, which is never taken back."""

    attempt: int


# To the rank that calls the roll.


@dataclass(frozen=True)
class Answer(Message):
    """This rank is here, on a visit of its own. ``broken``: the group is to be made anew in any case; ``extends``: ranks
    are to join; ``left``: who has closed the group."""

    number: int
    visit: int
    broken: bool
    extends: bool
    hindered: OfEach
    left: Ranks


@dataclass(frozen=True)
class GivesUp(Message):
    """Nobody is to count on this rank's answer any more."""


# Among the old ranks: the starter asks on a visit of its own, each says what it wants on one of its own, and all are
# told how that went.


@dataclass(frozen=True)
class Verdict:
    """What the starter says of ranks that are to join: the same on all old ranks.

    Attributes:
        why_not: they do not; empty: all of them are there, and wait to be connected.
        same: whether the arguments of all ranks were the same.
        token: by which their processes are known, if there are any.
    """

    why_not: str = ""
    same: bool = True
    token: str = ""


@dataclass(frozen=True)
class Asks(Message):
    """What do you want?"""

    visit: str


@dataclass(frozen=True)
class Wants(Message):
    """What a rank wants, in words."""

    asked: str
    visit: str
    words: str


@dataclass(frozen=True)
class Tells(Message):
    """How that went, for the rank on this visit."""

    visit: str
    verdict: Verdict


# Between the old ranks and the new ones.


@dataclass(frozen=True)
class Invites(Message):
    """A new rank is to be connected. ``command``: that starts more of them."""

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
    """A new rank is as far as the next step; or it cannot go on, and why."""

    why_not: str


@dataclass(frozen=True)
class TakenIn(Message):
    """All ranks have made the group."""
