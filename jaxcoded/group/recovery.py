"""The ranks that live agree on who is left of a group, where MPI is fault-tolerant (ULFM)."""

import threading
import time
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from jaxcoded.errors import CodedError

# In the group's own communicator, in which nothing else is sent meanwhile.
_WORD, _VERDICT = 32_001, 32_002
_LATE, _DEAD = -1, -2  # of a rank that has not said how many rounds it knows
_PAUSE = 1e-3  # seconds between two looks


class Called(NamedTuple):
    """What a roll-call said.

    Attributes:
        dead: the ranks that are dead.
        rounds: of every rank how many rounds of all it knows; negative if it is dead.
    """

    dead: list[int]
    rounds: list[int]


class Roll:
    """Who is left, called by the root, or by the first rank after it that lives. Collective of the
    ranks that live.

    MPI's own way to shrink a communicator waits for every rank that is not dead, for a
    stopped one too. So all meet at one rank before, which waits for so long and no longer.

    Args:
        comm: whose ranks meet.
        root: where they meet as long as it lives.
    """

    def __init__(self, comm: MPI.Intracomm, root: int) -> None:
        self._comm = comm
        self._callers = [root, *(rank for rank in range(comm.size) if rank != root)]
        self.number = 0  # of the call, by which words of earlier ones are told
        self._coming: dict[tuple[int, int], tuple[MPI.Request, np.ndarray]] = {}
        # MPI reads them later
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []

    def call(self, seconds: float, rounds: int) -> Called:
        """Who is dead, and what the others know, the same on all ranks that live.

        Args:
            seconds: for which ranks that live and do not come are waited for.
            rounds: that this rank knows.

        Raises:
            CodedError: ranks that live have not come by then. On every rank that lives, on the
                late ones when they come.
        """
        self._sent = [it for it in self._sent if not it[0].Test()]
        self.number += 1
        word = np.array([self.number, rounds])
        for place, caller in enumerate(self._callers):
            if caller == self._comm.rank:
                known = self._gather(seconds, rounds)
                break
            self._send(word, caller, _WORD)
            verdict = self._verdict(caller, seconds)
            if verdict is not None:
                self.number, known = verdict
                break
        dead, late = (np.flatnonzero(known == it).tolist() for it in (_DEAD, _LATE))
        if late:
            raise CodedError(
                f"ranks {late} live, but have not called recovered: they are late, "
                "stuck or stopped, and MPI would wait for them. Call it again later, or "
                "with a longer timeout, or end their processes; dead are ranks "
                f"{dead}"
            )
        if dead and caller != self._comm.rank:
            # The caller may die before all have heard it. Whoever calls the roll then is to know that
            # this rank has come; and whoever looks to this rank for it, what was said.
            said = np.array([self.number, *known])
            for other in self._callers[place + 1 :]:
                if other != self._comm.rank and other not in dead:
                    self._send(word, other, _WORD)
                    self._send(said, other, _VERDICT)
        return Called(dead, known.tolist())

    def _send(self, what: np.ndarray, to: int, tag: int) -> None:
        try:
            self._sent.append((self._comm.Isend(what, to, tag), what))
        except MPI.Exception as error:
            _unless_dead(error)

    def _gather(self, seconds: float, rounds: int) -> np.ndarray:
        """Called by this rank: what the others say."""
        until = time.monotonic() + seconds
        known = np.full(self._comm.size, _LATE, np.int64)
        known[self._comm.rank] = rounds
        while True:
            for rank in np.flatnonzero(known == _LATE).tolist():
                known[rank] = self._word(rank)
            if not (known == _LATE).any() or time.monotonic() >= until:
                break
            time.sleep(_PAUSE)
        verdict = np.array([self.number, *known])
        for rank in np.flatnonzero(known != _DEAD).tolist():
            if rank != self._comm.rank:
                self._send(verdict, rank, _VERDICT)
        return known

    def _word(self, rank: int) -> int:
        """How many rounds a rank knows that has come to this call."""
        try:
            while (word := self._received(rank, _WORD, 2)) is not None:
                if word[0] >= self.number:
                    return int(word[1])
        except MPI.Exception as error:
            _unless_dead(error)
            return _DEAD
        return _LATE

    def _verdict(self, caller: int, seconds: float) -> tuple[int, np.ndarray] | None:
        """What the caller of the roll says: the call's number, and what ranks know; None if it is
        dead."""
        # it waits for others as long, and may have begun later
        until = time.monotonic() + 2 * seconds + 1
        try:
            while time.monotonic() < until:
                verdict = self._received(caller, _VERDICT, 1 + self._comm.size)
                if verdict is not None and verdict[0] >= self.number:
                    return int(verdict[0]), verdict[1:]
                if verdict is None:
                    time.sleep(_PAUSE)
        except MPI.Exception as error:
            _unless_dead(error)
            return None
        raise CodedError(
            f"rank {caller}, which is to say who is left, lives, but does not answer: it is "
            "late, stuck or stopped. Call recovered again later, or end its process"
        )

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


def _unless_dead(error: MPI.Exception) -> None:
    if error.Get_error_class() != MPI.ERR_PROC_FAILED:
        raise error


def shrunk(
    comm: MPI.Intracomm, rounds: list[int], root: int, seconds: float
) -> tuple[MPI.Intracomm, list[int]]:
    """A communicator of the ranks that live, and which these are. Collective of them.

    They keep their order, but where the root is dead the first that knows most rounds comes first.

    Args:
        comm: of all ranks.
        rounds: that each of them knows.
        root: among them.
        seconds: for which those that live are waited for.

    Raises:
        CodedError: not all of them came, as the rank that called the roll has died.
    """
    made: list[MPI.Comm | MPI.Exception] = []

    def shrink() -> None:
        try:
            made.append(comm.Shrink())
        except MPI.Exception as error:
            made.append(error)

    # MPI would wait without end
    thread = threading.Thread(target=shrink, daemon=True)
    thread.start()
    thread.join(seconds)
    if not made:
        raise CodedError(
            "ranks that live have not come to make the group anew, as one more has died "
            "meanwhile: start the job again from a checkpoint"
        )
    (smaller,) = made
    if isinstance(smaller, MPI.Exception):
        raise smaller
    survivors = _among(smaller, comm)
    first = max(survivors, key=lambda rank: rounds[rank])
    if root not in survivors and first != survivors[0]:
        ordered = smaller.Split(0, -1 if comm.rank == first else comm.rank)
        smaller.Free()
        smaller, survivors = ordered, _among(ordered, comm)
    assert isinstance(smaller, MPI.Intracomm)
    return smaller, survivors


def _among(some: MPI.Comm, all_of_them: MPI.Intracomm) -> list[int]:
    """The ranks of a communicator, as another one numbers them."""
    group = all_of_them.Get_group()
    return list(MPI.Group.Translate_ranks(some.Get_group(), None, group))


def agree(comm: MPI.Intracomm, done: bool) -> bool:
    """Whether something was done on all ranks and all of them live, the same on all, and frees
    the communicator. Collective of the ranks that live."""
    try:
        return bool(comm.Agree(int(done)))
    except MPI.Exception as error:
        _unless_dead(error)
        return False
    finally:
        comm.Free()
