"""The tolerance of a linear code, by enumeration."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

# The largest number of sets of columns to try. Up to block length 20 this covers all
# sets.
MAX_SUBSETS = 200_000
_BATCH = 4096
# The parity check matrix has orthonormal rows. Its columns count as dependent below this
# singular value.
_DEPENDENT = 1e-9


def minimum_distance(generator: np.ndarray) -> int:
    """Return the minimum distance ``δ`` of a linear code over the reals: the smallest
    number of columns without which its generator loses rank.

    The function computes ``δ`` by enumeration, as the smallest number of dependent
    columns of the parity check matrix.

    Args:
        generator: float array ``(m, d)`` of rank ``m``.

    Returns:
        ``δ`` in ``1 … d−m+1``; any ``δ − 1`` columns may be missing.

    Raises:
        ValueError: ``generator`` is not a finite real ``(m, d)`` of rank ``m``, or there
            are more than 200,000 sets of columns to try (block lengths up to 20 have
            fewer).

    Example:
        >>> import numpy as np
        >>> from jaxcoded import codes
        >>> codes.minimum_distance(np.array([[1, 0, 1], [0, 1, 1]]))
        2
        >>> codes.minimum_distance(np.array([[1, 0, 1, 0], [0, 1, 0, 1]]))
        2
        >>> codes.minimum_distance(np.ones((1, 5)))
        5
    """
    H = parity_check(generator)
    surplus, d = H.shape
    if math.comb(d, surplus) <= MAX_SUBSETS and independent(H, surplus):
        return surplus + 1  # the largest possible distance, by Singleton's bound
    return next(e for e in range(1, surplus + 2) if not independent(H, e))


def parity_check(generator: np.ndarray) -> np.ndarray:
    """Return a matrix ``(d−m, d)`` with orthonormal rows that is orthogonal to the
    generator after its columns are scaled to norm 1. Raise a ValueError unless the
    generator is a finite real ``(m, d)`` of rank ``m``."""
    G = np.asarray(generator)
    if G.ndim != 2 or 0 in G.shape or G.dtype.kind not in "buif":
        raise ValueError(
            f"a generator must be a real matrix (m, d), got {G.dtype} of shape {G.shape}"
        )
    if not np.isfinite(G).all():
        raise ValueError("the generator has entries that are not finite")
    norms = np.linalg.norm(G.astype(float), axis=0)
    _, values, right = np.linalg.svd(G / np.where(norms > 0, norms, 1.0))
    rank = int((values > 1e-10 * values[0]).sum())
    if rank < len(G):
        raise ValueError(
            f"the {len(G)} rows of the generator have rank {rank}: its {G.shape[1]} "
            f"columns cannot give {len(G)} slices; take independent rows"
        )
    return right[rank:]


def independent(H: np.ndarray, e: int) -> bool:
    """Return whether any ``e`` columns are linearly independent. Raise a ValueError if
    the first 200,000 sets are, but more sets exist."""
    if e > len(H):
        return False
    return e == 0 or all(
        np.linalg.svd(columns, compute_uv=False)[:, -1].min() > _DEPENDENT
        for columns in submatrices(H, e)
    )


def submatrices(matrix: np.ndarray, e: int) -> Iterator[np.ndarray]:
    """Yield all choices of ``e`` columns, in batches ``(sets, rows, e)``. Raise a
    ValueError after 200,000 choices if more exist."""
    sets = itertools.combinations(range(matrix.shape[1]), e)
    tried = 0
    while batch := list(itertools.islice(sets, _BATCH)):
        if tried > MAX_SUBSETS:
            raise too_many(matrix.shape[1], e)
        tried += len(batch)
        yield matrix[:, batch].swapaxes(0, 1)


def too_many(d: int, e: int) -> ValueError:
    """Return the error for more than 200,000 sets of columns."""
    return ValueError(
        f"a linear code with block length d = {d} has more than {MAX_SUBSETS:,} "
        f"sets of {e} columns to try; take shorter blocks or fewer stragglers"
    )
