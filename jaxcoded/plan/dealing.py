"""The batch dealt out over a plan: the runs of examples that each rank computes, and their
coefficients."""

import itertools
import math
from collections.abc import Container
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jaxcoded.plan import Plan


class Run(NamedTuple):
    """Neighbouring examples and their coefficients ``(P, M)`` in a rank's message, with ``P``
    and ``M`` as in `Plan.parts_above` and `Plan.slices_above`."""

    start: Fraction
    end: Fraction
    coefficients: np.ndarray


def dealt(
    plan: Plan, size: Fraction, ranks: Container[int], *, whole: bool
) -> dict[int, list[Run]]:
    """What ranks compute themselves.

    A rank keeps ``v/c`` of what it is assigned (``v``: its speed, 1 where all are equal; ``c``:
    the capacity of its subtree), see `Plan.own_share`, and codes the rest over its children.
    Coefficients multiply down the path; with slices, a coefficient is a vector, and slice ``u``
    of a parent cut into ``m`` is slices ``u·m … u·m + m−1`` of the child. With parts there is one
    such vector for each, and part ``p`` of a parent with ``P'`` parts to a child is parts ``p·P' …
    p·P' + P'−1`` of the child.

    Args:
        plan: a plan with codes.
        size: of the batch.
        ranks: those that are wanted, and all above them.
        whole: whether it consists of examples, which are not cut; ``size`` is their number.

    Returns:
        Their runs, in the order in which each has them.
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
    """How much of what is assigned to its subtree a rank computes itself."""
    share = plan.own_share(rank) * assigned
    return Fraction(math.ceil(share)) if whole else share


def _between(runs: list[Run], start: Fraction, end: Fraction) -> list[Run]:
    """What lies between two positions of runs laid end to end."""
    out = []
    position = Fraction(0)
    for run in runs:
        # from the position of the run to that of the batch
        shift = run.start - position
        position += run.end - run.start
        first, last = max(start + shift, run.start), min(end + shift, run.end)
        if first < last:
            out.append(run._replace(start=first, end=last))
    return out
