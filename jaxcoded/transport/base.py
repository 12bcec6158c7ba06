"""The interface of all transports."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jaxcoded.plan import Plan
from jaxcoded.transport import devices
from jaxcoded.transport.devices import Devices
from jaxcoded.transport.round import Round


class Carrier(abc.ABC):
    """The object that carries out rounds. A compiled program finds it by its group's
    index."""

    index: int  # the index of the group, which no later group gets
    plan: Plan  # the ranks' plan
    rank: int  # the rank of this process
    can_lag = False  # whether rounds may be decided before a rank calls them
    takes_tokens = False  # whether a token can order rounds instead of JAX's effect
    takes_parts = False  # whether parts of a message can be sent ahead of the others
    # How many rounds can be started before the first of them is finished. 0 means that a started round would not
    # progress while its rank computes.
    most_started = 0
    # whether a sum of wrong examples raises an error; otherwise its result is NaN
    refuses_miscounts = False
    compares = False  # whether parents compare their children's messages

    @abc.abstractmethod
    def lower(
        self, ctx: Any, operands: Sequence[Any], round: Round, platform: str | None
    ) -> Any:
        """Lower a round for a platform, as a JAX lowering rule does."""

    def devices(self, token: Any) -> Devices | None:
        """Return the devices of the traced program if several devices make the call
        together. Raise a ValueError if they cannot. ``token`` orders the call, if
        given.
        """
        if devices.of_program() is not None:
            raise ValueError(f"without the engine {devices.REMEDY}")
        return None


class Transport(Carrier):
    """A transport carries the rounds of one group."""

    name: ClassVar[str]

    def computes_with(self, eps: Callable[[], float]) -> None:
        """Record the precision of one of the group's programs, as a machine epsilon.
        The largest recorded epsilon determines how much messages may differ in a check.
        """

    def host_lag(self) -> int:
        """Return the current lag; see `CodedGroup.lag`."""
        return 0

    @abc.abstractmethod
    def rounds(self) -> int:
        """Return the number of rounds that this rank has called."""

    @abc.abstractmethod
    def note_failure(self, words: str) -> None:
        """Record that an error prevented a round on this rank. The other ranks get the
        error when this rank begins its next round.
        """

    @abc.abstractmethod
    def broadcast(self, words: str, array: np.ndarray) -> np.ndarray:
        """Return the root's array on every rank, sent in a separate round."""

    @abc.abstractmethod
    def replanned(self, index: int, plan: Plan) -> Self:
        """Return a transport that continues with another plan and index, and close this
        transport."""

    def enter(self) -> None:
        """Begin to work. All ranks must have opened this transport."""

    @abc.abstractmethod
    def close(self, seconds: float) -> list[int]:
        """End the group's rounds. Return the ranks that did not take part. Collective.
        The session removes the group from the registry, also after `abandon`."""

    def abandon(self, error: BaseException) -> None:
        """Leave the group after an error, without waiting for other ranks."""
