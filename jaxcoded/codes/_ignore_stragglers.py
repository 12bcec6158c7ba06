import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode


def ignore_stragglers(n: int, stragglers: int) -> GradientCode:
    """Return a code without redundancy or waits: the sum of the first ``n−s`` children,
    times ``n/(n−s)``.

    This is the inexact baseline of Tandon et al. 2017 (arXiv 1612.03301, section 5).
    The loads are the same as in `uncoded`.

    Args:
        n: number of children.
        stragglers: ``s`` in ``0 … n−1``.

    Returns:
        A `GradientCode` with ``B`` the identity, ``(n, n, 1)``, and one-step decoding.

    Raises:
        ValueError: ``s`` is not in ``0 … n−1``.

    Example:
        >>> from jaxcoded import codes
        >>> codes.ignore_stragglers(3, 1).decode([0, 2]).coefficients
        array([[1.5, 0. , 1.5]])
    """
    n = _require.integer("n", n, 1)
    return GradientCode(np.eye(n), stragglers, "ignore_stragglers", decoding="one_step")
