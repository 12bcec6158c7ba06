"""The ranks that live agree on who is left of a group, where MPI is fault-tolerant (ULFM)."""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from jaxcoded.errors import CodedError
from jaxcoded.group.pending import Pending
from jaxcoded.group.process import Process
from jaxcoded.transport.agreement import Unreadable, gathered

logger = logging.getLogger("jaxcoded")

# In the group's own communicator, in which nothing else is sent meanwhile.
_WORD, _VERDICT = 32_001, 32_002
# Of a rank that has not said how many rounds it knows: it has not come, MPI reports it dead, it has closed
# the group, or its program has ended with an error.
_LATE, _DEAD, _LEFT, _FAILED = -1, -2, -3, -4
_PAUSE = 1e-3  # seconds between two looks
OPENS = 120.0  # seconds in which ranks have made a group, and more
REPORTED = 10.0  # seconds in which MPI has reported whoever was killed, and more


class Called(NamedTuple):
    """What a roll-call said.

    Attributes:
        dead: the ranks that are dead.
        rounds: of every rank how many rounds of all it knows; negative if it is dead.
        missed: whether a rank that lives has missed the round in which the root announced the call.
    """

    dead: list[int]
    rounds: list[int]
    missed: bool


class Roll:
    """Who is left, called by the root, or by the first rank after it that lives. Collective of the
    ranks that live.

    MPI's own way to shrink a communicator waits for every rank that is not dead, for a
    stopped one too. So all meet at one rank before, which waits for so long and no longer. A rank that has
    not come by then can be put out: one that can kill its process does so, and nobody goes on before MPI has
    reported it dead, so that there are never two roots.

    Args:
        comm: whose ranks meet. Collective.
        root: where they meet as long as it lives.
    """

    def __init__(self, comm: MPI.Intracomm, root: int) -> None:
        self._comm = comm
        self._departed: Callable[[], Mapping[int, str]] = dict
        self._processes = [Process(*each) for each in gathered(comm, Process.own())]
        self._callers = [root, *(rank for rank in range(comm.size) if rank != root)]
        self.number = 0  # of the call, by which words of earlier ones are told
        # Seconds, and whether who is late is put out, as the root said last; and whether a rank
        # missed that.
        self._agreed, self._missed = (0.0, False), False
        # What the root has not heard yet, and the rounds that this rank knew before.
        self._announced: tuple[Pending[np.ndarray | None], int] | None = None
        self._coming: dict[tuple[int, int], tuple[MPI.Request, np.ndarray]] = {}
        # MPI reads them later
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []

    def call(
        self,
        announce: Callable[[np.ndarray], np.ndarray | None],
        seconds: float,
        rounds: int,
        departed: Callable[[], Mapping[int, str]] = dict,
        *,
        put_out: bool = False,
    ) -> Called:
        """Who is dead, and what the others know, the same on all ranks that live.

        Args:
            announce: tells all ranks what the root says; returns None if it decides nothing any more,
                and nothing as long as it does not come.
            seconds: for which ranks that are alive but do not come are waited for.
            rounds: that this rank knows.
            departed: of the ranks below this one that make no more calls the error that has ended
                their program, in words, or an empty text.
            put_out: whether these are put out then. Those whose programs have ended with an error
                are in any case.

        Raises:
            CodedError: ranks that live have not come by then, and are not or cannot be put out. On
                every rank that lives, on the late ones when they come.
        """
        self._sent = [it for it in self._sent if not it[0].Test()]
        words = np.array([seconds, put_out, self.number])
        announced = self._announced or (
            Pending(functools.partial(announce, words)),
            rounds,
        )
        pending, rounds = announced
        self._announced = said = None
        try:
            said = pending.result(seconds)
        except TimeoutError:
            self._announced = announced
        if said is not None:
            seconds, put_out = float(said[0]), bool(said[1])
            self.number = int(said[2])
        self._agreed, self._departed = (seconds, put_out), departed
        self._missed = said is None
        return self.again(rounds, "have not called recovered")

    def again(
        self, rounds: int, what: str, unless: Callable[[], bool] = lambda: False
    ) -> Called:
        """The same once more, as the latest `call` was made.

        Args:
            rounds: that this rank knows.
            what: ranks that live but do not come have not done, in words.
            unless: whether nobody is to be put out any more.

        Raises:
            CodedError: as there.
        """
        seconds, put_out = self._agreed
        nothing = np.zeros(self._comm.size, np.int64)
        known, hindered = self._called(seconds, rounds, nothing, put_out)
        self._announced = None
        late = _absent(known)
        if put_out and self._comm.rank in late:
            raise CodedError(
                f"rank {self._comm.rank} has called recovered too late: the others put it out"
            )
        out = late if put_out else _which(known, _FAILED)
        if out and not unless():
            hindered = nothing.copy()
            for rank in out:
                if self._within_reach(rank, self._comm.rank):
                    hindered[rank] = self._kill(rank, int(known[rank]))
            seconds = max(seconds, REPORTED)
            self._departed = dict  # MPI is to report them dead
            known, hindered = self._called(seconds, rounds, hindered, put_out)
            late = _absent(known)
        if late and not unless():
            raise CodedError(self._late_in_words(known, what, put_out, hindered))
        return Called(_which(known, _DEAD), known.tolist(), self._missed)

    def _late_in_words(
        self, known: np.ndarray, what: str, put_out: bool, hindered: np.ndarray
    ) -> str:
        """Who has not come, and what to do."""
        late = _absent(known)
        words = f"ranks {late} live, but {what}: they are late, stuck or stopped"
        if left := _which(known, _LEFT):
            words = (
                f"ranks {late} live, but {what}: of these {left} have closed the group"
            )
        if failed := _which(known, _FAILED):
            words += f", and the programs of {failed} have ended with an error"
        words += ", and MPI would wait for them. "
        if put_out or failed:
            words += f"They could not be put out: {self._why(known, hindered)}"
        elif left:
            words += "End their processes, or say recovered(put_out=True)"
        else:
            words += (
                "Call it again later, or with a longer timeout, or end their processes, or say "
                "recovered(put_out=True)"
            )
        return f"{words}; dead are ranks {_which(known, _DEAD)}"

    def _called(
        self, seconds: float, rounds: int, hindered: np.ndarray, put_out: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """What ranks know, and the number of the error that has kept a rank of its host from
        killing one, or 0, by rank."""
        self.number += 1
        below = self._left_below()
        word = np.array([self.number, self._missed, rounds, *hindered, *below])
        for place, caller in enumerate(self._callers):
            if caller == self._comm.rank:
                return self._gather(seconds, rounds, hindered)
            self._send(word, caller, _WORD)
            verdict = self._verdict(caller, seconds, put_out)
            if verdict is not None:
                break
        assert verdict is not None  # this rank is among the callers
        self.number, self._missed = int(verdict[0]), bool(verdict[1])
        known, hindered = np.split(verdict[2:], 2)
        if known.min() < 0:
            # The caller may die before all have heard it. Whoever calls the roll then is to know that
            # this rank has come; and whoever looks to this rank for it, what was said.
            for other in self._callers[place + 1 :]:
                if other != self._comm.rank and known[other] != _DEAD:
                    self._send(word, other, _WORD)
                    self._send(verdict, other, _VERDICT)
        return known, hindered

    def _send(self, what: np.ndarray, to: int, tag: int) -> None:
        try:
            self._sent.append((self._comm.Isend(what, to, tag), what))
        except MPI.Exception as error:
            _unless_dead(error)

    def _left_below(self) -> np.ndarray:
        """Whether the ranks below this one have failed or left, or 0."""
        left = np.zeros(self._comm.size, np.int64)
        for rank, failure in self._departed().items():
            left[rank] = _FAILED if failure else _LEFT
        return left

    def _gather(
        self, seconds: float, rounds: int, hindered: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Called by this rank: what the others say."""
        until = time.monotonic() + seconds
        known = np.full(self._comm.size, _LATE, np.int64)
        known[self._comm.rank] = rounds
        left = np.zeros(self._comm.size, np.int64)
        while True:
            for rank in _absent(known):
                known[rank], could_not, has_left = self._word(rank)
                hindered = np.maximum(hindered, could_not)
                left = np.minimum(left, has_left)
            # of the ranks below this one some may leave meanwhile
            left = np.minimum(left, self._left_below())
            late = known == _LATE
            # a process that has closed the group may be about to end
            if not (late & (left != _FAILED)).any() or time.monotonic() >= until:
                break
            time.sleep(_PAUSE)
        known[late & (left < 0)] = left[late & (left < 0)]
        verdict = np.array([self.number, self._missed, *known, *hindered])
        for rank in np.flatnonzero(known != _DEAD).tolist():
            if rank != self._comm.rank:
                self._send(verdict, rank, _VERDICT)
        return known, hindered

    def _word(self, rank: int) -> tuple[int, np.ndarray | int, np.ndarray | int]:
        """How many rounds a rank knows that has come to this call, whom it could not kill, and who has
        left below it."""
        try:
            while (
                word := self._received(rank, _WORD, 3 + 2 * self._comm.size)
            ) is not None:
                if word[0] >= self.number:
                    self._missed |= bool(word[1])
                    could_not, has_left = np.split(word[3:], 2)
                    return int(word[2]), could_not, has_left
        except MPI.Exception as error:
            _unless_dead(error)
            return _DEAD, 0, 0
        return _LATE, 0, 0

    def _verdict(self, caller: int, seconds: float, put_out: bool) -> np.ndarray | None:
        """What the caller of the roll says; None if it is dead."""
        # it waits for others as long, and may have begun later
        until = time.monotonic() + 2 * seconds + 1
        hindered = 0
        try:
            while True:
                count = 2 + 2 * self._comm.size
                verdict = self._received(caller, _VERDICT, count)
                if verdict is not None and verdict[0] >= self.number:
                    return verdict
                if time.monotonic() >= until:
                    if not put_out:
                        break
                    # nobody says who is there: all that can kill it
                    put_out = False
                    if self._within_reach(caller, self._comm.rank):
                        hindered = self._kill(caller)
                    until = time.monotonic() + max(seconds, REPORTED)
                if verdict is None:
                    time.sleep(_PAUSE)
        except MPI.Exception as error:
            _unless_dead(error)
            return None
        process = self._processes[caller]
        raise CodedError(
            f"rank {caller}, which is to say who is left, lives, but does not answer: it is "
            "late, stuck or stopped. Call recovered again later, or end its process, "
            f"{process}" + (f" ({os.strerror(hindered)})" if hindered else "")
        )

    def _within_reach(self, rank: int, other: int) -> bool:
        """Whether another rank can see the process of a rank."""
        return self._processes[rank].reachable(self._processes[other])

    def _kill(self, rank: int, known: int = _LATE) -> int:
        """Kill the process of a rank. The number of the error if that cannot be."""
        process = self._processes[rank]
        if number := process.kill():
            return number
        logger.warning(
            "rank %d has killed %s, rank %d, as %s",
            *(self._comm.rank, process, rank),
            "its program has ended with an error"
            if known == _FAILED
            else "it lives and has not called recovered",
        )
        return 0

    def _why(self, known: np.ndarray, hindered: np.ndarray) -> str:
        """Why ranks could not be put out, in words."""
        words = []
        for rank in _absent(known):
            if number := int(hindered[rank]):
                why = os.strerror(number)
            elif any(
                self._within_reach(rank, it)
                for it in np.flatnonzero(known >= 0).tolist()
            ):
                why = "it was killed, but has not ended"
            else:
                why = "no rank that has come can see it"
            words.append(f"rank {rank} ({self._processes[rank]}): {why}")
        return ", ".join(words)

    def _received(self, rank: int, tag: int, count: int) -> np.ndarray | None:
        """The next message of a rank, if it is here."""
        if (rank, tag) not in self._coming:
            words = np.zeros(count, np.int64)
            self._coming[rank, tag] = self._comm.Irecv(words, rank, tag), words
        request, words = self._coming[rank, tag]
        try:
            if not request.Test():
                return None
        except MPI.Exception:
            del self._coming[rank, tag]
            raise
        del self._coming[rank, tag]
        return words


def _which(known: np.ndarray, what: int) -> list[int]:
    return np.flatnonzero(known == what).tolist()


def _absent(known: np.ndarray) -> list[int]:
    """Who lives and has not come."""
    return np.flatnonzero((known < 0) & (known != _DEAD)).tolist()


def _unless_dead(error: MPI.Exception) -> None:
    if error.Get_error_class() != MPI.ERR_PROC_FAILED:
        raise error


def shrunk(comm: MPI.Intracomm, seconds: float) -> MPI.Intracomm:
    """A communicator of the ranks that live, in their order. Collective of them.

    Args:
        comm: of all ranks.
        seconds: for which those that live are waited for.

    Raises:
        CodedError: not all of them came, as the rank that called the roll has died.
    """
    try:
        smaller: MPI.Comm = Pending(comm.Shrink).result(seconds)  # or without end
    except TimeoutError:
        raise CodedError(
            "ranks that live have not come to make the group anew, as one more has died "
            "meanwhile: start the job again from a checkpoint"
        ) from None
    assert isinstance(smaller, MPI.Intracomm)
    return smaller


def successors(
    smaller: MPI.Intracomm, comm: MPI.Intracomm, rounds: list[int], root: int
) -> list[int]:
    """The ranks of a group made anew, as this one numbers them. They keep their order, but where the
    root is dead the first that knows most rounds comes first.

    Args:
        smaller: of the ranks that live.
        comm: of all ranks.
        rounds: that each of them knows.
        root: among them.
    """
    group = comm.Get_group()
    alive = list(MPI.Group.Translate_ranks(smaller.Get_group(), None, group))
    if root in alive:
        return alive
    first = max(alive, key=lambda rank: rounds[rank])
    return [first, *(rank for rank in alive if rank != first)]


@contextlib.contextmanager
def let_go(comms: Callable[[], Sequence[MPI.Comm | None]]) -> Iterator[None]:
    """Inside, whoever waits for others in these communicators for `OPENS` seconds gets an error instead: a
    rank that dies at the wrong moment leaves ranks of Open MPI 5.0 in ``MPI_Comm_dup`` for ever, now and
    then.

    Args:
        comms: those that there are by then.
    """

    def revoke() -> None:
        for comm in comms():
            if comm:
                with contextlib.suppress(MPI.Exception):  # it is freed
                    comm.Revoke()

    timer = threading.Timer(OPENS, revoke)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be at work


def has_died(failure: BaseException | None) -> bool:
    """Whether a rank's death may be why not all have made a group, where this is what has failed here,
    if anything has. Otherwise the same has failed on all."""
    return failure is None or isinstance(failure, MPI.Exception | Unreadable)


class Agreement:
    """Whether something was done on all ranks and all of them live, the same on all. Collective of the
    ranks that live: MPI waits for a stopped one without end.

    Frees the communicator, but not where a rank may have died: MPI would use its number again, and
    take what was sent in it and comes later for messages of the next one.

    Args:
        comm: of these ranks.
        failure: why it was not done on this one; None if it was.
    """

    def __init__(self, comm: MPI.Intracomm, failure: BaseException | None) -> None:
        self._comm, self._failure = comm, failure
        self._pending = Pending(self._reach)

    def _reach(self) -> bool:
        try:
            agreed = bool(self._comm.Agree(int(self._failure is None)))
        except MPI.Exception as error:
            _unless_dead(error)
            return False
        if agreed or not has_died(self._failure):
            self._comm.Free()
        return agreed

    def is_reached(self) -> bool:
        """Whether all ranks have come."""
        return not self._pending.runs()

    def result(self, seconds: float) -> bool:
        """What all have agreed on.

        Raises:
            TimeoutError: nothing, after so many seconds.
        """
        return self._pending.result(seconds)
