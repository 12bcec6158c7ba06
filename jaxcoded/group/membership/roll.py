"""The ranks that live agree on who is left of a group, where MPI is fault-tolerant (ULFM)."""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxcoded.errors import CodedError
from jaxcoded.group.membership.pending import Pending
from jaxcoded.group.process import Process

logger = logging.getLogger("jaxcoded")

# Of messages in the group's own communicator, in which nothing else is sent meanwhile: from the rank that
# calls the roll, and to it.
_DOWN, _UP = 32_001, 32_002
_EXTENDS = 2  # in what a rank answers, where it wants ranks to join
_GIVES_UP = -1  # in place of the number of the call that is answered
# What it says: who is here? Kill those who are late; nobody is dead; make the group anew; some are late.
_CALL, _KILL, _STAY, _ANEW, _LATE = range(1, 6)
# Of what a caller says: what, the attempt, the call, the visit of who is told, whether those who are late are
# put out, and seconds. What is known of each rank follows, and the errors of killing it.
_HEADER = 6
# What is known of a rank: it has come, or not, MPI reports it dead, or it has closed the group.
_HERE, _MISSING, _DEAD, _LEFT = range(4)
_PAUSE = 1e-3  # seconds between two looks
# While MPI makes the group anew this process leaves the communicator alone, first for this share of the time for
# which ranks wait, and then between two looks: one crashed there, which read a message meanwhile.
_AT_FIRST, _SERVES = 1 / 4, 20e-3
_STOPPED = 1.0  # more than these, and it has not waited meanwhile: it was stopped
_GO_ON = (
    ". Rounds have been decided meanwhile, so that nobody was put out: do all ranks call recovered after the same "
    "step?"
)
_CALLS = 3  # in vain, where all that live have come and MPI does not go on
REPORTED = 10.0  # seconds in which MPI has reported whoever was killed, and more

_Moving = tuple[MPI.Request, np.ndarray]
# What is on its way, of all groups of this process. Little: of a group's end, or of ranks that are stopped.
_moving: list[tuple[dict[tuple[int, int], _Moving], list[_Moving]]] = []


class Roll:
    """Who is left, called by the root, or by the first rank after it that lives.

    MPI's own way to shrink a communicator waits for every rank that is not dead, for a stopped one too, and
    what has been begun there cannot be taken back. So whoever calls the roll asks all before, and waits for so
    long and no longer. A rank that has not answered by then can be put out: one that can kill its
    process does so, and nobody goes on before MPI has reported it dead, so that there are never two roots.

    Nobody answers but who is in `call` or `wait`, so that ranks may come and give up at any time. But that the group
    is to be made anew is never taken back: all ranks hand it on, and who has given up meanwhile finds it when
    it comes again.

    Args:
        comm: whose ranks meet.
        processes: of each rank.
        root: who calls as long as it lives.
    """

    def __init__(
        self, comm: MPI.Intracomm, processes: Sequence[Process], root: int
    ) -> None:
        self._comm, self._rank, self._processes = comm, comm.rank, processes
        self._callers = [root, *(rank for rank in range(comm.size) if rank != root)]
        self._extends = False
        self._attempt = 0  # to make the group anew
        self._anew = -1  # the latest attempt that all are to make
        self._visits = 0  # of this rank
        self._awaited: Pending[Any] | None = None
        self._since = 0.0  # it is
        self._calls = 0  # by this rank
        self._dead: set[int] = set()
        self._answers: dict[int, np.ndarray] = {}  # to the latest call
        self._answered: set[int] = set()  # callers, in this visit
        self._said: dict[int, np.ndarray] = {}  # by callers, what is to be read yet
        self._asks = (
            0.0,
            False,
        )  # the latest call, for how long and whether those who are late are put out
        self._no_news = np.zeros(comm.size)
        self._hindered = np.zeros(comm.size)  # numbers of errors, of killing
        # MPI reads and writes them later, also when the group is no more
        self._coming: dict[tuple[int, int], _Moving] = {}
        self._sent: list[_Moving] = []
        _moving.append((self._coming, self._sent))

    def call(
        self,
        seconds: float,
        put_out: bool,
        left: Callable[[], Mapping[int, str]] = dict,
        *,
        broken: bool = False,
        extends: bool = False,
        decided: Callable[[], int] = int,
    ) -> bool:
        """Whether the group is to be made anew, as some are dead. The same on all ranks.

        Args:
            seconds: for which ranks that live but do not come are waited for.
            put_out: whether these are put out then. Of all but the caller what the caller says counts.
            left: the ranks below this one that make no more calls, as keys.
            broken: whether the group is to be made anew in any case.
            extends: whether ranks are to join. Who wants something else has not come.
            decided: how many rounds are over. While there are more and more nobody is killed.

        Raises:
            CodedError: ranks that live have not come by then, and are not or cannot be put out. On every
                rank that lives, on the late ones when they come.
        """
        self._extends = extends
        what = f"have not called {'extended' if extends else 'recovered'}"
        with self._visit():
            return self._attend(
                *(lambda: False, 0.0, seconds, put_out, left, broken, decided),
                what,
            )

    def wait(
        self,
        pending: Pending[Any],
        patience: float,
        seconds: float,
        put_out: bool,
        *,
        extends: bool = False,
    ) -> None:
        """Wait for what all ranks do that live. Who does not is looked for, and put out, as in `call`.

        Args:
            pending: it.
            patience: seconds after which those who are missing are looked for.
            seconds, put_out, extends: as there.

        Raises:
            CodedError: as there, or who calls has said that the group is to stay. What is pending stays so, and is to be waited for again.
        """
        # others count from then on, also where this rank gives up and comes again
        if self._awaited is not pending:
            self._awaited, self._since = pending, time.monotonic()
        self._extends = extends
        with self._visit():
            if not self._attend(
                *(lambda: not pending.runs(), patience, seconds, put_out),
                *(dict, not extends, int),
                "have not made the group with the others",
            ):
                raise CodedError(
                    "another rank has begun anew what this one waits for: call it again"
                )

    def next_attempt(self) -> None:
        """The group could not be made anew, on any rank."""
        self._attempt += 1

    @contextlib.contextmanager
    def _visit(self) -> Iterator[None]:
        """Inside, this rank is there. Where it gives up nobody is to count on it."""
        self._visits += 1
        self._answered.clear()
        try:
            yield
        except BaseException:
            for caller in self._answered - self._dead:
                self._answer(_GIVES_UP, caller, np.zeros(self._comm.size))
            raise

    def _attend(
        self,
        over: Callable[[], bool],
        patience: float,
        seconds: float,
        put_out: bool,
        left: Callable[[], Mapping[int, str]],
        broken: bool,
        decided: Callable[[], int],
        what: str,
    ) -> bool:
        """Answer, and call where this rank is to. Whether something is over, or all are to go on; not where
        the caller says that nobody is dead."""
        waits = patience > 0
        self._said.clear()
        self._hindered[:] = 0
        self._broken, self._below = broken, left
        self._calling = False
        decided_before = decided()
        caller, killed, calls, until = -1, False, 0, 0.0
        now = time.monotonic()
        serves_at = now + _AT_FIRST * seconds
        while True:
            if over():
                return True
            looked, now = now, time.monotonic()
            heard = {}
            if not waits or now >= serves_at:
                heard, serves_at = self._serve(), now + _SERVES
            if not waits and self._anew >= self._attempt:
                return True
            if now - looked > _STOPPED:
                until += now - looked
            # who has not come would be killed at its work
            if busy := decided() > decided_before:
                put_out = False
            first = next(it for it in self._callers if it not in self._dead)
            if first != caller:
                caller, killed = first, False
                calls_at = self._since + patience if waits else now
                until = calls_at if caller == self._rank else now + patience + seconds
            said = self._said.pop(caller, None)
            if caller == self._rank:
                if not self._calling:
                    if now < until:
                        time.sleep(_PAUSE)
                        continue
                    # all of which it may say nothing
                    self._begin(seconds + patience, put_out)
                    until, calls = now + seconds, calls + 1
                known = self._known()
                late = _absent(known)
                if not late and not waits:
                    return self._decide(known)
                if now >= until and not late:
                    # all are here, but MPI has them wait
                    if calls == _CALLS:
                        self._tell(_LATE, known)
                        raise CodedError(self._in_words(known, what, False))
                    self._calling, until = False, now + patience
                elif now >= until and put_out and not killed:
                    killed, until = True, now + max(seconds, REPORTED)
                    self._tell(_KILL, known, seconds=seconds + patience, put_out=True)
                    self._kill(late)
                elif now >= until:
                    self._tell(_LATE, known, put_out=put_out)
                    words = self._in_words(known, what, put_out)
                    raise CodedError(words + _GO_ON * busy)
            elif said is not None and said[0] == _STAY:
                return False
            elif said is not None:
                known, self._hindered = np.split(said[_HEADER:].copy(), 2)
                if known[self._rank] in (_MISSING, _LEFT):
                    so = ", which wanted to put it out" if said[4] else ""
                    raise CodedError(
                        f"rank {self._rank} has called this too late for the others{so}, or they have called something "
                        "else: all call the same after the same step"
                    )
                raise CodedError(self._in_words(known, what, bool(said[4])))
            elif caller in heard:
                # it waits for others as long, and may kill some
                until = now + heard[caller]
            elif now >= until and put_out and not killed:
                killed, until = True, now + max(seconds, REPORTED)
                self._kill([caller])
            elif now >= until:
                number = int(self._hindered[caller])
                raise CodedError(
                    f"rank {caller}, which is to say who is left, lives, but does not answer: it is "
                    "late, stuck or stopped, or calls something else. Call this again later, or end its process, "
                    f"{self._processes[caller]}"
                    + (f" ({_why(number)})" if number else "")
                    + _GO_ON * busy
                )
            time.sleep(_PAUSE)

    def _serve(self) -> dict[int, float]:
        """Take what has come, and answer who calls. Of these for how many seconds they may say nothing."""
        self._sent[:] = [it for it in self._sent if not _is_over(it[0])]
        out = {}
        for rank in range(self._comm.size):
            if rank in self._dead or rank == self._rank:
                continue
            try:
                while (word := self._received(rank, _UP)) is not None:
                    if word[0] == self._calls:
                        self._answers[rank] = word
                    elif word[0] == _GIVES_UP:
                        self._answers.pop(rank, None)
                        if self._calling:  # for when it comes again
                            self._say(_CALL, rank, self._no_news, *self._asks)
                # what is said after a verdict is for the next visit
                while (
                    not self._is_answered(rank)
                    and (word := self._received(rank, _DOWN)) is not None
                ):
                    if (seconds := self._take(rank, word)) is not None:
                        out[rank] = seconds
            except MPI.Exception as error:
                _unless_dead(error)
                self._dead.add(rank)
        return out

    def _is_answered(self, caller: int) -> bool:
        """Whether a rank has said how the roll ended to which this one has come."""
        return caller in self._said and self._said[caller][3] == self._visits

    def _take(self, caller: int, word: np.ndarray) -> float | None:
        kind, attempt, number, visit, put_out = map(int, word[:5])
        if kind == _ANEW:
            self._go_on(attempt)
        elif kind in (_CALL, _KILL):
            self._said.pop(caller, None)  # that this rank was late for a call before
            if kind == _KILL and visit == self._visits:  # and not of long ago
                late = np.flatnonzero(
                    np.isin(word[_HEADER:][: self._comm.size], (_MISSING, _LEFT))
                )
                self._kill([rank for rank in late.tolist() if rank != self._rank])
            below = np.zeros(self._comm.size)
            below[list(self._below())] = 1
            self._answer(number, caller, below)
            self._answered.add(caller)
            return 2 * word[5] + 1 + (REPORTED if put_out else 0)
        elif visit == self._visits or (kind == _LATE and not visit):
            self._said[caller] = word
        return None

    def _answer(self, number: int, caller: int, below: np.ndarray) -> None:
        wants = self._broken + _EXTENDS * self._extends
        answer = [number, self._visits, wants, *self._hindered, *below]
        self._send(np.array(answer, np.float64), caller, _UP)

    def _go_on(self, attempt: int) -> None:
        """All are to make the group anew. Whoever has said so may die before all have heard it."""
        if attempt > self._anew:
            self._anew = attempt
            self._tell(_ANEW, self._no_news, attempt=attempt)

    def _begin(self, seconds: float, put_out: bool) -> None:
        self._calling = True
        self._calls += 1
        self._answers.clear()
        self._asks = seconds, put_out
        self._tell(_CALL, self._no_news, *self._asks)

    def _decide(self, known: np.ndarray) -> bool:
        """All that live are here. Whether the group is to be made anew."""
        answers = self._answers.values()
        broken = self._broken or any(answer[2] % _EXTENDS for answer in answers)
        if broken or (known == _DEAD).any():
            self._go_on(self._attempt)
            return True
        self._tell(_STAY, known)
        return False

    def _known(self) -> np.ndarray:
        """What is known of each rank, of the latest call of this one."""
        out = np.full(self._comm.size, _MISSING)
        left = np.zeros(self._comm.size, bool)
        left[list(self._below())] = True
        for answer in self._answers.values():
            hindered, below = np.split(answer[3:], 2)
            self._hindered = np.maximum(self._hindered, hindered)
            left |= below > 0
        out[left] = _LEFT
        out[self._rank] = _HERE
        for rank, answer in self._answers.items():
            if answer[2] // _EXTENDS == self._extends:
                out[rank] = _HERE
        out[list(self._dead)] = _DEAD
        return out

    def _tell(
        self,
        kind: int,
        known: np.ndarray,
        seconds: float = 0.0,
        put_out: bool = False,
        attempt: int | None = None,
    ) -> None:
        """Say something to all that live."""
        for rank in range(self._comm.size):
            if rank != self._rank and rank not in self._dead:
                self._say(kind, rank, known, seconds, put_out, attempt)

    def _say(
        self,
        kind: int,
        to: int,
        known: np.ndarray,
        seconds: float,
        put_out: bool,
        attempt: int | None = None,
    ) -> None:
        attempt = self._attempt if attempt is None else attempt
        answer = self._answers.get(to)
        visit = 0 if answer is None else answer[1]
        header = [kind, attempt, self._calls, visit, put_out, seconds]
        self._send(np.array([*header, *known, *self._hindered], np.float64), to, _DOWN)

    def _send(self, what: np.ndarray, to: int, tag: int) -> None:
        try:
            self._sent.append((self._comm.Isend(what, to, tag), what))
        except MPI.Exception as error:
            _unless_dead(error)

    def _received(self, rank: int, tag: int) -> np.ndarray | None:
        """The next message of a rank, if it is here.

        Raises:
            CodedError: it is nonsense.
        """
        if (rank, tag) not in self._coming:
            if not self._comm.Iprobe(rank, tag):
                return None
            header = _HEADER if tag == _DOWN else 3
            words = np.zeros(header + 2 * self._comm.size)
            self._coming[rank, tag] = self._comm.Irecv(words, rank, tag), words
        request, words = self._coming[rank, tag]
        try:
            if not request.Test():
                return None
        except MPI.Exception:
            del self._coming[rank, tag]
            raise
        del self._coming[rank, tag]
        if not _is_word(words, tag):
            raise CodedError(
                f"what rank {rank} says of who is left cannot be read: {words[:_HEADER].tolist()}: do all ranks run "
                "the same jaxcoded?"
            )
        return words

    def _kill(self, late: list[int]) -> None:
        """Kill the processes of ranks that this one can see, as others do, of which one says so."""
        for rank in late:
            process = self._processes[rank]
            if not process.reachable(self._processes[self._rank]):
                continue
            self._hindered[rank] = process.kill()
            if not self._hindered[rank] and process.is_first():
                logger.warning(
                    "rank %d has killed %s, rank %d, as it lives and has not called recovered",
                    *(self._rank, process, rank),
                )

    def _in_words(self, known: np.ndarray, what: str, put_out: bool) -> str:
        """Who has not come, and what to do."""
        late = _absent(known)
        if not late:
            return (
                "all ranks that live have come to make the group anew, but MPI does not let them go on: start "
                "the job again from a checkpoint"
            )
        words = f"ranks {late} live, but {what}: they are late, stuck or stopped"
        if left := np.flatnonzero(known == _LEFT).tolist():
            words = (
                f"ranks {late} live, but {what}: of these {left} have closed the group"
            )
        words += ", and MPI would wait for them. "
        if put_out:
            words += f"They could not be put out: {self._why_not(known)}"
        elif left:
            words += "End their processes, or say recovered(put_out=True)"
        else:
            words += (
                "Call it again later, or with a longer timeout, or end their processes, or say "
                "recovered(put_out=True)"
            )
        dead = np.flatnonzero(known == _DEAD).tolist()
        return f"{words}; dead are ranks {dead}" if dead else words

    def _why_not(self, known: np.ndarray) -> str:
        """Why ranks could not be put out, in words."""
        here = [self._processes[it] for it in np.flatnonzero(known == _HERE).tolist()]
        words = []
        for rank in _absent(known):
            process = self._processes[rank]
            if number := int(self._hindered[rank]):
                why = _why(number)
            elif any(map(process.reachable, here)):
                why = "it was killed, but has not ended"
            else:
                why = "no rank that has come can see it"
            words.append(f"rank {rank} ({process}): {why}")
        return ", ".join(words)


def _is_word(words: np.ndarray, tag: int) -> bool:
    """Whether it is one that ranks say: of whole numbers, besides seconds."""
    numbers = words
    if tag == _DOWN:
        if not (_CALL <= words[0] <= _LATE and words[5] >= 0):
            return False
        numbers = np.delete(words, 5)
    return bool(((np.abs(numbers) < 2**31) & (numbers == np.rint(numbers))).all())


def _absent(known: np.ndarray) -> list[int]:
    """Who lives and has not come."""
    return np.flatnonzero((known == _MISSING) | (known == _LEFT)).tolist()


def _why(number: int) -> str:
    if number == errno.ESRCH:
        return "its process has ended, but MPI does not report it"
    return os.strerror(number)


def _is_over(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception as error:
        _unless_dead(error)
        return True


def _unless_dead(error: MPI.Exception) -> None:
    if error.Get_error_class() != MPI.ERR_PROC_FAILED:
        raise error
