"""Processes that a running group starts and takes in, where MPI is fault-tolerant (ULFM).

One rank, the starter, starts them (`MPI_Comm_spawn`), on a thread: where one of them ends before it is in MPI, this
never returns. They run on its host: the daemons of Open MPI 5.0 break as they connect processes of several hosts, with
`MPI_Comm_spawn` as with `MPI_Comm_connect`. Once all of them say that they are there, both sides meet by the starter
(`MPI_Intercomm_create`), which lets every old rank reach every new one without the daemons. What is said before goes
as JSON in messages of two ranks, for which nobody waits in MPI.
"""

import dataclasses
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mpi4py import MPI

from jaxcoded import _own_process, _require
from jaxcoded.errors import CodedError
from jaxcoded.group.line import Gone, Line
from jaxcoded.group.pending import Pending
from jaxcoded.group.recovery import shrunk
from jaxcoded.group.started import MARK, Started, wrapper
from jaxcoded.transport import engine
from jaxcoded.transport.agreement import in_words, plain
from jaxcoded.transport.options import Options

T = TypeVar("T")

# 1 where the launcher goes on where such a process dies (`jaxcoded.cli.rank`)
FORGIVES = "JAXCODED_TAKES_IN"
_HAN = "OMPI_MCA_coll_han_priority"
# of messages in a group's own communicator, of those between the one that starts and those that are started, and
# in the communicator of all
_TAG, _TAG_NEW, _TAG_ALL = 32_010, 32_011, 32_012
_PAUSE = 2e-3  # seconds between two looks
_SERVES = 20e-3  # and where MPI is at work
LATER = 10.0  # seconds that others wait longer than the one who decides
_LEAST = 30.0  # seconds for making the group, and more

_joined = False
_command: list[str] = []  # by default, where this process has joined itself
MOST = 2**15  # ranks that join at once
LONGEST = 1e6  # seconds for which others wait: longer is for ever, and more than clocks can count


def why_not(hosts: int) -> str:
    """Why no ranks can be taken in here, in words; empty if they can.

    Args:
        hosts: how many the group has.
    """
    if os.environ.get(FORGIVES) != "1":
        return (
            "extended needs a launcher that goes on where a rank dies that was started later: start the job with "
            f"jaxcoded run --ft, or set {FORGIVES}=1 and PRTE_MCA_state_base_recoverable=1 for mpirun --with-ft ulfm"
        )
    if hosts > 1 and os.environ.get(_HAN) != "-1":
        return (
            "Open MPI's collectives for several hosts give wrong values to ranks that have joined: start the job with "
            f"jaxcoded run --ft, or set {_HAN}=-1"
        )
    return ""


def _tolerant(comm: Any) -> Any:
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def _within(
    pending: Pending[T], until: float, what: str, look: Callable[[], object]
) -> T:
    """What a call gives that may never return.

    Args:
        look: called meanwhile, may raise.

    Raises:
        CodedError: it has not by then.
    """
    while True:
        try:
            return pending.result(_SERVES)
        except TimeoutError:
            if time.monotonic() > until:
                raise CodedError(f"{what} took too long") from None
        look()


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
        token: by which their processes are known, if there are any.
    """

    why_not: str = ""
    same: bool = True
    token: str = ""


class OldRanks:
    """The old ranks of a group, among which one starts ranks. Collective; all of them are here, as the roll
    has told.

    Args:
        comm: of the group.
        names: of the host of each rank.
        root: in it.
        agreed: whether something is so on all of them. Collective.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        names: Sequence[str],
        root: int,
        agreed: Callable[[bool], bool],
    ) -> None:
        self._comm, self._root, self._agreed = comm, root, agreed
        self._starter = starter(names, root)
        self._line = Line(comm, _TAG)
        self._visit = secrets.token_hex(8)
        self._visits: dict[int, str] = {}  # of others, on the starter
        self._between: MPI.Intercomm | None = None
        self._new: Line | None = None
        self.verdict = Verdict()

    def ask(
        self, words: str, ranks: int, command: Sequence[str], seconds: float
    ) -> None:
        """Have the starter start ranks, and know how that went: `verdict`.

        Args:
            words: what this rank wants: all must want the same.
            ranks: how many.
            command: that starts each; empty: as the starter was.
            seconds: until they must be there.

        Raises:
            CodedError: the starter is dead, or says nothing.
        """
        if self._comm.rank == self._starter:
            try:
                until = time.monotonic() + seconds
                self.verdict = self._all_want(words, until)
                if not self.verdict.why_not and ranks:
                    self._start(ranks, command, seconds, until)
            except BaseException as error:
                self.verdict.why_not = (
                    f"{_require.kind(error)} on rank {self._starter}, which starts them"
                )
                raise
            finally:
                for rank, visit in self._visits.items():
                    self._line.say(rank, [visit, dataclasses.asdict(self.verdict)])
            return
        until = time.monotonic() + seconds + LATER
        while True:
            try:
                # of earlier visits nothing counts any more
                for visit, said in self._line.all_heard(self._starter):
                    if said is None:
                        self.verdict.token = visit  # also if it dies now
                        self._line.say(self._starter, [visit, self._visit, words])
                    elif visit == self._visit:
                        self.verdict = Verdict(**said)
                        return
            except Gone:
                why = "has died"
                break
            if time.monotonic() > until:
                why = "has not called it, or is late"
                break
            time.sleep(_PAUSE)
        raise CodedError(
            f"rank {self._starter}, which starts ranks that join, {why}: this group goes on as it is. All ranks call "
            "extended after the same step, and recovered before"
        )

    def _all_want(self, words: str, until: float) -> Verdict:
        """Whether all want the same."""
        others = set(range(self._comm.size)) - {self._starter}
        for rank in others:
            self._line.say(rank, [self._visit, None])
        said = {self._starter: words}
        while len(said) < self._comm.size:
            for rank in others:
                try:
                    for asked, visit, its in self._line.all_heard(rank):
                        if asked == self._visit:
                            self._visits[rank], said[rank] = visit, its
                except Gone:
                    return Verdict(f"rank {rank} has died: call recovered first")
            late = sorted(others - set(said))
            if late and time.monotonic() > until:
                return Verdict(f"ranks {late} have not called extended")
            time.sleep(_PAUSE)
        if len(set(said.values())) == 1:
            return Verdict()
        answers = [said[rank] for rank in sorted(said)]
        why = in_words(answers, "ranks called extended with different arguments")
        return Verdict(why, same=False)

    def _start(
        self, ranks: int, command: Sequence[str], seconds: float, until: float
    ) -> None:
        self.verdict = Verdict(token=self._visit)
        info = MPI.Info.Create()
        info["PMIX_ENVAR"] = f"{MARK}={self._visit}:{seconds:.0f}"
        info["host"] = MPI.Get_processor_name()
        # both may be others by now
        if _own_process.began_in is not None:
            info["wdir"] = _own_process.began_in
        command = command or _own_command()
        words = [*wrapper(), *command]
        engine.join()
        spawning = Pending(lambda: _spawned(words, ranks, info))
        seen = Started(self._visit)
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

    def copied(self, mine: bool) -> MPI.Intracomm | None:
        """A communicator of the old ranks alone: revoking it lets go whoever waits there, and leaves the group as it
        is. None where not all of them are ready to connect, as none is to begin in MPI what others do not. Collective.

        Args:
            mine: whether this one is.
        """
        return _tolerant(shrunk(self._comm)) if self._agreed(mine) else None

    def connect(
        self, old: MPI.Intracomm, invitation: Invitation, until: float
    ) -> MPI.Intracomm:
        """All old ranks and then the new ones, in one communicator. Collective of both.

        Args:
            old: `copied`.
            invitation: of the new ones.
            until: when it is to be made.

        Raises:
            CodedError: it has not been made by then, or some have died.
        """
        if old.size < self._comm.size:
            raise CodedError("one of the old ranks has died: call recovered first")
        engine.join()
        side = _Side(old, self._starter, first=True)
        try:
            if self._new is not None:
                what = [self._root, plain(invitation.to_json()), _own_command()]
                for rank in range(invitation.ranks):
                    self._new.say(rank, what)
            return side.joined(self._between, 1, until, self._look)
        except BaseException:
            old.Revoke()
            raise

    def ready(self, ranks: int, until: float) -> str:
        """Why not all new ranks have made the group, on the starter; empty: they have, or this is another."""
        if self._new is None:
            return ""
        said: dict[int, str] = {}
        while len(said) < ranks:
            for rank in set(range(ranks)) - set(said):
                its = self._word_of(rank)
                if its is not None:
                    said[rank] = its
                if its:
                    return _has_not(rank, its)
            if time.monotonic() > until:
                return "one of them takes too long"
            time.sleep(_PAUSE)
        return ""

    def _look(self) -> None:
        """New ranks say nothing while they are connected, unless one fails."""
        if self._new is None:
            return
        assert self._between is not None
        for rank in range(self._between.Get_remote_size()):
            if its := self._word_of(rank):
                raise CodedError(_has_not(rank, its))

    def _word_of(self, rank: int) -> str | None:
        """Why a new rank has failed; empty: it has not; None: it says nothing yet."""
        assert self._new is not None
        try:
            its: str | None = self._new.heard(rank)
        except Gone:
            return "it has died"
        return its

    def tell(self, both: MPI.Intracomm) -> None:
        """Say to the new ranks that they are in: each of the old ones does, as some may die meanwhile."""
        line = Line(both, _TAG_ALL)
        for rank in range(self._comm.size, both.size):
            line.say(rank, True)

    def end(self) -> None:
        """End the processes that were started, as far as this one sees them."""
        Started(self.verdict.token).end()


def _has_not(rank: int, why: str) -> str:
    return f"number {rank + 1} of those that were started has not: {why}"


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


def _spawned(words: Sequence[str], ranks: int, info: MPI.Info) -> MPI.Intercomm:
    new: MPI.Intercomm = _tolerant(
        # others may do so in another thread
        MPI.COMM_SELF.Dup().Spawn(words[0], list(words[1:]), ranks, info)
    )
    info.Free()
    return new


def _own_command() -> list[str]:
    """That starts a process as those that were there at the beginning were started."""
    return _command or [sys.executable, *sys.orig_argv[1:]]


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


class _Side:
    """The old ranks, or the new ones, as they are connected with the others.

    Args:
        comm: of them.
        leader: the one of them that both sides meet by.
        first: whether they are to be the first ranks of all.
    """

    def __init__(self, comm: MPI.Intracomm, leader: int, *, first: bool) -> None:
        self._comm, self._leader, self._first = comm, leader, first
        self._made: list[MPI.Comm] = []

    def joined(
        self,
        between: MPI.Intercomm | None,
        other: int,
        until: float,
        look: Callable[[], object],
    ) -> MPI.Intracomm:
        """All ranks, in one communicator. Collective of both.

        Args:
            between: of the starter and those that it has started; None on all others.
            other: the leader of the other side there, where the starter is the first.
            until: when it is to be made.
            look: called meanwhile, may raise.

        Raises:
            CodedError: it has not been made by then.
        """
        making = Pending(lambda: self._make(between, other))
        try:
            return _within(making, until, "connecting them", look)
        except BaseException:
            for comm in self._made:
                comm.Revoke()
            raise

    def _make(self, between: MPI.Intercomm | None, other: int) -> MPI.Intracomm:
        bridge = self._comm  # which counts on the leader alone
        if between is not None:
            bridge = self._kept(between.Merge(high=not self._first))
        apart = self._kept(
            self._comm.Create_intercomm(self._leader, bridge, other, _TAG_ALL)
        )
        return self._kept(apart.Merge(high=not self._first))

    def _kept(self, comm: Any) -> Any:
        self._made.append(_tolerant(comm))
        return comm


class NewRank:
    """This process, which was started to join.

    Args:
        parent: whoever started it.
        seconds: for which that waits.
    """

    def __init__(self, parent: MPI.Intercomm, seconds: float) -> None:
        self._parent = parent
        self._line = Line(_tolerant(parent), _TAG_NEW)
        self._seconds = seconds

    @staticmethod
    def waits_to_join() -> bool:
        """Whether this process was started to join, and has not tried to."""
        # processes that it starts itself have the variable, too
        marked = os.environ.get(MARK, "").count(":") == 1
        return marked and not _joined and MPI.Comm.Get_parent() != MPI.COMM_NULL

    @classmethod
    def of_this_process(cls) -> "NewRank | None":
        """None where nobody has started it so.

        Raises:
            CodedError: it has joined already, or cannot.
        """
        global _joined
        if _joined:
            raise CodedError("this process has called joining already: call it once")
        if not cls.waits_to_join():
            return None
        _joined = True
        seconds = os.environ[MARK].partition(":")[2]
        return cls(MPI.Comm.Get_parent(), float(seconds))

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
        until = time.monotonic() + self._seconds + LATER
        global _command
        root, said, _command = self._heard(lambda: self._line.heard(0), until)
        invitation = Invitation.from_json(said)
        until = time.monotonic() + opening_seconds(self._seconds)
        side = _Side(_tolerant(MPI.COMM_WORLD), 0, first=False)
        try:
            return side.joined(self._parent, 0, until, lambda: None), root, invitation
        except BaseException as error:
            self.ready(error)
            raise

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

        until = time.monotonic() + 2 * opening_seconds(self._seconds) + LATER
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
                raise CodedError(
                    "who has started this process has died, or has not taken it in: see what its group says"
                ) from None
            if said is not None:
                return said
            if time.monotonic() > until:
                raise CodedError("who has started this process has not taken it in")
            time.sleep(_PAUSE)


def opening_seconds(timeout: float) -> float:
    """In which ranks make the group together, or give up."""
    return max(timeout / 2, _LEAST)
