"""Compute the expected time of a star in closed form."""

import math

import numpy as np

from jaxcoded import _require


def expected_runtime(
    n: int,
    load: int,
    slices: int,
    *,
    compute: tuple[float, float],
    communicate: tuple[float, float],
) -> float:
    """Return the expected time of an iteration in the model of Ye & Abbe 2018 (arXiv 1802.03475, §VI).

    A worker takes ``load · T1 + T2 / slices``. ``T1`` is ``t1 + Exp(rate λ1)``, and ``T2`` is ``t2 + Exp(rate λ2)``.
    The master waits for the ``n − load + slices`` fastest.

    Args:
        n: workers.
        load: subsets of the data that each holds, ``d``.
        slices: ``m ≤ d``; ``s = d − m`` may be missing.
        compute: ``(t1, λ1)``, seconds and 1 / second.
        communicate: ``(t2, λ2)``.

    Returns:
        Seconds, to 10 digits: the tail of an order statistic of sums of two exponentials,
        integrated numerically.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> from jaxcoded.tools.simulator import expected_runtime
        >>> time = expected_runtime(8, 4, 3, compute=(1.6, 0.8), communicate=(6, 0.1))
        >>> round(time, 4)
        21.3697
    """
    _require.integer("n", n, 1)
    _require.integer("load", load, 1, n)
    _require.integer("slices", slices, 1, load)
    for name, (shift, rate) in (("compute", compute), ("communicate", communicate)):
        if not (0 <= shift < math.inf and 0 < rate < math.inf):
            raise ValueError(
                f"{name} must be seconds >= 0 and a rate > 0, got {(shift, rate)}"
            )
    shift = load * compute[0] + communicate[0] / slices
    fast, slow = sorted((compute[1] / load, communicate[1] * slices), reverse=True)
    waited_for = n - load + slices
    # Gauss-Legendre on panels: the tail decays as exp(-slow t), at a scale down to 1/fast
    end = (40 + math.log(n)) / slow
    edges = np.concatenate([[0], np.geomspace(1e-3 / fast / n, end, 400)])
    nodes, weights = np.polynomial.legendre.leggauss(12)
    half = np.diff(edges)[:, None] / 2
    t = edges[:-1, None] + half * (nodes + 1)
    done = _sum_of_two(t, fast, slow)
    # P(fewer than `waited_for` are done); as logarithms: of many workers the binomial
    # coefficients are beyond float64
    here, missing = (np.log(np.maximum(p, 1e-300)) for p in (done, 1 - done))
    still = np.zeros_like(t)
    for j in range(waited_for):
        still += np.exp(math.log(math.comb(n, j)) + j * here + (n - j) * missing)
    return shift + float((half * weights * still).sum())


def _sum_of_two(t: np.ndarray, fast: float, slow: float) -> np.ndarray:
    """Return P(X + Y ≤ t) for exponentials of these rates."""
    gap = fast - slow
    if gap < 1e-9 * fast:
        return -np.expm1(-slow * t) - slow * t * np.exp(-slow * t)
    return -np.expm1(-slow * t) - slow * np.exp(-slow * t) * -np.expm1(-gap * t) / gap
