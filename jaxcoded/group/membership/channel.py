"""Messages between two ranks. Each message is a frozen dataclass with a check. Messages
are sent as JSON, so that nothing is unpickled. No rank waits in MPI for a message.
"""

import dataclasses
import functools
import json
import operator
import threading
import time
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from mpi4py import MPI

from jaxcoded import _parse, _require
from jaxcoded.errors import CodedError
from jaxcoded.transport.agreement import LONGEST, plain

Ranks = Annotated[list[int], "which ranks"]
OfEach = Annotated[list[int], "a number of each rank"]
_MOST = 2**31 - 1
PAUSE = 2e-3  # seconds between two polls


class Message:
    """A message to a rank. Subclasses are frozen dataclasses of JSON values."""

    def check(self, ranks: int) -> None:
        """Raise a ValueError that names a field, unless all fields are valid for
        ``ranks`` ranks."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = field.name, getattr(self, field.name)
            if field.type is int:
                _require.integer(name, value, 0, _MOST)
            elif field.type is float:
                _require.not_negative(name, value)
            elif field.type in (Ranks, OfEach):
                most = ranks - 1 if field.type == Ranks else _MOST
                for number in value:
                    _require.integer(f"a number of {name}", number, 0, most)
                if field.type == OfEach and len(value) != ranks:
                    raise ValueError(f"{name} has {len(value)} numbers, not {ranks}")


M = TypeVar("M", bound=Message)
T = TypeVar("T")
_Moving = tuple[MPI.Request, np.ndarray]
# The messages of all channels that MPI has not finished sending. MPI uses their memory
# later, even after a group has ended.
_sent: list[_Moving] = []
_coming: list[dict[int, _Moving]] = []
_lock = threading.Lock()


class Gone(Exception):
    """A rank cannot send any more messages."""


class Dead(Gone):
    """MPI reports that a rank is dead."""


class Channel(Generic[M]):
    """Send and receive messages between this rank and other ranks, without waiting in
    MPI.

    Args:
        kinds: the classes of messages that may arrive.
        about: the subject of the messages, which follows "about" in errors.
        who: a function that names a rank.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        tag: int,
        kinds: tuple[type[M], ...],
        about: str = "ranks that join",
        who: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self._comm, self._tag, self._about, self._who = comm, tag, about, who
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._coming: dict[int, _Moving] = {}
        _coming.append(self._coming)

    def say(self, to: int, message: Message) -> None:
        """Send a message; dead ranks do not receive it."""
        fields = plain(dataclasses.asdict(message))  # type: ignore[call-overload]
        text = json.dumps({"kind": type(message).__name__, "fields": fields})
        data = np.frombuffer(bytearray(text.encode()), np.uint8)
        try:
            moving = self._comm.Isend(data, to, self._tag), data
        except MPI.Exception as error:
            _why_in_vain(error)
            return
        with _lock:
            _sent[:] = [sent for sent in _sent if not _is_over(sent[0])]
            _sent.append(moving)

    def heard(self, rank: int) -> M | None:
        """Return a rank's next message, or None if no message has arrived. Raise `Gone`
        if the rank is dead, or has given up. Raise a CodedError if the message cannot be
        read, or is longer than 16 MiB. A message that is too long stays in the channel,
        and nothing more is received from this rank.
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
            raise _why_in_vain(error) from error
        del self._coming[rank]
        try:
            return self._read(_parse.document(data.tobytes()))
        except ValueError as error:
            raise self._unreadable(rank, f"{error}: {data[:80].tobytes()!r}") from None

    def all_heard(self, rank: int) -> Iterator[M]:
        """Yield all messages of a rank that have arrived; see `heard`."""
        while (message := self.heard(rank)) is not None:
            yield message

    def _read(self, parsed: Any) -> M:
        fields = _parse.fields("a message", parsed, {"kind": str, "fields": dict})
        if (name := fields["kind"]) not in self._kinds:
            raise ValueError(f"unknown message {name!r:.80}")
        message = read(self._kinds[name], fields["fields"])
        message.check(self._comm.size)
        return message

    def _unreadable(self, rank: int, why: str) -> CodedError:
        return CodedError(
            f"a message of {self._who(rank)} about {self._about} cannot be read: {why}: do all ranks run the same jaxcoded?"
        )


def read(kind: type[T], parsed: Any) -> T:
    """Return a dataclass made from its fields in JSON. Raise a ValueError if the JSON
    has other fields."""
    hints = typing.get_type_hints(kind)
    fields = _parse.fields(kind.__name__, parsed, dict.fromkeys(hints, object))
    values = {
        name: _value(f"{name} of {kind.__name__}", hint, fields[name])
        for name, hint in hints.items()
    }
    return kind(**values)


def _value(what: str, hint: Any, value: Any) -> Any:
    """Return the value of a field with this annotation."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
    kinds = [typing.get_origin(option) or option for option in options]
    for kind in kinds:
        if isinstance(value, dict) and dataclasses.is_dataclass(kind):
            return read(typing.cast(type[Any], kind), value)
    if float in kinds:
        kinds.append(int)
    return _parse.of_kind(what, value, functools.reduce(operator.or_, kinds))


def looks(until: float) -> Iterator[None]:
    """Yield each time that the caller should poll, until the time ``until``."""
    yield
    while time.monotonic() <= until:
        time.sleep(PAUSE)
        yield


def _is_over(request: MPI.Request) -> bool:
    """Return whether MPI is done with a message. Open MPI would end this process if it freed a message to a dead
    rank before the connection fails, as ``Test`` does by itself.
    """
    try:
        return request.Get_status() and request.Test()
    except MPI.Exception as error:
        _why_in_vain(error)
        return True


def _why_in_vain(error: MPI.Exception) -> Gone:
    """Return `Dead` or `Gone` for an error that ends a channel. Raise any other
    error."""
    kind = error.Get_error_class()
    if kind == MPI.ERR_PROC_FAILED:
        return Dead(str(error))
    if kind == MPI.ERR_REVOKED:
        return Gone(str(error))
    raise error
