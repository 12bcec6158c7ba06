import contextlib
import threading
from collections.abc import Iterator, Sequence

from jaxcoded import _require
from jaxcoded.errors import CodedError
from jaxcoded.group.membership import joining, old_ranks
from jaxcoded.group.membership.extending import Extending
from jaxcoded.group.membership.recovery import Recovering
from jaxcoded.group.membership.roll import Roll
from jaxcoded.group.session import Session
from jaxcoded.plan import Strategy
from jaxcoded.plan.strategy import check_strategy
from jaxcoded.transport import engine, primitive
from jaxcoded.transport.engine import Engine
from jaxcoded.transport.options import Options


class Membership:
    """The ranks of a group, which may leave and join. Only one thread at a time changes
    the ranks.

    Attributes:
        session: the group's session; a `replan` replaces it by another session of the
            same ranks.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._roll = Roll(session.comm, session.processes, session.plan.root)
        # the change of the session that is in progress, if any
        self._change: Recovering | Extending | None = None
        self._changes = threading.Lock()

    def recovered(
        self,
        strategy: Strategy | None,
        options: Options | None,
        timeout: float,
        put_out: bool,
    ) -> Session:
        """See `CodedGroup.recovered`. Return the same session if it continues unchanged."""
        timeout = min(_require.not_negative("timeout", timeout), joining.LONGEST)
        _require.boolean("put_out", put_out)
        if strategy is not None:
            check_strategy(strategy)
        with self._changing("recovered") as transport:
            primitive.effects_barrier()
            transport.drained(timeout / 2)
            rounds = transport.rounds_of_all()
            if isinstance(self._change, Extending):
                self._change.make(timeout, put_out)
            else:
                if self._change is None:
                    if not self._is_to_change(transport, rounds, timeout, put_out):
                        return self.session
                    self._change = Recovering(self.session, self._roll)
                self._change.make(rounds, strategy, options, timeout, put_out)
            return self._changed(self._change, rounds)

    def extended(
        self,
        ranks: int,
        strategy: Strategy | None,
        options: Options | None,
        command: Sequence[str] | None,
        timeout: float,
    ) -> Session:
        """See `CodedGroup.extended`."""
        ranks = _require.integer("ranks", ranks, 1, joining.MOST)
        timeout = min(_require.not_negative("timeout", timeout), joining.LONGEST)
        if strategy is not None:
            check_strategy(strategy)
        if not (options is None or isinstance(options, Options)):
            raise TypeError(
                f"options must be jaxcoded.Options, got {_require.kind(options)}"
            )
        words = old_ranks.checked(command)
        with self._changing("extended") as transport:
            if why := joining.why_not(len(set(self.session.hosts))):
                raise ValueError(why)
            primitive.effects_barrier()
            drained = transport.drained(timeout / 2)
            rounds = transport.rounds_of_all()
            if not isinstance(self._change, Extending):
                if self._change is not None or self._is_to_change(
                    transport, rounds, timeout, extends=True
                ):
                    raise CodedError(
                        "some ranks of the group are dead, or got an error in a round in which other ranks got a sum: call "
                        "recovered first, and then extended"
                    )
                arguments = ranks, strategy, options, words, timeout, rounds, drained
                self._change = Extending(self.session, self._roll, *arguments)
            self._change.make(timeout, put_out=False)
            return self._changed(self._change, rounds)

    def _is_to_change(
        self,
        transport: Engine,
        rounds: int,
        timeout: float,
        put_out: bool = False,
        *,
        extends: bool = False,
    ) -> bool:
        """Return whether the group must be made again: see `Roll.call`."""
        return self._roll.call(
            *(timeout, put_out, transport.departed),
            # a round that failed on this rank may have succeeded on other ranks
            broken=rounds < self.session.transport.rounds(),
            extends=extends,
            decided=transport.decided,
        )

    def _changed(self, change: Recovering | Extending, rounds: int) -> Session:
        self._change = None
        return change.session(rounds)

    @contextlib.contextmanager
    def _changing(self, call: str) -> Iterator[Engine]:
        """Let only this thread change the ranks of the group in this block. Raise a
        ValueError if the ranks cannot change, and a CodedError if another thread is
        changing them.
        """
        transport = self.session.transport
        if not (isinstance(transport, Engine) and engine.fault_tolerant()):
            raise ValueError(
                f"{call} needs the engine, and an MPI that survives the death of a rank: start the job "
                "with jaxcoded run --ft, which needs Open MPI 5"
            )
        if not self._changes.acquire(blocking=False):
            raise CodedError("another thread of this rank is in recovered or extended")
        try:
            with transport.watching():
                yield transport
        finally:
            self._changes.release()
