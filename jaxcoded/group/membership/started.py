"""Find the processes of this host that were started to join a group, in Linux's /proc."""

import os
import pathlib
import time
from collections.abc import Iterator

from mpi4py import MPI

from jaxcoded import _parse
from jaxcoded.errors import CodedError
from jaxcoded.group.membership.joining import LONGEST
from jaxcoded.group.process import BEGAN, PARENT, STATE, Process, environment, stat

MARK = "JAXCODED_JOINS"  # environment variable of a process that should join: TOKEN:SECONDS
# the words before the command of a rank, one per line (`jaxcoded.tools.launch.rank`)
_WRAPPER = "JAXCODED_STARTER"
_LOOKS = 0.25  # seconds between two checks
_has_tried = False  # whether this process has tried to join


def waits_to_join() -> bool:
    """Return whether this process was started to join a group, and has not yet tried to
    join."""
    # child processes of a process that should join inherit the variable
    marked = os.environ.get(MARK, "").count(":") == 1
    return marked and not _has_tried and MPI.Comm.Get_parent() != MPI.COMM_NULL


def check_joined() -> None:
    """Raise a CodedError if this process should join, but has not tried to join."""
    if waits_to_join():
        raise CodedError(
            "this process was started to join a group: call jaxcoded.CodedGroup.joining() first, and make a group "
            "if it returns None"
        )


def tries_to_join() -> bool:
    """Return whether this process must join now. Raise a CodedError if it is called a
    second time."""
    global _has_tried
    if _has_tried:
        raise CodedError("this process has called joining already: call it once")
    _has_tried = waits_to_join()
    return _has_tried


def mark(token: str, seconds: float) -> str:
    """Return the value of `MARK` for a token and the number of seconds that other ranks
    wait."""
    # at least one second: the start of a process takes longer in any case
    return f"{token}:{max(seconds, 1.0):.0f}"


def awaited() -> float:
    """Return how many seconds other ranks wait for this process. Raise a CodedError if
    `MARK` cannot be read."""
    text = os.environ.get(MARK, "")
    try:
        seconds = _parse.number_of_seconds(
            f"the seconds in {MARK}", text.partition(":")[2]
        )
    except ValueError as error:
        raise CodedError(f"this process cannot join: {error}") from None
    return min(seconds, LONGEST)


def wrapper() -> list[str]:
    """Return the command that wraps a rank and reports how it ended, or an empty list
    if there is no such command."""
    return list(filter(None, os.environ.get(_WRAPPER, "").split("\n")))


class Started:
    """The processes that were started together with one token, and their child
    processes. With an empty token there are none.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._seen: set[Process] = set()
        self._next = 0.0

    def look(self) -> None:
        """Check the processes, at most every 0.25 s. Raise a CodedError if a process
        has ended."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LOOKS
        first, _ = self._processes()
        self._seen |= first
        if not all(map(_lives, self._seen)):
            raise CodedError(
                "one of them has ended before it called jaxcoded.CodedGroup.joining(): see its output above, or "
                "give command="
            )

    def end(self) -> None:
        """Kill the processes, except the wrappers, which report the ends of the other
        processes."""
        first, others = self._processes()
        parents = {parent for _, parent in others}
        around = {process for process in first if wrapper() and process.pid in parents}
        # Kill the parents first, since they may wait for their child processes.
        for process in [*(first - around), *(child for child, _ in others)]:
            process.kill()

    def _processes(self) -> tuple[set[Process], list[tuple[Process, int]]]:
        """Return the started processes, and their child processes, each with its parent."""
        marked = list(_marked(self._token))
        pids = {process.pid for process, _ in marked}
        first = {process for process, parent in marked if parent not in pids}
        return first, [pair for pair in marked if pair[0] not in first]


def _marked(token: str) -> Iterator[tuple[Process, int]]:
    """Yield each process with the token, and its parent."""
    if not token:
        return
    # the token may come from another rank; no process has a token that is invalid UTF-8
    begins = f"{MARK}={token}:".encode(errors="replace")
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        pid = int(place.name)
        try:
            if any(variable.startswith(begins) for variable in environment(pid)):
                fields = stat(pid)
                yield Process("", "", pid, int(fields[BEGAN])), int(fields[PARENT])
        except OSError:  # the process belongs to another user, or has ended
            continue


def _lives(process: Process) -> bool:
    try:
        fields = stat(process.pid)
    except OSError:
        return False
    return fields[STATE] not in "ZX" and int(fields[BEGAN]) == process.started
