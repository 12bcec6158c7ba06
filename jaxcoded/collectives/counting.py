"""Count the examples of a sum together with the sum."""

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
from jaxcoded.transport.kernels import counts

# A count of examples may differ from the number of examples by the larger of two
# bounds. The first bound is `_MISCOUNT` times the number. The second is `_ROUNDINGS`
# rounding errors, and one more for each rank, amplified by the code.
_MISCOUNT = 1e-6
_ROUNDINGS = 64


class Count(NamedTuple):
    """The first vector that a rank adds to a sum, which counts its examples."""

    # This rank's part of the count, ``(length of a message,)``. It is a NumPy array if
    # the weights are a NumPy array, and ``None`` if the sum may be approximate.
    vector: Any = None
    examples: tuple[float, float] | None = None  # see `Round`
    words: str = ""  # a text that must be equal on all ranks
    numbers: int = 1  # how many numbers the count has


NOT_COUNTED = Count()


def counted(weights: Any, group: CodedGroup, name: str) -> Count:
    """Return the count for a sum of values with these weights. Without weights, return
    an empty count.

    Raises:
        TypeError, ValueError: weights are missing, or belong to another group.
    """
    with group._session.failing(name):
        check_counted(weights, group, name)
        if weights is None:
            return NOT_COUNTED
        counts = weights.counts if isinstance(weights, Weights) else None
        if counts is None:
            return count(weights, group, name)
        of = group.plan.fingerprint, group.rank, group.approximate
        if (known := counts.get(of)) is None:
            known = counts[of] = count(weights, group, name)
        return known


def count(
    weights: Any,
    group: CodedGroup,
    name: str,
    key: jax.Array | None = None,
    *,
    present: bool = False,
) -> Count:
    """Return the count for a sum of values with these weights.

    Args:
        weights: the `Weights` of a batch, or of several batches.
        key: the key that must be equal on all ranks, see `jaxcoded.collectives.marks`.
            Default: the key of the batches.
        present: whether the count has a second number, the number of examples without
            padding. Then even a sum that may be approximate has a count.

    Raises:
        TypeError, ValueError: ``weights`` are not `Weights`, or belong to another rank or
            group.
    """
    plan, rank = group.plan, group.rank
    given = [weights] if isinstance(weights, Weights) else weights
    several = isinstance(given, list | tuple)
    if not (several and given and all(isinstance(each, Weights) for each in given)):
        kind = "an empty list" if several and not given else _require.kind(weights)
        raise TypeError(
            f"weights must be batch.weights of a batch of this group, or a list of them, got {kind}: "
            f"{name}(x, group, batch.weights)"
        )
    for each in given:
        each.check(plan, rank)
    exact = not group.approximate
    fixed = _fixed(plan, rank, tuple(each.batch_size for each in given), given[0].dtype)
    if not (exact or present):
        return Count(words=fixed.words)
    parts, slices = plan.parts_above[rank], plan.slices_above[rank]
    leaves = [
        x
        for each in given
        for x in (each.values, each.examples, each.number, each.likeness)
    ]
    host = key is None and all(isinstance(x, np.ndarray | np.generic) for x in leaves)
    xp: Any = np if host else jnp
    total: Any = 0
    present_examples: Any = 0
    for each, mark in zip(given, fixed.marks):
        values = xp.asarray(each.values)
        held = values.reshape(-1, parts, slices)[:, :, 0].sum(0)
        if xp is jnp:
            held = over_devices(held, _jax_compat.varying(values))
        # Scale to a whole batch, since transports check a number that is known at compile
        # time.
        examples = (
            int(each.examples) if host else jnp.asarray(each.examples, held.dtype)
        )
        total = total + held * (each.batch_size / examples)
        present_examples = present_examples + held
        if exact and host:
            batch_key = _key_on_host(int(each.number)) + each.likeness
            total = total + batch_key * mark
        elif exact:
            batch_key = key
            if key is None:
                number = jnp.asarray(each.number).astype(np.uint32)
                likeness = jnp.asarray(each.likeness, held.dtype)
                batch_key = marks.of_batch(number).astype(held.dtype) + likeness
            total = total + batch_key.astype(held.dtype) * mark.astype(held.dtype)
    # The vector starts with the count, and is padded so that it can be cut into slices.
    numbers = [total, present_examples] if present else [total]
    length = len(numbers) * (plan.padding_multiple // slices - 1)
    vector = total
    if length or present:
        rest = np.zeros((parts, length), total.dtype)
        columns = [each[:, None] for each in numbers]
        vector = xp.concatenate([*columns, rest], axis=1).reshape(-1)
    if host:  # A count on the host can be cached, so nobody may change it.
        vector.setflags(write=False)
    return Count(vector, fixed.examples if exact else None, fixed.words, len(numbers))


class _Fixed(NamedTuple):
    """The part of a count that depends only on the plan, the rank, the sizes of the batches and the dtype."""

    words: str
    examples: tuple[float, float]
    # For each batch, what this rank adds to the count if the key is 1: one number for each
    # part of its message.
    marks: tuple[np.ndarray, ...]


@functools.lru_cache(maxsize=256)
def _fixed(plan: Plan, rank: int, sizes: tuple[int, ...], dtype: Any) -> _Fixed:
    share = rounding(plan, dtype)
    words = f", for a batch of {sum(sizes)}" + f" in {len(sizes)}" * (len(sizes) > 1)
    added = tuple(_mark(plan, rank, size, share).astype(dtype) for size in sizes)
    return _Fixed(words, (float(sum(sizes)), share), added)


@functools.lru_cache(maxsize=1024)
def _key_on_host(number: int) -> int:
    with np.errstate(over="ignore"):
        return int(marks.of_batch(np.asarray(number).astype(np.uint32)))


def count_of_blocks(weights: Weights, group: CodedGroup) -> Count:
    """Return the count before any block of shared work, with both numbers of `count`."""
    sizes = (weights.batch_size,)
    fixed = _fixed(group.plan, group.rank, sizes, np.dtype(np.float32))
    examples = None if group.approximate else fixed.examples
    return Count(jnp.zeros(2, jnp.float32), examples, fixed.words, 2)


def check_counted(weights: Any, group: CodedGroup, name: str, call: str = "") -> None:
    """Raise a TypeError if a sum needs weights and has none. ``call`` is the call with weights."""
    if weights is None and not (group._session.blocks or _adds_up(group.plan)):
        call = (
            call
            or f"{name}(x, group, batch.weights) with an x that was made with these weights"
        )
        loop = ", or call it after a loop over group.blocks(batch_size)"
        raise TypeError(
            f"{name} needs the batch's weights in a group whose ranks hold the same examples ({group.plan.strategy!r}): "
            f"call {call}, or "
            f"coded_value_and_grad{loop * group.plan.strategy.by_blocks}. "
            "To sum one value of each rank, use jaxcoded.baselines.allreduce(x, comm)"
        )


@functools.lru_cache(maxsize=64)
def _adds_up(plan: Plan) -> bool:
    """Return whether a sum contains the contribution of every rank exactly once."""
    if any(len(holders) > 1 for holders in plan.placement.holders):
        return False
    codes = [coding.code.B for _, coding in plan.coded_parents]
    return all(np.array_equal(B, np.eye(len(B))[:, :, None]) for B in codes)


def _mark(plan: Plan, rank: int, batch_size: int, share: float) -> np.ndarray:
    """Return what this rank adds to each part of the count if the key is 1."""
    if not plan.strategy.by_blocks:
        return marks.of_rank(plan, rank, batch_size, share)
    own = list(plan.placement.owned(rank))
    return marks.of_blocks(plan.placement, batch_size)[own].sum(keepdims=True)


def rounding(plan: Plan, *dtypes: Any) -> float:
    """Return the fraction by which rounding in these dtypes may change a count."""
    eps = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
    return max(_MISCOUNT, (_ROUNDINGS + plan.size) * plan.amplification * eps)


def present(counted: jax.Array, weights: Weights, count: Count) -> jax.Array:
    """Return the number of examples of a batch without padding, by which a mean is divided.

    Transports check the first number of the count, and must know its right value at
    compile time. So the first number is ``batch_size`` even for a smaller last batch,
    whose examples count as more than 1. The mean is divided by the second number, which
    is the same on all ranks, even on a late rank that is still at another batch.
    """
    present_examples = counted[..., 1]
    if count.examples is None:
        # if the sum has no examples, the mean is 0, like the sum
        return jnp.where(present_examples == 0, 1, present_examples)
    expected = jnp.asarray(weights.examples, present_examples.dtype)
    near = counts(present_examples, expected, count.examples[1])
    return jnp.where(near, expected, jnp.round(present_examples))


def over_devices(x: Any, split: Sequence[str]) -> Any:
    """Return the sum of ``x`` over the devices over which a batch is split, if any."""
    return jax.lax.psum(x, tuple(split)) if split else x
