import math

import numpy as np

from jaxcoded import _require
from jaxcoded.codes._distance import MAX_SUBSETS, submatrices, too_many
from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._linear import of_groups
from jaxcoded.codes._redraw import MAX_DRAWS

_WORK = 100_000  # sets of columns to try, in less than a second


def gaussian_mds(
    n: int,
    stragglers: int,
    slices: int = 1,
    *,
    seed: int = 0,
    max_condition: float | None = None,
) -> GradientCode:
    """Return a code of groups of ``d = s+m`` children with a Gaussian generator, which
    is maximum distance separable with probability 1: any ``s`` of each group may be
    missing.

    The generator is drawn at most 64 times, or fewer times if there are many sets of
    ``m`` columns. The draw whose worst set has the smallest condition number becomes
    the generator. These are the Gaussian codes of Kadhe, Koyluoglu and Ramchandran 2020
    (arXiv 2005.07184); see `linear`.

    Args:
        n: number of children and of partitions, a multiple of ``s+m``.
        stragglers: ``s ≥ 0``.
        slices: ``m ≥ 1``; messages are ``1/m`` as long as the gradient.
        seed: the seed of the random draws; equal seeds give equal codes on all ranks.
        max_condition: if given, the first draw is taken in which no ``m`` columns have
            a larger condition number. Default: the best of all draws is taken.

    Returns:
        A `GradientCode` with ``B`` of shape ``(n, n, m)``.

    Raises:
        ValueError: ``s+m`` does not divide ``n``; an argument is out of range; no draw
            reaches ``max_condition``; there are more than 200,000 sets of ``m`` columns
            (blocks up to 20 have fewer); or float64 cannot decode the code.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.gaussian_mds(8, 2, 2, max_condition=15)
        >>> code.stragglers, code.loads.tolist()
        (2, [4, 4, 4, 4, 4, 4, 4, 4])
    """
    s = _require.integer("stragglers", stragglers, 0)
    m = _require.integer("slices", slices, 1)
    subsets = math.comb(s + m, m)
    if subsets > MAX_SUBSETS:
        raise too_many(s + m, m)
    draws = min(MAX_DRAWS, max(1, _WORK // subsets))
    rng = np.random.default_rng([seed, s, m])
    best, least = np.empty(0), np.inf
    for _ in range(draws):
        G = rng.standard_normal((m, s + m))
        condition = max(np.linalg.cond(each).max() for each in submatrices(G, m))
        if condition < least:
            best, least = G, float(condition)
        if max_condition is not None and least <= max_condition:
            break
    else:
        if max_condition is not None:
            raise ValueError(
                f"gaussian_mds with stragglers = {s}, slices = {m}: the least condition "
                f"number of {draws} draws is {least:.3g}, not {max_condition:.3g}; take "
                "a larger max_condition, fewer slices or another seed"
            )
    return of_groups(n, best, s, "gaussian_mds")
