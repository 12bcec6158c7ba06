import dataclasses
import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from mpi4py import MPI

from jaxcoded.errors import CodedError
from jaxcoded.group.membership.channel import Channel, Dead, Message
from jaxcoded.group.membership.messages import (
    Answer,
    Call,
    GivesUp,
    Kill,
    Late,
    Regroup,
    State,
    Stay,
)
from jaxcoded.group.process import Process

logger = logging.getLogger("jaxcoded")

# Tags of messages from the rank that calls the roll, and of messages to that rank.
# During the roll the group's communicator carries no other messages.
_FROM_CALLER, _TO_CALLER = 32_001, 32_002
_ABOUT = "the remaining ranks"
_PAUSE = 1e-3  # seconds between two polls
# While MPI makes the new group, this process rarely uses the communicator, since a
# process that read a message at such a time crashed. At first this process pauses for
# `_AT_FIRST` of the time for which ranks wait. Then it pauses for `_SERVES` seconds
# between two polls.
_AT_FIRST, _SERVES = 1 / 4, 20e-3
_STOPPED = 1.0  # seconds; a longer pause shows that this process was stopped
_GO_ON = ". Rounds were decided meanwhile, so no rank was put out: do all ranks call recovered after the same step?"
# If all live ranks take part but MPI does not return, an error follows after this
# number of calls.
_CALLS = 3
REPORTED = 10.0  # seconds within which MPI reports a killed rank


class Roll:
    """The roll of the remaining ranks, called by the root or by the first living rank after it.

    MPI's own way to shrink a communicator waits for every rank that is not dead, even a stopped rank, and cannot be
    undone once begun. So the caller of the roll first asks all ranks, and waits for their answers for a limited
    time. A rank that has not answered after this time can be put out: another rank with the necessary permission
    kills its process. No rank continues before MPI has reported the killed rank dead, so there are never two roots.

    Only ranks in `call` or `wait` answer, so ranks may begin to take part, and give up, at any time. One call of
    `call` or `wait` is a *visit*. The decision to make the group again is never taken back. All ranks pass the
    decision on, and a rank that gave up before receives it when it takes part again."""

    def __init__(
        self, comm: MPI.Intracomm, processes: Sequence[Process], root: int
    ) -> None:
        self._size, self._rank, self._processes = comm.size, comm.rank, processes
        self._callers = [root, *(rank for rank in range(comm.size) if rank != root)]
        self._from_caller: Channel[Call | Stay | Late | Regroup] = Channel(
            comm, _FROM_CALLER, (Call, Kill, Stay, Late, Regroup), _ABOUT
        )
        self._to_caller: Channel[Answer | GivesUp] = Channel(
            comm, _TO_CALLER, (Answer, GivesUp), _ABOUT
        )
        self._attempt = 0  # number of the attempt to make the new group
        self._regrouping = -1  # the latest attempt that all ranks must make
        self._visits = 0  # number of visits of this rank
        self._visit = _Visit("", 0.0, False)  # the latest visit
        self._awaited: Future[Any] | None = None
        self._since = 0.0  # when this rank began to wait for the joint action
        self._calls = 0  # number of roll calls by this rank
        self._dead: set[int] = set()
        self._answers: dict[int, Answer] = {}  # answers to the latest call
        self._answered: set[int] = set()  # callers answered in this visit
        # unread messages, by caller
        self._verdicts: dict[int, Stay | Late] = {}
        # for each rank, the number of the error that prevented its killing, or 0
        self._hindered = [0] * comm.size

    def call(
        self,
        seconds: float,
        put_out: bool,
        left: Callable[[], Iterable[int]] = tuple,
        *,
        broken: bool = False,
        extends: bool = False,
        decided: Callable[[], int] = int,
    ) -> bool:
        """Return whether a new group is needed, because some ranks are dead. The answer
        is the same on all ranks.

        Args:
            seconds: how long to wait for living ranks that do not take part.
            put_out: whether to put these ranks out after this time. The value on the
                rank that calls the roll decides about all other ranks.
            left: a function that returns the ranks below this rank that make no more
                calls.
            broken: whether a new group is needed in any case.
            extends: whether ranks will join. A rank with another value counts as missing.
            decided: a function that returns how many rounds are over. While the number grows, no rank is killed.

        Raises:
            CodedError: living ranks do not take part in time, and are not or cannot be put out. Raised on every
                living rank; a late rank gets the error when it takes part.
        """
        what = f"have not called {'extended' if extends else 'recovered'}"
        return self._attend(
            _Visit(
                *(what, seconds, put_out),
                left=left,
                broken=broken,
                extends=extends,
                decided=decided,
            )
        )

    def wait(
        self,
        pending: Future[Any],
        patience: float,
        seconds: float,
        put_out: bool,
        *,
        extends: bool = False,
    ) -> None:
        """Wait for a joint action of all live ranks. After ``patience`` seconds, call
        the roll, and put out missing ranks as in `call`, with the same errors. Also
        raise a CodedError if the caller has decided that the group stays. The joint
        action then remains pending, and a later call can wait for it again.
        """
        # The patience counts from the first call that waits for this action, even if
        # this rank gives up and calls again.
        if self._awaited is not pending:
            self._awaited, self._since = pending, time.monotonic()
        visit = _Visit(
            *("have not made the group with the other ranks", seconds, put_out),
            patience=patience,
            over=pending.done,
            broken=not extends,
            extends=extends,
        )
        if not self._attend(visit):
            raise CodedError(
                "another rank has restarted the call in which this rank waits: repeat the call"
            )

    def next_attempt(self) -> None:
        """Record that no rank could make the new group."""
        self._attempt += 1

    def _attend(self, visit: "_Visit") -> bool:
        """Answer the caller of the roll, or call the roll if this rank is the caller.
        Return True if the visit is over or all ranks must make a new group. Return
        False if the caller reports that no rank is dead.
        """
        self._visit = visit
        self._visits += 1
        self._answered.clear()
        self._verdicts.clear()
        self._hindered = [0] * self._size
        try:
            return self._outcome(visit)
        except BaseException:
            for caller in self._answered - self._dead:
                self._to_caller.say(caller, GivesUp())
            raise

    def _outcome(self, visit: "_Visit") -> bool:
        decided = visit.decided()
        now = time.monotonic()
        serves_at = now + _AT_FIRST * visit.seconds
        while not visit.over():
            looked, now = now, time.monotonic()
            silent: dict[int, float] = {}
            if not visit.waits or now >= serves_at:
                silent, serves_at = self._serve(), now + _SERVES
            if not visit.waits and self._regrouping >= self._attempt:
                return True
            if now - looked > _STOPPED:
                visit.until += now - looked
            visit.busy = visit.decided() > decided
            caller = next(rank for rank in self._callers if rank not in self._dead)
            if caller != visit.caller:
                visit.caller, visit.killed = caller, False
                visit.until = now + visit.patience + visit.seconds
                if caller == self._rank:
                    visit.until = self._since + visit.patience if visit.waits else now
            outcome = (
                self._lead(visit, now)
                if caller == self._rank
                else self._follow(visit, now, silent.get(caller))
            )
            if outcome is not None:
                return outcome
            time.sleep(_PAUSE)
        return True

    def _lead(self, visit: "_Visit", now: float) -> bool | None:
        """Call the roll. Return the outcome, or None if it is not decided yet."""
        if not visit.calling:
            if now < visit.until:
                return None
            self._calls += 1
            self._answers.clear()
            visit.calling, visit.calls = True, visit.calls + 1
            visit.asks = visit.silent, visit.kills
            # the time for which the caller may be silent
            self._tell(functools.partial(Call, self._calls, *visit.asks))
            visit.until = now + visit.seconds
        known = self._known(visit)
        late = _absent(known)
        if not (late or visit.waits):
            return self._decide(known)
        if now < visit.until:
            return None
        if late and visit.kills and not visit.killed:
            visit.killed, visit.until = True, now + max(visit.seconds, REPORTED)
            self._tell(
                functools.partial(Kill, self._calls, visit.silent, True, late=late)
            )
            self._kill(late)
        elif not late and visit.calls < _CALLS:
            # All ranks take part, but MPI keeps them waiting.
            visit.calling, visit.until = False, now + visit.patience
        else:
            late_ones = functools.partial(Late, visit.kills, known, self._hindered)
            self._tell(late_ones)
            words = self._in_words(known, visit.what, visit.kills)
            raise CodedError(words + _GO_ON * visit.busy)
        return None

    def _follow(self, visit: "_Visit", now: float, silent: float | None) -> bool | None:
        """Check for the caller's verdict. Return the outcome, or None if it is not
        decided yet. ``silent`` is the number of seconds for which the caller may be
        silent, or None if it has not just called.
        """
        caller = visit.caller
        verdict = self._verdicts.pop(caller, None)
        if isinstance(verdict, Stay):
            return False
        if verdict is not None:
            self._hindered = verdict.hindered
            if verdict.known[self._rank] in (State.MISSING, State.LEFT):
                so = ", which wanted to put it out" if verdict.put_out else ""
                raise CodedError(
                    f"rank {self._rank} has called this too late for the other ranks{so}, or the other ranks have called "
                    "something else: make the same call on all ranks after the same step"
                )
            raise CodedError(self._in_words(verdict.known, visit.what, verdict.put_out))
        if silent is not None:
            # During this time the caller waits for other ranks, and may kill some of
            # them.
            visit.until = now + silent
        elif now >= visit.until and visit.kills and not visit.killed:
            visit.killed, visit.until = True, now + max(visit.seconds, REPORTED)
            self._kill([caller])
        elif now >= visit.until:
            number = self._hindered[caller]
            raise CodedError(
                f"rank {caller}, which coordinates the recovery, is alive but does not answer: it is "
                "late, stuck or stopped, or calls something else. Call this again later, or end its process, "
                f"{self._processes[caller]}"
                + (f" ({_why(number)})" if number else "")
                + _GO_ON * visit.busy
            )
        return None

    def _serve(self) -> dict[int, float]:
        """Receive the messages that have arrived, and answer callers. Return how many seconds each caller may be
        silent."""
        silent = {}
        for rank in self._others():
            try:
                for answer in self._to_caller.all_heard(rank):
                    self._count(rank, answer)
                # messages that follow a verdict are for this rank's next visit
                while (
                    not self._is_answered(rank)
                    and (message := self._from_caller.heard(rank)) is not None
                ):
                    if (seconds := self._take(rank, message)) is not None:
                        silent[rank] = seconds
            except Dead:
                self._dead.add(rank)
        return silent

    def _count(self, rank: int, answer: Answer | GivesUp) -> None:
        if isinstance(answer, GivesUp):
            self._answers.pop(rank, None)
            if self._visit.calling:  # call again, for the sender's next visit
                self._from_caller.say(
                    rank, Call(self._calls, *self._visit.asks, visit=0)
                )
        elif answer.number == self._calls:
            self._answers[rank] = answer

    def _is_answered(self, caller: int) -> bool:
        """Return whether a caller has sent the verdict for this rank's visit."""
        verdict = self._verdicts.get(caller)
        return verdict is not None and verdict.visit == self._visits

    def _take(self, caller: int, message: Call | Stay | Late | Regroup) -> float | None:
        """Process a caller's message. If it is a call, return how many seconds the caller may then be
        silent."""
        if isinstance(message, Regroup):
            self._go_on(message.attempt)
        elif isinstance(message, Call):
            # An earlier verdict says only that this rank was late for an earlier call.
            self._verdicts.pop(caller, None)
            # ignore messages for an old visit
            if isinstance(message, Kill) and message.visit == self._visits:
                self._kill([rank for rank in message.late if rank != self._rank])
            visit, below = self._visit, list(self._visit.left())
            answer = self._visits, visit.broken, visit.extends, self._hindered, below
            self._to_caller.say(caller, Answer(message.number, *answer))
            self._answered.add(caller)
            return 2 * message.seconds + 1 + (REPORTED if message.put_out else 0)
        elif message.visit == self._visits or (
            isinstance(message, Late) and not message.visit
        ):
            self._verdicts[caller] = message
        return None

    def _go_on(self, attempt: int) -> None:
        """Pass on to all ranks the decision to make a new group, since its sender may die
        before it has told them all."""
        if attempt > self._regrouping:
            self._regrouping = attempt
            self._tell(lambda visit: Regroup(attempt))

    def _decide(self, known: list[int]) -> bool:
        """Decide once all live ranks take part. Return whether a new group is needed."""
        broken = any(answer.broken for answer in self._answers.values())
        if self._visit.broken or broken or State.DEAD in known:
            self._go_on(self._attempt)
            return True
        self._tell(Stay)
        return False

    def _known(self, visit: "_Visit") -> list[int]:
        """Return the state of each rank, from the answers to this rank's latest call."""
        out: list[int] = [State.MISSING] * self._size
        answers = self._answers
        for rank in visit.left():
            out[rank] = State.LEFT
        for answer in answers.values():
            self._hindered = [*map(max, self._hindered, answer.hindered)]
            for rank in answer.left:
                out[rank] = State.LEFT
        for rank, answer in answers.items():
            if answer.extends == visit.extends:
                out[rank] = State.HERE
        for rank in self._dead:
            out[rank] = State.DEAD
        out[self._rank] = State.HERE
        return out

    def _others(self) -> list[int]:
        """Return the other living ranks, as far as this rank knows."""
        gone = {self._rank, *self._dead}
        return [rank for rank in range(self._size) if rank not in gone]

    def _tell(self, message: Callable[..., Message]) -> None:
        """Send a message to all live ranks, with the visit of each."""
        for rank in self._others():
            answer = self._answers.get(rank)
            visit = 0 if answer is None else answer.visit
            self._from_caller.say(rank, message(visit=visit))

    def _kill(self, late: list[int]) -> None:
        """Kill the late ranks whose processes this rank can signal."""
        for rank in late:
            process = self._processes[rank]
            if not process.reachable(self._processes[self._rank]):
                continue
            self._hindered[rank] = process.kill()
            if not self._hindered[rank] and process.is_first():
                logger.warning(
                    "rank %d has killed %s, rank %d, which is alive but has not called recovered",
                    *(self._rank, process, rank),
                )

    def _in_words(self, known: Sequence[int], what: str, put_out: bool) -> str:
        """Return a text that names the missing ranks and the remedy."""
        late = _absent(known)
        if not late:
            return (
                "all live ranks take part, but MPI does not let them make a new group: start the job "
                "again from a checkpoint"
            )
        words = f"ranks {late} are alive, but {what}: they are late, stuck or stopped"
        if left := _ranks_in(known, State.LEFT):
            words = f"ranks {late} are alive, but {what}: ranks {left} have closed the group"
        words += ", and MPI would wait for them. "
        if put_out:
            words += f"They could not be put out: {self._why_not(known)}"
        elif left:
            words += "End their processes, or call recovered(put_out=True)"
        else:
            words += (
                "Call it again later, or with a longer timeout, or end their processes, or call "
                "recovered(put_out=True)"
            )
        dead = _ranks_in(known, State.DEAD)
        return f"{words}; ranks {dead} are dead" if dead else words

    def _why_not(self, known: Sequence[int]) -> str:
        """Return a text that says why ranks could not be put out."""
        present = [self._processes[rank] for rank in _ranks_in(known, State.HERE)]
        words = []
        for rank in _absent(known):
            process = self._processes[rank]
            if number := self._hindered[rank]:
                why = _why(number)
            elif any(map(process.reachable, present)):
                why = "it was killed, but has not ended"
            else:
                why = "no rank in this call can see it"
            words.append(f"rank {rank} ({process}): {why}")
        return ", ".join(words)


@dataclasses.dataclass
class _Visit:
    """One call of `Roll.call` or `Roll.wait` on a rank: its purpose and its state."""

    what: str  # what late ranks have not done, as text
    # seconds, put_out, left, broken, extends and decided are explained in `Roll.call`
    seconds: float
    put_out: bool
    patience: float = 0.0  # seconds after which the roll is called; 0: at once
    over: Callable[[], bool] = bool  # whether the awaited action has ended
    left: Callable[[], Iterable[int]] = tuple
    broken: bool = False
    extends: bool = False
    decided: Callable[[], int] = int
    caller: int = -1  # the rank that must call the roll now
    until: float = 0.0  # when this rank's patience ends
    # whether this rank has called the roll, and waits for answers
    calling: bool = False
    # how many seconds this rank may be silent after its call, and whether it kills late ranks
    asks: tuple[float, bool] = (0.0, False)
    calls: int = 0  # number of calls
    killed: bool = False  # whether this rank has killed the late ranks
    # whether rounds were decided during the visit: then a kill would end a working rank
    busy: bool = False

    @property
    def waits(self) -> bool:
        """Return whether this rank waits for a joint action."""
        return self.patience > 0

    @property
    def kills(self) -> bool:
        """Return whether late ranks are put out."""
        return self.put_out and not self.busy

    @property
    def silent(self) -> float:
        """Return how many seconds this rank may be silent after a call."""
        return self.seconds + self.patience


def _ranks_in(known: Sequence[int], *states: State) -> list[int]:
    """Return the ranks known to be in one of these states."""
    return [rank for rank, state in enumerate(known) if state in states]


def _absent(known: Sequence[int]) -> list[int]:
    """Return the living ranks that are missing."""
    return _ranks_in(known, State.MISSING, State.LEFT)


def _why(number: int) -> str:
    if number == errno.ESRCH:
        return "its process has ended, but MPI does not report it"
    return os.strerror(number)
