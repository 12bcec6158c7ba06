"""The examples that a sum is of, counted with the sum itself."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded import _jax_compat, _require
from jaxcoded.collectives import marks
from jaxcoded.group.group import CodedGroup
from jaxcoded.group.weights import Weights
from jaxcoded.plan import Plan

# How far the examples that were counted may be from their number: as a share of it; and the
# roundings that add to those of one for each rank, amplified by the code.
_MISCOUNT = 1e-6
_ROUNDINGS = 64


class Count(NamedTuple):
    """What a rank adds to a sum, as its first vector, so that its examples are counted.

    Attributes:
        vector: this rank's part of the count, ``(length of a message,)``, of NumPy if the weights are; ``None`` if the
            sum may be approximate.
        examples: see `Collective`.
        words: what all ranks must agree on.
    """

    vector: Any
    examples: tuple[float, float] | None
    words: str


def count(weights: Any, group: CodedGroup, name: str) -> Count:
    """Return the count that goes with a sum of what was weighted with these weights.

    Args:
        weights: a batch's `Weights`, or several batches'.
        group: that sums.
        name: of the call.

    Raises:
        TypeError, ValueError: they are no `Weights`, or not of this rank of this group.
    """
    plan, rank = group.plan, group.rank
    given = [weights] if isinstance(weights, Weights) else weights
    if not (isinstance(given, list | tuple) and given) or not all(
        isinstance(each, Weights) for each in given
    ):
        raise TypeError(
            f"weights must be batch.weights of a batch of this group, or a list of them, got {_require.kind(weights)}: "
            f"{name}(x, group, batch.weights)"
        )
    for each in given:
        each.check(plan, rank)
    number = sum(each.batch_size for each in given)
    words = f", for a batch of {number}" + f" in {len(given)}" * (len(given) > 1)
    if group.approximate:
        return Count(None, None, words)
    share = rounding(plan, given[0].dtype)
    parts, slices = plan.parts_above[rank], plan.slices_above[rank]
    leaves = jax.tree.leaves(given)
    xp: Any = np if all(isinstance(x, np.ndarray | np.generic) for x in leaves) else jnp
    total: Any = 0
    for each in given:
        values = xp.asarray(each.values)
        held = values.reshape(-1, parts, slices)[:, :, 0].sum(0)
        if xp is jnp:
            held = over_devices(held, _jax_compat.varying(values))
        # as of a whole batch: transports look for a number that they know when they compile
        whole = each.batch_size / xp.asarray(each.examples, held.dtype)
        with np.errstate(over="ignore"):
            key = marks.of_batch(xp.asarray(each.number).astype(np.uint32))
        mark = _mark(plan, rank, each.batch_size, share)
        total = total + held * whole + key.astype(held.dtype) * mark.astype(held.dtype)
    # the first number of a vector that can be cut into slices
    rest = np.zeros((parts, plan.padding_multiple // slices - 1), total.dtype)
    vector = xp.concatenate([total[:, None], rest], axis=1).reshape(-1)
    return Count(vector, (float(number), share), words)


def check_counted(weights: Any, group: CodedGroup, name: str) -> None:
    """Raise if a sum needs weights and has none.

    Raises:
        TypeError: the message has the call that has them.
    """
    if weights is None and not _adds_up(group.plan):
        raise TypeError(
            f"{name} needs the batch's weights in a group whose ranks compute the same examples ({group.plan.strategy!r}): "
            f"call {name}(x, group, batch.weights) with an x that was made with these weights, or "
            "coded_value_and_grad. The sum of one value for each rank is jaxcoded.baselines.allreduce(x, comm)"
        )


@functools.lru_cache(maxsize=64)
def _adds_up(plan: Plan) -> bool:
    """Whether a sum is that of what the ranks hand in, each once."""
    codes = [coding.code.B for coding in plan.codings if coding is not None]
    return all(np.array_equal(B, np.eye(len(B))[:, :, None]) for B in codes)


@functools.lru_cache(maxsize=256)
def _mark(plan: Plan, rank: int, batch_size: int, share: float) -> np.ndarray:
    """What this rank adds to the count for a key of 1, part by part."""
    if not plan.strategy.by_blocks:
        return marks.of_rank(plan, rank, batch_size, share)
    own = list(plan.placement.owned(rank))
    return marks.of_blocks(plan.placement, batch_size)[own].sum(keepdims=True)


def rounding(plan: Plan, *dtypes: Any) -> float:
    """The share of a count of examples, in numbers of these dtypes, that rounding explains."""
    eps = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
    return max(_MISCOUNT, (_ROUNDINGS + plan.size) * plan.amplification * eps)


def checked_count(count: jax.Array, examples: tuple[float, float]) -> jax.Array:
    """The number of examples if that is what was counted, to rounding; otherwise NaN.

    The engine makes an error of it, in the order of the rounds. Raised here, beside that
    order, it would end this rank's program in the middle of sending the result on, or
    of the next round.
    """
    number, allowed = examples
    near = jnp.abs(count - number) <= allowed * number
    return jnp.where(near, jnp.asarray(number, count.dtype), jnp.nan)


def over_devices(x: Any, split: Sequence[str]) -> Any:
    """The sum over the devices that a batch is split over, if it is."""
    return jax.lax.psum(x, tuple(split)) if split else x
