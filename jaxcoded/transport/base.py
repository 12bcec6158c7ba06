"""The interface of all transports."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jaxcoded.plan import Plan
from jaxcoded.transport import devices
from jaxcoded.transport.devices import Devices
from jaxcoded.transport.round import Round


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
        """Return the devices of the program that is traced here, if several call
        together; a ValueError if they cannot. ``token`` orders the call, if anything.
        """
        if devices.of_program() is not None:
            raise ValueError(f"without the engine {devices.REMEDY}")
        return None


class Transport(Carrier):
    """Carries the rounds of one group. What only some can do is a `jaxcoded.transport.capabilities.Capability`."""

    name: ClassVar[str]

    def check_sum(self, dtype: np.dtype) -> None:
        """Raise a TypeError unless vectors of this dtype can be summed."""

    def computes_with(self, eps: float) -> None:
        """Programs of the group compute what is summed in numbers of this eps, the coarsest that is
        said counts: what is compared may be off by as much."""

    def host_lag(self) -> int:
        """The lag now."""
        return 0

    @abc.abstractmethod
    def rounds(self) -> int:
        """Rounds that this rank has called."""

    @abc.abstractmethod
    def note_failure(self, words: str) -> None:
        """An error kept this rank from a round; the other ranks hear of it when it
        begins its next one."""

    @abc.abstractmethod
    def broadcast(self, words: str, array: np.ndarray) -> np.ndarray:
        """The root's array on every rank, in a round of its own."""

    @abc.abstractmethod
    def replanned(self, index: int, plan: Plan) -> Self:
        """The same ranks with another plan from the next round on, under another
        index. This one is then closed."""

    def enter(self) -> None:
        """All ranks have opened this."""

    @abc.abstractmethod
    def close(self, seconds: float) -> list[int]:
        """End the group's rounds. Collective; returns ranks that did not come."""

    @abc.abstractmethod
    def abandon(self, error: BaseException) -> None:
        """The group is given up after an error, without waiting for anybody."""
