"""What two ranks say to each other, in JSON."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxcoded.errors import CodedError

# what is on its way: MPI reads it later
_sent: list[tuple[MPI.Request, np.ndarray]] = []


class Gone(Exception):
    """MPI reports a rank dead of whom something is to come."""


class Line:
    """Messages of two ranks, for which nobody waits in MPI.

    Args:
        comm: of both, or between them.
        tag: of the messages.
    """

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        self._comm, self._tag = comm, tag
        self._coming: dict[int, tuple[MPI.Request, np.ndarray]] = {}

    def say(self, to: int, what: Any) -> None:
        """Whoever is dead does not hear it."""
        data = np.frombuffer(bytearray(json.dumps(what).encode()), np.uint8)
        _sent[:] = [it for it in _sent if not is_over(it[0])]
        try:
            _sent.append((self._comm.Isend(data, to, self._tag), data))
        except MPI.Exception as error:
            unless_dead(error)

    def heard(self, rank: int) -> Any:
        """What a rank has said next; None: nothing yet.

        Raises:
            Gone: it is dead.
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
            unless_dead(error)
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


def is_over(request: MPI.Request) -> bool:
    """Whether a message has been sent, or nobody is there to have it."""
    try:
        return request.Test()
    except MPI.Exception as error:
        unless_dead(error)
        return True


def unless_dead(error: MPI.Exception) -> None:
    """Raise it, unless a rank has died."""
    if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
        raise error
