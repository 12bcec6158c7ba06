import functools
import itertools
from collections.abc import Callable

import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode


def block_design(
    n: int, stragglers: int, load: int | None = None, *, decoding: str = "least_squares"
) -> GradientCode:
    """Return a block design code: a symmetric balanced incomplete block design, in
    which every child holds ``k`` of ``n`` partitions and any two children share ``λ``.
    The code is approximate, for any ``s < n``.

    If ``r`` children answered, least squares gives each of them the coefficient
    ``k/(k−λ+λr)``. The squared residual is ``n − k²r/(k−λ+λr)``: Kadhe, Koyluoglu and
    Ramchandran 2019 (arXiv 1904.13373). Designs exist only for some ``n``:

    - the points and hyperplanes of projective spaces over the prime fields, ``n =
      (p^(D+1)−1)/(p−1)`` and ``k = (p^D−1)/(p−1)`` with ``D ≥ 2``: 7, 13, 15, 31, 40,
      57, 63, …;
    - the quadratic residues of the primes ``n = 4t+3``, ``k = (n−1)/2`` and ``λ = t``:
      7, 11, 19, 23, 31, 43, ….

    Args:
        n: number of children and of partitions.
        stragglers: ``s`` in ``0 … n−1``.
        load: ``k``, for an ``n`` that has designs with several ``k``. Default: the
            smallest ``k``.
        decoding: ``"least_squares"``, or ``"one_step"``; see `GradientCode`.

    Returns:
        A `GradientCode` with ``B`` 0/1 of shape ``(n, n, 1)``.

    Raises:
        ValueError: this function knows no design for ``n`` (the message names the
            nearest ``n``), or an argument is out of range.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.block_design(7, 2)
        >>> code.decode([0, 1, 3, 4, 6]).coefficients.round(3)
        array([[0.429, 0.429, 0.   , 0.429, 0.429, 0.   , 0.429]])
    """
    n = _require.integer("n", n, 1)
    designs = _designs(n)
    if not designs:
        below = next((v for v in range(n - 1, 0, -1) if _designs(v)), None)
        above = next(v for v in itertools.count(n + 1) if _designs(v))
        nearest = f"{above}" if below is None else f"{below} or {above}"
        raise ValueError(
            f"no symmetric design for n = {n}; the nearest are n = {nearest}"
        )
    load = min(designs) if load is None else load
    if load not in designs:
        raise ValueError(
            f"the designs for n = {n} have load {' or '.join(map(str, sorted(designs)))}, "
            f"got {load!r}"
        )
    B = designs[load]().astype(float)
    return GradientCode(B, stragglers, "block_design", decoding=decoding)


def _designs(n: int) -> dict[int, Callable[[], np.ndarray]]:
    """Return, for the load of each design for ``n``, a function that builds the design."""
    designs: dict[int, Callable[[], np.ndarray]] = {}
    if n >= 7 and n % 4 == 3 and _prime(n):
        designs[(n - 1) // 2] = functools.partial(_residues, n)
    for p in range(2, int(n**0.5) + 1):
        points, dimension = 1 + p, 1
        while points < n:
            points, dimension = 1 + p * points, dimension + 1
        if points == n and dimension > 1 and _prime(p):
            designs[(n - 1) // p] = functools.partial(_space, p, dimension)
    return designs


def _prime(p: int) -> bool:
    return p > 1 and all(p % factor for factor in range(2, int(p**0.5) + 1))


def _residues(n: int) -> np.ndarray:
    """Return bool ``(n, n)``: whether ``j − i`` is a nonzero square modulo ``n``."""
    numbers = np.arange(n)
    return np.isin((numbers - numbers[:, None]) % n, numbers[1:] ** 2 % n)


def _space(p: int, dimension: int) -> np.ndarray:
    """Return bool ``(n, n)``: whether point ``j`` lies on hyperplane ``i``."""
    vectors = np.array(list(itertools.product(range(p), repeat=dimension + 1))[1:])
    first = vectors[np.arange(len(vectors)), (vectors != 0).argmax(axis=1)]
    points = vectors[first == 1]
    return points @ points.T % p == 0
