"""What is asked of a coded sum, besides what it is of."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded import _jax_compat
from jaxcoded.collectives.counting import check_counted, count
from jaxcoded.group.group import CodedGroup
from jaxcoded.transport import primitive
from jaxcoded.transport.devices import Devices
from jaxcoded.transport.primitive import Extras


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of a coded sum; see `coded_allreduce`.

    Attributes:
        name: of the collective.
        about: what else all ranks must agree on, in words.
        down: whether every rank gets the sum.
        last_part: whether what is summed is the last part of this rank's message, of
            which the others have gone ahead.
        apart: keys, see `Packing.apart`.
        count: of examples, which goes with what is summed.
        examples, devices: see `Collective`.
    """

    name: str = "coded_allreduce"
    divisor: Any = None
    erasures: Any = None
    skip: Any = None
    residual: bool = False
    wire_dtype: Any = None
    token: Any = None
    transpose: bool = False
    about: str = ""
    down: bool = True
    last_part: bool = False
    apart: tuple[str, ...] = ()
    count: Any = None
    examples: tuple[float, float] | None = None
    devices: Devices | None = None

    def checked(self, group: CodedGroup) -> "Request":
        """The same, of arrays, if it is sound.

        Raises:
            TypeError, ValueError: the message names the value and the remedy.
        """
        erasures, skip, token = self.erasures, self.skip, self.token
        for name in ("skip", "erasures", "token", "divisor"):
            value = getattr(self, name)
            if isinstance(value, jax.Array) and _jax_compat.varying(value):
                raise ValueError(
                    f"{name} is one for all devices, but differs between those of this shard_map "
                    "as far as JAX knows: hand it in with the in_specs P()"
                )
        return dataclasses.replace(
            self,
            devices=group._session.transport.devices(token),
            about=self.about + _checked_divisor(self.divisor),
            erasures=None
            if erasures is None
            else jnp.asarray(checked_erasures(erasures, group.size)),
            skip=None if skip is None else _checked_skip(skip, group),
            token=None if token is None else primitive.checked_token(token),
        )

    def counting(self, weights: Any, group: CodedGroup) -> "Request":
        """The same, of a sum of what was weighted with these weights, if there are any.

        Raises:
            TypeError, ValueError: there must be some, or they are not of this group.
        """
        with group._session.failing(self.name):
            check_counted(weights, group, self.name)
            if weights is None:
                return self
            vector, examples, words = count(weights, group, self.name)
        return dataclasses.replace(
            self, count=vector, examples=examples, about=self.about + words
        )

    @property
    def extras(self) -> Extras:
        place = None if self.devices is None else self.devices.place()
        return Extras(self.skip, self.erasures, place)


def _checked_divisor(divisor: Any) -> str:
    """``divisor`` in words, as far as it is known."""
    if divisor is None:
        return ""
    if isinstance(divisor, _jax_compat.Tracer):
        if divisor.ndim:
            raise ValueError(
                f"divisor is one number, got an array of shape {divisor.shape}"
            )
        return ", divided by a traced number"
    if isinstance(divisor, bool | str) or np.iscomplexobj(divisor):
        raise TypeError(
            "divisor is the number to divide by, such as the global batch size, "
            f"got {divisor!r}"
        )
    if np.ndim(divisor):
        raise ValueError(
            f"divisor is one number, got an array of shape {np.shape(divisor)}"
        )
    if not 0 < divisor < math.inf:
        raise ValueError(
            "divisor is the number to divide by, so it must be > 0 and finite, "
            f"got {divisor!r}"
        )
    return f", divided by {float(divisor)}"


def checked_erasures(erasures: Any, size: int) -> Any:
    """The mask as an array, if it is one.

    Raises:
        ValueError: it is not bool ``(size,)``.
    """
    if not isinstance(erasures, jax.Array):
        erasures = np.asarray(erasures)
    if erasures.shape != (size,) or erasures.dtype != bool:
        raise ValueError(
            f"erasures must be bool of shape ({size},), one for each rank, "
            f"got {erasures.dtype}{list(erasures.shape)}"
        )
    return erasures


def _checked_skip(skip: Any, group: CodedGroup) -> jax.Array:
    if not group._session.transport.can_lag:
        raise ValueError(
            "skip= needs a group with the engine: with the mpi4jax transport every rank "
            "contributes; leave ranks out with erasures="
        )
    skip = jnp.asarray(skip)
    if skip.shape or not (
        skip.dtype == bool or jnp.issubdtype(skip.dtype, jnp.integer)
    ):
        raise ValueError(f"skip is True or False, got {skip.dtype}{list(skip.shape)}")
    return skip.astype(bool).astype(jnp.int32)
