"""Processes of this host that were started to join a group, as Linux shows them."""

import os
import pathlib
import time
from collections.abc import Iterator

from mpi4py import MPI

from jaxcoded import _parse
from jaxcoded.errors import CodedError
from jaxcoded.group.membership.joining import LONGEST
from jaxcoded.group.process import Process

MARK = "JAXCODED_JOINS"  # of a process that was started so: TOKEN:SECONDS
# the words before the command of a rank, one a line (`jaxcoded.tools.launch.rank`)
_WRAPPER = "JAXCODED_STARTER"
_LOOKS = 0.25  # seconds between two looks
# of /proc/PID/stat, behind the name
_STATE, _PARENT, _BEGAN = 0, 1, 19
_has_tried = False  # to join


def waits_to_join() -> bool:
    """Whether this process was started to join a group, and has not tried to."""
    # processes that it starts itself have the variable, too
    marked = os.environ.get(MARK, "").count(":") == 1
    return marked and not _has_tried and MPI.Comm.Get_parent() != MPI.COMM_NULL


def check_joined() -> None:
    """Raise a CodedError where a process that was started to join a group makes one of
    its own, and has not tried to."""
    if waits_to_join():
        raise CodedError(
            "this process was started to join a group: call jaxcoded.CodedGroup.joining() first, and make a group "
            "where it returns None"
        )


def tries_to_join() -> bool:
    """Return whether this process is to join a group now, for the first and last time;
    a CodedError if it has tried before."""
    global _has_tried
    if _has_tried:
        raise CodedError("this process has called joining already: call it once")
    _has_tried = waits_to_join()
    return _has_tried


def mark(token: str, seconds: float) -> str:
    """Return what `MARK` is in processes that are known by this token, for which others
    wait for so many seconds."""
    # at least one: what is shorter than it takes to start need not be told apart
    return f"{token}:{max(seconds, 1.0):.0f}"


def awaited() -> float:
    """Return the seconds for which others wait for this process, which was started so;
    a CodedError if `MARK` does not say."""
    said = os.environ.get(MARK, "")
    try:
        seconds = _parse.number_of_seconds(
            f"what {MARK} says behind its colon", said.partition(":")[2]
        )
    except ValueError as error:
        raise CodedError(f"this process cannot join: {error}") from None
    return min(seconds, LONGEST)


def wrapper() -> list[str]:
    """The command of the small process that is to be around a rank, and tells how it ends; empty: there is none."""
    return list(filter(None, os.environ.get(_WRAPPER, "").split("\n")))


class Started:
    """Processes that were started together, known by their token, and what they have
    started. An empty one: there are none."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._seen: set[Process] = set()
        self._next = 0.0

    def look(self) -> None:
        """See how they are, now and then; a CodedError if one has ended."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LOOKS
        first, _ = self._found()
        self._seen |= first
        if not all(map(_lives, self._seen)):
            raise CodedError(
                "one of them has ended before it called jaxcoded.CodedGroup.joining(): see what it says above, or "
                "give command="
            )

    def end(self) -> None:
        """Kill them, but for those around others, which tell how these end."""
        first, others = self._found()
        parents = {parent for _, parent in others}
        around = {it for it in first if wrapper() and it.pid in parents}
        # before those that they wait for
        for process in [*(first - around), *(it for it, _ in others)]:
            process.kill()

    def _found(self) -> tuple[set[Process], list[tuple[Process, int]]]:
        """Return the started processes, and those that they have started, with the parents of these."""
        here = list(_marked(self._token))
        pids = {process.pid for process, _ in here}
        first = {process for process, parent in here if parent not in pids}
        return first, [it for it in here if it[0] not in first]


def _marked(token: str) -> Iterator[tuple[Process, int]]:
    """Processes that have the token, and their parents."""
    if not token:
        return
    # another rank may have said the token: what is no text in UTF-8 is none's
    begins = f"{MARK}={token}:".encode(errors="replace")
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            variables = (place / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or it is gone
            continue
        if any(it.startswith(begins) for it in variables) and (stat := _stat(place)):
            process = Process("", "", int(place.name), int(stat[_BEGAN]))
            yield process, int(stat[_PARENT])


def _lives(process: Process) -> bool:
    stat = _stat(pathlib.Path(f"/proc/{process.pid}"))
    return (
        bool(stat) and stat[_STATE] not in "ZX" and int(stat[_BEGAN]) == process.started
    )


def _stat(place: pathlib.Path) -> list[str]:
    """Return the fields of proc(5); nothing if the process is gone."""
    try:
        return (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
