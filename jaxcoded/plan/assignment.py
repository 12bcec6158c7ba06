"""Compute the examples that each rank reads, and their coding weights, from a plan and
a batch size.
"""

import numpy as np

from jaxcoded import _require
from jaxcoded.plan.plan import Plan


def loads(plan: Plan, batch_size: int) -> np.ndarray:
    """Return the number of distinct examples of a batch that each rank computes, int64
    ``(size,)``.

    If the partitions of a child lie side by side on a circle, no rank exceeds ``⌈load · batch_size⌉`` by more than
    the depth of the tree. With block designs, expanders and random approximate codes, it exceeds it by less than
    one example for each partition that it holds. A ValueError if ``batch_size < 1``.

    Example:
        >>> import jaxcoded
        >>> from jaxcoded.plan.assignment import loads
        >>> loads(jaxcoded.make_plan(13, jaxcoded.Coded(fanout=3)), 30).tolist()
        [0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]
    """
    return plan.strategy.loads(plan, _require.integer("batch_size", batch_size, 1))


def shares(plan: Plan, rank: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples of one rank, and their coefficients in its message; see
    `jaxcoded.plan.dealing.dealt`. A ValueError if ``batch_size < 1``, or there is no
    such rank.

    Returns:
        indices: int64 ``(load,)``, distinct numbers in ``0 … d−1``.
        coefficients: float64 ``(load, P, M)`` with ``P = plan.parts_above[rank]`` and
            ``M = plan.slices_above[rank]``: this rank adds ``Σ_u coefficients[e, p, u]
            · gradient_e[slice u of M]`` to part ``p`` of its message for every example
            ``e``.
    """
    rank = _require.integer("rank", rank, 0, plan.size - 1)
    batch_size = _require.integer("batch_size", batch_size, 1)
    return plan.strategy.shares(plan, rank, batch_size)


def assignment(plan: Plan, rank: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples and weights of one rank, padded to one static length for all
    ranks, or to a separate length with unequal speeds. A ValueError if ``batch_size <
    1``, or the rank does not exist.

    Padding repeats one of the rank's own examples (example 0 on a rank without data) with weight 0.

    Returns:
        indices: int64 ``(length,)`` into the global batch, ``length ≥ 1``.
        weights: float64. With shared work ``(blocks · size,)``: 1 for the examples of
            the rank's own blocks, which come first, and 0 for those that it holds for
            others. Without slices and parts ``(length,)``: the weight of each example
            in the local loss. Otherwise ``(chunks, length // chunks, P · M)``: the
            coefficients of the ``M`` slices of each example's gradient in the ``P``
            parts of the message, equal within a chunk but for padding. The number of
            chunks is a multiple of ``P``, and the first ``(p + 1) / P`` of them are all
            of part ``p``.

    Example:
        >>> import jaxcoded
        >>> from jaxcoded.plan.assignment import assignment
        >>> indices, weights = assignment(jaxcoded.make_plan(3, jaxcoded.Coded()), 1, 4)  # both workers hold everything
        >>> indices.tolist(), weights.tolist()
        ([0, 1, 2, 3], [1.0, 1.0, 1.0, 1.0])
    """
    rank = _require.integer("rank", rank, 0, plan.size - 1)
    batch_size = _require.integer("batch_size", batch_size, 1)
    return plan.strategy.assignment(plan, rank, batch_size)
