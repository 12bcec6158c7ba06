"""What some transports can do, besides carrying rounds."""

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jaxcoded.transport.round import Round

# A round whose work is shared: its number, the call in words, and the blocks that each rank has
# computed, in order.
Dealt = tuple[int, str, list[list[int]]]


class Capability(abc.ABC):
    """A transport that can do something has a subclass of this among its bases.

    Attributes:
        needed: what needs it, in words.
    """

    needed: ClassVar[str]

    @classmethod
    def of(cls, transport: object) -> Self:
        """The transport, which has this capability.

        Raises:
            NotImplementedError: it has not.
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
        """A round on numpy arrays, without XLA: ``results`` are written."""


class SharedWork(Capability):
    needed = "shared work needs"

    @abc.abstractmethod
    def take_block(self, words: str, *, first: bool) -> int | None:
        """Return the next block of a round whose vectors follow in the next one;
        ``None`` once all are computed, and `end_of_blocks` is to be called. All ranks
        must agree on ``words``."""

    @abc.abstractmethod
    def end_of_blocks(self) -> None:
        """End such a round."""

    @abc.abstractmethod
    def leave_blocks(self) -> None:
        """Take no more of them: others compute what this rank had."""

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

    @abc.abstractmethod
    def telemetry(self) -> dict[str, list[Any]]:
        """What was remembered of the latest rounds, by name."""

    @abc.abstractmethod
    def reports(self) -> Callable[[], tuple[Any, ...] | None]:
        """A function that waits for the next round and gives its fields; ``None`` after
        the last."""

    @abc.abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Figures of the transport, by name."""


class Snapshots(Capability):
    needed = "resync needs"

    @abc.abstractmethod
    def keep_state(self, state: np.ndarray) -> None:
        """Keep a copy of these bytes as this rank's snapshot."""

    @abc.abstractmethod
    def fetch_state(self, seconds: float) -> tuple[int, bytes]:
        """The round of the newest snapshot of the nearest ancestor, 0 if there is
        none, and its bytes."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Continue at the round of the fetched snapshot."""


class LosesRanks(Capability):
    needed = "ranks that die or join need"

    @abc.abstractmethod
    def departed(self) -> dict[int, str]:
        """Of the ranks below this one that make no more calls the error that ended their program,
        in words, or an empty text."""

    @abc.abstractmethod
    def drained(self, seconds: float) -> bool:
        """Whether all rounds that this rank has called are over, after so many seconds."""

    @abc.abstractmethod
    def rounds_of_all(self) -> int:
        """How many rounds of this rank are over, before any that it alone saw fail, without the
        root."""

    @abc.abstractmethod
    def decided(self) -> int:
        """The latest round that is over, as far as this rank knows."""

    @abc.abstractmethod
    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Inside, ranks above are asked what is decided, also where this one calls nothing and its parent
        says nothing."""

    @abc.abstractmethod
    def agreed(self, mine: bool) -> bool:
        """Return whether something is so on all ranks, and all of them live; the same on all.
        Collective."""

    @abc.abstractmethod
    def expect_state(self) -> None:
        """Make sums an error on this rank until a broadcast has come."""

    @abc.abstractmethod
    def alike(self) -> bool:
        """Whether none is expected, or it has come."""
