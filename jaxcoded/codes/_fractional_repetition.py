import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode


def fractional_repetition(n: int, stragglers: int) -> GradientCode:
    """Return a fractional repetition code (FRC): ``n/(s+1)`` groups of ``s+1`` children
    that all send the same sum.

    One answer of every group suffices to decode, so often fewer than ``n−s`` answers
    suffice. The coefficients are 0 and 1. The amplification is 1, so rounding errors do
    not grow. This is the fractional repetition scheme of Tandon et al. 2017 (arXiv
    1612.03301).

    Args:
        n: number of children.
        stragglers: ``s``, with ``s + 1`` dividing ``n``.

    Returns:
        A `GradientCode` with ``B`` 0/1 of shape ``(n, n, 1)``. Children ``g(s+1) …
        g(s+1)+s`` form group ``g`` and hold the partitions with the same numbers.

    Raises:
        ValueError: ``s + 1`` does not divide ``n``, or ``s`` is not in ``0 … n−1``.

    Example:
        >>> from jaxcoded import codes
        >>> codes.fractional_repetition(4, 1).decode([False, True, True, False]).coefficients
        array([[0., 1., 1., 0.]])
    """
    n = _require.integer("n", n, 1)
    stragglers = _require.integer("stragglers", stragglers, 0, n - 1)
    copies = stragglers + 1
    if n % copies:
        raise ValueError(
            f"fractional repetition needs s + 1 = {copies} to divide n = {n}; "
            f"take n = {n // copies * copies or copies} children (the fanout of Coded), or code='cyclic_repetition'"
        )
    return GradientCode(
        np.kron(np.eye(n // copies), np.ones((copies, copies))),
        stragglers,
        "fractional_repetition",
    )
