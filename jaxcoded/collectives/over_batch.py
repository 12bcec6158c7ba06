"""The sum of what the examples of a batch give, in one round, as the group's strategy says."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcoded import _jax_compat
from jaxcoded.collectives import coded, marks, shared
from jaxcoded.collectives.counting import Count, over_devices
from jaxcoded.group.group import CodedGroup
from jaxcoded.group.weights import Weights
from jaxcoded.transport.check import DEBUG
from jaxcoded.transport.result import Result


def summed(
    compute: Callable[..., tuple[Any, Any]],
    alike: Any,
    batch: Any,
    weights: Weights,
    group: CodedGroup,
    *,
    eps: Callable[[], float],
    name: str,
    token: jax.Array | None,
    same_bits: bool = True,
    moving: Sequence[Any] = (),
    **asked: Any,
) -> tuple[Result, Any, jax.Array, Count]:
    """The sum of ``compute`` over the batch.

    Args:
        compute: see `coded.summed` and `shared.summed`.
        alike: pytree of what all ranks must have in common, beside the batch.
        batch, weights: the examples of this rank.
        group: that sums.
        eps: tells in which numbers ``compute`` computes, see `_jax_compat.coarsest_eps`.
        same_bits: whether all ranks have what is ``alike`` to the bit, and not to rounding.
        moving: pytrees that they must have in common, too, each on a scale of its own: tangents or cotangents.
        name, token, asked: see `coded.summed`.

    Returns:
        The sum, on every rank the same; the auxiliary data; the numbers that were counted, and how.
    """
    transport, by_blocks = group._session.transport, group.plan.strategy.by_blocks
    with group._session.failing(name):
        devices = transport.devices(token)
        if group.options.check and not by_blocks and devices is None:
            transport.computes_with(eps())
        key = None
        if not group.approximate:
            # of a code messages are compared, which may differ in rounding
            to_the_bit = same_bits and by_blocks and group.options.check == DEBUG
            key = marks.key(weights.number, alike, moving, to_the_bit=to_the_bit)
            # one of all devices that it is split over, as the count is
            key = over_devices(key, _jax_compat.varying(key))
    how = shared.summed if by_blocks else coded.summed
    return how(compute, batch, weights, group, key, name=name, token=token, **asked)
