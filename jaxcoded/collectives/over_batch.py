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
    """Return the sum of ``compute`` over the batch, formed in one round as the group's
    strategy requires.

    Args:
        compute: see `coded.summed` and `shared.summed`.
        alike: pytree of values that must be equal on all ranks, in addition to the
            batch.
        eps: the precision of ``compute``, see `_jax_compat.coarsest_eps`.
        same_bits: whether ``alike`` must have the same bits on all ranks. Otherwise its
            values may differ in rounding.
        moving: pytrees of tangents or cotangents that must also be equal on all ranks,
            each on a separate scale.
        name, token, asked: see `coded.summed`.

    Returns:
        Four values: the sum, which is the same on every rank; the auxiliary data; the
        counted numbers; and their `Count`.
    """
    transport = group._session.transport
    with group._session.failing(name):
        devices = transport.devices(token)
        if devices is None:
            transport.computes_with(eps)
        key = None
        if not group.approximate:
            # Messages that a check compares may differ in rounding.
            same_bits &= group.options.check == DEBUG and not transport.compares
            key = marks.key(weights.number, alike, moving, to_the_bit=same_bits)
            key = key + jax.lax.convert_element_type(weights.likeness, key.dtype)
            # Every device of a split batch has a part of the count; the parts are added
            # up, so add up their keys, too.
            key = over_devices(key, _jax_compat.varying(key))
    how = shared.summed if group.plan.strategy.by_blocks else coded.summed
    return how(compute, batch, weights, group, key, name=name, token=token, **asked)
