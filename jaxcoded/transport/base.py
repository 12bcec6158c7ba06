"""What a group asks of the transport that carries its rounds."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcoded.plan import Plan
from jaxcoded.transport import devices
from jaxcoded.transport.devices import Devices
from jaxcoded.transport.packing import Apart
from jaxcoded.transport.primitive import NO_EXTRAS, Extras

# A round whose work is shared: its number, the call in words, and the blocks that each rank has
# computed, in order.
Dealt = tuple[int, str, list[list[int]]]


@dataclasses.dataclass(frozen=True)
class Collective:
    """What happens in a round.

    Attributes:
        call: its name, shapes and dtypes; equal on ranks that call the same.
        up: the ranks' vectors are summed; otherwise the root's are told.
        down: every rank gets the result; otherwise the root alone, zeros elsewhere.
        batch: the sizes of the axes made by ``vmap``.
        devices: those of this process that call together, if there are several.
        splits: for each vector, over which of their axes it is split.
        apart: in a group that looks for mistakes, what is not compared with the rest.
        examples: what the first number of the sum should be, as far as it is known, and
            the share of it that rounding explains. Transports may look at it: a round
            in which it is another one is an error on all ranks then.
        audits: of work that is shared, what of one block in each round two ranks compute,
            to compare: see `jaxcoded.collectives.audit.Audit.eps`.
    """

    call: str
    up: bool = True
    down: bool = True
    batch: tuple[int, ...] = ()
    devices: Devices | None = None
    splits: tuple[tuple[str, ...], ...] = ()
    apart: tuple[Apart, ...] = ()
    examples: tuple[float, float] | None = None
    audits: tuple[float, ...] = ()

    @property
    def signature(self) -> str:
        """What all ranks must agree on."""
        words = self.call
        if self.batch:
            words += f", batched {list(self.batch)}"
        if self.devices is not None:
            words += f", on devices [{self.devices}]"
        return words


class Transport(abc.ABC):
    """How the rounds of one group are carried.

    Attributes:
        index: of the group; never used again.
        plan: of the group.
        rank: of this process in it.
    """

    index: int
    plan: Plan
    rank: int

    # Whether a rank can be behind: then its rounds may be decided before it calls them.
    can_lag = False
    # Whether a token can order rounds in the effect's place.
    takes_tokens = False
    # Whether the parts of a message can go ahead of the others.
    takes_parts = False
    # How many rounds can be started before the first is finished. 0: a started round
    # would not go on while its rank computes.
    most_started = 0

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

    @abc.abstractmethod
    def carry(
        self,
        collective: Collective,
        vectors: Sequence[jax.Array],
        extras: Extras = NO_EXTRAS,
        token: jax.Array | None = None,
        *,
        last_part: bool = False,
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        """Trace a round.

        Args:
            collective: what happens.
            vectors: this rank's, ``(..., length)``.
            extras: what goes with them.
            token: int32 that orders the round; otherwise the effect does.
            last_part: whether `begin` had all parts of the vectors but the last, which
                these are.

        Returns:
            The resulting vectors, and the next token.
        """

    def begin(
        self,
        collective: Collective,
        vectors: Sequence[jax.Array],
        number: int,
        extras: Extras = NO_EXTRAS,
        token: jax.Array | None = None,
    ) -> jax.Array | None:
        """Trace the sending of one part of a round's vectors, ahead of the round
        itself. Does not wait.

        Args:
            collective: of the round.
            vectors: ``(length / parts,)``, the next part of each of them.
            number: of that part, from 0.
            extras, token: as for `carry`, without erasures. What is skipped later is
                not sent.

        Returns:
            The next token.
        """
        raise NotImplementedError

    def take(
        self,
        collective: Collective,
        vectors: Sequence[jax.Array],
        token: jax.Array | None = None,
        *,
        first: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Trace asking for the next block of a round whose work is shared. Waits until
        there is one, or the round is over.

        Args:
            collective: of the round.
            vectors: this rank's ``(length,)``, with all that it was given before.
            token: as for `carry`.
            first: whether it is the round's first.

        Returns:
            int32 ``(3,)``: the block, -1 at the end; not 0 where the vectors are to
            be zeros before the block is added; and whether it is added, told to be compared, or both. And
            the next token.
        """
        raise NotImplementedError

    def collect(
        self,
        collective: Collective,
        results: Sequence[Any],
        token: jax.Array | None = None,
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        """Trace the end of a round after whose last block `take` was called.

        Args:
            collective, token: as for `take`.
            results: like the vectors, as ``ShapedArray``.

        Returns:
            The sums, and the next token.
        """
        raise NotImplementedError

    def computed(
        self, blocks: int, token: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Trace what this rank has computed between `take_block` and `end_of_blocks` in the
        round before: float32 ``(blocks,)``, 1 for each such block of as many, and the next
        token. An error where that round was another one."""
        raise NotImplementedError

    def start(
        self,
        collective: Collective,
        vectors: Sequence[jax.Array],
        extras: Extras = NO_EXTRAS,
        token: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Trace the beginning of a round, which does not wait. Only where
        `most_started` is not 0.

        Args:
            collective, vectors, extras, token: as for `carry`, without batch axes.

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

    def enter(self) -> None:
        """All ranks have opened this."""

    def abandon(self, error: BaseException) -> None:
        """The group is given up after an error, without waiting for anybody."""

    def host_round(
        self,
        collective: Collective,
        vectors: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        extras: Extras = NO_EXTRAS,
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
