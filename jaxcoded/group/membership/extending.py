import dataclasses
import functools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from fractions import Fraction

from mpi4py import MPI

from jaxcoded.errors import CodedError, GroupMismatch
from jaxcoded.group.membership import joining
from jaxcoded.group.membership.change import Change, let_go
from jaxcoded.group.membership.joining import Invitation, plan_of_root, tolerant
from jaxcoded.group.membership.old_ranks import OldRanks
from jaxcoded.group.membership.pending import pending
from jaxcoded.group.membership.recovery import shrunk
from jaxcoded.group.membership.roll import Roll
from jaxcoded.group.session import Session
from jaxcoded.plan import Plan, Strategy
from jaxcoded.transport.agreement import plain
from jaxcoded.transport.options import Options

_GOES_ON = "; this group continues unchanged"


class Extending(Change):
    """Replace a group by a group with more ranks.

    Args:
        old, roll: as in `Change`; all ranks are alive.
        strategy, options, timeout: as in `CodedGroup.extended`.
        command: as in `CodedGroup.extended`. If it is empty, use the command that
            started the job's first ranks.
        rounds: the number of the group's decided rounds that this rank knows.
        drained: whether all rounds that this rank has called are over.
    """

    died = (
        "no rank has joined: a new or an old rank has died meanwhile, or other ranks have failed and report "
        f"why{_GOES_ON}: call recovered, and then extended again"
    )

    def __init__(
        self,
        old: Session,
        roll: Roll,
        ranks: int,
        strategy: Strategy | None,
        options: Options | None,
        command: Sequence[str],
        timeout: float,
        rounds: int,
        drained: bool,
    ) -> None:
        super().__init__(old, roll)
        self._ranks, self._rounds, self._strategy = ranks, rounds, strategy
        self._options = old.wanted if options is None else options
        self._command, self._timeout, self._drained = command, timeout, drained
        self._agreed = old.engine.agreed
        self._old_ranks = OldRanks(old.comm, old.hosts, old.plan.root)
        self._invitation: Invitation | None = None
        self._copying: Future[MPI.Intracomm | None] | None = None
        self._comms: list[MPI.Intracomm] = []  # communicators of old and new ranks
        self._until = 0.0  # the time by which the group must be made

    def make(self, timeout: float, put_out: bool) -> None:
        """Make the new group together with the other ranks. Raise a CodedError if not
        all ranks agree in time."""
        wait = functools.partial(
            self._roll.wait, seconds=timeout, put_out=put_out, extends=True
        )
        if self._copying is None:
            with self._failing():
                self._start()
            ready = self._failure is None
            self._copying = pending(lambda: self._copied(ready))
        wait(self._copying, patience=self._timeout + joining.LATER)
        self._agreement = self._agreement or self._agree(self._copying)
        # other ranks may wait as long as this rank
        wait(self._agreement, patience=max(self._until - time.monotonic(), 0.0) + 1.0)

    def _copied(self, ready: bool) -> MPI.Intracomm | None:
        """Return a communicator of the old ranks only. Revoking it frees waiting ranks
        and does not affect the group. Return None if some old ranks are not ready to
        connect, since no rank may begin an MPI call that other ranks do not make.
        Collective.
        """
        return tolerant(shrunk(self._old.comm)) if self._agreed(ready) else None

    def _agree(self, copying: Future[MPI.Intracomm | None]) -> Future[bool]:
        """Make the group if all ranks are ready. Return a future that tells whether all
        ranks have made it."""
        with self._failing():
            ranks = copying.result(0.0)
            if ranks is None:
                return pending(lambda: False)
            self._make(ranks)
        if self._failure is not None:
            for comm in self._comms:  # other ranks may wait in this communicator
                comm.Revoke()
        return pending(lambda: self._agreed(self._failure is None))

    def _tell(self) -> None:
        self._old_ranks.tell(self._comms[0])

    def _end(self) -> None:
        self._old_ranks.end()

    def _start(self) -> None:
        """Let one rank start the new ranks, and wait until all are present."""
        old, place, wrong = self._old, 0, None
        try:
            self._options.complete().validate()
            if not (self._strategy or old.plan.strategy).by_host:
                place = self._planned([""] * (old.plan.size + self._ranks)).root
        except Exception as error:  # noqa: BLE001  # different errors raise GroupMismatch
            wrong = error
        sizes = old.plan.size, self._ranks
        invitation = Invitation(*sizes, old.plan.root, place, self._options)
        words = (
            f"ranks={self._ranks}, rounds={self._rounds}, command={self._command}, "
            f"{plain(dataclasses.asdict(invitation))}, {old.plan.fingerprint}, {wrong}"
        )
        ranks = 0 if wrong else self._ranks
        self._old_ranks.ask(words, ranks, self._command, self._timeout)
        if not self._old_ranks.verdict.same:
            raise GroupMismatch(self._old_ranks.verdict.why_not)
        if wrong:
            raise wrong
        if why := self._old_ranks.verdict.why_not:
            raise CodedError(self._none(why))
        self._invitation = invitation

    def _make(self, ranks: MPI.Intracomm) -> None:
        """Make the group from its old ranks and the ranks that join."""
        old, invitation = self._old, self._invitation
        assert invitation is not None
        self._until = time.monotonic() + joining.opening_seconds(self._timeout)
        try:
            all_ranks = self._old_ranks.connect(ranks, invitation, self._until)
        except CodedError as error:
            raise CodedError(self._none(str(error))) from error
        self._comms.append(all_ranks)
        if not self._drained:
            raise CodedError(
                f"rank {old.rank} still lacks results of rounds that it has called, after "
                f"{self._timeout / 2:g} s: call extended again later"
            )
        with let_go(self._comms, max(self._until - time.monotonic(), 0.0)):
            own = invitation.own(all_ranks)
            self._comms.append(own)
            self._new = Session.taking_over(
                *(own, self._options, invitation.request),
                lambda hosts: plan_of_root(
                    *(own, invitation.place, lambda: self._planned(hosts))
                ),
                1 if old.ahead is None or old.alike else old.ahead + 1,
            )
        if why := self._old_ranks.ready(self._ranks, self._until):
            raise CodedError(self._none(why))

    def _planned(self, hosts: Sequence[str]) -> Plan:
        speeds = list(self._old.plan.speeds)
        if speeds:  # the speeds of new ranks are unknown
            speeds += [sum(speeds, Fraction(0)) / len(speeds)] * self._ranks
        return self._old.plan_for(
            hosts, speeds, self._strategy, "extended", "that the group would have"
        )

    def _none(self, why: str) -> str:
        return f"none of the {self._ranks} new ranks has joined: {why}{_GOES_ON}"
