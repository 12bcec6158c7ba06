"""The batch cut into atoms: parts whose examples have the same coefficients on every
rank.

The coefficients of all atoms in a sum describe the sum. All coefficients are 1 if the
sum is exact. With shared work the atoms are the blocks, which are assigned to ranks
during the round.
"""

import functools
import itertools
from fractions import Fraction

import numpy as np

from jaxcoded.plan import Plan
from jaxcoded.plan.dealing import Run, dealt


@functools.lru_cache(maxsize=64)
def sizes(plan: Plan) -> np.ndarray:
    """Return the atoms' sizes, float64 ``(atoms,)``, which add up to 1."""
    return np.array([float(b - a) for a, b in itertools.pairwise(_bounds(plan))])


@functools.lru_cache(maxsize=64)
def coefficients(plan: Plan, rank: int) -> np.ndarray:
    """Return the coefficients of each atom in a rank's message, 0 if the rank does not
    hold the atom: float64 ``(atoms, P, M)`` with its `Plan.parts_above` and
    `Plan.slices_above`."""
    bounds = _bounds(plan)
    place = {bound: i for i, bound in enumerate(bounds)}
    out = np.zeros((len(bounds) - 1, plan.parts_above[rank], plan.slices_above[rank]))
    for run in _runs(plan)[rank]:
        out[place[run.start] : place[run.end]] = run.coefficients
    return out


def probe(plan: Plan, rank: int) -> np.ndarray:
    """Return the vector that one rank adds to a round to measure the coefficients of the atoms: float64 ``(P · F ·
    atoms · F / M,)``. It is the rank's message for known gradients.

    The known gradient of atom ``c`` has ``F · atoms · F`` numbers in ``F`` slices,
    which are as fine as any rank's slices. It is 1 at place ``(c, v)`` of each slice
    ``v``, and 0 elsewhere. Then place ``(c, v)`` of slice ``u`` of the sum is a
    coefficient: it shows how much slice ``v`` of atom ``c`` contributes to slice ``u``
    of the result.
    """
    weights = coefficients(plan, rank)
    atoms, parts, slices = weights.shape
    fine = plan.padding_multiple
    finer = fine // slices
    out = np.zeros((parts, finer, atoms, slices, finer))
    for w in range(finer):
        out[:, w, :, :, w] = weights.transpose(1, 0, 2)
    return out.reshape(-1)


def deviation(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of all probes in an exact sum, and the weights of deviations from this sum, both float64 ``(F
    · atoms · F,)``. The residual is ``√Σ weights · (sum − exact)²``."""
    fine, lengths = plan.padding_multiple, sizes(plan)
    shape = fine, len(lengths), fine
    exact = np.broadcast_to(np.eye(fine)[:, None, :], shape)
    weights = np.broadcast_to(lengths[:, None] / fine, shape)
    return exact.reshape(-1), weights.reshape(-1)


@functools.lru_cache(maxsize=64)
def _bounds(plan: Plan) -> tuple[Fraction, ...]:
    return plan.strategy.bounds(plan)


@functools.lru_cache(maxsize=64)
def _runs(plan: Plan) -> dict[int, list[Run]]:
    """Return each rank's own part of a batch that can be cut anywhere."""
    return dealt(plan, Fraction(1), range(plan.size), whole=False)
