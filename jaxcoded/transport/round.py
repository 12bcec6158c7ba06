import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxcoded._jax_compat import ShapedArray
from jaxcoded.transport.devices import Devices
from jaxcoded.transport.packing import Apart, Kind


@dataclasses.dataclass(frozen=True)
class Round:
    """A call of a group's transport: a round, or a step of a round. The JAX primitive has it as a parameter, and
    the transport reads it."""

    group: int  # the index of the group
    # the call's name, shapes and dtypes; equal on ranks that make the same call
    call: str = ""
    kind: str = "round"  # the step of a round: a key of `primitive.RULES`
    vectors: tuple[Kind, ...] = ()  # the dtypes of each vector, and how it is split
    leading: tuple[str, ...] = ()  # the names of the `Operands` in front of the vectors
    # whether the ranks' vectors are summed; otherwise every rank gets the root's vectors
    up: bool = True
    # whether every rank gets the result; otherwise only the root gets it, and other ranks get zeros
    down: bool = True
    # the sizes of the leading axes that ``vmap`` has added to the vectors
    batch: tuple[int, ...] = ()
    # the devices of this process, if several devices make the call together
    devices: Devices | None = None
    # the types of the call's results; ``None``: `primitive.results` derives them from
    # the vectors
    results: tuple[ShapedArray, ...] | None = None
    counts: bool = False  # whether the first vector counts examples
    residual: bool = False  # whether the last vector holds the coefficients of the sum
    # in a group with a check, the elements that are compared separately from the rest of their
    # vector
    apart: tuple[Apart, ...] = ()
    # The expected first number of the sum, if known, and the relative error that
    # rounding explains. If the number differs by more, all ranks get an error.
    examples: tuple[float, float] | None = None
    # with shared work, how to compare the block that two ranks compute in each round: see
    # `jaxcoded.collectives.audit.Audit.precision`
    audits: tuple[float, ...] = ()
    number: int = 0  # the number of a part sent ahead, or of a block, from 0
    # whether the vectors are the last part of the message, whose other parts were sent
    # ahead
    last_part: bool = False
    # whether the round may have a transpose: its operands may come from values of
    # `jaxcoded.spread`
    transposes: bool = False
    transposed: bool = False  # whether this is the round's transpose, the identity

    @functools.cached_property
    def signature(self) -> str:
        """The fields that must be equal on all ranks."""
        words = self.call
        if self.batch:
            words += f", batched {list(self.batch)}"
        if self.devices is not None:
            words += f", on devices [{self.devices}]"
        return words

    @functools.cached_property
    def fingerprint(self) -> int:
        """The number that ranks compare instead of the signature."""
        return fingerprint(self.signature)

    def __str__(self) -> str:
        return self.signature

    def step(self, kind: str, **changes: Any) -> "Round":
        """Return another step of this round."""
        return dataclasses.replace(self, kind=kind, **changes)


def fingerprint(signature: str) -> int:
    """Return the number that ranks compare instead of a signature: signed, of 64 bits."""
    digest = hashlib.sha256(signature.encode()).digest()
    return int.from_bytes(digest[:8], signed=True)


class Operands(NamedTuple):
    """The operands of a round. The vectors come last. Only the vectors are batched and differentiated."""

    vectors: Sequence[jax.Array] = ()  # ``(..., length)`` each
    # int32, the number of this device if several devices make the call together
    place: jax.Array | None = None
    # int32 or float32, the token that orders the round instead of JAX's effect
    token: jax.Array | None = None
    skip: jax.Array | None = None  # int32, not 0 if this rank has nothing to contribute
    erasures: jax.Array | None = None  # bool ``(size,)``, ranks to leave out

    def leading(self, *, takes_tokens: bool) -> tuple[str, ...]:
        """Return the names of the operands in front of the vectors, in the engine's
        order."""
        return tuple(
            name
            for name in self._fields[1:]
            if getattr(self, name) is not None and (takes_tokens or name != "token")
        )
