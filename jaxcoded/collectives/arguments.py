"""Check the arguments of a coded sum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded import _jax_compat, _require
from jaxcoded._warn import warn
from jaxcoded.group.batch import Batch, check_batch, check_length
from jaxcoded.group.group import CodedGroup
from jaxcoded.transport import tokens
from jaxcoded.transport.leaves import array, converted
from jaxcoded.transport.primitive import placed
from jaxcoded.transport.round import Operands

_MOST_DIVISORS = 16  # A group warns after this many different divisors outside `jit`.


def checked_operands(
    group: CodedGroup,
    *,
    divisor: Any = None,
    erasures: Any = None,
    skip: Any = None,
    token: Any = None,
) -> tuple[Operands, dict[str, Any]]:
    """Check these arguments. Return the operands that a round needs in addition to its
    vectors, and the fields of the `Round` that describe these operands.

    Raises:
        TypeError, ValueError: the message names the value and the remedy.
    """
    given = {"skip": skip, "erasures": erasures, "token": token, "divisor": divisor}
    for name, value in given.items():
        if isinstance(value, jax.Array) and _jax_compat.varying(value):
            raise ValueError(
                f"{name} must be equal on all devices, but as far as JAX knows it differs between the devices "
                "of this shard_map: pass it with in_specs P()"
            )
    if erasures is not None:
        erasures = jnp.asarray(checked_erasures(erasures, group.size))
    return placed(
        group._session.transport,
        tokens.checked(token),
        skip=None if skip is None else _checked_skip(skip, group),
        erasures=erasures,
    )


def divided_by(divisor: Any, group: CodedGroup) -> str:
    """Return ``divisor`` as text, without its value if it is traced."""
    if divisor is None:
        return ""
    if isinstance(divisor, _jax_compat.Tracer):
        if divisor.ndim:
            raise ValueError(
                f"divisor must be one number, got an array of shape {divisor.shape}"
            )
        return ", divided by a traced number"
    if isinstance(divisor, bool | str) or np.iscomplexobj(divisor):
        raise TypeError(
            "divisor must be the number to divide by, such as the global batch size, "
            f"got {divisor!r}"
        )
    if np.ndim(divisor):
        raise ValueError(
            f"divisor must be one number, got an array of shape {np.shape(divisor)}"
        )
    # leaves of at most 32 bits are divided in float32
    least, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    if not least <= float(divisor) <= largest:
        raise ValueError(
            f"divisor must be the number to divide by, from {least:.1e} to {largest:.1e}, "
            f"got {divisor!r}"
        )
    known = group._session.divisors
    if not _jax_compat.tracing() and len(known) < _MOST_DIVISORS:
        known.add(float(divisor))
        if len(known) == _MOST_DIVISORS:
            warn(
                f"this group has divided by {_MOST_DIVISORS} numbers outside jit, the last one {divisor}: each "
                "compiles a program, which stays in memory. Divide the sum yourself, or call the collective in jit"
            )
    return f", divided by {float(divisor)}"


def checked_erasures(erasures: Any, size: int) -> Any:
    """Return the mask as an array. Raise a ValueError if it is not bool ``(size,)``."""
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
        raise ValueError(
            f"skip must be True or False, got {skip.dtype}{list(skip.shape)}"
        )
    return skip.astype(bool).astype(jnp.int32)


def checked_params(params: Any) -> Any:
    """Return the parameters as arrays. Raise a TypeError if a leaf has no gradient."""
    check_no_batch(params)

    def taken(leaf: Any, name: str) -> jax.Array:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None and isinstance(leaf, bool | int | float | complex):
            dtype = jnp.result_type(leaf)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            kind = (
                f"is {_require.kind(leaf)}" if dtype is None else f"has dtype {dtype}"
            )
            raise TypeError(
                f"{name} {kind}, which has no gradient: "
                "partition the model, pass its floating-point leaves as params, and "
                "put the rest back in losses, as equinox.partition(model, "
                "equinox.is_inexact_array) and equinox.combine do"
            )
        return array(leaf, name)

    return converted(params, "params", taken)


def check_no_batch(params: Any) -> None:
    """Raise a TypeError if the batch is given as the first argument."""
    if isinstance(params, Batch):
        raise TypeError(
            "params is a batch: give the arguments in the order (params, batch)"
        )


def checked_data(batch: Batch, group: CodedGroup) -> Any:
    """Return this rank's examples of a batch, as arrays."""
    check_batch(batch)
    weights, plan, rank = batch.weights, group.plan, group.rank
    weights.check(plan, rank)
    data = converted(batch.data, "data")
    numbers = plan.parts_above[rank] * plan.slices_above[rank]
    shape, encoded = np.shape(weights.values), plan.encoded
    if len(shape) != (3 if encoded else 1) or (encoded and shape[2] != numbers):
        wanted = f"(chunks, length // chunks, {numbers})" if encoded else "(length,)"
        raise ValueError(
            f"batch.weights must have shape {wanted}, got {shape}: pass the batch as the group made it"
        )
    check_length(data, shape[0] * shape[1] if encoded else shape[0])
    return data
