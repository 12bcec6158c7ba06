"""Abilities of some transports, in addition to carrying rounds."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jaxcoded.errors import GroupClosed
from jaxcoded.transport.round import Round

# A round whose work is shared: its number, the call in words, and the blocks that each rank has
# computed, in order.
Dealt = tuple[int, str, list[list[int]]]


class Capability(abc.ABC):
    """A transport that can do something has a subclass of this among its bases, and asks the engine.

    Attributes:
        needed: what needs it, in words.
    """

    needed: ClassVar[str]

    @abc.abstractmethod
    def _ask(self, name: str, *args: Any) -> Any:
        """Return the answer of a function of the engine about this group."""

    @classmethod
    def of(cls, transport: object) -> Self:
        """Return the transport, which has this capability; a NotImplementedError if it
        has not."""
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
        """A round on numpy arrays, without XLA: ``results`` are written."""


class SharedWork(Capability):
    needed = "shared work needs"

    @abc.abstractmethod
    def take_block(
        self, words: str, *, first: bool, costs: Sequence[float] = ()
    ) -> int | None:
        """Return the next block of a round whose vectors follow in the next one;
        ``None`` once all are computed, and `end_of_blocks` is to be called. All ranks
        must agree on ``words``. ``costs``: of each block, > 0, about 1; none: all the same."""

    @abc.abstractmethod
    def end_of_blocks(self) -> None:
        """End such a round."""

    def leave_blocks(self) -> None:
        """Take no more of them: others compute what this rank had."""
        self._ask("leave_share")

    @abc.abstractmethod
    def record(self) -> Callable[[], Dealt | None]:
        """At the root, a function that waits for the next round whose work is shared, and
        tells who has computed what; ``None`` after the last."""

    @abc.abstractmethod
    def replay(self, rounds: Sequence[Dealt]) -> None:
        """At the root: from now on work is divided as it was in these rounds. Others are
        errors."""


class Reports(Capability):
    needed = "telemetry needs"

    def telemetry(self) -> dict[str, list[Any]]:
        """Return the records of the latest rounds, by name."""
        return self._ask("telemetry")

    @abc.abstractmethod
    def reports(self) -> Callable[[], tuple[Any, ...] | None]:
        """A function that waits for the next round and gives its fields; ``None`` after
        the last."""

    def statistics(self) -> dict[str, Any]:
        """Figures of the transport, by name."""
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
        """The round of the newest snapshot of the nearest ancestor, 0 if there is
        none, and its bytes."""
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
        """Whether all rounds that this rank has called are over, after so many seconds."""
        return self._ask("drained", seconds)

    def rounds_of_all(self) -> int:
        """How many rounds of this rank are over, before any that it alone saw fail, without the
        root."""
        return self._ask("rounds_of_all")

    def decided(self) -> int:
        """The latest round that is over, as far as this rank knows."""
        return self._ask("decided")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, ranks above are asked what is decided, also where this one calls nothing and its parent
        says nothing."""
        self._ask("watch", True)
        try:
            yield
        finally:
            with contextlib.suppress(GroupClosed):  # it may be, by now
                self._ask("watch", False)

    @abc.abstractmethod
    def agreed(self, mine: bool) -> bool:
        """Return whether something is so on all ranks, and all of them live; the same on all.
        Collective."""

    def expect_state(self) -> None:
        """Make sums an error on this rank until a broadcast has come."""
        self._ask("expect_state")

    def alike(self) -> bool:
        """Whether none is expected, or it has come."""
        return self._ask("alike")
