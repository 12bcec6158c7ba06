"""Collect how each rank of a job ended. The rank's parent process, `jaxcoded.tools.launch.rank`, reports it."""

import contextlib
import pathlib
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from jaxcoded import _format
from jaxcoded.tools.launch import rank

# The options skip imports, which take time.
WRAPPER = [
    *(sys.executable, "-I", "-S"),
    str(pathlib.Path(__file__).with_name("rank.py")),
]
_LONGEST = 200  # the most bytes of a report
_PATIENCE = 3.0  # seconds in which a report must arrive
_UNHEARD = "no rank is known to have begun: none was started, or no host answers"


class Ends:
    """The reports of ranks. Ranks that have joined are numbered after the job's first
    ranks, in the order of their reports.

    Attributes:
        variables: the environment variables that ranks need in order to report.
        ended: for each rank that has ended, its status (or minus the number of the signal that killed it), and the
            seconds from the start of the job to the rank's end. The ranks are in the order of their ends.
        begun: the ranks that have reported their beginning.
        sure: whether every rank that begins is certain to report.
        of_job: an event that is set once a rank has ended the whole job.
    """

    def __init__(
        self, ranks: int, line: socket.socket, host: str, near: bool, sure: bool
    ) -> None:
        self.ranks = ranks
        self._line, self._token = line, secrets.token_hex(8)
        self._near, self.sure = near, sure
        self._since = time.monotonic()
        self.variables = {
            rank.VARIABLE: f"{host}:{line.getsockname()[1]}:{self._token}"
        }
        self.ended: dict[int, tuple[int, float]] = {}
        self.begun: set[int] = set()
        self._joined: dict[str, int] = {}
        self.of_job = threading.Event()

    def hear(self) -> None:
        """Receive reports until the socket is closed."""
        while True:
            try:
                caller, _ = self._line.accept()
            except OSError:
                return
            # other programs may connect and send anything
            with caller, contextlib.suppress(OSError, ValueError, TypeError):
                caller.settimeout(_PATIENCE)
                report = caller.makefile("rb").readline(_LONGEST).decode()
                token, name, code, *more = report.split()
                if not secrets.compare_digest(token, self._token):
                    continue
                number = self._number(name)
                if code == "begun":
                    self.begun.add(number)
                else:
                    ended = int(code), time.monotonic() - self._since
                    self.ended.setdefault(number, ended)
                    if more:
                        self.of_job.set()
                caller.sendall(b".")

    def _number(self, name: str) -> int:
        """Return the number of a rank, given its name. A rank that was started to join has the name START.RANK. Ranks
        that were started together have the same START."""
        start, _, rank = name.rpartition(".")
        number = int(rank)
        if not start:
            return number
        return self._joined.setdefault(name, self.ranks + len(self._joined))

    @property
    def failure(self) -> int:
        """Return the first status above 0 with which a rank ended. Without such a status, return 1 if no rank ended
        with status 0, although ranks have begun or are certain to report (`sure`). Otherwise return 0.
        """
        codes = [code for code, _ in self.ended.values()]
        none_ended = (self.sure or bool(self.begun)) and 0 not in codes
        return next((code for code in codes if code > 0), int(none_ended))

    @property
    def heard_any(self) -> bool:
        """Return whether a rank has reported."""
        return bool(self.begun or self.ended)

    def fields(self) -> list[dict[str, int | float | str | None]]:
        """Return the fields of the JSON output for each rank. Unknown values are
        null."""
        out: list[dict[str, int | float | str | None]] = []
        for number in sorted({*range(self.ranks), *self.begun, *self.ended}):
            code, after = self.ended.get(number, (None, None))
            killed = code is not None and code < 0
            out.append(
                {
                    "rank": number,
                    "begun": number in self.begun,
                    "status": None if killed else code,
                    "signal": signal_name(-code) if code and killed else None,
                    "seconds": after,
                }
            )
        return out

    def words(self) -> list[str]:
        """Return a line for each way in which ranks ended, or no lines if all ranks
        succeeded."""
        if not self.heard_any:
            return ["no rank has begun" if self.sure else _UNHEARD]
        alike: dict[int, list[int]] = {}
        for number, (code, _) in self.ended.items():
            alike.setdefault(code, []).append(number)
        first_ranks = {*range(self.ranks)}
        missing = (first_ranks | self.begun) - set(self.ended)
        if set(alike) == {0} and not missing:
            return []
        lines = []
        for code, numbers in alike.items():
            after = _format.seconds(self.ended[numbers[0]][1])
            first = "the first of them " * (len(numbers) > 1)
            how = f"status {code}" if code >= 0 else f"killed by {signal_name(-code)}"
            lines.append(f"{_format.ranks(numbers)}: {how}, {first}after {after}")
        why = "mpirun ended the job first"
        if not self._near:
            why += ", or a host does not answer"
        by_others = f"the ranks that had started them ended them, or {why}"
        for some, what in (
            (missing - self.begun, f"no report at all: {why}"),
            (missing & self.begun & first_ranks, f"no report of the end: {why}"),
            (missing - first_ranks, f"no report of the end: {by_others}"),
        ):
            if some:
                lines.append(f"{_format.ranks(some)}: {what}")
        return lines


@contextlib.contextmanager
def listening(
    ranks: int, hosts: Sequence[str] | None = (), *, sure: bool = False
) -> Iterator[Ends]:
    """In this ``with`` block, collect how ``ranks`` ranks end.

    Args:
        hosts: the ranks' hosts, except this host; ``None`` if they are unknown. For ``()``, the socket accepts
            connections from this host only.
        sure: whether all ranks are known to be started on this host.
    """
    address = "127.0.0.1" if hosts == () else _address(hosts or ())
    open_to = address if hosts == () else ""
    with socket.create_server((open_to, 0), backlog=1024) as line:
        ends = Ends(ranks, line, address, hosts == (), sure)
        thread = threading.Thread(target=ends.hear, daemon=True)
        thread.start()
        try:
            yield ends
        finally:
            line.shutdown(socket.SHUT_RDWR)  # wakes the listener
            thread.join()


def _address(hosts: Sequence[str]) -> str:
    """Return the address of this host for the other hosts."""
    for host in hosts:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line,
            contextlib.suppress(OSError, UnicodeError),  # the host's name is impossible
        ):
            line.connect((host, 9))  # this only selects an address, and sends nothing
            address: str = line.getsockname()[0]
            if not address.startswith("127."):
                return address
    return socket.gethostname()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
