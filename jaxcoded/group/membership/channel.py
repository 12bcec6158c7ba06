"""What two ranks say to each other, in JSON: nothing is unpickled."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from jaxcoded import _parse
from jaxcoded.errors import CodedError
from jaxcoded.transport.agreement import LONGEST

T = TypeVar("T")
_Moving = tuple[MPI.Request, np.ndarray]
# What is on its way, of all lines: MPI reads and writes it later.
_sent: list[_Moving] = []
_coming: list[dict[int, _Moving]] = []
_lock = threading.Lock()


class Gone(Exception):
    """MPI reports a rank dead of whom something is to come, or nothing can come any more."""


class Line:
    """Messages of two ranks, for which nobody waits in MPI.

    Args:
        comm: of both, or between them.
        tag: of the messages.
        who: says a rank, in words.
    """

    def __init__(
        self, comm: MPI.Comm, tag: int, who: Callable[[int], str] = "rank {}".format
    ) -> None:
        self._comm, self._tag, self._who = comm, tag, who
        self._coming: dict[int, _Moving] = {}
        _coming.append(self._coming)

    def say(self, to: int, what: Any) -> None:
        """Whoever is dead does not hear it."""
        data = np.frombuffer(bytearray(json.dumps(what).encode()), np.uint8)
        try:
            moving = self._comm.Isend(data, to, self._tag), data
        except MPI.Exception as error:
            _unless_in_vain(error)
            return
        with _lock:
            _sent[:] = [it for it in _sent if not _is_over(it[0])]
            _sent.append(moving)

    def heard(self, rank: int, read: Callable[[Any], T]) -> T | None:
        """What a rank has said next; None: nothing yet.

        Args:
            rank: that says it.
            read: makes of what is in JSON what is meant, or raises a ValueError.

        Raises:
            Gone: it is dead, or has given up.
            CodedError: what it says cannot be read, or is longer than 16 MiB: that stays where it is, and nothing is
                heard of this rank any more.
        """
        try:
            if rank not in self._coming:
                status = MPI.Status()
                if not self._comm.Iprobe(rank, self._tag, status):
                    return None
                length = status.Get_count(MPI.BYTE)
                if not 0 <= length <= LONGEST:
                    raise self._unreadable(rank, f"{length} bytes, not 0 to {LONGEST}")
                data = np.zeros(length, np.uint8)
                self._coming[rank] = self._comm.Irecv(data, rank, self._tag), data
            request, data = self._coming[rank]
            if not request.Test():
                return None
        except MPI.Exception as error:
            self._coming.pop(rank, None)
            _unless_in_vain(error)
            raise Gone from error
        del self._coming[rank]
        try:
            return read(_parse.document(data.tobytes()))
        except ValueError as error:
            raise self._unreadable(rank, f"{error}: {data[:80].tobytes()!r}") from None

    def all_heard(self, rank: int, read: Callable[[Any], T]) -> Iterator[T]:
        """What it has said since, see `heard`."""
        while (what := self.heard(rank, read)) is not None:
            yield what

    def _unreadable(self, rank: int, why: str) -> CodedError:
        return CodedError(
            f"what {self._who(rank)} says of ranks that join cannot be read: {why}: do all run the same jaxcoded?"
        )


def _is_over(request: MPI.Request) -> bool:
    """Whether a message has been sent, or nobody is there to have it."""
    try:
        return request.Test()
    except MPI.Exception as error:
        _unless_in_vain(error)
        return True


def _unless_in_vain(error: MPI.Exception) -> None:
    if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
        raise error
