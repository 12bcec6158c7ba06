"""What a group asks of the transport that carries its rounds."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxcoded.plan import Plan
from jaxcoded.transport import devices
from jaxcoded.transport.devices import Devices
from jaxcoded.transport.round import Round

# A round whose work is shared: its number, the call in words, and the blocks that each rank has
# computed, in order.
Dealt = tuple[int, str, list[list[int]]]


class Carrier(abc.ABC):
    """What a round in a compiled program finds by the index of its group.

    Attributes:
        index: never used again.
        plan: of the ranks.
        rank: of this process.
        can_lag: whether a rank can be behind: then its rounds may be decided before it calls them.
        takes_tokens: whether a token can order rounds in the effect's place.
        takes_parts: whether the parts of a message can go ahead of the others.
        most_started: how many rounds can be started before the first is finished. 0: a started
            round would not go on while its rank computes.
    """

    index: int
    plan: Plan
    rank: int
    can_lag = False
    takes_tokens = False
    takes_parts = False
    most_started = 0

    @abc.abstractmethod
    def lower(
        self, ctx: Any, operands: Sequence[Any], round: Round, platform: str | None
    ) -> Any:
        """Lower a round for a platform, as a rule of JAX does."""

    def devices(self, token: Any) -> Devices | None:
        """The devices of the program that is traced here, if several call together.

        Args:
            token: what orders the call, if anything.

        Raises:
            ValueError: they cannot.
        """
        if devices.of_program() is not None:
            raise ValueError(f"without the engine {devices.REMEDY}")
        return None


class Transport(Carrier):
    """How the rounds of one group are carried."""

    def check_sum(self, dtype: np.dtype) -> None:
        """Raise a TypeError unless vectors of this dtype can be summed."""

    @abc.abstractmethod
    def host_lag(self) -> int:
        """The lag now."""

    @abc.abstractmethod
    def rounds(self) -> int:
        """Rounds that this rank has called."""

    @abc.abstractmethod
    def note_failure(self, words: str) -> None:
        """An error kept this rank from a round; the other ranks hear of it when it
        begins its next one."""

    @abc.abstractmethod
    def close(self, seconds: float) -> list[int]:
        """End the group's rounds. Collective; returns ranks that did not come."""

    def enter(self) -> None:
        """All ranks have opened this."""

    def abandon(self, error: BaseException) -> None:
        """The group is given up after an error, without waiting for anybody."""

    def host_round(
        self,
        round: Round,
        vectors: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        skip: bool = False,
        erasures: np.ndarray | None = None,
    ) -> None:
        """A round on numpy arrays, without XLA: ``results`` are written."""
        raise NotImplementedError(
            'rounds on numpy arrays need a group with transport="engine"'
        )

    def take_block(self, words: str, *, first: bool) -> int | None:
        """The next block of a round whose vectors follow in the next one; ``None`` once
        all are computed, and `end_of_blocks` is to be called.

        Args:
            words: what all ranks must agree on.
            first: whether it is the round's first.
        """
        raise NotImplementedError('shared work needs a group with transport="engine"')

    def end_of_blocks(self) -> None:
        """End such a round."""
        raise NotImplementedError('shared work needs a group with transport="engine"')

    def leave_blocks(self) -> None:
        """Take no more of them: others compute what this rank had."""

    def record(self) -> Callable[[], Dealt | None]:
        """At the root, a function that waits for the next round whose work is shared, and
        tells who has computed what; ``None`` after the last."""
        raise NotImplementedError('shared work needs a group with transport="engine"')

    def replay(self, rounds: Sequence[Dealt]) -> None:
        """At the root: from now on work is divided as it was in these rounds. Others are
        errors."""
        raise NotImplementedError('shared work needs a group with transport="engine"')

    @abc.abstractmethod
    def broadcast(self, words: str, array: np.ndarray) -> np.ndarray:
        """The root's array on every rank, in a round of its own."""

    def computes_with(self, eps: float) -> None:
        """Programs of the group compute what is summed in numbers of this eps, the coarsest that is
        said counts: what is compared may be off by as much."""

    @abc.abstractmethod
    def replanned(self, index: int, plan: Plan) -> "Transport":
        """The same ranks with another plan from the next round on, under another
        index. This one is then closed."""

    def telemetry(self) -> dict[str, list[Any]]:
        """What was remembered of the latest rounds, by name."""
        raise NotImplementedError('telemetry needs a group with transport="engine"')

    def reports(self) -> Callable[[], tuple[Any, ...] | None]:
        """A function that waits for the next round and gives its fields; ``None`` after
        the last."""
        raise NotImplementedError('telemetry needs a group with transport="engine"')

    def keep_state(self, state: np.ndarray) -> None:
        """Keep a copy of these bytes as this rank's snapshot."""

    def fetch_state(self, seconds: float) -> tuple[int, bytes]:
        """The round of the newest snapshot of the nearest ancestor, 0 if there is
        none, and its bytes."""
        raise NotImplementedError('resync needs a group with transport="engine"')

    def resume(self) -> None:
        """Continue at the round of the fetched snapshot."""

    def statistics(self) -> dict[str, Any]:
        """Figures of the transport, by name."""
        return {}
