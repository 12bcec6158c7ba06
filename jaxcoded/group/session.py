import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Self

from mpi4py import MPI

from jaxcoded import _jax_compat, _require
from jaxcoded.errors import CodedError, GroupClosed
from jaxcoded.group import alone, opening
from jaxcoded.group.process import Process
from jaxcoded.group.record import Record
from jaxcoded.plan import Plan, Strategy, make_plan
from jaxcoded.transport import build, engine, registry
from jaxcoded.transport.agreement import check_communicator, gathered
from jaxcoded.transport.engine import Engine
from jaxcoded.transport.options import Options

# The options that must be the same on all ranks.
_COMMON = ("piece_bytes", "sections_from", "deadline", "on_deadline", "check")


class Choice(NamedTuple):
    """The plan that `CodedGroup.auto` has chosen. It is the same on all ranks."""

    plan: Plan  # the group's plan
    piece: int | None  # bytes in each piece of a message; ``None``: the default
    # Messages with at least this many bytes form sums in sections; ``None``: the default.
    sections_from: int | None
    words: str  # the reason for the choice


_MOST_KEPT = 16


class _Failing(NamedTuple):
    """The context manager that `Session.failing` returns. It is a class because a
    generator would take as long as a short round."""

    session: "Session"
    call: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, Exception) and not _jax_compat.runs_again():
            failure = f" after {_require.kind(error)} in {self.call}"
            # The next round carries the failure, and pending rounds come before it.
            _jax_compat.effects_barrier()
            self.session.transport.note_failure(failure)


class Session:
    """The plan, transport and options with which a group runs. Collective: all ranks of
    the group's communicator make the session, or no rank does. It has the arguments and
    errors of `CodedGroup`, and these arguments:

    Args:
        request: the remaining arguments of the call that makes the group, by name.
        planner: a function that makes this rank's plan from a list of hosts, one for
            each rank.
        chooser: a function that chooses another plan for the final options, once all
            ranks have the first plan.
        ahead: if ranks have different amounts of results, how many of these different
            amounts are smaller than this rank's amount. ``None`` if all ranks have the
            same results.

    Attributes:
        wanted: the options of a group that replaces this group, unless other options
            are given.
        planned: the reason for the chosen plan, as text.
        words: text on the plan in the description of coded calls. It differs between
            ranks if some ranks have missed a replan.
        spreads: whether `jaxcoded.spread` was called; otherwise reverse-mode
            differentiation of a sum raises an error.
        divisors: the first few divisors of sums outside ``jit``.
        blocks: whether the program loops over blocks. The sums of such a loop need no
            weights.
        hands_on: whether the program has called or compiled a `tree_bcast`, which sends
            the root's state to the other ranks. Only the engine knows whether the state
            was sent.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        transport: str,
        options: Options | None,
        request: dict[str, Any],
        planner: Callable[[Sequence[str]], Plan],
        chooser: Callable[[MPI.Intracomm, str, Options], Choice] | None = None,
        record: Record | None = None,
        ahead: int | None = None,
    ) -> None:
        self.comm, self.ahead = comm, ahead
        self.record = record or Record(None, None)
        self.planned = self.words = ""
        self.hands_on = self.spreads = self.blocks = False
        self.divisors: set[float] = set()
        self._kept: dict[Any, Any] = {}
        given = Options() if options is None else options
        wanted = (given if isinstance(given, Options) else Options()).complete()

        def checked(hosts: Sequence[str]) -> Plan:
            if not isinstance(given, Options):
                raise TypeError(
                    f"options must be jaxcoded.Options, got {_require.kind(given)}"
                )
            wanted.validate()
            plan = planner(hosts)
            self.record.check(plan, wanted.waits)
            return plan

        request = request | self.record.request
        request |= {name: getattr(wanted, name) for name in _COMMON}
        try:
            other_jax = build.check(comm)
            self.processes = [Process(*args) for args in gathered(comm, Process.own())]
            self.hosts = [process.host for process in self.processes]
            self.plan = opening.agreed_plan(
                comm, transport, request, lambda: checked(self.hosts)
            )
            if chooser is not None:
                choice = chooser(comm, transport, wanted)
                self.plan, self.planned = choice.plan, choice.words
                wanted = dataclasses.replace(wanted, piece_bytes=choice.piece)
                if choice.sections_from is not None:
                    wanted = dataclasses.replace(
                        wanted, sections_from=choice.sections_from
                    )
            self.record.open(comm, self.plan)
            self.transport, self.options, more = opening.agreed_transport(
                *(comm, registry.new_index(), self.plan),
                *(transport, wanted, given.check is not None),
            )
        except Exception as error:
            self.record.close()
            if opening.has_died(error) and engine.fault_tolerant():
                comm.Revoke()  # free the ranks that wait in this communicator
            raise
        self.record.follow(self.transport)
        self.wanted = dataclasses.replace(self.options, check=given.check)
        self.warnings = [*filter(None, [other_jax, *more])]

    @classmethod
    def opened(cls, comm: MPI.Intracomm, *arguments: Any, **options: Any) -> Self:
        """Make a session on a duplicate of ``comm``, and begin to work. Return the
        session. Collective."""
        check_communicator(comm)
        own = opening.communicator_of_its_own(comm)
        try:
            session = cls(own, *arguments, **options)
        except Exception as error:
            # Do not free a communicator in which other ranks wait; see `agreed`.
            if not (opening.has_died(error) and engine.fault_tolerant()):
                own.Free()
            raise
        session.transport.enter()
        if warning := alone.warning():
            session.warnings.insert(0, warning)
        return session

    @classmethod
    def taking_over(
        cls,
        comm: MPI.Intracomm,
        options: Options,
        request: dict[str, Any],
        planner: Callable[[Sequence[str]], Plan],
        ahead: int | None,
    ) -> Self:
        """Return a session that replaces another session as soon as all ranks agree
        that they have the new session."""
        session = cls(comm, "engine", options, request, planner, ahead=ahead)
        if ahead is not None:
            session.engine.expect_state()
        return session

    @property
    def index(self) -> int:
        """Return the index by which compiled code finds the transport."""
        return self.transport.index

    @property
    def engine(self) -> Engine:
        return Engine.of(self.transport, "ranks that die or join need")

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def closed(self) -> bool:
        return not registry.is_open(self.index)

    @property
    def alike(self) -> bool:
        """See `CodedGroup.alike`."""
        return self.ahead is None or self.engine.alike()

    def kept(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the cached value of this key if it is among the latest 16 values.
        Otherwise make the value."""
        try:
            made = self._kept.pop(key, None)
        except TypeError:  # the key is not hashable
            return make()
        made = self._kept[key] = made or make()
        if len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return made

    def check_alike(self) -> None:
        """Raise a CodedError unless all ranks have received the same sums. Without this
        check, ranks could continue with different values.
        """
        if not (self.hands_on or self.alike):
            raise CodedError(
                "ranks have joined that have no state yet, or the root died, and only some ranks got the sum of its last "
                "round: first send the root's state to all ranks, as params = jaxcoded.tree_bcast(params, group)"
            )

    def failing(self, call: str) -> "_Failing":
        """Record an error in this rank's arguments, which prevents a round on this rank.

        Other ranks may be in that round already. They get the error when this rank
        begins its next round. If all ranks had errors, no rank gets the others' errors.
        While JAX repeats a computation to locate a NaN, no error is recorded, because
        the round was already called the first time.
        """
        return _Failing(self, call)

    def replanned(self, strategy: Strategy) -> Self:
        """Return a session that continues with another strategy, and close this
        session."""
        other = copy.copy(self)
        other.plan = dataclasses.replace(self.plan, strategy=strategy)
        other.words = f", replanned ({other.plan.fingerprint[:8]})"
        other.transport = self.transport.replanned(registry.new_index(), other.plan)
        return other

    def plan_for(
        self,
        hosts: Sequence[str],
        speeds: Sequence[Fraction],
        strategy: Strategy | None,
        call: str,
        whose: str,
    ) -> Plan:
        """Return the plan of a group that replaces this group and has other ranks, or
        raise a ValueError.

        Args:
            speeds: the speed of each rank; empty if all speeds count as equal.
            strategy: a strategy in place of this session's strategy, if given.
            call, whose: words for the call and for the ranks, for errors.
        """
        if self.record.request:
            raise ValueError(
                "a record covers all ranks of its group: a group with record or replay cannot continue "
                "with other ranks"
            )
        size = len(hosts)
        try:
            other = strategy or self.plan.strategy.for_others(speeds)
            return make_plan(size, other, hosts=hosts)
        except ValueError as error:
            raise ValueError(
                f"no plan for the {size} ranks {whose}: {error}. Or give a strategy: "
                f"{call}(strategy=jaxcoded.Shared()) fits any number of ranks; "
                "this group continues unchanged"
            ) from None

    def close(self, timeout: float) -> str:
        """Close the session, see `CodedGroup.close`; return a warning or an empty text."""
        begun = time.monotonic()
        try:
            absent = self.transport.close(timeout)
        except GroupClosed:
            return ""  # another thread has closed the session meanwhile
        finally:
            registry.remove(self.index)
        self.record.close()
        if not absent:
            self.comm.Free()
            return ""
        waited = time.monotonic() - begun >= timeout
        late = f"did not close it within {timeout:g} s"
        return (
            f"rank {self.rank} closed the group without ranks {absent} and the ranks below them: they are dead, or "
            f"{late if waited else 'a rank below has given them up'}"
        )

    def withdraw(self, error: BaseException | None = None) -> None:
        """Leave the session, either because some ranks do not have it, or because of an
        ``error`` on this rank."""
        registry.remove(self.index)
        if error is None:
            self.transport.close(0.0)
        else:
            self.transport.abandon(error)
