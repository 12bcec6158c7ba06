"""What two ranks say to each other, in JSON."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxcoded.errors import CodedError

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
    """

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        self._comm, self._tag = comm, tag
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

    def heard(self, rank: int) -> Any:
        """What a rank has said next; None: nothing yet.

        Raises:
            Gone: it is dead, or has given up.
            CodedError: it cannot be read.
        """
        try:
            if rank not in self._coming:
                status = MPI.Status()
                if not self._comm.Iprobe(rank, self._tag, status):
                    return None
                data = np.zeros(status.Get_count(MPI.BYTE), np.uint8)
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
            return json.loads(data.tobytes())
        except ValueError:
            raise CodedError(
                f"what rank {rank} says of ranks that join cannot be read: {data[:80].tobytes()!r}: do all run "
                "the same jaxcoded?"
            ) from None

    def all_heard(self, rank: int) -> Iterator[Any]:
        """What it has said since."""
        while (what := self.heard(rank)) is not None:
            yield what


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
