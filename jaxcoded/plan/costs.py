"""Divide examples of known, unequal cost so that all ranks finish at the same time."""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcoded import _arrays, _require

_LEAST = 1e-3  # the least cost of a block, relative to the mean


def checked(costs: Any, examples: int) -> np.ndarray:
    """Return the costs relative to the largest cost: float64 ``(examples,)``, read-only.
    Raise a TypeError or ValueError unless each cost is a finite number ≥ 0."""
    try:
        given = np.asarray(_arrays.viewed(costs))
        # dtypes of ml_dtypes, such as bfloat16, have the kind "V"
        real = given.dtype.kind in "fiu" or (
            given.dtype.kind == "V" and given.dtype.type is not np.void
        )
        if not real or isinstance(costs, np.ma.MaskedArray):
            raise TypeError
        out = given.astype(np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"costs must have one number for each example, got {_require.shown(costs)}: give the seconds that each "
            "takes, or numbers in proportion to them"
        ) from None
    if out.shape != (examples,):
        raise ValueError(
            f"costs must have shape ({examples},), one for each example, got {out.shape}"
        )
    wrong = np.flatnonzero(~(np.isfinite(out) & (out >= 0)))
    if len(wrong):
        raise ValueError(
            f"costs must be finite and >= 0, got {out[wrong[0]]:g} for example {wrong[0]}: give the seconds that each "
            "takes, or numbers in proportion to them"
        )
    out /= out.max() or 1.0
    out.setflags(write=False)
    return out


def longest_first(costs: np.ndarray, rooms: Sequence[int]) -> list[np.ndarray]:
    """Return the examples of each place; a place is a rank or a block. The examples are
    assigned in order of cost, the most expensive first. Each example goes to the place
    with the least cost so far that has room (longest processing time first; Graham
    1969). ``rooms`` has the number of examples that each place can take; together the
    places can take all examples. The cost of each place is about in proportion to its
    room.
    """
    places: list[list[int]] = [[] for _ in rooms]
    # Among places of equal cost, take the place with fewer examples, so that examples
    # with cost 0 are divided, too.
    heap = [(0.0, 0, place) for place, room in enumerate(rooms) if room]
    for example in np.argsort(-costs, kind="stable").tolist():
        cost, count, place = heap[0]
        places[place].append(example)
        if count + 1 == rooms[place]:
            heapq.heappop(heap)
        else:
            more = cost + float(costs[example]) / float(rooms[place])
            heapq.heapreplace(heap, (more, count + 1, place))
    return [np.array(sorted(place), np.int64) for place in places]


def divided(costs: np.ndarray, rooms: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the examples of each block. Examples are divided among ranks, and then
    among each rank's blocks.

    The blocks of a rank cost about the same, so that other ranks can take any of them.
    An example that costs more than a block should becomes a separate block, which the
    rank computes first. ``rooms`` has, for each rank, the number of examples that each
    of its blocks takes.
    """
    out = []
    for examples, room in zip(
        longest_first(costs, [sum(room) for room in rooms]), rooms
    ):
        out += [examples[block] for block in longest_first(costs[examples], room)]
    return out


def relative(costs: Sequence[float]) -> list[float]:
    """Return the costs of blocks as multiples of the mean cost, at least 1/1000."""
    mean = sum(costs) / len(costs)
    return [max(float(cost / mean), _LEAST) if mean else 1.0 for cost in costs]
