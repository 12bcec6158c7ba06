"""What ranks say to each other of who is left of a group, and of ranks that join."""

import dataclasses
import enum

from jaxcoded import _parse, _require
from jaxcoded.group.membership.channel import Message
from jaxcoded.group.membership.joining import Invitation

_MOST = 2**31 - 1


class State(enum.IntEnum):
    """What is known of a rank: it has come, or not, MPI reports it dead, or it has closed the group."""

    HERE = 0
    MISSING = 1
    DEAD = 2
    LEFT = 3


def _whole(**numbers: int) -> None:
    for name, number in numbers.items():
        _require.integer(name, number, 0, _MOST)


def _each(name: str, numbers: list[int], most: int, count: int | None = None) -> None:
    """Raise unless these are whole numbers up to ``most``, and so many."""
    if count not in (None, len(numbers)):
        raise ValueError(f"{name} must be {count} numbers, got {len(numbers)}")
    for number in numbers:
        _require.integer(f"a number of {name}", number, 0, most)


# Of the rank that calls the roll. Each but `Anew` has the visit of whom it is said to, as far as the caller knows it.


@dataclasses.dataclass(frozen=True)
class Call(Message):
    """Who is here?

    Attributes:
        number: of this caller's calls.
        seconds: for which it says nothing after that, and then half of them again.
        put_out: whether those who are late are put out then.
    """

    number: int
    seconds: float
    put_out: bool
    visit: int

    def check(self, ranks: int) -> None:
        _whole(number=self.number, visit=self.visit)
        _require.not_negative("seconds", self.seconds)


@dataclasses.dataclass(frozen=True)
class Kill(Call):
    """Kill the processes of those who are late, whoever can."""

    late: list[int]

    def check(self, ranks: int) -> None:
        super().check(ranks)
        _each("late", self.late, ranks - 1)


@dataclasses.dataclass(frozen=True)
class Stay(Message):
    """All are here, and nobody is dead."""

    visit: int

    def check(self, ranks: int) -> None:
        _whole(visit=self.visit)


@dataclasses.dataclass(frozen=True)
class Late(Message):
    """Some have not come.

    Attributes:
        put_out: whether they were to be killed.
        known: the `State` of each rank.
        hindered: the number of the error of killing each; 0: none.
    """

    put_out: bool
    known: list[int]
    hindered: list[int]
    visit: int

    def check(self, ranks: int) -> None:
        _whole(visit=self.visit)
        _each("known", self.known, max(State), ranks)
        _each("hindered", self.hindered, _MOST, ranks)


@dataclasses.dataclass(frozen=True)
class Anew(Message):
    """The group is to be made anew, which is never taken back.

    Attributes:
        attempt: the number of this attempt.
    """

    attempt: int

    def check(self, ranks: int) -> None:
        _whole(attempt=self.attempt)


# To the rank that calls the roll.


@dataclasses.dataclass(frozen=True)
class Answer(Message):
    """This rank is here.

    Attributes:
        number: of the call.
        visit: of this rank.
        broken: whether the group is to be made anew in any case.
        extends: whether ranks are to join.
        hindered: as in `Late`, as far as this rank knows.
        left: the ranks that have closed the group, too.
    """

    number: int
    visit: int
    broken: bool
    extends: bool
    hindered: list[int]
    left: list[int]

    def check(self, ranks: int) -> None:
        _whole(number=self.number, visit=self.visit)
        _each("hindered", self.hindered, _MOST, ranks)
        _each("left", self.left, ranks - 1)


@dataclasses.dataclass(frozen=True)
class GivesUp(Message):
    """Nobody is to count on this rank's answer any more."""


# Among the old ranks: the starter asks, each says what it wants, and all are told what comes of it.


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class Asks(Message):
    """What do you want?

    Attributes:
        visit: of the starter.
    """

    visit: str


@dataclasses.dataclass(frozen=True)
class Wants(Message):
    """What a rank wants, in words.

    Attributes:
        asked: the visit of the starter.
        visit: its own.
    """

    asked: str
    visit: str
    words: str


@dataclasses.dataclass(frozen=True)
class Tells(Message):
    """How that went.

    Attributes:
        visit: of the rank that is told.
    """

    visit: str
    verdict: Verdict


# Between the old ranks and the new ones.


@dataclasses.dataclass(frozen=True)
class Invites(Message):
    """A new rank is to be connected.

    Attributes:
        root: of the old group.
        command: that starts more of them.
    """

    root: int
    invitation: Invitation
    command: list[str]

    def check(self, ranks: int) -> None:
        self.invitation.check()
        _require.integer("root", self.root, 0, self.invitation.size - 1)
        if not self.command:
            raise ValueError("command has no words")
        for word in self.command:
            _parse.of_kind("a word of command", word, str)


@dataclasses.dataclass(frozen=True)
class Ready(Message):
    """A new rank is as far as the next step.

    Attributes:
        why_not: it cannot go on; empty: it does.
    """

    why_not: str


@dataclasses.dataclass(frozen=True)
class TakenIn(Message):
    """All ranks have made the group."""
