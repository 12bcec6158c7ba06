import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._linear import of_groups


def hamming(n: int, r: int) -> GradientCode:
    """Return the binary Hamming code with ``r`` checks, its generator read as real
    numbers: ``[2^r − 1, 2^r − 1 − r, 3]``.

    Any two children of each group may be missing, and also many sets of up to ``r``
    children. A long code has short messages and a high load. This is one of the codes
    in the framework of Kadhe, Koyluoglu and Ramchandran 2020 (arXiv 2005.07184); see
    `linear`.

    Args:
        n: number of children and of partitions, a multiple of ``2^r − 1``.
        r: number of checks, 2 … 6.

    Returns:
        A `GradientCode` with ``B`` 0/1 of shape ``(n, n, 2^r − 1 − r)``. In each group
        the first ``m`` children send one slice each, and the other children send sums
        of slices.

    Raises:
        ValueError: ``2^r − 1`` does not divide ``n``, or ``r`` is out of range.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.hamming(7, 3)
        >>> code.m, code.stragglers
        (4, 2)
        >>> code.decodable([0, 1, 2, 3]), code.decodable([0, 1, 3, 4])
        (True, False)
    """
    r = _require.integer("r", r, 2, 6)
    words = np.arange(1, 2**r)[:, None] >> np.arange(r) & 1
    checks = words[words.sum(axis=1) > 1]
    G = np.hstack([np.eye(len(checks)), checks])
    return of_groups(n, G, None, "hamming")
