"""The examples that a rank of a coded tree reads, in chunks with equal coefficients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from jaxcoded.plan.dealing import loads, shares

if TYPE_CHECKING:
    from jaxcoded.plan.plan import Plan


def assignment(plan: Plan, rank: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """See `Strategy.assignment`."""
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


def _chunks(coefficients: np.ndarray, chunk_size: int, chunks: int) -> list[np.ndarray]:
    """Return the positions of examples in chunks of at most ``chunk_size`` examples
    with equal coefficients. Each stage (`_alike`) has the same number of chunks, the
    first stage first."""
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
    """Return each set of examples with equal coefficients: its stage, which is the first
    part to which it contributes, and the examples' positions."""
    _, first, number = np.unique(
        coefficients, axis=0, return_index=True, return_inverse=True
    )
    stages = (coefficients != 0).any(axis=2).argmax(axis=1)
    return [
        (int(stages[first[i]]), np.flatnonzero(number.reshape(-1) == i))
        for i in np.argsort(first)
    ]


def _grid(plan: Plan, batch_size: int, ranks: Iterable[int]) -> tuple[int, int]:
    """Return the number and size of the chunks of all these ranks: the size with the
    least padding, and among equal sizes the largest."""
    # for every rank, the numbers of examples with equal coefficients, by stage
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
