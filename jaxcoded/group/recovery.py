"""The ranks that live agree on who is left of a group, where MPI is fault-tolerant (ULFM)."""

import time

import numpy as np
from mpi4py import MPI

from jaxcoded.errors import CodedError

# In the group's own communicator, in which nothing else is sent meanwhile.
_TAG = 32_001
_PRESENT, _DEAD, _LATE = range(3)
_PAUSE = 1e-3  # seconds between two looks


class Roll:
    """Who is left, called by the root. Collective of the ranks that live.

    MPI's own way to shrink a communicator waits for every rank that is not dead, for a
    stopped one too. So all meet at the root before, which waits for so long and no longer.

    Args:
        comm: whose ranks meet.
        root: the rank that they tell that they are there.
    """

    def __init__(self, comm: MPI.Intracomm, root: int) -> None:
        self._comm, self._root = comm, root
        self._calls = 0
        # at the root, of each other rank: the number of the call to which it has come,
        # which may be one that the root has given up
        self._words = {
            rank: np.zeros(1, np.int64)
            for rank in range(comm.size)
            if comm.rank == root != rank
        }
        self._coming: dict[int, MPI.Request] = {}
        # MPI reads them later
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []

    def call(self, seconds: float) -> list[int]:
        """The dead, the same on all ranks that live.

        Args:
            seconds: for which the root waits for ranks that live and do not come.

        Raises:
            CodedError: ranks that live have not come by then, or the root is dead. On
                every rank that lives, on the late ones when they come.
        """
        self._calls += 1
        at_root = self._comm.rank == self._root
        states = self._gather(seconds) if at_root else self._meet()
        dead, late = (np.flatnonzero(states == it).tolist() for it in (_DEAD, _LATE))
        if late:
            raise CodedError(
                f"ranks {late} live, but have not called recovered: they are late, "
                "stuck or stopped, and MPI would wait for them. Call it again later, or "
                "with a longer timeout, or end their processes; dead are ranks "
                f"{dead}"
            )
        return dead

    def _gather(self, seconds: float) -> np.ndarray:
        until = time.monotonic() + seconds
        states = np.full(self._comm.size, _LATE, np.int64)
        states[self._root] = _PRESENT
        while True:
            for rank in np.flatnonzero(states == _LATE).tolist():
                states[rank] = self._state(rank)
            if not (states == _LATE).any() or time.monotonic() >= until:
                break
            time.sleep(_PAUSE)
        for rank in self._words:
            if states[rank] != _DEAD:
                self._sent.append((self._comm.Isend(states, rank, _TAG), states))
        return states

    def _state(self, rank: int) -> int:
        words = self._words[rank]
        try:
            while True:
                if rank not in self._coming:
                    self._coming[rank] = self._comm.Irecv(words, rank, _TAG)
                if not self._coming[rank].Test():
                    return _LATE
                del self._coming[rank]
                if words[0] == self._calls:
                    return _PRESENT
        except MPI.Exception as error:
            _unless_dead(error)
            self._coming.pop(rank, None)
            return _DEAD

    def _meet(self) -> np.ndarray:
        states = np.zeros(self._comm.size, np.int64)
        words = np.array([self._calls], np.int64)
        try:
            coming = self._comm.Irecv(states, self._root, _TAG)
            self._sent.append((self._comm.Isend(words, self._root, _TAG), words))
            while not coming.Test():
                time.sleep(_PAUSE)
        except MPI.Exception as error:
            _unless_dead(error)
            raise CodedError(
                f"the root, rank {self._root}, is dead, and no other rank can take its "
                "place: start the job again from a checkpoint"
            ) from error
        return states


def _unless_dead(error: MPI.Exception) -> None:
    if error.Get_error_class() != MPI.ERR_PROC_FAILED:
        raise error


def shrunk(comm: MPI.Intracomm) -> tuple[MPI.Intracomm, list[int]]:
    """A communicator of the ranks that live, in their order, and which these are.
    Collective of them."""
    smaller = comm.Shrink()
    assert isinstance(smaller, MPI.Intracomm)
    survivors = MPI.Group.Translate_ranks(smaller.Get_group(), None, comm.Get_group())
    return smaller, list(survivors)


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
