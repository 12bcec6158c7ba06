"""Abilities of some transports, in addition to carrying rounds."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jaxcoded.errors import GroupClosed
from jaxcoded.transport.round import Round

# A round with shared work: its number, the call's description, and the blocks that each
# rank has computed, in order.
Dealt = tuple[int, str, list[list[int]]]


class Capability(abc.ABC):
    """An ability of a transport: a subclass of this is among the transport's bases, and
    asks the engine.

    Attributes:
        needed: the calls that need it, as text.
    """

    needed: ClassVar[str]

    @abc.abstractmethod
    def _ask(self, name: str, *args: Any) -> Any:
        """Return the answer of a function of the engine about this group."""

    @classmethod
    def of(cls, transport: object) -> Self:
        """Return the transport if it has this capability; otherwise raise a
        NotImplementedError.
        """
        if isinstance(transport, cls):
            return transport
        raise NotImplementedError(f'{cls.needed} a group with transport="engine"')


class HostRounds(Capability):
    needed = "rounds on numpy arrays need"

    @abc.abstractmethod
    def host_round(
        self,
        round: Round,
        vectors: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        skip: bool = False,
        erasures: np.ndarray | None = None,
    ) -> None:
        """Do a round on NumPy arrays, without XLA; write the ``results``."""


class SharedWork(Capability):
    needed = "shared work needs"

    @abc.abstractmethod
    def take_block(
        self, words: str, *, first: bool, costs: Sequence[float] = ()
    ) -> int | None:
        """Return the next block of a round whose vectors are summed in the next round;
        ``None`` once all are computed: then call `end_of_blocks`. All ranks must agree
        on ``words``. ``costs``: the cost of each block, > 0, about 1; none: all equal.
        """

    @abc.abstractmethod
    def end_of_blocks(self) -> None:
        """End a round of blocks."""

    def leave_blocks(self) -> None:
        """Take no more blocks: others compute those of this rank."""
        self._ask("leave_share")

    @abc.abstractmethod
    def record(self) -> Callable[[], Dealt | None]:
        """Return, on the root, a function that waits for the next round with shared
        work, and returns which rank computed which blocks; ``None`` after the last.
        """

    @abc.abstractmethod
    def replay(self, rounds: Sequence[Dealt]) -> None:
        """On the root, divide work from now on as in these rounds. Other rounds are
        errors.
        """


class Reports(Capability):
    needed = "telemetry needs"

    def telemetry(self) -> dict[str, list[Any]]:
        """Return the records of the latest rounds, by name."""
        return self._ask("telemetry")

    @abc.abstractmethod
    def reports(self) -> Callable[[], tuple[Any, ...] | None]:
        """Return a function that waits for the next round and returns its fields;
        ``None`` after the last.
        """

    def statistics(self) -> dict[str, Any]:
        """Return the transport's statistics, by name."""
        names = (
            "history_bytes",
            "memory_bytes",
            "fetched_bytes",
            "formed_bytes",
            "compared_rounds",
        )
        return {name: self._ask(name) for name in names}


class Snapshots(Capability):
    needed = "resync needs"

    def keep_state(self, state: np.ndarray) -> None:
        """Keep a copy of these bytes as this rank's snapshot."""
        self._ask("keep_state", state.ctypes.data, state.nbytes)

    def fetch_state(self, seconds: float) -> tuple[int, bytes]:
        """Return the round of the newest snapshot of the nearest ancestor, 0 if none,
        and its bytes.
        """
        round_ = self._ask("fetch_state", seconds)
        return round_, self._ask("state") if round_ else b""

    def resume(self) -> None:
        """Continue at the round of the fetched snapshot."""
        self._ask("resume")


class LosesRanks(Capability):
    needed = "ranks that die or join need"

    def departed(self) -> dict[int, str]:
        """Return the ranks below this one that make no more calls, each with the error that ended its program, or
        an empty text."""
        return dict(self._ask("departed"))

    def drained(self, seconds: float) -> bool:
        """Return whether all rounds that this rank has called are over within
        ``seconds``.
        """
        return self._ask("drained", seconds)

    def rounds_of_all(self) -> int:
        """Return how many rounds of this rank are over, before any that failed on it
        alone, without the root.
        """
        return self._ask("rounds_of_all")

    def decided(self) -> int:
        """Return the latest round that is over, as far as this rank knows."""
        return self._ask("decided")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In this block ask the ranks above which rounds are decided, even if this rank
        calls nothing and its parent is silent.
        """
        self._ask("watch", True)
        try:
            yield
        finally:
            with contextlib.suppress(GroupClosed):  # it may be closed by now
                self._ask("watch", False)

    @abc.abstractmethod
    def agreed(self, mine: bool) -> bool:
        """Return whether ``mine`` holds on all ranks and all of them live; the same on
        all. Collective.
        """

    def expect_state(self) -> None:
        """Make sums an error on this rank until a broadcast has come."""
        self._ask("expect_state")

    def alike(self) -> bool:
        """Return whether no state is expected, or it has come."""
        return self._ask("alike")
