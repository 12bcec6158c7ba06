import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode


def bernoulli(
    n: int,
    stragglers: int,
    load: float,
    *,
    seed: int = 0,
    decoding: str = "least_squares",
) -> GradientCode:
    """Return a Bernoulli code (BGC): child ``i`` holds partition ``j`` with probability
    ``load/n``, independently of all other entries. The code is approximate, for any
    ``n`` and ``s < n``.

    This is the Bernoulli gradient code of Charles, Papailiopoulos and Ellenberg 2017
    (arXiv 1711.06771). With ``r`` answers and the coefficients ``n/(r · load)`` the
    squared residual is ``(n − load) · n/(r · load)`` on average. Unlike in the paper,
    every partition has a holder, and every child has a partition: after the draw, an
    empty row or column gets an entry, in the column or row with the fewest entries. So
    the average load is a little above ``load`` if ``load`` is as small as ``log n``.

    Args:
        n: number of children and of partitions.
        stragglers: ``s`` in ``0 … n−1``.
        load: the expected number of partitions of a child, above 0 and at most ``n``.
        seed: the seed of the random draws; equal seeds give equal codes on all ranks.
        decoding: ``"least_squares"``, or ``"one_step"``; see `GradientCode`.

    Returns:
        A `GradientCode` with ``B`` 0/1 of shape ``(n, n, 1)``.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.bernoulli(100, 10, 8)
        >>> int(code.loads.min()), float(code.loads.mean()), int(code.loads.max())
        (3, 8.22, 15)
    """
    n = _require.integer("n", n, 1)
    if not 0 < load <= n:
        raise ValueError(f"load must be above 0 and at most n = {n}, got {load!r}")
    B = _draw(np.full((n, n), load / n), seed)
    return GradientCode(B, stragglers, "bernoulli", decoding=decoding)


def stochastic_block(
    n: int,
    stragglers: int,
    load: float,
    blocks: int,
    *,
    inside: float = 0.8,
    seed: int = 0,
    decoding: str = "least_squares",
) -> GradientCode:
    """Return a stochastic block code (SBC): a child draws some of its partitions from
    its own block, and the rest from all other blocks. The code is approximate, for any
    ``n`` and ``s < n``.

    Children and partitions are cut into ``blocks`` blocks of size ``n/blocks``, rounded
    up or down. Entries are drawn independently, with one probability inside the blocks
    and another probability outside. This is the stochastic block code of Charles and
    Papailiopoulos 2018 (arXiv 1805.10378). It is a compromise between fractional
    repetition (``inside = 1`` and ``load = n/blocks``) and the Bernoulli code (``inside
    = 1/blocks``). Fractional repetition loses little to random stragglers, but the
    worst set of stragglers costs it a whole block. Empty partitions and children get an
    entry as in `bernoulli`.

    Args:
        n: number of children and of partitions.
        stragglers: ``s`` in ``0 … n−1``.
        load: the expected number of partitions of a child, above 0.
        blocks: the number of blocks, in ``2 … n``.
        inside: the fraction of the load that is in the child's own block, in ``0 … 1``.
        seed: the seed of the random draws; equal seeds give equal codes on all ranks.
        decoding: ``"least_squares"``, or ``"one_step"``; see `GradientCode`.

    Returns:
        A `GradientCode` with ``B`` 0/1 of shape ``(n, n, 1)``.

    Raises:
        ValueError: an argument is out of range, or a child would hold more partitions
            inside or outside of its block than exist.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.stochastic_block(8, 2, 4, 2, inside=1)
        >>> code == codes.approximate(codes.fractional_repetition(8, 3), 2)
        True
    """
    n = _require.integer("n", n, 2)
    blocks = _require.integer("blocks", blocks, 2, n)
    if not 0 < load < np.inf or not 0 <= inside <= 1:
        raise ValueError(
            f"load must be above 0 and inside from 0 to 1, got {load!r} and {inside!r}"
        )
    block = np.arange(n) * blocks // n
    own = block[:, None] == block
    size = own.sum(axis=1, keepdims=True)
    probability = np.where(own, inside * load / size, (1 - inside) * load / (n - size))
    if probability.max() > 1:
        raise ValueError(
            f"a child cannot hold {inside * load:g} partitions of its block of "
            f"{size.min()} and {(1 - inside) * load:g} of the other blocks; take another "
            "load, inside or blocks"
        )
    B = _draw(probability, seed)
    return GradientCode(B, stragglers, "stochastic_block", decoding=decoding)


def _draw(probability: np.ndarray, seed: int) -> np.ndarray:
    """Draw a 0/1 matrix with these probabilities and no empty row or column."""
    n = len(probability)
    held = np.random.default_rng([seed, n]).random((n, n)) < probability
    # the partitions, then the children
    for rows, chances in ((held.T, probability.T), (held, probability)):
        for row in np.flatnonzero(~rows.any(axis=1)):
            entries = np.where(chances[row] > 0, rows.sum(axis=0), n)
            rows[row, entries.argmin()] = True
    return held.astype(float)
