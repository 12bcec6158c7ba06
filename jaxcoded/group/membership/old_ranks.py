import dataclasses
import secrets
import time
from collections.abc import Sequence

from mpi4py import MPI

from jaxcoded import _own_process, _require
from jaxcoded.errors import CodedError
from jaxcoded.group.membership.channel import Channel, Gone, looks
from jaxcoded.group.membership.joining import (
    LATER,
    TAG_ALL,
    TAG_NEW,
    Invitation,
    joined,
    tolerant,
)
from jaxcoded.group.membership.messages import (
    Asks,
    Invites,
    Ready,
    TakenIn,
    Tells,
    Verdict,
    Wants,
)
from jaxcoded.group.membership.pending import pending
from jaxcoded.group.membership.started import MARK, Started, mark, wrapper
from jaxcoded.transport import engine
from jaxcoded.transport.agreement import in_words

_TAG = 32_010  # tag of messages in the group's communicator


class OldRanks:
    """The old ranks of a group. One of them, the starter, starts new ranks. The methods
    are collective; the roll has ensured that all old ranks take part.
    """

    def __init__(self, comm: MPI.Intracomm, names: Sequence[str], root: int) -> None:
        self._comm = comm
        self._starter = starter(names, root)
        self._old: Channel[Asks | Wants | Tells] = Channel(
            comm, _TAG, (Asks, Wants, Tells)
        )
        self._visit = secrets.token_hex(8)
        self._visits: dict[int, str] = {}  # visits of other ranks, on the starter
        self._between: MPI.Intercomm | None = None
        self._new: Channel[Ready] | None = None
        self.verdict = Verdict()

    def ask(
        self, words: str, ranks: int, command: Sequence[str], seconds: float
    ) -> None:
        """Let the starter start ranks, and set `verdict` to the outcome. Raise a
        CodedError if the starter is dead or silent, or its message cannot be read.

        Args:
            words: this rank's arguments as text, which must be the same on all ranks.
            command: the command that starts each new rank; if empty, the starter's own
                command.
            seconds: seconds until the new ranks must be present.
        """
        if self._comm.rank == self._starter:
            try:
                until = time.monotonic() + seconds
                self.verdict = self._all_want(words, until)
                if not self.verdict.why_not and ranks:
                    self._start(ranks, command, seconds, until)
            except BaseException as error:
                self._fail(
                    f"{_require.kind(error)} on rank {self._starter}, which starts the new ranks"
                )
                raise
            finally:
                for rank, visit in self._visits.items():
                    self._old.say(rank, Tells(visit, self.verdict))
            return
        why = "has not called extended, or is late"
        try:
            for _ in looks(time.monotonic() + seconds + LATER):
                # messages of earlier visits no longer count
                for message in self._old.all_heard(self._starter):
                    if isinstance(message, Asks):
                        # The verdict counts even if the starter dies now.
                        self.verdict = Verdict(token=message.visit)
                        wants = Wants(message.visit, self._visit, words)
                        self._old.say(self._starter, wants)
                    elif isinstance(message, Tells) and message.visit == self._visit:
                        self.verdict = message.verdict
                        return
        except Gone:
            why = "has died"
        raise CodedError(
            f"rank {self._starter}, which starts ranks that join, {why}: this group continues unchanged. Call recovered, "
            "and then extended, on all ranks after the same step"
        )

    def _all_want(self, words: str, until: float) -> Verdict:
        """Return a verdict on whether all ranks gave the same arguments."""
        others = set(range(self._comm.size)) - {self._starter}
        for rank in others:
            self._old.say(rank, Asks(self._visit))
        texts = {self._starter: words}
        lost: dict[int, str] = {}  # lost ranks with the reasons
        for _ in looks(until):
            for rank in others - set(lost):
                try:
                    for reply in self._old.all_heard(rank):
                        if isinstance(reply, Wants) and reply.asked == self._visit:
                            self._visits[rank], texts[rank] = reply.visit, reply.words
                except Gone:
                    lost[rank] = f"rank {rank} has died: call recovered first"
                except CodedError as error:
                    lost[rank] = str(error)
            # ranks that have not answered get no verdict
            if not (late := others - set(lost) - set(texts)):
                break
        else:
            return Verdict(f"ranks {sorted(late)} have not called extended")
        if lost:
            return Verdict(lost[min(lost)])
        if len(set(texts.values())) == 1:
            return Verdict()
        answers = [texts[rank] for rank in sorted(texts)]
        why = in_words(answers, "ranks called extended with different arguments")
        return Verdict(why, same=False)

    def _start(
        self, ranks: int, command: Sequence[str], seconds: float, until: float
    ) -> None:
        self.verdict = Verdict(token=self._visit)
        info = MPI.Info.Create()
        info["PMIX_ENVAR"] = f"{MARK}={mark(self._visit, seconds)}"
        info["host"] = MPI.Get_processor_name()
        # The program may have changed its working folder and its command line.
        if _own_process.began_in is not None:
            info["wdir"] = _own_process.began_in
        command = command or _own_process.command
        words = [*wrapper(), *command]
        engine.join()
        spawning = pending(lambda: _spawned(words, ranks, info))
        seen = Started(self._visit)
        late = set(range(ranks))
        try:
            for _ in looks(until):
                seen.look()
                if spawning.done():
                    break
            else:
                raise CodedError(
                    f"they had not started MPI after {seconds:g} s: see their output above, or give command=, or a "
                    "longer timeout="
                )
            self._between = spawning.result(0.0)
            self._new = Channel(self._between, TAG_NEW, (Ready,), who=_number)
            for _ in looks(until):
                seen.look()
                for rank in sorted(late):
                    if (message := self._new.heard(rank)) is None:
                        continue
                    if message.why_not:
                        raise CodedError(
                            f"number {rank + 1} of them cannot join: {message.why_not}"
                        )
                    late.remove(rank)
                if not late:
                    break
            else:
                raise CodedError(
                    f"numbers {[rank + 1 for rank in sorted(late)]} of them have not called "
                    "jaxcoded.CodedGroup.joining(): does the program call it early, or should timeout= be longer?"
                )
        except (CodedError, Gone, MPI.Exception) as error:
            why = "one of them has died" if isinstance(error, Gone) else str(error)
            what = f"processes were started as {' '.join(command)!r}"
            self._fail(f"{what}, but {why}")

    def _fail(self, why: str) -> None:
        self.verdict = dataclasses.replace(self.verdict, why_not=why)

    def connect(
        self, old: MPI.Intracomm, invitation: Invitation, until: float
    ) -> MPI.Intracomm:
        """Return a communicator of the old ranks (``old``, a copy of the group's
        communicator), followed by the new ranks. Collective on old and new ranks. Raise
        a CodedError if the communicator is not ready in time, or if ranks have died.
        """
        if old.size < self._comm.size:
            raise CodedError("one of the old ranks has died: call recovered first")
        engine.join()
        try:
            if self._new is not None:
                invites = Invites(invitation, _own_process.command)
                for rank in range(invitation.ranks):
                    self._new.say(rank, invites)
            arguments = self._starter, self._between, until, self._look
            return joined(old, *arguments, first=True)
        except BaseException:
            old.Revoke()
            raise

    def ready(self, ranks: int, until: float) -> str:
        """Return why new ranks do not have the group. Return an empty text if all of
        them have it, or if this rank is not the starter."""
        if self._new is None:
            return ""
        late = set(range(ranks))
        for _ in looks(until):
            for rank in sorted(late):
                if why := self._word_of(rank):
                    return _has_not(rank, why)
                if why is not None:
                    late.remove(rank)
            if not late:
                return ""
        return "a new rank takes too long"

    def _look(self) -> None:
        """Raise a CodedError if a new rank has failed. While ranks connect, only failed
        ranks send a message."""
        if self._new is None:
            return
        assert self._between is not None
        for rank in range(self._between.Get_remote_size()):
            if why := self._word_of(rank):
                raise CodedError(_has_not(rank, why))

    def _word_of(self, rank: int) -> str | None:
        """Return why a new rank has failed. Return an empty text if the rank reports
        success, and None if no message has arrived."""
        assert self._new is not None
        try:
            message = self._new.heard(rank)
        except Gone:
            return "it has died"
        except CodedError as error:
            return str(error)
        return None if message is None else message.why_not

    def tell(self, all_ranks: MPI.Intracomm) -> None:
        """Tell new ranks that they have joined. Every old rank sends this message,
        since some old ranks may die."""
        new = Channel(all_ranks, TAG_ALL, (TakenIn,))
        for rank in range(self._comm.size, all_ranks.size):
            new.say(rank, TakenIn())

    def end(self) -> None:
        """Kill the started processes that this process can see."""
        Started(self.verdict.token).end()


def starter(names: Sequence[str], root: int) -> int:
    """Return the rank that starts new ranks: a rank on a host with the fewest ranks. If
    the root is on such a host, return the root.

    Example:
        >>> starter(["a", "a", "b"], 0), starter(["a", "b", "a", "b"], 3)
        (2, 3)
    """
    ranks = range(len(names))
    return min(ranks, key=lambda rank: (names.count(names[rank]), rank != root))


def checked(command: Sequence[str] | None) -> list[str]:
    """Return the command as a list of words, or an empty list for ``None``. Raise a
    TypeError if the command does not consist of words."""
    if command is None:
        return []
    if isinstance(command, str | bytes) or not (
        isinstance(command, Sequence)
        and command
        and all(isinstance(word, str) and word for word in command)
    ):
        raise TypeError(
            f"command must be a non-empty sequence of words, such as [sys.executable, 'train.py'], got {_require.shown(command)}"
        )
    return list(command)


def _spawned(words: Sequence[str], ranks: int, info: MPI.Info) -> MPI.Intercomm:
    new: MPI.Intercomm = tolerant(
        # another thread may call Spawn, too
        MPI.COMM_SELF.Dup().Spawn(words[0], list(words[1:]), ranks, info)
    )
    info.Free()
    return new


def _has_not(rank: int, why: str) -> str:
    return f"{_number(rank)} has not joined: {why}"


def _number(rank: int) -> str:
    return f"number {rank + 1} of the started processes"
