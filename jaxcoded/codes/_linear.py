import numpy as np

from jaxcoded import _require
from jaxcoded.codes._distance import independent, minimum_distance, parity_check
from jaxcoded.codes._gradient_code import GradientCode
from jaxcoded.codes._redraw import accepted


def linear(
    n: int, generator: np.ndarray, *, stragglers: int | None = None
) -> GradientCode:
    """Return a code of groups of ``d`` children that send their sum encoded by any
    linear ``[d, m, δ]`` code.

    The ``d`` children of a group hold the same ``d`` partitions. The sum of these
    partitions is cut into ``m`` slices. Child ``i`` sends the combination of slices
    with the coefficients in column ``i`` of the generator. So the block length is the
    load, the dimension is the saving of communication, and the minimum distance
    determines the tolerance. This is the framework of Kadhe, Koyluoglu and Ramchandran
    2020 (arXiv 2005.07184). A set of answers is decodable if in every group the columns
    of the children that answered have rank ``m``. Any ``d−δ+1`` columns of a group have
    this rank.

    A generator with a single row of ones is fractional repetition.

    Args:
        n: number of children and of partitions, a multiple of ``d``.
        generator: float array ``(m, d)`` of rank ``m``.
        stragglers: ``s`` below ``δ``. Default: ``δ − 1``, with ``δ`` from
            `minimum_distance`.

    Returns:
        A `GradientCode` with ``B`` of shape ``(n, n, m)``. Children ``gd … gd+d−1``
        form group ``g`` and hold the partitions with the same numbers.

    Raises:
        ValueError: the generator is not a finite real matrix of rank ``m``, or ``d``
            does not divide ``n``. Also if the code cannot decode without some set of
            ``stragglers`` columns, if there are more than 200,000 sets of columns to
            try, or if float64 cannot decode the code (amplification · eps > 1e-3).

    Example:
        >>> from jaxcoded import codes
        >>> code = codes.linear(4, [[1, 0, 1, 1], [0, 1, 1, -1]])
        >>> code.stragglers, code.m, code.loads.tolist()
        (2, 2, [4, 4, 4, 4])
        >>> code.decode([2, 3]).coefficients.round(6) + 0.0
        array([[ 0. ,  0. ,  0.5,  0.5],
               [ 0. ,  0. ,  0.5, -0.5]])
    """
    return of_groups(n, np.asarray(generator), stragglers, "linear")


def of_groups(n: int, G: np.ndarray, stragglers: int | None, name: str) -> GradientCode:
    """Return the code of `linear` under another name."""
    n = _require.integer("n", n, 1)
    H = parity_check(G)
    d = G.shape[1]
    if n % d:
        below = f"{n // d * d} or " if n > d else ""
        raise ValueError(
            f"{name} has groups of d = {d} children, which must divide n = {n}; take "
            f"n = {below}{(n // d + 1) * d} children, or random_generator for any n"
        )
    if stragglers is None:
        s = minimum_distance(G) - 1
    else:
        s = _require.integer("stragglers", stragglers, 0, d - 1)
        if not independent(H, s):
            raise ValueError(
                f"{name}: in float64 some {s} of the {d} children of a group cannot be "
                "missing; take stragglers below codes.minimum_distance(generator)"
            )
    B = np.einsum("gh,ui,j->gihju", np.eye(n // d), G, np.ones(d))
    return accepted(
        B.reshape(n, n, len(G)), s, name, "take a better conditioned generator"
    )
