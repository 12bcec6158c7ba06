"""From a plan and a batch size to the examples that each rank reads and their coding
weights."""

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from jaxcoded import _require
from jaxcoded.plan import Plan
from jaxcoded.plan.dealing import dealt, kept
from jaxcoded.plan.placement import Placement


def loads(plan: Plan, batch_size: int) -> np.ndarray:
    """Number of distinct examples that each rank computes, int64 ``(size,)``.

    No rank exceeds ``⌈load · batch_size⌉`` by more than the depth of the tree, where the
    partitions of a child lie side by side on a circle (all but block designs, expanders
    and the random approximate codes; there by less than one example for each of the
    partitions that it holds).

    Args:
        plan: the plan.
        batch_size: ``d``, the number of examples in the global batch.

    Raises:
        ValueError: ``batch_size < 1``.

    Example:
        >>> import jaxcoded
        >>> from jaxcoded.plan.assignment import loads
        >>> loads(jaxcoded.make_plan(13, fanout=3), 30).tolist()
        [0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]
    """
    if plan.placement is not None:
        _require.integer("batch_size", batch_size, 1)
        sizes = np.diff(plan.placement.examples(batch_size))
        owned = (plan.placement.owned(rank) for rank in range(plan.size))
        return np.array([sizes[list(blocks)].sum() for blocks in owned], np.int64)
    assigned, own = np.zeros((2, plan.size), np.int64)
    assigned[plan.root] = _require.integer("batch_size", batch_size, 1)
    for rank in plan.tree.order:
        own[rank] = kept(plan, rank, Fraction(int(assigned[rank])), whole=True)
        coding = plan.codings[rank]
        if coding is not None:
            rest = Fraction(int(assigned[rank] - own[rank]))
            sizes = np.diff(np.array(coding.cuts(rest, whole=True), np.int64))
            assigned[list(plan.coded_children(rank))] = coding.code.support @ sizes
    return own


def shares(plan: Plan, rank: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of one rank, and their coefficients in its message; see
    `jaxcoded.plan.dealing.dealt`.

    Args:
        plan: the plan.
        rank: whose share.
        batch_size: ``d``, the number of examples in the global batch.

    Returns:
        indices: int64 ``(load,)``, distinct numbers in ``0 … d−1``.
        coefficients: float64 ``(load, P, M)`` with ``P = plan.parts_above[rank]`` and
            ``M = plan.slices_above[rank]``: this rank adds ``Σ_u coefficients[e, p, u]
            · gradient_e[slice u of M]`` to part ``p`` of its message for every example
            ``e``.

    Raises:
        ValueError: ``batch_size < 1``, or no such rank.
    """
    rank = _require.integer("rank", rank, 0, plan.size - 1)
    batch_size = _require.integer("batch_size", batch_size, 1)
    if plan.placement is not None:
        starts = plan.placement.examples(batch_size)
        spans = [
            (starts[block], starts[block + 1]) for block in plan.placement.owned(rank)
        ]
        weights = [np.ones((1, 1))] * len(spans)
    else:
        path = [rank]
        while path[-1] != plan.root:
            path.append(plan.tree.parents[path[-1]])
        runs = dealt(plan, Fraction(batch_size), path, whole=True)[rank]
        spans = [(int(run.start), int(run.end)) for run in runs]
        weights = [run.coefficients for run in runs]
    indices = np.concatenate([np.arange(0), *itertools.starmap(np.arange, spans)])
    grid = plan.parts_above[rank], plan.slices_above[rank]
    table = np.array(weights).reshape(-1, *grid)
    return indices, np.repeat(table, [end - start for start, end in spans], axis=0)


def assignment(plan: Plan, rank: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """What one rank reads, padded to one static length for all ranks; in a plan with
    unequal speeds, to a length of its own.

    Padding repeats one of the rank's own examples (example 0 where it has none) with
    weight 0.

    Args:
        plan: the plan.
        rank: whose assignment.
        batch_size: ``d``, the number of examples in the global batch, at least 1.

    Returns:
        indices: int64 ``(length,)`` into the global batch, ``length ≥ 1``.
        weights: float64. Where the work is shared, ``(blocks · size,)``: 1 for the
            examples of the rank's own blocks, which come first, and 0 for those that it
            holds for others. Without slices and parts ``(length,)``: the weight of each
            example in the local loss. Otherwise ``(chunks, length // chunks, P · M)``:
            the coefficients of the ``M`` slices of each example's gradient in the
            ``P`` parts of the message, equal within a chunk but for padding. The number
            of chunks is a multiple of ``P``, and the first ``(p + 1) / P`` of them are
            all of part ``p``.

    Raises:
        ValueError: ``batch_size < 1``.

    Example:
        >>> import jaxcoded
        >>> from jaxcoded.plan.assignment import assignment
        >>> indices, weights = assignment(jaxcoded.make_plan(3), 1, 4)  # both workers hold everything
        >>> indices.tolist(), weights.tolist()
        ([0, 1, 2, 3], [1.0, 1.0, 1.0, 1.0])
    """
    if plan.placement is not None:
        return _blocks(plan.placement, rank, batch_size)
    indices, coefficients = shares(plan, rank, batch_size)
    ranks = [rank] if plan.speeds else range(plan.size)
    if plan.encoded:
        chunks, chunk_size = _grid(plan, batch_size, ranks)
        members = _chunks(coefficients, chunk_size, chunks)
    else:
        own = loads(plan, batch_size)
        chunks, chunk_size = 1, max(1, *(int(own[each]) for each in ranks))
        members = [np.arange(len(indices))]
    filler = indices[0] if len(indices) else 0
    read = np.full((chunks, chunk_size), filler, np.int64)
    weights = np.zeros((chunks, chunk_size, *coefficients.shape[1:]))
    for chunk, positions in enumerate(members):
        read[chunk, : len(positions)] = indices[positions]
        weights[chunk, : len(positions)] = coefficients[positions]
    weights = weights.reshape(chunks, chunk_size, -1)
    return read.reshape(-1), weights if plan.encoded else weights.reshape(-1)


def _blocks(
    placed: Placement, rank: int, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The blocks that a rank holds, its own first, padded to one size. Weights are 1 in its
    own: what it adds to a sum in which nobody shares anything."""
    starts = placed.examples(_require.integer("batch_size", batch_size, 1))
    held, owned = placed.held(rank), placed.owned(rank)
    size = int(np.diff(starts).max())
    if not held:
        return np.zeros(1, np.int64), np.zeros(1)
    first = starts[list(held)][:, None]
    there = np.arange(size) < np.diff(starts)[list(held)][:, None]
    indices = np.where(
        there, first + np.arange(size), np.minimum(first, batch_size - 1)
    )
    weights = there * (np.arange(len(held)) < len(owned))[:, None]
    return indices.reshape(-1), weights.reshape(-1).astype(float)


def _chunks(coefficients: np.ndarray, chunk_size: int, chunks: int) -> list[np.ndarray]:
    """Positions of examples with equal coefficients, in runs of at most
    ``chunk_size``; stage after stage, as many chunks in each."""
    stages: list[list[np.ndarray]] = [[] for _ in range(coefficients.shape[1])]
    for stage, alike in _alike(coefficients):
        stages[stage] += [
            alike[start : start + chunk_size]
            for start in range(0, len(alike), chunk_size)
        ]
    empty = np.zeros(0, np.int64)
    return [
        chunk
        for stage in stages
        for chunk in stage + [empty] * (chunks // len(stages) - len(stage))
    ]


def _alike(coefficients: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Positions of examples with equal coefficients, and their stage: the first part
    that they are in."""
    _, first, number = np.unique(
        coefficients, axis=0, return_index=True, return_inverse=True
    )
    stages = (coefficients != 0).any(axis=2).argmax(axis=1)
    return [
        (int(stages[first[i]]), np.flatnonzero(number.reshape(-1) == i))
        for i in np.argsort(first)
    ]


def _grid(plan: Plan, batch_size: int, ranks: Iterable[int]) -> tuple[int, int]:
    """Number and size of chunks, the same for all of these ranks: as few examples as
    will take every rank's, alike in a chunk, and of equals the largest chunks."""
    # for every rank, by stage, how many examples are alike
    sizes: list[list[list[int]]] = []
    for rank in ranks:
        sizes.append([[] for _ in range(plan.parts_above[rank])])
        for stage, alike in _alike(shares(plan, rank, batch_size)[1]):
            sizes[-1][stage].append(len(alike))
    multiple = math.lcm(*map(len, sizes))
    candidates = sorted(
        {size for stages in sizes for stage in stages for size in stage}
    ) or [1]

    def chunks(chunk_size: int) -> int:
        most = max(
            len(stages)
            * max(sum(-(-size // chunk_size) for size in stage) for stage in stages)
            for stages in sizes
        )
        return -(-max(1, most) // multiple) * multiple

    best = min(candidates, key=lambda size: (chunks(size) * size, -size))
    return chunks(best), best
