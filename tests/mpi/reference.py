"""References for the tests of this folder: sums over the whole batch in float64 NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from independent import random_missing, solvable

from jaxcoded import kernels

BATCH = 20


def per_example(*shape, seed=0, dtype="float64"):
    """Return a gradient for each example, the same on all ranks: ``(BATCH, *shape)``."""
    values = np.random.default_rng(seed).standard_normal((BATCH, *shape))
    return values.astype(jnp.dtype(dtype))


def contribution(group, gradients):
    """Return this rank's coded contribution from a pytree of arrays ``(BATCH, ...)``."""
    part = group.batch(BATCH)
    held = jax.tree.map(lambda leaf: leaf[part.indices], gradients)
    if group.plan.encoded:
        parts = group.plan.parts_above[group.rank]
        coefficients = part.weights.reshape(len(part.indices), parts, -1).transpose(
            1, 0, 2
        )
        multiple = group.plan.padding_multiple
        return kernels.encode(held, coefficients, multiple=multiple)

    def weigh(leaf):
        return np.tensordot(part.weights, leaf.astype(np.float64), 1).astype(leaf.dtype)

    return jax.tree.map(weigh, held)


def exact(gradients):
    return jax.tree.map(lambda leaf: leaf.astype(np.float64).sum(0), gradients)


def rounding(group, dtype):
    """Return a bound on the error of a sum in a dtype, as a fraction of the sum of absolute values.

    Every rounding, half an eps, is amplified by κ at most. A message in a narrow type is rounded once when it is made
    and once in every layer. In wider types every addition counts.
    """
    plan = group.plan
    depth = fanout = 0
    for rank in range(plan.size):
        fanout = max(fanout, len(plan.coded_children(rank)))
        path = 0
        while rank != plan.root:
            rank, path = plan.parents[rank], path + 1
        depth = max(depth, path)
    narrow = jnp.finfo(dtype).bits < 32
    roundings = 1 + depth * (1 if narrow else fanout + 3)
    # the last factor covers float32's error in narrow sums, and the reference
    return (
        roundings * float(jnp.finfo(dtype).eps) / 2 * plan.amplification * 1.01 + 1e-15
    )


def assert_sum(group, actual, gradients, factor=1.0):
    """Check that each leaf is ``factor`` times the sum of the gradients, to the
    precision of its dtype.
    """
    jax.tree.map(
        lambda *leaves: _assert_sum(group, factor, *leaves),
        *(actual, gradients, exact(gradients)),
    )


def _assert_sum(group, factor, actual, gradients, expected):
    assert (actual.shape, actual.dtype) == (gradients.shape[1:], gradients.dtype)
    size = np.abs(gradients.astype(np.float64)).sum(0)
    bound = rounding(group, actual.dtype) * size * abs(factor)
    error = np.abs(np.asarray(actual, np.float64) - factor * expected)
    assert np.all(error <= bound), (actual.dtype, error.max(), bound.max())


def assert_same_bits(comm, tree):
    """Check that all ranks hold the same bytes."""
    mine = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    assert all(other == mine for other in comm.allgather(mine))


def tolerated_masks(plan):
    """Return every mask that leaves the root a decodable set, by enumeration: bool
    ``(masks, size)``.
    """
    masks = itertools.product([False, True], repeat=plan.size)
    return np.array([mask for mask in masks if _has_sum(plan, plan.root, mask)])


def lost(plan, mask):
    """Return the erased ranks, the parents that lack too many children, and all ranks
    below them.
    """
    out = np.array([not _has_sum(plan, rank, mask) for rank in range(plan.size)])
    for rank in plan.tree.order:
        if rank != plan.root:
            out[rank] |= out[plan.parents[rank]]
    return out


def _has_sum(plan, rank, erased):
    """Return whether a rank has a message to send; a matrix rank decides what is
    decodable.
    """
    children = plan.coded_children(rank)
    answered = tuple(
        i for i, child in enumerate(children) if _has_sum(plan, child, erased)
    )
    return not erased[rank] and (not children or _decodable(plan, rank, answered))


@functools.cache
def _decodable(plan, rank, answered):
    return solvable(plan.codings[rank].code.B, list(answered))


def random_erasures(plan, rng):
    """Draw as many missing children of every parent as it tolerates, equal on all ranks
    for equal generators: bool ``(size,)``.
    """
    erased = np.zeros(plan.size, bool)
    erased[list(random_missing(plan, rng))] = True
    return erased
