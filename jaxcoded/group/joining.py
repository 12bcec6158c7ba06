"""Processes that a running group starts and takes in, where MPI is fault-tolerant (ULFM).

One rank, the starter, starts them (`MPI_Comm_spawn`), on a thread: where one of them ends before it is in MPI, this
never returns. They run on its host: the daemons of Open MPI 5.0 break as they connect processes of several hosts, with
`MPI_Comm_spawn` as with `MPI_Comm_connect`. Once all of them say that they are there, both sides meet by the starter
(`MPI_Intercomm_create`), which lets every old rank reach every new one without the daemons. What is said before goes
as JSON in messages of two ranks, for which nobody waits in MPI.
"""

import dataclasses
import json
import os
import pathlib
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from jaxcoded import _require
from jaxcoded.errors import CodedError
from jaxcoded.group.pending import Pending
from jaxcoded.transport import engine
from jaxcoded.transport.options import Options

T = TypeVar("T")

MARK = "JAXCODED_JOINS"  # of a process that was started so: NUMBER:TOKEN:SECONDS
# 1 where the launcher goes on where such a process dies (`jaxcoded.cli.rank`)
FORGIVES = "JAXCODED_TAKES_IN"
# the words before the command of a rank, one a line (`jaxcoded.cli.rank`)
_STARTER = "JAXCODED_STARTER"
# of messages in a group's own communicator, of those between the one that starts and those that are started, and
# in the communicator of all
_TAG, _TAG_NEW, _TAG_ALL = 32_010, 32_011, 32_012
_PAUSE = 2e-3  # seconds between two looks
_LOOKS = 0.25  # and between two looks at processes
_LATER = 10.0  # seconds that others wait longer than the one who decides
_LEAST = 30.0  # seconds for making the group, and more

# How many processes the job has had, as far as this one knows.
_processes = 0
_joined = False
# what is on its way: MPI reads it later
_sent: list[tuple[MPI.Request, np.ndarray]] = []
try:
    _began_in: str | None = os.getcwd()
except OSError:  # it was removed
    _began_in = None


MOST = 2**15  # ranks that join at once


class Gone(Exception):
    """MPI reports a rank dead of whom something is to come."""


def why_not() -> str:
    """Why no ranks can be taken in here, in words; empty if they can."""
    if os.environ.get(FORGIVES) == "1":
        return ""
    return (
        "extended needs a launcher that goes on where a rank dies that was started later: start the job with "
        f"jaxcoded run --ft, or set {FORGIVES}=1 and PRTE_MCA_state_base_recoverable=1 for mpirun --with-ft ulfm"
    )


class Line:
    """What two ranks say to each other, in JSON.

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
        try:
            _sent.append((self._comm.Isend(data, to, self._tag), data))
        except MPI.Exception as error:
            _unless_dead(error)

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
            _unless_dead(error)
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


def _unless_dead(error: MPI.Exception) -> None:
    if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
        raise error


def _tolerant(comm: Any) -> Any:
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def _within(pending: Pending[T], until: float, what: str) -> T:
    """What a call gives that may never return.

    Raises:
        CodedError: it has not by then.
    """
    try:
        return pending.result(max(until - time.monotonic(), 0.0))
    except TimeoutError:
        raise CodedError(f"{what} took too long") from None


@dataclasses.dataclass
class Invitation:
    """What ranks that join must know of the group. All old ranks have the same.

    Attributes:
        size: ranks of the old group.
        ranks: that join.
        place: of the old root in the new group.
        asked: what its plan was asked for with; None if it was given or chosen.
        options: of the new group.
    """

    size: int
    ranks: int
    place: int
    asked: Mapping[str, Any] | None
    options: Options

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Invitation":
        return cls(**{**said, "options": Options(**said["options"])})

    @property
    def request(self) -> dict[str, Any]:
        """What the new group is asked for with."""
        return {"extended": [self.size, self.ranks]}

    def own(self, both: MPI.Intracomm, root: int) -> MPI.Intracomm:
        """The new group's communicator, in which the old root has its place. Collective.

        Args:
            both: old ranks, and then new ones.
            root: of the old group.
        """
        order = [rank for rank in range(both.size) if rank != root]
        order.insert(self.place, root)
        if order == sorted(order):
            return both
        own: MPI.Intracomm = _tolerant(both.Split(0, order.index(both.rank)))
        return own


@dataclasses.dataclass
class Verdict:
    """What the starter says of ranks that are to join: the same on all old ranks.

    Attributes:
        why_not: they do not; empty: all of them are there, and wait to be connected.
        same: whether the arguments of all ranks were the same.
        token: by which their processes are known; empty: none was started.
        processes: that the job has had.
    """

    why_not: str = ""
    same: bool = True
    token: str = ""
    processes: int = 0


class Hosts:
    """The old ranks of a group, among which one starts ranks. Collective; all of them are here, as the roll
    has told.

    Args:
        comm: of the group.
        names: of the host of each rank.
        root: in it.
    """

    def __init__(self, comm: MPI.Intracomm, names: Sequence[str], root: int) -> None:
        self._comm, self._root = comm, root
        self._starter = starter(names, root)
        self._line = Line(comm, _TAG)
        self._visit = secrets.token_hex(8)
        self._visits: dict[int, str] = {}  # of others
        self._between: MPI.Intercomm | None = None
        self._new: Line | None = None
        self._copying: Pending[MPI.Intracomm] | None = None
        self.verdict = Verdict()

    def ask(
        self, words: str, ranks: int, command: Sequence[str], seconds: float
    ) -> None:
        """Have the starter start ranks, and know how that went: `verdict`.

        Args:
            words: what this rank wants: all must want the same.
            ranks: how many.
            command: that starts each; empty: as the root was started.
            seconds: until they must be there.

        Raises:
            CodedError: the starter is dead, or says nothing.
        """
        if self._comm.rank == self._starter:
            until = time.monotonic() + seconds
            self.verdict = self._agreed(words, until)
            if not self.verdict.why_not and ranks:
                self._start(ranks, command, seconds, until)
            for rank, visit in self._visits.items():
                self._line.say(rank, [visit, dataclasses.asdict(self.verdict)])
            return
        self._line.say(self._starter, [self._visit, words, _processes])
        until = time.monotonic() + seconds + _LATER
        while True:
            try:
                # what is of earlier visits counts no more
                for visit, said in self._line.all_heard(self._starter):
                    if visit == self._visit:
                        self.verdict = Verdict(**said)
                        _known(self.verdict.processes)
                        return
            except Gone:
                why = "has died"
                break
            if time.monotonic() > until:
                why = "says nothing"
                break
            time.sleep(_PAUSE)
        raise CodedError(
            f"rank {self._starter}, which starts ranks that join, {why}: this group goes on as it is; call recovered"
        )

    def _agreed(self, words: str, until: float) -> Verdict:
        """Whether all want the same."""
        said = {self._starter: words}
        while len(said) < self._comm.size:
            for rank in range(self._comm.size):
                if rank == self._starter:
                    continue
                try:
                    for visit, its, processes in self._line.all_heard(rank):
                        self._visits[rank], said[rank] = visit, its
                        _known(processes)
                except Gone:
                    return Verdict(f"rank {rank} has died: call recovered first")
            late = sorted(set(range(self._comm.size)) - set(said))
            if late and time.monotonic() > until:
                return Verdict(f"ranks {late} have not called extended")
            time.sleep(_PAUSE)
        if len(set(said.values())) == 1:
            return Verdict()
        by_rank = "; ".join(f"rank {rank}: {said[rank]}" for rank in sorted(said))
        return Verdict(
            f"ranks called extended with different arguments: {by_rank}", same=False
        )

    def _start(
        self, ranks: int, command: Sequence[str], seconds: float, until: float
    ) -> None:
        first = max(_processes, MPI.COMM_WORLD.size)
        token = secrets.token_hex(8)
        _known(first + ranks)
        self.verdict = Verdict(token=token, processes=first + ranks)
        info = MPI.Info.Create()
        info["PMIX_ENVAR"] = f"{MARK}={first}:{token}:{seconds:.0f}"
        info["host"] = MPI.Get_processor_name()
        if _began_in is not None:
            info["wdir"] = _began_in
        # this process's own may differ from others', as it may have joined, too
        command = command or [sys.executable, *sys.orig_argv[1:]]
        starter = os.environ.get(_STARTER, "")
        words = [*filter(None, starter.split("\n")), *command]
        engine.join()
        spawning = Pending(lambda: _spawned(words, ranks, info))
        seen = _Seen(token, words)
        here: set[int] = set()
        try:
            while spawning.runs():
                seen.look()
                if time.monotonic() > until:
                    raise CodedError(
                        f"they were not in MPI after {seconds:g} s: see what they say above, or give command=, or a "
                        "longer timeout="
                    )
                time.sleep(_PAUSE)
            self._between = spawning.result(0.0)
            self._new = Line(self._between, _TAG_NEW)
            while len(here) < ranks:
                seen.look()
                for rank in set(range(ranks)) - here:
                    said = self._new.heard(rank)
                    if said is None:
                        continue
                    if said != "":
                        raise CodedError(
                            f"number {rank + 1} of them cannot join: {said}"
                        )
                    here.add(rank)
                if time.monotonic() > until:
                    late = [rank + 1 for rank in sorted(set(range(ranks)) - here)]
                    raise CodedError(
                        f"numbers {late} of them have not called jaxcoded.CodedGroup.joining(): does the program "
                        "call it early, or should timeout= be longer?"
                    )
                time.sleep(_PAUSE)
        except (CodedError, Gone, MPI.Exception) as error:
            why = "one of them has died" if isinstance(error, Gone) else str(error)
            what = f"processes were started as {' '.join(command)!r}"
            self.verdict.why_not = f"{what}, but {why}"

    def connect(self, invitation: Invitation, until: float) -> MPI.Intracomm:
        """All old ranks and then the new ones, in one communicator. Collective of both.

        Raises:
            CodedError: it has not been made by then, or some have died.
        """
        engine.join()
        if self._new is not None:
            for rank in range(invitation.ranks):
                self._new.say(rank, [self._root, invitation.to_json()])
        made: list[MPI.Comm] = []
        # revoking this one lets go whoever waits there, and leaves the old group as it is
        self._copying = Pending(lambda: _tolerant(self._comm.Shrink()))
        what = "connecting them"
        old: MPI.Intracomm = _within(self._copying, until, what)
        made.append(old)

        def connected() -> MPI.Intracomm:
            old.Barrier()  # Open MPI crashes where one is revoked that it still makes
            bridge = old  # which counts on the starter alone
            if self._between is not None:
                bridge = _tolerant(self._between.Merge(high=False))
                made.append(bridge)
            between = _tolerant(
                old.Create_intercomm(self._starter, bridge, 1, _TAG_ALL)
            )
            made.append(between)
            both: MPI.Intracomm = _tolerant(between.Merge(high=False))
            return both

        try:
            if old.size < self._comm.size:
                raise CodedError("one of the old ranks has died: call recovered first")
            return _within(Pending(connected), until, what)
        except BaseException:
            for comm in made:
                comm.Revoke()
            raise

    def ready(self, ranks: int, until: float) -> str:
        """Why not all new ranks have made the group, on the starter; empty: they have, or this is another."""
        if self._new is None:
            return ""
        said: dict[int, str] = {}
        while len(said) < ranks:
            for rank in set(range(ranks)) - set(said):
                try:
                    its = self._new.heard(rank)
                except Gone:
                    its = "it has died"
                if its is not None:
                    said[rank] = its
                if its:
                    return (
                        f"number {rank + 1} of those that were started has not: {its}"
                    )
            if time.monotonic() > until:
                return "one of them takes too long"
            time.sleep(_PAUSE)
        return ""

    def agreed(self, mine: bool) -> bool:
        """Whether it is so on all old ranks and all of them live, the same on all. Collective."""
        if self._copying is not None:  # MPI counts what all ranks agree on
            self._copying.wait()
        try:
            # seen once: MPI said yes to a rank of which all had said no
            return bool(self._comm.Agree(int(mine))) and mine
        except MPI.Exception as error:
            _unless_dead(error)
            return False

    def tell(self, both: MPI.Intracomm | None) -> None:
        """Say to the new ranks that they are in: each of the old ones does, as some may die meanwhile."""
        assert both is not None
        line = Line(both, _TAG_ALL)
        for rank in range(self._comm.size, both.size):
            line.say(rank, True)

    def end(self) -> None:
        """End the processes that were started, as far as this one sees them."""
        for pid in _marked(self.verdict.token, _wrapper()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # it has ended


def starter(names: Sequence[str], root: int) -> int:
    """The rank that starts others: on the host with the fewest ranks, the root if it is there.

    Args:
        names: of the host of each rank.
        root: among them.

    Example:
        >>> starter(["a", "a", "b"], 0), starter(["a", "b", "a", "b"], 3)
        (2, 3)
    """
    ranks = range(len(names))
    return min(ranks, key=lambda rank: (names.count(names[rank]), rank != root))


def _known(processes: int) -> None:
    global _processes
    _processes = max(_processes, processes)


def _spawned(words: Sequence[str], ranks: int, info: MPI.Info) -> MPI.Intercomm:
    new: MPI.Intercomm = _tolerant(
        MPI.COMM_SELF.Spawn(words[0], list(words[1:]), ranks, info)
    )
    return new


def checked(command: Sequence[str] | None) -> list[str]:
    """A command that starts a process, or nothing.

    Raises:
        TypeError: it is something else.

    Example:
        >>> checked(["python", "train.py"])
        ['python', 'train.py']
    """
    if command is None:
        return []
    if isinstance(command, str | bytes) or not (
        isinstance(command, Sequence)
        and command
        and all(isinstance(word, str) and word for word in command)
    ):
        raise TypeError(
            f"command must be words, such as [sys.executable, 'train.py'], got {_require.shown(command)}"
        )
    return list(command)


class Arrival:
    """This process, which was started to join.

    Args:
        parent: whoever started it.
        seconds: for which that waits.
    """

    def __init__(self, parent: MPI.Intercomm, seconds: float) -> None:
        self._parent = parent
        self._line = Line(_tolerant(parent), _TAG_NEW)
        self._seconds = seconds

    @classmethod
    def of_this_process(cls) -> "Arrival | None":
        """None where nobody has started it so.

        Raises:
            CodedError: it has joined already, or cannot.
        """
        global _joined
        parent = MPI.Comm.Get_parent()
        words = os.environ.get(MARK, "").split(":")
        # processes that it starts itself have the variable, too
        if parent == MPI.COMM_NULL or len(words) != 3:
            return None
        if _joined:
            raise CodedError("this process has joined already: call joining once")
        _joined = True
        _known(int(words[0]) + MPI.COMM_WORLD.size)
        return cls(parent, float(words[2]))

    def invited(self) -> tuple[MPI.Intracomm, int, Invitation]:
        """Be connected with the old ranks: the communicator of all, the old root, and what is to be known.

        Raises:
            CodedError: the others have not gone on with this one.
        """
        why = engine.missing()
        if not why and not engine.fault_tolerant():
            why = "its MPI is not fault-tolerant"
        self._line.say(0, why)
        if why:
            raise CodedError(f"this process cannot join: {why}")
        engine.join()
        until = time.monotonic() + self._seconds + _LATER
        root, said = self._heard(lambda: self._line.heard(0), until)
        invitation = Invitation.from_json(said)
        world = _tolerant(MPI.COMM_WORLD)

        def connected() -> MPI.Intracomm:
            bridge = _tolerant(self._parent.Merge(high=True))
            between = _tolerant(world.Create_intercomm(0, bridge, 0, _TAG_ALL))
            both: MPI.Intracomm = _tolerant(between.Merge(high=True))
            return both

        until = time.monotonic() + opening_seconds(self._seconds)
        return (
            _within(Pending(connected), until, "connecting with the group"),
            root,
            invitation,
        )

    @property
    def seconds(self) -> float:
        """For which the group's ranks wait for this one."""
        return self._seconds

    def ready(self, failure: BaseException | None) -> None:
        """Tell the starter that the group is made here, or why not."""
        words = failure and f"{type(failure).__name__}: {failure}"
        self._line.say(0, words or "")

    def enter(self, both: MPI.Intracomm, old: int) -> None:
        """Wait until the old ranks have agreed that all have made the group.

        Raises:
            CodedError: they have not.
        """
        line, left = Line(both, _TAG_ALL), set(range(old))

        def told() -> bool | None:
            for rank in list(left):
                try:
                    said: bool | None = line.heard(rank)
                except Gone:
                    left.discard(rank)
                    continue
                if said is not None:
                    return said
            if not left:
                raise Gone
            return None

        until = time.monotonic() + 2 * opening_seconds(self._seconds) + _LATER
        if not self._heard(told, until):
            raise CodedError(
                "the group has not taken this process in: its ranks say why"
            )

    @staticmethod
    def _heard(ask: Callable[[], Any], until: float) -> Any:
        while True:
            try:
                said = ask()
            except Gone:
                raise CodedError("who has started this process is dead") from None
            if said is not None:
                return said
            if time.monotonic() > until:
                raise CodedError("who has started this process has not taken it in")
            time.sleep(_PAUSE)


def opening_seconds(timeout: float) -> float:
    """In which ranks make the group together, or give up."""
    return max(timeout / 2, _LEAST)


class _Seen:
    """Processes on this host that were started, looked for now and then.

    Args:
        token: by which they are known.
        command: of each. What they start themselves has others.
    """

    def __init__(self, token: str, command: Sequence[str]) -> None:
        self._token, self._command = token, list(command)
        self._pids: set[int] = set()
        self._next = 0.0

    def look(self) -> None:
        """
        Raises:
            CodedError: one has ended.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LOOKS
        here = set(_marked(self._token, lambda words: words != self._command))
        if self._pids - here:
            raise CodedError(
                "one of them has ended before it called jaxcoded.CodedGroup.joining(): see what it says above, or "
                "give command="
            )
        self._pids |= here


def _wrapper() -> Callable[[list[str]], bool]:
    """Whether a command is that of the small process around a rank, which tells how the rank ends."""
    words = list(filter(None, os.environ.get(_STARTER, "").split("\n")))
    return lambda command: bool(words) and command[: len(words)] == words


def _marked(token: str, but: Callable[[list[str]], bool]) -> Iterator[int]:
    """Processes of this host that were started with a token, or by those, but for some commands."""
    if not token:
        return
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            marks = (place / "environ").read_bytes().split(b"\0")
            command = (place / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # another user's, or it is gone
            continue
        ours = any(
            mark.startswith(f"{MARK}=".encode()) and token.encode() in mark
            for mark in marks
        )
        if ours and command and not but(command.rstrip("\0").split("\0")):
            yield int(place.name)
