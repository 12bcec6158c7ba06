import numpy as np

from jaxcoded import _require
from jaxcoded.codes._gradient_code import GradientCode


def grouped(
    n: int,
    stragglers: int,
    load: int,
    slices: int = 1,
    *,
    decoding: str = "least_squares",
) -> GradientCode:
    """Return a code of groups of at most ``load`` children that hold the same
    partitions. Any ``m`` children of a group give its sum. This is fractional
    repetition with slices, for any ``n`` and any ``s < n``. The code is approximate.

    If ``a`` of the ``c`` children of a group answer, the squared residual is the sum of
    ``c · max(0, m − a)`` over the groups. These are the groups of Kadhe, Koyluoglu and
    Ramchandran 2020 (arXiv 2005.07184). Here, orthogonal real trigonometric vectors are
    the code of each group, and ``s`` may be larger than ``c − m``.

    Args:
        n: number of children and of partitions.
        stragglers: ``s`` in ``0 … n−1``.
        load: the largest number of partitions that a child holds, which is the largest
            size of a group. The sizes of groups are as equal as possible.
        slices: ``m ≥ 1``, at most the size of the smallest group; messages are ``1/m``
            as long as the gradient.
        decoding: ``"least_squares"``; ``"exact"``, which needs a small enough ``s``; or
            ``"one_step"``, which needs one slice. See `GradientCode`.

    Returns:
        A `GradientCode` with ``B`` of shape ``(n, n, m)``.

    Raises:
        ValueError: an argument is out of range, or a group has fewer than ``m``
            children.

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.grouped(7, 4, load=4, slices=2)
        >>> code.loads.tolist()
        [4, 4, 4, 4, 3, 3, 3]
        >>> [round(code.decode(a).residual**2, 9) for a in ([0, 3, 4, 5], [0, 1, 2, 4])]
        [0.0, 3.0]
    """
    n = _require.integer("n", n, 1)
    load = _require.integer("load", load, 1, n)
    groups = -(-n // load)
    m = _require.integer("slices", slices, 1)
    if n // groups < m:
        raise ValueError(
            f"{m} slices need groups of at least {m} children, but {n} children with a "
            f"load of at most {load} form groups of {n // groups}; take a larger load"
        )
    B = np.zeros((n, n, m))
    for group in np.array_split(np.arange(n), groups):
        B[np.ix_(group, group)] = trigonometric(len(group), m)[:, None, :]
    return GradientCode(B, stragglers, "grouped", decoding=decoding)


def trigonometric(children: int, slices: int) -> np.ndarray:
    """Return a matrix ``(children, slices)`` with orthogonal columns. Any ``slices``
    rows are independent.

    Row ``i`` is ``cos + sin`` of ``f · 2πi/children``, for ``slices`` frequencies ``f``
    around 0, in steps of 1. A combination of the columns is ``exp(−i·x·(slices−1)/2)``
    times a polynomial of degree ``slices − 1`` in ``exp(i·x)``. So it vanishes at
    ``slices − 1`` angles at most.
    """
    angles = 2 * np.pi * np.arange(children) / children
    phases = np.outer(angles, np.arange(slices) - (slices - 1) / 2)
    return np.cos(phases) + np.sin(phases)
