import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._linear import of_groups


def single_parity_check(n: int, slices: int) -> GradientCode:
    """Return a code of groups of ``m+1`` children: ``m`` children send one slice each
    of the group's sum, and the last child sends the sum of these slices. This is an
    ``[m+1, m, 2]`` code.

    In each group any one child may be missing. The coefficients are then 0, 1 and −1.
    This is the simplest code in the framework of Kadhe, Koyluoglu and Ramchandran 2020
    (arXiv 2005.07184); see `linear`.

    Args:
        n: number of children and of partitions, a multiple of ``m+1``.
        slices: ``m ≥ 1``; messages are ``1/m`` as long as the gradient.

    Returns:
        A `GradientCode` with ``B`` 0/1 of shape ``(n, n, m)`` and ``stragglers = 1``.

    Raises:
        ValueError: ``m+1`` does not divide ``n``, or an argument is out of range.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.single_parity_check(3, 2)
        >>> code.decode([0, 2]).coefficients.round(6) + 0.0
        array([[ 1.,  0.,  0.],
               [-1.,  0.,  1.]])
    """
    m = _require.integer("slices", slices, 1)
    G = np.column_stack([np.eye(m), np.ones(m)])
    return of_groups(n, G, 1, "single_parity_check")
