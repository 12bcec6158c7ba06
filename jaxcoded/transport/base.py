"""What a group asks of the transport that carries its rounds."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcoded.plan import Plan
from jaxcoded.transport.packing import Apart

# In the words of a round that carries several payloads, before the list of their numbers.
BATCHED = ", batched "


@dataclasses.dataclass(frozen=True)
class Trip:
    """What happens in a round.

    Attributes:
        words: collective, shapes and dtypes; equal on ranks that call the same.
        up: the ranks' vectors are summed; otherwise the root's are told.
        down: every rank gets the result; otherwise the root alone, zeros elsewhere.
        apart: in a group that looks for mistakes, what is not compared with the rest.
        examples: what the first number of the sum should be, as far as it is known, and
            the share of it that rounding explains. Transports may look at it: a round
            in which it is another one is an error on all ranks then.
    """

    words: str
    up: bool = True
    down: bool = True
    apart: tuple[Apart, ...] = ()
    examples: tuple[float, float] | None = None


class Transport(abc.ABC):
    """How the rounds of one group are carried."""

    # Whether a rank can be behind: then its rounds may be decided before it calls them.
    can_lag = False
    # Whether a token can order rounds in the effect's place.
    takes_tokens = False
    # Whether the parts of a message can go ahead of the others.
    takes_parts = False
    # How many rounds can be started before the first is finished. None: a started round
    # would not go on while its rank computes.
    most_started = 0

    @abc.abstractmethod
    def carry(
        self,
        trip: Trip,
        vectors: Sequence[jax.Array],
        *,
        erased: jax.Array | None = None,
        skipped: jax.Array | None = None,
        token: jax.Array | None = None,
        begun: bool = False,
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        """Trace a round.

        Args:
            trip: what happens.
            vectors: this rank's, ``(..., length)``.
            erased: bool ``(size,)``, ranks to leave out.
            skipped: int32, not 0 where this rank has nothing to contribute.
            token: int32 that orders the round; otherwise the effect does.
            begun: whether `begin` had all parts of the vectors but the last, which
                these are.

        Returns:
            The resulting vectors, and the next token.
        """

    def begin(
        self,
        trip: Trip,
        vectors: Sequence[jax.Array],
        number: int,
        *,
        skipped: jax.Array | None = None,
        token: jax.Array | None = None,
    ) -> jax.Array | None:
        """Trace the sending of one part of a round's vectors, ahead of the round
        itself. Does not wait.

        Args:
            trip: of the round.
            vectors: ``(length / parts,)``, the next part of each of them.
            number: of that part, from 0.
            skipped, token: as for `carry`. What is skipped later is not sent.

        Returns:
            The next token.
        """
        raise NotImplementedError

    def start(
        self,
        trip: Trip,
        vectors: Sequence[jax.Array],
        *,
        erased: jax.Array | None = None,
        skipped: jax.Array | None = None,
        token: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Trace the beginning of a round, which does not wait. Only where
        `most_started` is not 0.

        Args:
            trip, vectors, erased, skipped, token: as for `carry`, without batch axes.

        Returns:
            uint32, the number by which `finish` calls for the result, and the next
            token.
        """
        raise NotImplementedError

    def finish(
        self,
        number: jax.Array,
        results: Sequence[Any],
        after: Sequence[jax.Array],
        token: jax.Array | None,
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        """Trace waiting for the result of a round that was started.

        Args:
            number: of that round.
            results: what `carry` would return, as ``ShapedArray``.
            after: what is to be computed before.
            token: as for `carry`.

        Returns:
            The resulting vectors, and the next token.
        """
        raise NotImplementedError

    def check_sum(self, dtype: np.dtype) -> None:
        """Raise a TypeError unless vectors of this dtype can be summed."""

    @abc.abstractmethod
    def lag(self, token: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Trace reading the lag: int32, and the next token."""

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

    def abandon(self, error: BaseException) -> None:
        """The group is given up after an error, without waiting for anybody."""

    def host_round(
        self,
        trip: Trip,
        vectors: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        *,
        erased: np.ndarray | None = None,
        skipped: bool = False,
    ) -> None:
        """A round on numpy arrays, without XLA: ``results`` are written."""
        raise NotImplementedError(
            'rounds on numpy arrays need a group with transport="engine"'
        )

    @abc.abstractmethod
    def broadcast(self, words: str, array: np.ndarray) -> np.ndarray:
        """The root's array on every rank, in a round of its own."""

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
