"""Divide the batch over a tree with codes: the runs of examples that each rank
computes, and their coefficients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxcoded.plan.plan import Plan


class Run(NamedTuple):
    """Consecutive examples and their coefficients in a rank's message, ``(P, M)`` with its
    `Plan.parts_above` and `Plan.slices_above`."""

    start: Fraction
    end: Fraction
    coefficients: np.ndarray


def dealt(
    plan: Plan, size: Fraction, ranks: Container[int], *, whole: bool
) -> dict[int, list[Run]]:
    """Return for each rank the runs that it computes itself, in order.

    A rank keeps the fraction ``v/c`` of the set assigned to its subtree
    (`Plan.own_share`). Here ``v`` is its speed, which is 1 if all speeds are equal, and
    ``c`` is the capacity of its subtree. Its code divides the rest among its children.
    A rank's coefficients are the products of the coefficients on the path from the
    root.

    With slices, a coefficient is a vector. If a parent's code has ``m`` slices, the
    parent's slice ``u`` consists of the child's slices ``u·m … u·m + m−1``. With parts,
    each part has such a vector. If each child sends ``P'`` parts for one part of its
    parent, the parent's part ``p`` consists of the child's parts ``p·P' … p·P' +
    P'−1``.

    Args:
        ranks: the ranks whose runs are requested; all ranks above these must be
            included.
        whole: whether the batch consists of ``size`` examples that must not be cut.
    """
    assigned = {plan.root: [Run(Fraction(0), size, np.ones((1, 1)))]}
    out = {}
    for rank in (rank for rank in plan.tree.order if rank in ranks):
        runs = assigned.pop(rank, [])
        total = sum((run.end - run.start for run in runs), Fraction(0))
        own = kept(plan, rank, total, whole=whole)
        out[rank] = _between(runs, Fraction(0), own)
        coding = plan.codings[rank]
        if coding is None:
            continue
        code = coding.code
        B = code.B.reshape(code.n, code.parts, code.k, code.m)
        children = [
            (row, child)
            for row, child in enumerate(plan.coded_children(rank))
            if child in ranks
        ]
        for j, (start, end) in enumerate(
            itertools.pairwise(coding.cuts(total - own, whole=whole))
        ):
            partition = _between(runs, own + start, own + end)
            for row, child in children:
                if code.support[row, j]:
                    assigned.setdefault(child, []).extend(
                        run._replace(
                            coefficients=np.kron(run.coefficients, B[row, :, j])
                        )
                        for run in partition
                    )
    return out


def kept(plan: Plan, rank: int, assigned: Fraction, *, whole: bool) -> Fraction:
    """Return how much a rank computes itself of the set assigned to its subtree."""
    share = plan.own_share(rank) * assigned
    return Fraction(math.ceil(share)) if whole else share


def _between(runs: list[Run], start: Fraction, end: Fraction) -> list[Run]:
    """Return the part of some runs, laid end to end, that is between two positions."""
    out = []
    position = Fraction(0)
    for run in runs:
        # Convert positions in the run to positions in the batch.
        shift = run.start - position
        position += run.end - run.start
        first, last = max(start + shift, run.start), min(end + shift, run.end)
        if first < last:
            out.append(run._replace(start=first, end=last))
    return out


def loads(plan: Plan, batch_size: int) -> np.ndarray:
    """See `Strategy.loads`."""
    assigned, own = np.zeros((2, plan.size), np.int64)
    assigned[plan.root] = batch_size
    for rank in plan.tree.order:
        own[rank] = kept(plan, rank, Fraction(int(assigned[rank])), whole=True)
        coding = plan.codings[rank]
        if coding is not None:
            rest = Fraction(int(assigned[rank] - own[rank]))
            sizes = np.diff(np.array(coding.cuts(rest, whole=True), np.int64))
            assigned[list(plan.coded_children(rank))] = coding.code.support @ sizes
    return own


def shares(plan: Plan, rank: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """See `Strategy.shares`."""
    path = [rank]
    while path[-1] != plan.root:
        path.append(plan.tree.parents[path[-1]])
    runs = dealt(plan, Fraction(batch_size), path, whole=True)[rank]
    spans = [(int(run.start), int(run.end)) for run in runs]
    indices = np.concatenate([np.arange(0), *itertools.starmap(np.arange, spans)])
    grid = plan.parts_above[rank], plan.slices_above[rank]
    table = np.array([run.coefficients for run in runs]).reshape(-1, *grid)
    return indices, np.repeat(table, [end - start for start, end in spans], axis=0)


def bounds(plan: Plan) -> tuple[Fraction, ...]:
    """Return all positions at which a batch of length 1 is cut into the ranks' runs."""
    return _ends(plan, Fraction(1), whole=False)


def cuts(plan: Plan, batch_size: int) -> list[np.ndarray]:
    """Return the start and end of each run of a batch of examples."""
    ends = _ends(plan, Fraction(batch_size), whole=True)
    return [np.array(pair, np.int64) for pair in itertools.pairwise(ends)]


def _ends(plan: Plan, size: Fraction, *, whole: bool) -> tuple[Fraction, ...]:
    runs = dealt(plan, size, range(plan.size), whole=whole)
    ends = {bound for each in runs.values() for run in each for bound in run[:2]}
    return tuple(sorted(ends | {Fraction(0), size}))
