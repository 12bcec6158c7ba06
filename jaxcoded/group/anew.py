"""A group without its dead ranks, made by those that live."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from mpi4py import MPI

from jaxcoded.errors import CodedError
from jaxcoded.group import recovery
from jaxcoded.group.pending import Pending
from jaxcoded.plan import Plan, Strategy
from jaxcoded.transport.agreement import gathered
from jaxcoded.transport.options import Options

if TYPE_CHECKING:
    from jaxcoded.group.group import CodedGroup


class Anew:
    """A group without the dead, as far as it is made. What has been begun is waited for again by the next call of
    `CodedGroup.recovered`, where one has given up.

    Args:
        old: the group that has lost them, of which all ranks that live have come.
    """

    def __init__(self, old: CodedGroup) -> None:
        self._old = old
        self._shrinking = Pending(lambda: recovery.shrunk(old.comm))
        self._group: CodedGroup | None = None
        self._rounds = 0  # of the old one that were decided before
        self._failure: BaseException | None = None  # here
        self._agreement: recovery.Agreement | None = None

    def make(
        self,
        rounds: int,
        strategy: Strategy | None,
        options: Options | None,
        timeout: float,
        put_out: bool,
    ) -> None:
        """Make it with the others, and wait until all agree that they have it, or that they do not.

        Args:
            rounds: of the old group, that this rank knows.
            strategy, options, timeout, put_out: as in `CodedGroup.recovered`.

        Raises:
            CodedError: they have not come to that yet.
        """
        roll, patience = self._old._roll, 2 * timeout + 1
        roll.wait(self._shrinking, patience, timeout, put_out)
        if self._agreement is None:
            self._make(rounds, strategy, options)
        assert self._agreement is not None
        roll.wait(self._agreement.pending, patience, timeout, put_out)

    def group(self, rounds: int) -> CodedGroup:
        """It, once they agree.

        Args:
            rounds: of the old group, that this rank knows now.

        Raises:
            CodedError: not all have it, or it is not what follows on those rounds.
            Exception: what has failed on all.
        """
        assert self._agreement is not None
        old, group, failure = self._old, self._group, self._failure
        if not self._agreement.pending.result(0.0):
            old._roll.next_attempt()
            if group is not None:
                group._withdraw()
            if recovery.has_died(failure):
                raise CodedError(
                    "one more rank died while the group was made anew, or did not come: this one "
                    "goes on as it is; call recovered again"
                ) from failure
            assert failure is not None
            raise failure
        assert group is not None
        if rounds != self._rounds:
            old._roll.next_attempt()
            overtaken = recovery.overtaken(old.rank)
            group._withdraw(overtaken)
            raise overtaken
        return group

    def _make(
        self, rounds: int, strategy: Strategy | None, options: Options | None
    ) -> None:
        old = self._old
        self._rounds = rounds
        smaller = self._shrinking.result(0.0)
        comms: list[MPI.Comm] = [smaller]
        try:
            with recovery.let_go(comms):
                known = True, rounds
                if old._ahead is not None and not old.alike:
                    known = False, old._ahead
                survivors, best, ahead = recovery.successors(
                    *(smaller, old.comm, old.plan.root, known),
                    0 if strategy is None else strategy.root % smaller.size,
                )
                if survivors != sorted(survivors):
                    comms.append(smaller.Split(0, survivors.index(old.rank)))
                own = comms[-1]
                assert isinstance(own, MPI.Intracomm)
                # others may not have heard of the last `replan`
                known_speeds = gathered(own, [str(it) for it in old.plan.speeds])
                speeds = list(map(Fraction, known_speeds[survivors.index(best)]))
                of_those = [speeds[rank] for rank in survivors if speeds]

                def planned(hosts: Sequence[str]) -> Plan:
                    return old._planned_anew(
                        hosts, of_those, strategy, "recovered", "that live"
                    )

                # No other is made: a death meanwhile crashes Open MPI 5.0.11 where one is being made.
                self._group = old._taking_over(
                    *(own, old._options if options is None else options),
                    {"recovered": survivors},
                    planned,
                    ahead,
                )
        except BaseException as error:  # noqa: BLE001  # the others wait for an answer
            self._failure = error
            if recovery.has_died(error) or not isinstance(error, Exception):
                smaller.Revoke()  # in which others may wait; not those who agree
        self._agreement = recovery.Agreement(smaller, self._failure)
